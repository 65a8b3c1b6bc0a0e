"""One drafted token: its distribution, its randomness, its vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import noise as counter
from kernels_pallas.verify.op import Noise
from kernels_pallas.verify.sampling import TILE, draw
from lossless_certify.distributions import joint, softmax
from specrl_jax.decoding.drafters import sample_draft
from specrl_jax.decoding.sampling import Sampling
from tests.helpers.statistics import assert_drawn_from

LOGITS = np.array([0.3, -1.2, 2.0, 0.0, 1.1], np.float32)
# Neither sorted nor dense, and no entry at its own place.
VOCAB_MAP = jnp.array([7, 2, 9, 0, 5], jnp.int32)
N = 2**15


def drawn(logits=LOGITS, temperature=1.0, vocab_map=None, offset=1, seed=3, rollout_ids=None, position=11):
    """[N] tokens: one set of logits, or one per row, drafted for many rollouts."""
    ids = jnp.arange(N, dtype=jnp.uint32) if rollout_ids is None else jnp.asarray(rollout_ids, jnp.uint32)
    noise = Noise(jnp.uint32(seed), ids, jnp.full(ids.shape, position, jnp.int32))
    logits = jnp.broadcast_to(jnp.asarray(logits), (len(ids), np.shape(logits)[-1]))
    return np.asarray(sample_draft(noise, logits, offset, vocab_map=vocab_map, sampling=Sampling(temperature)))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_a_drafted_token_has_the_distribution_of_the_softmax_at_the_temperature(temperature):
    """5 outcomes, 2**15 rollouts: error rates 1e-6 at 0.02 against 0.04. The other two are further off."""
    assert_drawn_from(drawn(temperature=temperature), softmax(LOGITS / temperature), at_most=0.02)
    for other in {1.0, 0.5, 1.7} - {temperature}:
        assert 0.5 * np.abs(softmax(LOGITS / other) - softmax(LOGITS / temperature)).sum() > 0.04


@pytest.mark.slow
def test_a_vocabulary_of_several_tiles_is_drawn_from_as_a_whole():
    """A draw takes one uniform for the tile and one for the entry in it. Eight outcomes: 2e-2 against 4e-2 as above."""
    V, columns = 3 * TILE, [0, 1, TILE - 1, TILE, TILE + 7, 2 * TILE, 3 * TILE - 2, 3 * TILE - 1]
    logits = np.full(V, -np.inf, np.float32)
    logits[columns] = np.random.default_rng(0).normal(size=len(columns))
    tokens = drawn(logits)
    assert set(tokens.tolist()) <= set(columns)
    assert_drawn_from(np.searchsorted(columns, tokens), softmax(logits[columns]), at_most=0.02)


def test_at_temperature_0_the_best_token_is_drafted_whatever_the_noise():
    rows = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    for seed in (0, 1):
        np.testing.assert_array_equal(drawn(rows, 0.0, rollout_ids=np.arange(50), seed=seed), rows.argmax(axis=-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_draft_vocabulary_is_mapped_to_the_targets(temperature):
    mapped = drawn(temperature=temperature, vocab_map=VOCAB_MAP)
    assert mapped.dtype == np.int32
    np.testing.assert_array_equal(mapped, np.asarray(VOCAB_MAP)[drawn(temperature=temperature)])
    # Every entry of the map was used, or at temperature 0 the best one's.
    assert set(mapped.tolist()) == ({7, 2, 9, 0, 5} if temperature else {9})


@pytest.mark.slow
def test_a_draft_is_a_function_of_seed_rollout_position_and_offset_alone():
    """Not of the row, the batch or the neighbours' logits; and each of the four matters."""
    wanted = drawn()
    order = np.random.default_rng(0).permutation(N)
    np.testing.assert_array_equal(drawn(rollout_ids=order), wanted[order])
    np.testing.assert_array_equal(drawn(rollout_ids=np.arange(7, 19)), wanted[7:19])
    among_others = np.random.default_rng(1).normal(size=(3, len(LOGITS))).astype(np.float32)
    among_others[1] = LOGITS
    assert drawn(among_others, rollout_ids=[5, 6, 7])[1] == wanted[6]


CHANGES = [{"seed": 4}, {"position": 12}, {"offset": 2}, {"rollout_ids": np.arange(N, 2 * N)}]


@pytest.mark.parametrize("change", CHANGES, ids=["seed", "position", "offset", "rollout"])
def test_other_coordinates_give_an_independent_draft(change):
    """Joint distribution of both is the product: 25 outcomes, 2**15 pairs, error rates 1e-6 at 0.023 against 0.046."""
    p = softmax(LOGITS)
    pairs = drawn() * len(p) + drawn(**change)
    assert_drawn_from(pairs, joint([p, np.tile(p, (len(p), 1))]), at_most=0.023)


@pytest.mark.parametrize("stream", [counter.ACCEPT, counter.RESIDUAL], ids=["accept", "residual"])
def test_a_draft_is_independent_of_the_other_streams_of_its_place(stream):
    """What verification draws with the same seed, rollout, position and offset. 25 outcomes, as above."""
    p = softmax(LOGITS)
    ids = jnp.arange(N, dtype=jnp.uint32)
    uniforms = counter.uniforms(jnp.uint32(3), ids, jnp.full(N, 11), 1, stream)
    other = np.asarray(draw(jnp.broadcast_to(jax.nn.softmax(jnp.array(LOGITS)), (N, len(p))), uniforms))
    assert_drawn_from(drawn() * len(p) + other, joint([p, np.tile(p, (len(p), 1))]), at_most=0.023)


def test_a_draft_uses_the_stream_of_drafts():
    """Pins the contract, which another implementation of the drafter has to meet to give the same rollouts."""
    uniforms = counter.uniforms(jnp.uint32(3), jnp.arange(N, dtype=jnp.uint32), jnp.full(N, 11), 1, counter.DRAFT)
    # By the inverse CDF in float64; a uniform within a float32 rounding of a step may fall on either side.
    steps = np.cumsum(softmax(LOGITS))
    u = np.asarray(uniforms[1], np.float64)
    clear = np.abs(u[:, None] - steps[None]).min(axis=1) > 1e-6
    np.testing.assert_array_equal(drawn()[clear], np.searchsorted(steps, u, side="right")[clear])
    assert clear.mean() > 0.99
