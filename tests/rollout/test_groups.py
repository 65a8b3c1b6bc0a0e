"""Which rollouts a step learns from: generated again, shaped by their length, masked."""

import types

import numpy as np
import pytest

from specrl_jax.decoding.rollouts import Recorded, Rollouts, concatenate
from specrl_jax.rewards.scorer import Scores
from specrl_jax.rl.advantages import overlong_penalty
from specrl_jax.rollout.groups import (
    ScoredRollouts,
    first_id,
    merge_rounds,
    merge_scores,
    needs_round,
    select_groups,
    with_rewards,
)

P, G, LONGEST = 3, 2, 10


def settings(**changes):
    values = {
        "prompts_per_step": P,
        "prompts_at_once": P,
        "group_size": G,
        "sampling_rounds": 1,
        "advantage": "dr_grpo",
    }
    values |= {"advantage": "dr_grpo", "mask_truncated": False, "overlong_buffer": 0}
    return types.SimpleNamespace(**values | changes)


def rollouts_of(first_id, response=3, prompts=P, ended=None):
    rows = prompts * G
    counters = np.ones((rows, 1), np.int32)
    mask_count = np.arange(rows * 12, dtype=np.int32).reshape(rows, 12) % 3
    return Rollouts(
        rollout_id=np.arange(first_id, first_id + rows, dtype=np.uint32),
        prompt_index=np.repeat(np.arange(prompts), G),
        tokens=np.arange(rows * 12, dtype=np.int32).reshape(rows, 12),
        logprobs=np.zeros((rows, 12), np.float32),
        draft_positions=np.arange(rows * 12).reshape(rows, 12).astype(np.int8) % 4,
        prompt_length=np.full(rows, 2, np.int32),
        length=2 + np.broadcast_to(np.asarray(response, np.int32), rows),
        ended=np.ones(rows, bool) if ended is None else np.array(ended),
        eos=np.ones(rows, bool) if ended is None else np.array(ended),
        verifications=counters[:, 0],
        drafted=counters,
        accepted=counters,
        parked=counters[:, 0],
        environment=np.zeros((rows, 12), bool),
        weights_version=np.zeros(rows, np.int64),
        draft_version=np.zeros(rows, np.int64),
        checksum=np.zeros(rows, np.int64),
        finished=np.ones(rows, bool),
        chunks=(first_id,),
        features={
            "reverified": Recorded(counters[:, 0]),
            "mask_ids": Recorded(first_id * 1000 + np.arange(mask_count.sum(), dtype=np.int32), mask_count.sum(axis=1)),
            "mask_count": Recorded(mask_count),
        },
    )


def scores_of(rewards, failures=None):
    rewards = np.asarray(rewards, np.float32).reshape(-1)
    return Scores(rewards, {"exact": rewards}, rewards > 0, failures=failures or {}, extracted=[None] * len(rewards))


def rounds_of(*rewards, g=None, step=0):
    """The rounds of a step over prepared rewards [P, G], and the problems and ids of each."""
    asked, rounds, g = [], [], g or settings()
    drawn = iter([["first"] * P, ["more 1"] * P, ["more 2"] * P])
    while needs_round(rounds, g):
        asked.append((next(drawn), first_id(g, step, len(rounds))))
        scores = scores_of(rewards[len(rounds)])
        rounds.append(with_rewards(rollouts_of(asked[-1][1]), asked[-1][0], scores, grpo=g, longest=LONGEST))
    return rounds, asked


MIXED, EQUAL = [[1, 0], [0, 1], [1, 0]], [[1, 1], [0, 0], [1, 1]]
ONE = [[0, 0], [1, 0], [1, 1]]


def test_one_round_takes_what_comes():
    batches, asked = rounds_of(EQUAL, step=4)
    assert asked == [(["first"] * P, 4 * P * G)]
    kept = select_groups(merge_rounds(batches), settings())
    assert kept.loss_mask.all() and kept.rollouts.rollout_id.tolist() == list(range(24, 30))
    np.testing.assert_array_equal(kept.advantages, 0)


