"""Rollouts packed into rows: nothing is lost, and a step learns the same from them."""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl_jax.data.rows import pack
from specrl_jax.learner.batch import (
    ROW_BUCKETS,
    Packing,
    TrainingBatch,
    ids_per_row,
    learner_batch,
    pack_minibatches,
    packing_unit,
)
from specrl_jax.rl.objectives import LossInputs, Objective
from tests.helpers.slow import slow_but
from tests.learner.test_policy_step import PLAIN, assert_trees_close, recording_state, step_functions

T = 16


@given(st.lists(st.integers(1, T), min_size=1, max_size=40))
def test_packing_overlaps_nothing_and_wastes_little(length):
    length = np.array(length)
    places = pack(length, T)
    taken = np.zeros((places.rows, T), int)
    for row, start, n in zip(places.row, places.start, length):
        assert start + n <= T
        taken[row, start : start + n] += 1
    assert taken.max() == 1 and taken.any(axis=1).all()
    # No two rows would fit into one, so all but one are more than half full.
    assert places.rows <= 2 * length.sum() / T + 1
    for row in range(places.rows):
        order = np.argsort(places.start[places.row == row])
        assert places.segment[places.row == row][order].tolist() == list(range(1, len(order) + 1))


@given(st.integers(1, 3), st.sampled_from([1, 2, 4, 6]), st.sampled_from([T, 3 * T - 1, 5 * T]), st.integers(0, 2**16))
def test_minibatches_keep_their_rollouts_and_their_number_of_rows(minibatches, unit, tokens, seed):
    """Also where every rollout is as long as it may be."""
    rng = np.random.default_rng(seed)
    length = np.full(20 * minibatches, T) if seed % 5 == 0 else rng.integers(1, T + 1, 20 * minibatches)
    places = pack_minibatches(length, T, Packing(tokens, minibatches, unit))
    # Minibatch i is rows i, i + n, ... and rollouts i, i + n, ...
    assert (places.row % minibatches == np.arange(len(length)) % minibatches).all()
    rows = places.rows // minibatches
    assert places.rows % minibatches == 0 and rows % unit == 0 and places.row.max() < places.rows
    most = -(-20 // (tokens // T))
    assert rows in {unit * -(-most // (ROW_BUCKETS * unit)) * i for i in range(1, ROW_BUCKETS + 1)}


def test_the_unit_divides_for_devices_microbatches_and_the_draft():
    assert packing_unit(4, 6, 2) == 24 and packing_unit(4, 0, 1) == 4


def training_batch(seed=0, rollouts=8, masks=False):
    rng = np.random.default_rng(seed)
    prompt, response = rng.integers(1, 5, rollouts), rng.integers(1, 8, rollouts)
    tokens = np.zeros((rollouts, T), np.int32)
    logprobs = np.zeros((rollouts, T), np.float32)
    for i, (p, r) in enumerate(zip(prompt, response)):
        tokens[i, : p + r], logprobs[i, p : p + r] = rng.integers(2, 97, p + r), -4.85 + rng.normal(0, 0.3, r)
    position = np.arange(T)
    responses = (position >= prompt[:, None]) & (position < (prompt + response)[:, None])
    mask_count = np.where(responses, rng.integers(1, 9, (rollouts, T)), 0) if masks else np.zeros((rollouts, 0), int)
    ids = [rng.integers(2, 97, n) for n in mask_count.sum(axis=1)]
    record = types.SimpleNamespace(
        tokens=tokens,
        logprobs=logprobs,
        prompt_length=prompt,
        length=prompt + response,
        mask_count=mask_count,
        masks=lambda: ids,
    )
    loss_mask = np.ones(rollouts, bool)
    loss_mask[3] = False
    return TrainingBatch(record, rng.normal(size=rollouts).astype(np.float32), loss_mask)


def test_every_token_is_there_once_with_what_belongs_to_it():
    drawn = training_batch()
    padded, packed = learner_batch(drawn, 0), learner_batch(drawn, 0, Packing(2 * T, 2, 1))
    assert len(packed.rows.tokens) < len(padded.rows.tokens)

    def found(batch):
        at = batch.rows.mask
        parts = (batch.rows.targets, batch.rows.positions, batch.behaviour, batch.advantages, batch.loss_mask)
        return sorted(zip(*(x[at].tolist() for x in parts)))

    assert (
        found(packed) == found(padded)
        and len(found(packed)) == (drawn.rollouts.length - drawn.rollouts.prompt_length).sum()
    )
    # Padding belongs to no sequence.
    assert (
        packed.rows.segments[packed.rows.segments == 0].size + drawn.rollouts.length.sum()
    ) == packed.rows.tokens.size


def test_every_target_has_the_ids_that_sampling_kept():
    drawn = training_batch(masks=True)
    padded, packed = learner_batch(drawn, 0), learner_batch(drawn, 0, Packing(2 * T, 2, 1))

    def found(rows):
        assert rows.kept.ids.shape[1] % rows.tokens.shape[1] == 0 and ((rows.kept.count > 0) == rows.mask).all()
        ids = []
        for row, count in zip(rows.kept.ids, rows.kept.count):
            assert (row[count.sum() :] == -1).all()
            ids.append(np.split(row[: count.sum()], np.cumsum(count)[:-1]))
        targets = zip(*np.nonzero(rows.mask))
        return sorted((int(rows.targets[b, t]), int(rows.positions[b, t]), ids[b][t].tolist()) for b, t in targets)

    by_hand = []
    for tokens, count, ids in zip(drawn.rollouts.tokens, drawn.rollouts.mask_count, drawn.rollouts.masks()):
        parts = np.split(ids, np.cumsum(count)[:-1])
        by_hand += [(int(tokens[t]), int(t) - 1, parts[t].tolist()) for t in np.flatnonzero(count)]
    assert found(packed.rows) == found(padded.rows) == sorted(by_hand)
    assert learner_batch(training_batch(), 0).rows.kept is None


@pytest.mark.parametrize(("most", "room"), [(0, 8), (8, 8), (9, 16), (33, 64), (8 * 512, 8 * 512)])
def test_room_for_ids_has_few_sizes(most, room):
    assert ids_per_row(8, most) == room


OBJECTIVES = {
    "token": Objective(0.2, 0.28, 0.1),
    "sequence": Objective(0.2, 0.28, 0.1, loss="gspo", aggregation="sequence", correction="sequence_truncate"),
    "constant": Objective(0.2, 0.28, 0.1, loss="cispo", aggregation="constant", entropy_coef=0.01, longest=7),
}


@functools.cache
def gradient_of(name, packing=None, microbatch=0):
    batch = learner_batch(training_batch(), 0, packing)
    rng = np.random.default_rng(7)
    # By token, so that both layouts have the same: a function of the target.
    ref = (-4.85 + rng.normal(0, 0.3, 128)).astype(np.float32)[batch.rows.targets]
    inputs = LossInputs(batch.behaviour, ref, batch.advantages, ref - 0.2, batch.loss_mask)
    learner = dataclasses.replace(PLAIN, microbatch=microbatch)
    _, step = step_functions("one", learner, OBJECTIVES[name])
    state, metrics, learnt = step(recording_state("one"), batch.rows, inputs)
    return jax.device_get((state.opt_state, metrics.terms)), np.sort(np.asarray(learnt.logprobs)[batch.rows.mask])


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["token"], OBJECTIVES))
def test_packed_rows_give_the_gradient_of_padded_ones(name):
    (plain, logprobs), (packed, again) = gradient_of(name), gradient_of(name, Packing(2 * T, 1, 1))
    # Float32 sums in another order, as between microbatches.
    assert_trees_close(packed, plain, rtol=1e-5)
    np.testing.assert_allclose(again, logprobs, atol=1e-5)


@pytest.mark.slow
def test_microbatches_of_packed_rows_give_it_too():
    packed = gradient_of("sequence", Packing(2 * T, 1, 2), 2)[0]
    assert_trees_close(packed, gradient_of("sequence")[0], rtol=1e-5)
