"""Replayed verification is the engine's: to the draft for lookups and likeliest drafts, in law for sampled ones."""

import sys

import numpy as np
import pytest

from experiments import commands
from experiments.engine.bench import read_rows
from experiments.parts import prepared
from experiments.smollm import acceptance, answers, mismatch
from experiments.smollm.acceptance import head_chances, measured, tokens_of
from experiments.smollm.mismatch import Compared, kept_whole, rate
from experiments.smollm.replay import Kept, Texts, by_chance, by_lookup, replay
from specrl_jax.config import recipes
from tests.helpers.runs import ROOT

PROMPTS, SIBLINGS, K = 16, 4, 3


def tiny(kind, **draft):
    config = recipes.load("rlzero_tiny").get_config("")
    config.draft.update({"kind": kind, "length": K, "online": False, "history": 0, "ttt_steps": K, **draft})
    config.draft.path = "experiments/tiny_head/checkpoint" if kind == "eagle3" else ""
    config.grpo.update({"prompts_per_step": PROMPTS, "group_size": SIBLINGS})
    config.rollout.num_slots = PROMPTS * SIBLINGS  # all begin at once: siblings go on side by side
    return config


def generated(config):
    """Return (learner, state, texts, what the engine's verifications kept)."""
    learner, rollout, state, weights, work = prepared(config, (0, K))
    found = rollout.engine.generate(weights, work.prompts, work.samples, seed=5)
    limit = config.rollout.max_response_tokens
    texts = Texts(found.tokens, found.prompt_length, found.length, found.logprobs, limit)
    return learner, state, texts, Kept(found.verifications, found.drafted, found.accepted)


@pytest.mark.slow
@pytest.mark.parametrize("kind, siblings", [("ngram", 1), ("suffix", SIBLINGS)])
def test_lookups_are_replayed_to_the_draft(kind, siblings):
    config = tiny(kind)
    _, _, texts, kept = generated(config)
    found = by_lookup(texts, K, siblings=siblings, min_match=2, max_match=8)
    again = replay(texts, found, K)
    np.testing.assert_array_equal(again.verifications, kept.verifications)
    np.testing.assert_array_equal(again.accepted, kept.accepted)
    assert kept.accepted.sum() > 100


@pytest.mark.slow
def test_likeliest_drafts_are_replayed_to_the_draft():
    learner, state, texts, kept = generated(tiny("eagle3", argmax=True))
    again = replay(texts, by_chance(head_chances(learner, state, texts, K).argmax, 0), K)
    np.testing.assert_array_equal(again.verifications, kept.verifications)
    np.testing.assert_array_equal(again.drafted, kept.drafted)
    # The engine also counts drafts behind an end-of-text that are as the policy would go on; they are no part of it.
    beyond = kept.accepted - again.accepted
    assert not beyond[:, 0].any() and not beyond[texts.response_length == texts.limit].any()
    assert beyond.min() == 0 and beyond.max() <= 1


@pytest.mark.slow
def test_sampled_drafts_are_replayed_in_law():
    """The engine's verifications lie within 4 standard deviations of 200 replays.

    A false alarm is below 1e-4. Chances that are 2 % too small move the sum by 5 deviations.
    """
    learner, state, texts, kept = generated(tiny("eagle3"))
    chances = head_chances(learner, state, texts, K).sampled
    sums = [replay(texts, by_chance(chances, seed), K).verifications.sum() for seed in range(200)]
    mean, limit = np.mean(sums), 4 * np.std(sums)
    assert abs(kept.verifications.sum() - mean) < limit
    worse = [replay(texts, by_chance(0.98 * chances, seed), K).verifications.sum() for seed in range(20)]
    assert np.mean(worse) - mean > limit


def test_a_replay_by_hand():
    """An answer of five tokens that its limit cuts, with drafts of two."""
    texts = Texts(np.zeros((1, 7), int), np.array([2]), np.array([7]), np.zeros((1, 7)), limit=5)
    kept = np.array([[[1, 0], [1, 1], [1, 1], [0, 0], [1, 1]]], float)  # behind 0, 1, 2, 3, 4 tokens
    found = replay(texts, by_chance(kept, 0), 2)
    # Behind 0: one draft and a token of the policy. Behind 2: two and one. All five are there.
    assert found.verifications.tolist() == [2]
    assert found.drafted.tolist() == [[2, 2]] and found.accepted.tolist() == [[2, 1]]
    assert tokens_of(texts, found, 1).mean == 2.5
    longer = texts._replace(length=np.array([6]))
    found = replay(longer, by_chance(np.ones((1, 5, 2)), 0), 2)
    # Four tokens, the last an end-of-text: 3, then 1. One draft is left to make within the limit.
    assert found.verifications.tolist() == [2] and found.accepted.tolist() == [[2, 1]]
    assert found.drafted.tolist() == [[2, 1]]


def test_what_one_verification_keeps():
    disagrees = np.zeros(40, bool)
    disagrees[25] = True  # the sixth token of the second of two answers of twenty
    found = Compared(np.repeat([0, 1], 20), disagrees, np.zeros(40), np.zeros(40))
    whole, tokens = kept_whole(found, 20, np.random.default_rng(0))
    assert whole == pytest.approx(0.5, abs=0.02) and tokens == pytest.approx((20 + 5) / 40, abs=0.02)
    # Two answers are needed: one in four has none of the second, and 45, 25 or 5 of 40 tokens stand before it.
    whole, tokens = kept_whole(found, 40, np.random.default_rng(0))
    assert whole == pytest.approx(0.25, abs=0.02)
    assert tokens == pytest.approx((0.25 * 40 + 0.25 * 25 + 0.5 * 5) / 40, abs=0.02)
    assert rate(0, 100)[:2] == (0.0, 0.0) and rate(0, 100)[2] == pytest.approx(0.0369, abs=1e-4)


@pytest.mark.slow
def test_the_engine_counts_of_a_draft_length():
    (row,) = measured(tiny("ngram"), "ngram", [2])
    assert row["draft"] == "ngram" and 1 < row["per_verification"] <= 3 and row["accepted_2"] <= row["accepted_1"]


@pytest.mark.slow
def test_answers_are_recorded_replayed_and_compared(monkeypatch, tmp_path, capsys):
    """The commands of the page one after the other, at a small size; float32 rollouts agree with the learner."""
    monkeypatch.chdir(tmp_path)
    data = ["--data", str(ROOT / "experiments/smollm/problems/test.jsonl")]
    steps = [
        (answers, [*data, "--name", "float32"]),
        (answers, [*data, "--name", "greedy", "--temperature", "0", "--samples", "1"]),
        (answers, [*data, "--name", "int4", "--precision", "int4"]),
        (acceptance, [*data, "--self", "int8"]),
        (mismatch, ["--rollouts", "float32", "int4"]),
    ]
    for module, arguments in steps:
        monkeypatch.setattr(sys, "argv", ["command", "--small", *arguments])
        assert commands.run(module.main) == 0
    kept = read_rows(str(tmp_path / "runs/small/acceptance.csv"))
    assert {(row["temperature"], row["draft"]) for row in kept} == {
        *((temperature, draft) for temperature in (0, 1) for draft in ("ngram", "suffix")),
        (1, "self_int8"),
    }
    compared = {row["rollouts"]: row for row in read_rows(str(tmp_path / "runs/small/mismatch.csv"))[::8]}
    assert compared["float32"]["disagree"] == 0 and compared["float32"]["kl"] < 1e-9 < compared["int4"]["kl"]
