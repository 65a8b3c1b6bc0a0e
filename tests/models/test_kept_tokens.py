"""Scores, draft terms and gradients over the tokens that top-k and top-p kept, against whole logits in float64."""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.verify.sampling import truncate
from lossless_certify.distributions import sequences
from specrl_jax.core import DraftTerms
from specrl_jax.data.rows import KeptTokens
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.models.lm_head import TargetDistribution, TokenScores, draft_terms, token_scores
from specrl_jax.rl.objectives import LossInputs, Objective, grpo_loss
from tests.helpers.exact import final_probs
from tests.helpers.long import long_but, slow_but
from tests.models.test_lm_head import (
    CLOSE,
    IDS,
    STEPS,
    TAUGHT,
    B,
    T,
    V,
    assert_gradients_close,
    assert_terms_close,
    float64,
    inputs_of,
    pairs_of,
    tiling,
)

__all__ = ["float64"]  # a fixture


def kept_of(keep, everything=None, room=2):
    """KeptTokens of keep [B, T, V] bool, each target's ids in any order; `everything` [B, T]: not recorded."""
    rng = np.random.default_rng(0)
    everything = np.zeros(keep.shape[:2], bool) if everything is None else everything
    count = np.where(everything, 0, keep.sum(axis=-1)).astype(np.int32)
    ids = np.full((len(keep), room * keep.shape[1] * keep.shape[2]), -1, np.int32)
    for b, row in enumerate(keep):
        found = [rng.permutation(np.flatnonzero(x)) for x, whole in zip(row, everything[b]) if not whole]
        found = np.concatenate([*found, np.zeros(0, int)])
        ids[b, : len(found)] = found
    return KeptTokens(jnp.array(ids), jnp.array(count))


def some_kept(vocab, targets, seed=1):
    """keep [B, T, V]: a quarter of the tokens and the target; and [B, T], the first two targets of a row keep all."""
    keep = np.random.default_rng(seed).random((*targets.shape, vocab)) < 0.25
    np.put_along_axis(keep, targets[..., None], True, axis=-1)
    everything = np.broadcast_to(np.arange(targets.shape[1]) < 2, targets.shape)
    return keep | everything[..., None], everything


def masked(logits, keep):
    """Logits of tokens that are not kept so low that they have no probability, and a gradient of zero."""
    return jnp.where(keep, logits, -1e9)


def scores_by_hand(hidden, table, targets, cotangents, keep, temperature):
    def scores(hidden, table):
        logits = masked(jnp.einsum("BTD,VD->BTV", hidden, table) / temperature, keep)
        p = jax.nn.log_softmax(logits)
        logprobs = jnp.take_along_axis(p, jnp.asarray(targets)[..., None], axis=-1)[..., 0]
        return TokenScores(logprobs, -(jnp.exp(p) * p).sum(axis=-1), jax.nn.logsumexp(logits, axis=-1))

    with jax.enable_x64(True):
        found, pull = jax.vjp(scores, *(jnp.asarray(x, jnp.float64) for x in (hidden, table)))
        return jax.device_get((found, pull(TokenScores(*(jnp.asarray(c, jnp.float64) for c in cotangents)))))


SLOW = pytest.param(10, 30, "eight", marks=pytest.mark.slow)
SOME_LONG = [pytest.param(*case, marks=pytest.mark.long) for case in ((0, V, "one"), (7, V, "eight"))]


@pytest.mark.parametrize(("entries", "vocab", "mesh"), [(7, V, "one"), SLOW, *SOME_LONG])
def test_scores_are_those_of_the_tokens_kept(entries, vocab, mesh):
    """Some rows' kept tokens lie in few tiles, so that other tiles have none."""
    hidden, table, targets, cotangents = inputs_of(vocab)
    keep, everything = some_kept(vocab, targets)
    keep[1, 2:] = np.arange(vocab) >= vocab - 3
    targets[1, 2:] = vocab - 2
    kept, tiles = kept_of(keep, everything), tiling(entries, 0.6, mesh)

    @jax.jit
    def run(hidden, table, kept):
        found, pull = jax.vjp(lambda hidden, table: token_scores(hidden, table, targets, tiles, kept), hidden, table)
        return found, pull(cotangents)

    found, gradients = jax.device_get(run(hidden, table, kept))
    expected, expected_gradients = scores_by_hand(hidden, table, targets, cotangents, keep, 0.6)
    for name in TokenScores._fields:
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), **CLOSE, err_msg=name)
    assert_gradients_close(gradients, expected_gradients)


