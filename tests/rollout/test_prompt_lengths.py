"""Which rollouts start first: those to prompts whose last responses were longest, whatever else stays as it is."""

import numpy as np
import pytest

from specrl_jax.data.problem import Problem
from specrl_jax.rollout import prompt_lengths
from specrl_jax.rollout.prompt_lengths import PromptLengths
from tests.helpers.training import saved, train
from tests.rollout.stale.test_exact import assert_same_run, forget, no_evaluation, run_of

assert no_evaluation  # a fixture of every test
A, B, C, D = (Problem(name, "", "") for name in "abcd")


def test_the_longest_start_first_and_an_unknown_one_amid_them():
    lengths = PromptLengths()
    assert lengths.longest_first([A, B, C]).tolist() == [0, 1, 2]
    lengths.observe([A, B, C], np.array([1, 3, 9, 9, 4, 6]))
    assert lengths.longest_first([A, D, C, B]).tolist() == [3, 1, 2, 0]
    lengths.observe([A], np.array([50, 50]))
    assert PromptLengths(lengths.seen()).longest_first([B, C, A]).tolist() == [2, 0, 1]


def test_the_one_seen_longest_ago_is_forgotten(monkeypatch):
    monkeypatch.setattr(prompt_lengths, "MOST_PROMPTS", 2)
    lengths = PromptLengths()
    for problem in (A, B, A, C):
        lengths.observe([problem], np.array([5.0]))
    assert len(lengths.seen().prompts) == 2
    assert lengths.longest_first([D, B, A]).tolist() == PromptLengths().longest_first([D, B, A]).tolist()


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_is_the_same_to_the_last_bit_in_any_order_and_over_a_kill(mode, tmp_path, monkeypatch):
    (tmp_path / "given").mkdir()
    expected = run_of(tmp_path / "given", "sync"), tmp_path / "given/run"
    with monkeypatch.context() as patch:
        patch.setattr(PromptLengths, "longest_first", lambda self, problems: np.arange(len(problems)))
        train(*expected)
    run, workdir = run_of(tmp_path, mode), tmp_path / "run"
    train(run, workdir)
    assert_same_run(run, workdir, expected)
    seen = saved(run, workdir, 4)[1]["ahead"]["left"][0]["seen"]
    assert isinstance(seen["prompts"], str), "an array among the checkpoint's"
    forget(workdir, 4, 5)
    train(run, workdir)
    assert_same_run(run, workdir, expected)
