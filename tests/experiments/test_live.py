"""The measurements of what decoding and a step hold: workloads, rows of own lengths, kept rows; each runs (slow)."""

import numpy as np
import pytest

from experiments.engine import bench, live, live_work, peer_server


def test_a_long_tail_is_given_by_its_seed():
    work = live_work.long_tail(64, live_work.FULL, seed=1)
    assert work == live_work.long_tail(64, live_work.FULL, seed=1) != live_work.long_tail(64, live_work.FULL, seed=2)
    assert len(work.prompts) == 64 and len(work.responses) == len(work.repeated) == 64 * live_work.GROUP
    assert min(map(len, work.prompts)) >= 64 and max(map(len, work.prompts)) <= 512
    logs = np.log(work.responses)
    # Standard errors of 512 draws: 0.055 of the median's logarithm, 0.031 of sigma.
    assert abs(np.median(logs) - np.log(256)) < 0.2 and abs(logs.std() - 1) < 0.12
    assert min(work.responses) >= 1 and max(work.responses) <= 4096


def test_an_engine_has_the_sizes_of_a_training_run():
    config = live_work.engine_config(live_work.long_tail(16, live_work.FULL), lookup=True, page_tokens=16)
    assert (config.num_slots, config.cache_length, config.page_tokens, config.sizes) == (16, 4608, 16, (4, 1))
    assert config.sequences >= live_work.GROUP and config.groups >= 16
    assert config.shard_pages >= 16 * config.columns


def test_rows_of_own_lengths_run_to_the_longest_of_their_batch():
    asked = []

    def generate(prompts, new_tokens, eos):
        asked.append((prompts, new_tokens, eos))
        return [[7] * new_tokens for _ in prompts]

    command = {"prompts": [[1], [2, 2], [3]], "batch": 2, "new_tokens": [4, 9, 2], "eos": None}
    assert peer_server.run_own_lengths(peer_server.in_batches(generate), command)["tokens"] == 15
    assert asked == [([[1], [2, 2]], 9, None), ([[3]], 2, None)]
    with pytest.raises(ValueError, match="shorter"):
        peer_server.run_own_lengths(lambda prompts, own, batch: [[7] * 3 for _ in prompts], command)


def test_a_row_replaces_the_one_of_its_case(tmp_path):
    path = str(tmp_path / "live.csv")
    for speed in (1.0, 2.0):
        figures = live.Figures("tail", "jax 1")
        figures.compare(
            "x", {"a": [live_work.Measured(6, speed)], "b": [live_work.Measured(6, 3.0)]}, "speed", "tokens/s"
        )
        live.keep(path, figures.rows)
    other = live.Figures("limit", "jax 1")
    other.add("y", "ms", [1.0, 2.0, 4.0])
    live.keep(path, other.rows)
    found = {(row["figure"], row["case"]): row["median"] for row in bench.read_rows(path)}
    assert found == {("tail", "x a"): 3, ("tail", "x b"): 2, ("tail", "x a / b"): 1.5, ("limit", "y"): 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("limit", ["nano 64", "nano 128", "nano 128 / 64"]),
        ("tail", ["3 prompts ours"]),
        ("drafts", ["3 prompts suffix / plain", "3 prompts eagle3 / plain"]),
        ("pages", ["3 prompts, pages of 16 tokens", "3 prompts, pages of 64 tokens, peak"]),
        ("step", ["40 / 12, seconds", "40 / 12, peak memory"]),
    ],
)
def test_each_measurement_runs_with_little_work(name, cases, tmp_path):
    path = str(tmp_path / "live.csv")
    live.main([name, "--small", "--output", path])
    found = {row["case"]: row for row in bench.read_rows(path)}
    assert set(cases) <= set(found)
    assert all(row["median"] > 0 and row["processor"] and row["date"] for row in found.values())
    if name == "pages":
        # A page more than what lives, at least, and not as much as whole rows would hold.
        assert all(1 <= row["median"] < 40 for row in found.values() if row["unit"] == "ratio")