def terms_by_hand(outputs, table, target, keep, drafted, cotangents):
    """(DraftTerms, gradients of outputs and table) in float64; p~ is 0 where no drafted token is kept."""
    some = keep[..., drafted].any(axis=-1)
    at = np.minimum(np.arange(T) + 1 + np.arange(STEPS)[:, None], T - 1)

    def terms(outputs, table):
        log_q = jax.nn.log_softmax(jnp.einsum("SBTD,VD->SBTV", outputs, table))
        logits = jnp.einsum("BTD,VD->BTV", *(jnp.asarray(x, jnp.float64) for x in (target.hidden, target.table)))
        logits = masked(logits, keep[..., drafted])
        p = jnp.exp(logits - target.normaliser[..., None].astype(np.float64)) * keep[..., drafted]
        log_share = jax.nn.log_softmax(logits)
        share = jnp.exp(log_share) * some[..., None]
        p, share, log_share = (jnp.stack([x[:, at[i]] for i in range(STEPS)]) for x in (p, share, log_share))
        crossed, own = -(share * log_q).sum(-1), -(share * log_share).sum(-1)
        return DraftTerms(crossed, own, jnp.minimum(p, jnp.exp(log_q)).sum(-1))

    with jax.enable_x64(True):
        found, pull = jax.vjp(terms, *(jnp.asarray(x, jnp.float64) for x in (outputs, table)))
        crossed, overlap = (jnp.asarray(c, jnp.float64) for c in cotangents)
        return jax.device_get((found, pull(DraftTerms(crossed, jnp.zeros_like(crossed), overlap))))


@pytest.mark.parametrize(("entries", "vocab", "mesh"), slow_but([(5, 13, "one")], [(5, 13, "one"), (4, 12, "eight")]))
def test_draft_terms_are_those_of_the_tokens_kept(entries, vocab, mesh):
    """Also where the draft's vocabulary has none of them: nothing is accepted, the cross-entropy has no gradient."""
    drafted = IDS[vocab]
    outputs, table, target, cotangents = pairs_of(drafted)
    keep = np.random.default_rng(3).random((B, T, V)) < 0.3
    keep[2] = ~np.isin(np.arange(V), drafted)
    kept = kept_of(keep[..., drafted])
    # A count of 0 would say that everything is kept: recorded tokens outside the vocabulary have id -1.
    kept = KeptTokens(*with_missing(kept, keep, drafted))

    @jax.jit
    def run(outputs, table, kept):
        terms, tiles = target._replace(kept=kept), tiling(entries, 1.0, mesh)
        found, pull = jax.vjp(lambda outputs, table: draft_terms(outputs, table, terms, tiles), outputs, table)
        return found, pull(DraftTerms(cotangents[0], jnp.ones_like(cotangents[0]), cotangents[1]))

    found, gradients = jax.device_get(run(outputs, table, kept))
    expected, expected_gradients = terms_by_hand(outputs, table, target, keep, drafted, cotangents)
    assert (np.where(TAUGHT, found.overlap, 0)[:, 2] == 0).all() and (expected.overlap[:, 1] > 0).any()
    assert_terms_close(found, expected, **CLOSE)
    assert_gradients_close(gradients, expected_gradients)


def with_missing(kept, keep, drafted):
    """(ids of the draft's vocabulary, counts) of all kept tokens of the target's."""
    draft_id = np.full(V, -1)
    draft_id[drafted] = np.arange(len(drafted))
    whole = kept_of(keep)
    ids = np.asarray(whole.ids)
    return jnp.array(np.where(ids < 0, -1, draft_id[ids]), jnp.int32), whole.count


# --- the policy gradient


