"""The comparison with other libraries: token counts, the order of rounds, and our side of it."""

import dataclasses
import io
import json
import sys

import pytest

from experiments.engine import peer_server, peers
from specrl_jax.io import hf
from specrl_jax.models import decoder
from tests.helpers.policies import random_params

NANO = decoder.PRESETS["nano"]
# Answers three commands with 0, 1 and 2 tokens, then exits.
FAKE_PEER = """
import json, sys
for i, line in zip(range(3), sys.stdin):
    json.loads(line)
    print(json.dumps({"tokens": i, "seconds": 0.5}), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("nano"))
    hf.save_params(path, random_params(NANO, 0), NANO, dtype="float32")
    return path


def test_tokens_are_counted_up_to_and_with_the_first_eos():
    rows = [[5, 9, 9, 9], [9, 1, 1, 1], [1, 2, 3, 4], [1, 2, 3, 9]]
    assert peer_server.count_tokens(rows, 4, eos=9) == 2 + 1 + 4 + 4
    assert peer_server.count_tokens(rows, 4, eos=None) == 16


@pytest.mark.parametrize(("rows", "eos"), [([[1, 2, 3]], 9), ([[1, 2, 9]], None), ([[1, 2, 3, 4, 5]], 9)])
def test_a_row_of_the_wrong_length_is_refused(rows, eos):
    with pytest.raises(ValueError, match="does not end in"):
        peer_server.count_tokens(rows, 4, eos)


def test_rows_are_decoded_a_batch_at_a_time(monkeypatch, capsys):
    asked = []

    def generate(prompts, new_tokens, eos):
        asked.append(prompts)
        return [[7] * new_tokens for _ in prompts]

    command = {"batch": 2, "prompts": [[1], [2], [3]], "new_tokens": 4, "eos": None}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(command) + "\n"))
    peer_server.serve(generate)
    assert asked == [[[1], [2]], [[3]]]
    assert json.loads(capsys.readouterr().out)["tokens"] == 12


def test_prompts_of_several_lengths_need_an_eos():
    with pytest.raises(ValueError, match="several lengths"):
        peer_server.run(lambda *_: [], prompts=[[1], [2, 3]], batch=2, new_tokens=4, eos=None)


def test_the_order_of_sides_rotates_after_the_warm_up():
    calls = []
    runs = {who: lambda who=who: calls.append(who) or (6, 2.0) for who in "abc"}
    rows = list(peers.rounds_of(runs, 3))
    assert "".join(calls) == "abcabc" + "abc" + "bca" + "cab"
    assert [row["who"] for row in rows] == calls[6:]
    assert [row["round"] for row in rows] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert all(row["tokens_per_second"] == 3.0 for row in rows)


def test_a_peer_answers_until_it_ends(folder):
    work = peers.Workload("nano", folder, [[1, 2]], 4, None)
    with peers.start_peer([sys.executable, "-c", FAKE_PEER], folder) as process:
        run = peers.peer(process, work, batch=1)
        assert [run() for _ in range(3)] == [(0, 0.5), (1, 0.5), (2, 0.5)]
        process.wait()
        with pytest.raises(RuntimeError, match="ended"):
            run()


@pytest.mark.slow
def test_ours_generates_rows_of_the_requested_length(folder):
    """Three prompts over two slots, so two waves."""
    run = peers.ours(folder, [[1, 2, 3]] * 3, 5, num_slots=2)
    assert run()[0] == 15 and run()[0] == 15


@pytest.mark.slow
def test_ours_ends_rows_at_eos(tmp_path):
    """Uniform over 8 ids, one of them eos: with its eos a row has 8 tokens on average, standard deviation 7.5."""
    model = dataclasses.replace(NANO, vocab=8)
    params = random_params(model, 0)
    hf.save_params(str(tmp_path), params | {"final_norm": 0 * params["final_norm"]}, model, dtype="float32")
    tokens, _ = peers.ours(str(tmp_path), [[1, 2, 3]] * 64, 64, num_slots=64, eos=3)()
    assert abs(tokens - 64 * 8) < 6 * 7.5 * 8


@pytest.mark.slow
def test_each_round_of_ours_has_new_noise(folder):
    run = peers.ours(folder, [[1, 2, 3]] * 8, 64, num_slots=8, eos=3)
    assert len({run()[0] for _ in range(4)}) > 1