def test_rounds_go_on_until_every_group_has_reward_variance():
    """Ids never repeat: those of step 1 lie beyond all three rounds of step 0."""
    g = settings(sampling_rounds=3)
    batches, asked = rounds_of(ONE, MIXED, g=g, step=1)
    assert [first for _, first in asked] == [18, 24] and asked[1][0] == ["more 1"] * P
    kept = select_groups(merge_rounds(batches), g)
    # The middle group of the first round, and the first two of the second, in the order of their ids.
    assert kept.rollouts.rollout_id.tolist() == [20, 21, 24, 25, 26, 27]
    assert kept.advantages.tolist() == [0.5, -0.5, 0.5, -0.5, -0.5, 0.5] and kept.loss_mask.all()
    assert kept.rollouts.prompt_index.tolist() == [1, 1, 3, 3, 4, 4]


def test_groups_without_variance_that_fill_the_batch_are_masked_out():
    g = settings(sampling_rounds=2)
    batches, asked = rounds_of(EQUAL, ONE, g=g)
    assert len(asked) == 2
    kept = select_groups(merge_rounds(batches), g)
    assert kept.rollouts.rollout_id.tolist() == [0, 1, 2, 3, 8, 9]
    assert kept.loss_mask.tolist() == [False] * 4 + [True] * 2
    assert kept.advantages.tolist() == [0, 0, 0, 0, 0.5, -0.5]


def test_enough_at_once_is_not_generated_again():
    assert len(rounds_of(MIXED, g=settings(sampling_rounds=3))[1]) == 1


def test_truncated_responses_are_masked_out_but_count_in_their_group():
    g = settings(mask_truncated=True)
    ended = [True, False, True, True, False, True]
    batch = ScoredRollouts(
        rollouts_of(0, ended=ended), [], scores_of(MIXED), rewards=np.asarray(MIXED, np.float32).reshape(-1)
    )
    kept = select_groups(batch, g)
    assert kept.loss_mask.tolist() == ended and kept.advantages.tolist() == [0.5, -0.5, -0.5, 0.5, 0.5, -0.5]


def test_length_costs_reward():
    """DAPO's eq. 13 by hand: 10 tokens at most, the last four of them a buffer."""
    np.testing.assert_allclose(overlong_penalty(np.array([1, 6, 7, 8, 10]), 10, 4), [0, 0, -0.25, -0.5, -1])
    g = settings(overlong_buffer=4)
    rollouts = rollouts_of(0, [1, 10, 6, 8, 3, 3])
    batch = with_rewards(rollouts, [], scores_of(EQUAL), grpo=g, longest=LONGEST)
    np.testing.assert_allclose(batch.rewards, [1, 0, 0, -0.5, 1, 1])
    # What is reported is what was earned.
    assert batch.scores.total.tolist() == [1, 1, 0, 0, 1, 1]


def test_scores_of_rounds_add_up():
    one, two = scores_of(MIXED, {"timeout": 1}), scores_of(ONE, {"timeout": 2, "died": 1})
    both = merge_scores([one, two])
    assert both.total.tolist() == [1, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1] == both.rewards["exact"].tolist()
    assert both.failures == {"timeout": 3, "died": 1} and len(both.extracted) == 12
    faults = [scores._replace(first_failure=said) for scores, said in ((one, ""), (two, "b"), (two, "c"))]
    assert merge_scores(faults).first_failure == "b"
    assert both.correct.tolist() == (both.total > 0).tolist()


def test_parts_of_rounds_add_up():
    """A round in which no answer has a part."""
    one, two = scores_of(MIXED), scores_of(ONE)
    part = np.arange(len(one.total), dtype=np.float32)
    both = merge_scores([one._replace(parts={"format": part}), two])
    np.testing.assert_array_equal(both.parts["format"], [*part, *[np.nan] * len(two.total)])
    assert both.part_means("p/") == {"p/format": part.mean()}


def test_rollouts_of_several_calls_are_those_of_one():
    both = concatenate([rollouts_of(0), rollouts_of(6, prompts=2)])
    assert both.prompt_index.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] and both.chunks == (0, 6)
    part = both.take(np.array([7, 0]))
    assert part.rollout_id.tolist() == [7, 0] and part.tokens.shape == (2, 12)


@pytest.mark.parametrize("rewards", [np.full((P, G), 0.1, np.float32), np.zeros((P, G), np.float32)])
def test_equal_is_exact(rewards):
    generated = ScoredRollouts(rollouts_of(0), [], scores_of(rewards), rewards=rewards.reshape(-1))
    assert select_groups(generated, settings()).advantages.any() == 0
