"""The sampling mask: ids that top-k and top-p kept, recorded with the log-probs of the distribution sampled from."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.verify.op import SamplingMask, Verified
from specrl_jax.decoding.features import sampling_mask
from specrl_jax.decoding.features.base import Committed
from specrl_jax.decoding.features.sampling_mask import MaskBuffer, SamplingMasks
from specrl_jax.decoding.rollouts import concatenate
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from tests.helpers import toys
from tests.helpers.exact import final_probs, kept
from tests.helpers.long import long_but

V, EOS, PAD = 13, 12, 0
# Rounded, so that ties are frequent.
TABLE = np.round(toys.make_table(seed=0, V=V) * 2) / 2
DRAFT_TABLE = 1.5 * np.random.default_rng(1).normal(size=(V, V)).astype(np.float32)
PROMPTS = [[1, 2], [2], [1, 1, 2, 0], [0, 1, 1], [2, 2, 2, 2]]
CUTS = {"top_k": (3, 1.0), "top_p": (0, 0.8), "both": (5, 0.7), "one": (1, 1.0)}
RULES = ("rejection", "block", "coupled")


def generate(sampling, k=0, most_kept=512, **sizes):
    config = {
        "features": (SamplingMasks(most_kept),) if most_kept else (),
        "num_slots": 4,
        "max_prompt_tokens": 4,
        "max_response_tokens": 7,
        "chunk": 5,
    } | sizes
    drafter = toys.toy_drafter(DRAFT_TABLE, k, sampling.temperature, sampling.rule) if k else toys.NO_DRAFTER
    engine = toys.toy_engine(EngineConfig(**config), sampling, (EOS,), PAD, drafter, lengths=(k,))
    return engine.generate(TABLE, PROMPTS, samples=3, seed=1)


def masks(rollouts):
    """Return the ids of each response token: {(rollout, position): ids}."""
    count, ids = rollouts.features["mask_count"].values, rollouts.features["mask_ids"]
    rows, positions = np.nonzero(count)
    ends = np.cumsum(count[rows, positions])
    np.testing.assert_array_equal(ids.lengths, count.sum(axis=1))
    return dict(zip(zip(rows.tolist(), positions.tolist()), np.split(ids.values, ends[:-1])))


def assert_honest(rollouts, sampling):
    """Compare masks and log-probs with float64 definitions, token by token."""
    found = masks(rollouts)
    for row, (first, end) in enumerate(zip(rollouts.prompt_length, rollouts.length)):
        assert [t for r, t in found if r == row] == list(range(first, end)), "all response tokens, no others"
        for t in range(first, end):
            logits = toys.logits_after(TABLE, rollouts.tokens[row, :t])
            keep = kept(logits, sampling.temperature, sampling.top_k, sampling.top_p)
            assert sorted(found[row, t].tolist()) == np.flatnonzero(keep).tolist()
            logprob = np.log(final_probs(logits, sampling)[rollouts.tokens[row, t]])
            # Logits below 8 and a sum of 13: a few float32 roundings.
            assert abs(rollouts.logprobs[row, t] - logprob) < 4e-6


FAST = [("rejection", "both", 2), ("block", "top_p", 2)]


@pytest.mark.parametrize("rule, cut, k", long_but(FAST, RULES, CUTS, (0, 2)))
def test_masks_and_logprobs_are_those_of_the_distribution_sampled(rule, cut, k):
    sampling = Sampling(0.7, *CUTS[cut], rule)
    rollouts = generate(sampling, k)
    assert_honest(rollouts, sampling)
    if k and cut != "one":
        assert {0, 1} <= set(np.minimum(rollouts.accepted.sum(axis=1), 1).tolist()), "drafts are accepted and refused"


@pytest.mark.slow
def test_a_chunk_ends_before_a_row_has_no_room_for_its_ids(monkeypatch):
    """Three tokens of 13 ids fit at once: chunks end early, nothing is lost, and the tokens are the same."""
    sampling = Sampling(0.7, 13, 1.0)
    roomy = generate(sampling, chunk=7, most_kept=13)
    monkeypatch.setattr(sampling_mask, "LARGEST", 39)
    tight = generate(sampling, chunk=7, most_kept=13)
    assert_honest(tight, sampling)
    assert len(tight.chunks) > len(roomy.chunks) and max(chunk.iterations for chunk in tight.chunks) == 3
    np.testing.assert_array_equal(tight.tokens, roomy.tokens)


@pytest.mark.slow
def test_coupled_masks_do_not_depend_on_speculation():
    sampling = Sampling(0.7, 5, 0.9, rule="coupled")
    plain, speculative = generate(sampling), generate(sampling, 2)
    assert speculative.verifications.sum() < plain.verifications.sum()
    np.testing.assert_array_equal(plain.tokens, speculative.tokens)
    for name in ("mask_ids", "mask_count"):
        np.testing.assert_array_equal(plain.features[name].values, speculative.features[name].values)


@pytest.mark.slow
def test_nothing_is_recorded_unless_asked_for():
    rollouts = generate(Sampling(0.7, 5, 0.9), most_kept=0)
    assert not rollouts.features


def test_rows_taken_and_joined_keep_their_masks():
    sampling = Sampling(0.7, 0, 0.9)
    rollouts = generate(sampling)
    order = np.array([4, 0, 14, 7])
    taken = rollouts.take(order)
    assert_honest(taken, sampling)
    some = np.isin(np.arange(15), order)
    assert_honest(concatenate([rollouts.take(some), taken, rollouts.take(np.zeros(15, bool) | False)]), sampling)


def test_ids_of_tokens_that_are_not_committed_are_not_recorded():
    """Two of three tokens of the first row, none of the second, whose buffer is full, one of the third."""
    ids = jnp.arange(36, dtype=jnp.int32).reshape(3, 3, 4)
    count = jnp.array([[2, 1, 4], [4, 4, 4], [3, 1, 1]])
    buffer = MaskBuffer(jnp.zeros((3, 6), jnp.int32), jnp.full((3, 20), -1), jnp.array([0, 8, 1]))
    committed = jnp.array([[True, True, False], [False] * 3, [True, False, False]])
    where = jnp.where(committed, jnp.array([[1, 2, 3], [2, 3, 4], [3, 4, 5]]), 6)
    verified = Verified(ids[..., 0], committed.sum(axis=1) - 1, jnp.zeros((3, 3)), mask=SamplingMask(ids, count))
    out = SamplingMasks(4).commit(buffer, Committed(verified, committed, committed.sum(axis=1), where))
    assert out.used.tolist() == [3, 8, 4]
    assert out.ids[0, :3].tolist() == [0, 1, 4] and out.ids[1, :8].tolist() == [-1] * 8
    assert out.ids[2, :4].tolist() == [-1, 24, 25, 26]
    assert out.count.tolist() == [[0, 2, 1, 0, 0, 0], [0] * 6, [0, 0, 0, 3, 0, 0]]
