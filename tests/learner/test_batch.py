"""Rollouts packed into rows: nothing is lost, and a step learns the same from them."""

import functools
import types

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl_jax.data.rows import pack
from specrl_jax.decoding.rollouts import Recorded
from specrl_jax.learner.batch import (
    MICROBATCHES,
    TILE_BYTES,
    Packing,
    TrainingBatch,
    ids_per_row,
    learner_batch,
    pack_parts,
)
from specrl_jax.rl.objectives import LossInputs, Objective
from tests.helpers.long import long_but
from tests.helpers.updates import update_policy
from tests.learner.test_policy_step import PLAIN, assert_trees_close, recording_state, step_functions

T = 16
PACKING = Packing(T, shortest=T)


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


@given(st.integers(1, 3), st.sampled_from([1, 2, 4, 6]), st.sampled_from([0, 1, 300, 5000]), st.integers(0, 2**16))
def test_parts_keep_their_rollouts_and_their_number_of_rows(parts, shards, microbatch_tokens, seed):
    """Also where every rollout is as long as it may be, and where one is a hundred times as long as the others."""
    rng = np.random.default_rng(seed)
    length = np.full(20 * parts, T) if seed % 5 == 0 else rng.integers(1, T + 1, 20 * parts)
    length[0] *= 1 + 99 * (seed % 2)
    packing = Packing(1600 if seed % 3 else T, parts, shards, microbatch_tokens=microbatch_tokens, rollouts=20)
    length = np.minimum(length, packing.limit)
    places = pack_parts(length, packing)
    # Part i is rows i, i + n, ... and rollouts i, i + n, ...
    assert (places.row % parts == np.arange(len(length)) % parts).all() and (length <= places.tokens).all()
    assert places.tokens in packing.lengths
    # Full microbatches, of a size that the config says, and no microbatch that no part needs.
    size, rows = packing.microbatch(places.tokens), places.rows // parts
    assert places.rows % parts == 0 and rows % size == 0 and size % shards == 0 and places.row.max() < places.rows
    needed = max(len(set(places.row[i::parts])) for i in range(parts))
    assert needed <= rows < needed + size
    if microbatch_tokens:
        assert size * places.tokens <= microbatch_tokens or size == shards
    else:
        assert rows == size, "one microbatch has room for all"