@pytest.mark.parametrize(
    "sampling", long_but([Sampling(1.3, 4, 0.8)], [Sampling(0.7, 3), Sampling(0.7, 0, 0.7), Sampling(1.3, 4, 0.8)])
)
def test_the_policy_gradient_is_that_of_the_truncated_distribution(sampling, float64):
    """The gradient of E[R] over answers of two tokens, by enumeration and central differences of the truncated
    distribution itself, which may move with the weights; and by the loss, with what was kept held constant.
    """
    vocab, width, rng = 6, 4, np.random.default_rng(0)
    contexts, table = rng.normal(size=(1 + vocab, width)), 1.5 * rng.normal(size=(vocab, width))
    answers, rewards = sequences(vocab, 2), rng.normal(size=vocab**2)

    def probabilities(table):
        """[answers, 2], of both tokens."""
        p = final_probs(contexts @ table.T, sampling)
        return np.stack([p[0, answers[:, 0]], p[1 + answers[:, 0], answers[:, 1]]], axis=1)

    def difference(index):
        step = np.zeros_like(table)
        step[index] = 1e-6
        up, down = (probabilities(table + sign * step).prod(axis=1) @ rewards for sign in (1, -1))
        return (up - down) / 2e-6

    exact = np.array([[difference((i, j)) for j in range(width)] for i in range(vocab)])
    probs = probabilities(table).prod(axis=1)
    drawn = np.flatnonzero(probs)
    assert len(drawn) < len(probs), "some answers are cut"
    hidden = np.stack([np.broadcast_to(contexts[0], (len(drawn), width)), contexts[1 + answers[drawn, 0]]], axis=1)
    cut, _ = truncate(jnp.array(hidden @ table.T), sampling)
    kept = kept_of(np.isfinite(cut))
    advantages = jnp.array((probs * rewards)[drawn])[:, None]

    @jax.jit
    @jax.grad
    def gradient(table, kept):
        scores = token_scores(jnp.array(hidden), table, answers[drawn], tiling(4, sampling.temperature), kept)
        np.testing.assert_equal(scores.logprobs.dtype, np.float64)
        objective, mask = Objective(clip_low=0.2, clip_high=0.2, kl_coef=0.0), jnp.ones((len(drawn), 2), bool)
        inputs = LossInputs(None, None, advantages)
        return -grpo_loss(
            logprobs=scores.logprobs,
            entropy=scores.entropy,
            inputs=inputs,
            mask=mask,
            segments=None,
            objective=objective,
        ).loss.total

    replayed, ignored = (gradient(jnp.array(table), x) for x in (kept, None))
    scale = np.abs(exact).max()
    # Central differences of a function of size 1: 1e-6**2 and 2**-53 / 1e-6.
    np.testing.assert_allclose(replayed, exact, rtol=0, atol=1e-7 * max(scale, 1))
    assert np.abs(ignored - exact).max() > 0.05 * scale


# --- memory


def largest_array(jaxpr):
    """Elements of the largest array that a jaxpr computes, those of its loops and branches included."""
    sizes = [np.prod(v.aval.shape, dtype=int) for eqn in jaxpr.eqns for v in eqn.outvars if hasattr(v.aval, "shape")]
    inner = [largest_array(sub) for eqn in jaxpr.eqns for sub in jax.extend.core.jaxprs_in_params(eqn.params)]
    return max([0, *sizes, *inner])


@pytest.mark.parametrize("kind", ["scores", "terms"])
def test_no_array_of_every_token_and_entry(kind):
    """The largest array is a tile's logits or the table's gradient, as without kept tokens."""
    tokens, vocab, width, entries = (2, 64), 4096, 8, 512
    hidden, table = jax.ShapeDtypeStruct((*tokens, width), "f4"), jax.ShapeDtypeStruct((vocab, width), "f4")
    kept = KeptTokens(jax.ShapeDtypeStruct((2, 4 * 64), "i4"), jax.ShapeDtypeStruct(tokens, "i4"))

    def scores(hidden, table, kept, entries):
        found = token_scores(hidden, table, jnp.zeros(tokens, jnp.int32), tiling(entries), kept)
        return found.logprobs.sum() + found.entropy.sum()

    def terms(hidden, table, kept, entries):
        target = TargetDistribution(hidden, table, jnp.zeros(tokens), kept=kept)
        found = draft_terms(hidden[None], table, target, tiling(entries))
        return found.cross_entropy.sum() + found.overlap.sum()

    def largest(kept, entries):
        graded = jax.grad(lambda *x: {"scores": scores, "terms": terms}[kind](*x, entries), argnums=(0, 1))
        return largest_array(jax.make_jaxpr(graded)(hidden, table, kept).jaxpr)

    # The draft's pairs are shifted by one: a column more.
    assert largest(kept, entries) == largest(None, entries) <= 2 * 65 * entries
    assert largest(kept, 0) >= 2 * 64 * vocab, "without tiles it would be seen"