def test_rows_of_a_run_have_two_lengths_that_its_config_says():
    """Long rows have room for one rollout of the limit, shorter ones for two; where no rollout has half of it, rows are
    half as long. Rows split along their tokens divide.
    """
    packing = Packing(4608)
    assert packing.lengths == (2304, 4608)
    assert [packing.row_tokens(n) for n in (1, 128, 2304, 2305, 4608)] == [2304, 2304, 2304, 4608, 4608]
    # Of short ones there is one length: attention over fewer tokens saves little.
    assert [Packing(n).lengths for n in (20, 64, 65, 108, 128)] == [(128,), (128,), (256,), (256,), (256,)]
    assert [Packing(n).lengths for n in (129, 512, 600, 1024, 1025)] == [(256, 512), *[(512, 1024)] * 3, (513, 1025)]
    for limit in range(1, 5000, 77):
        for found in (Packing(limit), Packing(limit, sequence_shards=3)):
            assert all(n % found.sequence_shards == 0 for n in found.lengths) and len(found.lengths) <= 2
            assert all(found.row_tokens(n) >= n for n in (1, limit // 2, limit // 2 + 1, limit))
    # One rollout a row, as where a draft is trained on stored features.
    assert [packing.lone_row_tokens(n) for n in (1, 2304, 2305, 4608)] == [2304, 2304, 4608, 4608]
    assert Packing(70, sequence_shards=4).lone_row_tokens(41) == 72


@given(st.integers(1, 300), st.integers(1, 64), st.sampled_from([1, 3]), st.integers(0, 2**16))
def test_a_microbatch_is_a_part_of_the_most_rows_that_rollouts_can_need(limit, rollouts, shards, seed):
    length = np.random.default_rng(seed).integers(1, limit + 1, rollouts)
    whole = Packing(limit, num_shards=shards, rollouts=rollouts)
    parts = whole._replace(microbatch_tokens=2**20)
    for packing in (whole, parts):
        places = pack_parts(length, packing)
        most = 1 if packing is whole else MICROBATCHES
        assert places.rows <= most * packing.microbatch(places.tokens)
    # One microbatch of all is no larger than they can need.
    worst = pack_parts(np.full(rollouts, limit), whole)
    assert len(set(worst.row)) > worst.rows - shards


@given(st.sampled_from([100, 151_936]), st.sampled_from([1, 4]), st.sampled_from([0, 1600, 81_920]))
def test_the_logits_of_a_vocabulary_tile_are_bounded(vocab, shards, microbatch_tokens):
    packing = Packing(10_240, num_shards=2, sequence_shards=2, microbatch_tokens=microbatch_tokens, rollouts=512)
    tokens = max(rows * length for rows, length in packing.shapes) / 4
    tile = packing.vocab_tile(vocab, shards)
    logits = [4 * tokens * entries / shards for entries in (tile or vocab, vocab)]
    assert logits[0] <= TILE_BYTES + 4 * tokens and bool(tile) == (logits[1] > TILE_BYTES)
    assert tile == 0 or tile > TILE_BYTES * shards / (8 * tokens) - 1  # no smaller than it must be


def test_of_long_tailed_rollouts_few_tokens_are_padding():
    """Issue 29's: log-normal with a median of 256 and sigma 1, cut at 4,096, and prompts of 64 to 512 tokens."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        prompt = np.repeat(rng.integers(64, 513, 16), 8)
        length = prompt + np.minimum(np.exp(rng.normal(np.log(256), 1, 128)), 4096).astype(int)
        places = pack_parts(length, Packing(4608, microbatch_tokens=32_768, rollouts=128))
        assert places.rows * places.tokens <= 1.2 * length.sum()


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
        features={"mask_count": Recorded(mask_count), "mask_ids": Recorded.of_parts([[one] for one in ids])}
        if masks
        else {},
        draft_positions=np.where(responses, rng.integers(-2, 3, (rollouts, T)), 0).astype(np.int8),
        environment=np.zeros((rollouts, T), bool),
    )
    loss_mask = np.ones(rollouts, bool)
    loss_mask[3] = False
    return TrainingBatch(record, rng.normal(size=rollouts).astype(np.float32), loss_mask)


def test_every_token_is_there_once_with_what_belongs_to_it():
    drawn = training_batch()
    padded, packed = learner_batch(drawn, 0), learner_batch(drawn, 0, PACKING._replace(parts=2))
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


@pytest.mark.parametrize("packing", [None, PACKING._replace(parts=2)])
def test_what_an_environment_wrote_is_context_and_no_target(packing):
    drawn = training_batch(rollouts=16)
    r = drawn.rollouts
    at = np.arange(T)
    r.environment = (at >= r.prompt_length[:, None] + 1) & (at < np.minimum(r.prompt_length + 3, r.length - 1)[:, None])
    batch = learner_batch(drawn, 0, packing)
    own = (at >= r.prompt_length[:, None]) & (at < r.length[:, None]) & ~r.environment
    assert r.environment.sum() > 10
    assert sorted(np.asarray(batch.rows.targets)[np.asarray(batch.rows.mask)]) == sorted(r.tokens[own])
    whole = learner_batch(training_batch(rollouts=16), 0, packing)
    np.testing.assert_array_equal(batch.rows.tokens, whole.rows.tokens)


def test_every_target_has_the_ids_that_sampling_kept():
    drawn = training_batch(masks=True)
    padded, packed = learner_batch(drawn, 0), learner_batch(drawn, 0, PACKING._replace(parts=2))

    def found(rows):
        assert rows.kept.ids.shape[1] % rows.tokens.shape[1] == 0 and ((rows.kept.count > 0) == rows.mask).all()
        ids = []
        for row, count in zip(rows.kept.ids, rows.kept.count):
            assert (row[count.sum() :] == -1).all()
            ids.append(np.split(row[: count.sum()], np.cumsum(count)[:-1]))
        targets = zip(*np.nonzero(rows.mask))
        return sorted((int(rows.targets[b, t]), int(rows.positions[b, t]), ids[b][t].tolist()) for b, t in targets)

    by_hand = []
    recorded = drawn.rollouts.features
    masks = recorded["mask_count"].values, recorded["mask_ids"].by_rollout()
    for tokens, count, ids in zip(drawn.rollouts.tokens, *masks):
        parts = np.split(ids, np.cumsum(count)[:-1])
        by_hand += [(int(tokens[t]), int(t) - 1, parts[t].tolist()) for t in np.flatnonzero(count)]
    assert found(packed.rows) == found(padded.rows) == sorted(by_hand)
    assert learner_batch(training_batch(), 0).rows.kept is None


@pytest.mark.parametrize(("most", "room"), [(0, 8), (8, 8), (9, 16), (33, 64), (8 * 512, 8 * 512)])
def test_room_for_ids_has_few_sizes(most, room):
    assert ids_per_row(8, most) == room


def test_room_for_all_ids_of_a_small_top_k():
    """Of top-p alone, which may keep hundreds, for some; the first row that has more takes twice as much."""
    assert [Packing(T, most_kept=n).ids for n in (0, 1, 20, 32, 33, 512)] == [1, 1, 20, 32, 8, 8]
    drawn = training_batch(masks=True)
    for most_kept, room in ((20, 20), (512, 8)):
        rows = learner_batch(drawn, 0, PACKING._replace(most_kept=most_kept)).rows
        assert rows.kept.ids.shape == (len(rows.tokens), room * rows.tokens.shape[1])


OBJECTIVES = {
    "token": Objective(clip_low=0.2, clip_high=0.28, kl_coef=0.1),
    "sequence": Objective(
        clip_low=0.2, clip_high=0.28, kl_coef=0.1, loss="gspo", aggregation="sequence", correction="sequence_truncate"
    ),
    "constant": Objective(
        clip_low=0.2, clip_high=0.28, kl_coef=0.1, loss="cispo", aggregation="constant", entropy_coef=0.01, longest=7
    ),
}


@functools.cache
def gradient_of(name, packing=None, size=None):
    batch = learner_batch(training_batch(), 0, packing)
    rng = np.random.default_rng(7)
    # By token, so that both layouts have the same: a function of the target.
    ref = (-4.85 + rng.normal(0, 0.3, 128)).astype(np.float32)[batch.rows.targets]
    inputs = LossInputs(batch.behaviour, ref, batch.advantages, behaviour=ref - 0.2, loss_mask=batch.loss_mask)
    _, step = step_functions("one", PLAIN, OBJECTIVES[name])
    state, metrics, learnt = update_policy(step, recording_state("one"), batch.rows, inputs, size)
    return jax.device_get((state.opt_state, metrics.terms)), np.sort(np.asarray(learnt.logprobs)[batch.rows.mask])


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(["token"], OBJECTIVES))
def test_packed_rows_give_the_gradient_of_padded_ones(name):
    (plain, logprobs), (packed, again) = gradient_of(name), gradient_of(name, PACKING)
    # Float32 sums in another order, as between microbatches.
    assert_trees_close(packed, plain, rtol=1e-5)
    np.testing.assert_allclose(again, logprobs, atol=1e-5)


@pytest.mark.slow
def test_microbatches_of_packed_rows_give_it_too():
    packed = gradient_of("sequence", PACKING, 2)[0]
    assert_trees_close(packed, gradient_of("sequence")[0], rtol=1e-5)
