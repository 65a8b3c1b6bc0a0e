"""`verify` under rejection, block and greedy: its results. Its distribution: test_certified.py."""

import dataclasses
import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.verify import reference
from kernels_pallas.verify.op import Draft, Noise, RowSampling, VerifyInputs, verify
from lossless_certify.distributions import joint
from specrl_jax.decoding.sampling import Sampling
from tests.helpers.blocks import (
    NO,
    QUICKLY,
    SAMPLINGS,
    Model,
    completed,
    jitted_verify,
    make_model,
    plain_tokens,
    run_block,
    run_drafts,
)
from tests.helpers.exact import final_probs, log_softmax
from tests.helpers.interpreted import KERNELS
from tests.helpers.long import long_but
from tests.helpers.statistics import assert_drawn_from

RATIO_RULES = ["rejection", "block"]


def with_rule(rule, name="plain"):
    return dataclasses.replace(SAMPLINGS[name], rule=rule)


@functools.partial(jax.jit, static_argnames="sampling", compiler_options=QUICKLY)
def verify_with(uniform, draft, target_logits, sampling):
    """`verify` with uniform [rows, stream, position, offset] for its noise; NaN is noise that may not be used."""

    def tabulated(seed, rollout_id, position, offset, stream):
        return (uniform[rollout_id, stream, position, offset],) * 2

    rows = len(draft.tokens)
    noise = Noise(jnp.uint32(0), jnp.arange(rows), jnp.zeros(rows, jnp.int32))
    with mock.patch.object(reference.counter, "uniforms", tabulated):
        return verify(VerifyInputs(noise, draft, target_logits), sampling)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_residual_that_rounds_to_nothing_still_gives_a_possible_token(rule):
    """p and q equal but for rounding: p <= q everywhere, so the one rejection in 2**24 leaves max(p - q, 0) = 0."""
    rng = np.random.default_rng(0)
    target = np.array([NO, 0.3, -0.9], np.float32)
    drafts = target + rng.uniform(-5, 5, (2000, 1)).astype(np.float32)
    p, q = np.asarray(jax.nn.softmax(target)), np.asarray(jax.nn.softmax(jnp.array(drafts)))
    found = np.flatnonzero((p <= q).all(axis=1) & (p < q).any(axis=1))
    draft, lower = drafts[found[0]], np.flatnonzero(p < q[found[0]])

    uniform = jnp.full((1, 3, 2, 2), 1 - 2**-24, jnp.float32)
    drafted = Draft(jnp.array([[int(lower[0])]]), jnp.array(draft)[None, None], jnp.zeros(1, bool))
    out = verify_with(uniform, drafted, jnp.broadcast_to(jnp.array(target), (1, 2, 3)), with_rule(rule))
    emitted = np.asarray(out.tokens)[0, : int(out.num_accepted[0]) + 1]
    assert 0 not in emitted.tolist()


# --- drafts without probabilities


@pytest.mark.slow
@pytest.mark.parametrize("certain", ["no logits", "logits to ignore"])
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_without_probabilities_plain_decoding_is_replayed_token_for_token(certain, rule):
    """Whatever is drafted, however far, emitted are the tokens of decoding without drafts, with the same noise."""
    model, sampling, ids = make_model("random", 4, 3), with_rule(rule, "all three"), np.arange(600)
    plain = plain_tokens(model, sampling, ids, length=4)
    rng = np.random.default_rng(1)
    for k in (1, 3):
        # Half of the drafts right, some of them cut short.
        drafts = np.where(rng.random((600, k)) < 0.5, plain[:, :k], rng.integers(0, 4, (600, k)))
        drafts = np.where(np.arange(k) < rng.integers(0, 2 * k + 1, (600, 1)), drafts, -1).astype(np.int32)
        given = model if certain == "logits to ignore" else without_draft(model)
        out = run_drafts(given, sampling, ids, drafts)
        assert_replays(out, drafts, plain)


def without_draft(model):
    bare = Model(np.random.default_rng(0), model.V, 0)
    bare.target, bare.draft = model.target, []
    return bare


def assert_replays(out, drafts, plain):
    k = drafts.shape[1]
    accepted = np.asarray(out.num_accepted)
    np.testing.assert_array_equal(accepted, np.cumprod(drafts == plain[:, :k], axis=1).sum(axis=1))
    assert set(accepted.tolist()) == set(range(k + 1))
    emitted = np.arange(k + 1) <= accepted[:, None]
    np.testing.assert_array_equal(np.asarray(out.tokens)[emitted], plain[:, : k + 1][emitted])


RULES_BY_EQUALITY = [with_rule("rejection"), with_rule("block"), with_rule("coupled"), Sampling(0.0)]


@pytest.mark.parametrize("sampling", RULES_BY_EQUALITY, ids=["rejection", "block", "coupled", "greedy"])
@pytest.mark.parametrize("reduced", [True, False])
def test_where_nothing_was_drafted_nothing_is_accepted(sampling, reduced):
    """The last token of the vocabulary is certain, so that a -1 which reaches around would be accepted."""
    model = make_model("reduced" if reduced else "random", 4, 3)
    for table in model.target:
        table[...] = np.where(np.arange(4) == 3, 0, NO)
    drafts = np.array([[3, 3, 3], [3, 3, -1], [3, -1, -1], [-1, -1, -1]], np.int32)
    out = run_drafts(model, sampling, np.arange(4), drafts)
    assert out.num_accepted.tolist() == [3, 2, 1, 0]
    np.testing.assert_array_equal(out.tokens, 3)
    np.testing.assert_array_equal(out.logprobs, 0)


@pytest.mark.parametrize(
    "rule, kind", long_but([("block", "random")], [*RATIO_RULES, "coupled"], ["random", "equal", "reduced"])
)
def test_a_row_with_fewer_drafted_tokens_is_verified_as_if_alone_with_them(rule, kind):
    """Rows of 0 to 3 drafted tokens in one call emit what calls with k = 0 to 3 emit"""
    model, sampling, ids = make_model(kind, 4, 3), with_rule(rule, "warm"), np.arange(2000)
    drafts, _ = run_block(model, sampling, ids)
    drafts, num_drafted = np.asarray(drafts), ids % 4
    ragged = np.where(np.arange(3) < num_drafted[:, None], drafts, -1)
    together = run_drafts(model, sampling, ids, ragged, deterministic=False)
    for k in range(4):
        rows = num_drafted == k
        alone = run_drafts(model, sampling, ids[rows], drafts[rows, :k], deterministic=False)
        accepted = np.asarray(alone.num_accepted)
        assert kind == "equal" or set(accepted.tolist()) == set(range(k + 1))
        np.testing.assert_array_equal(np.asarray(together.num_accepted)[rows], accepted)
        emitted = np.arange(k + 1) <= accepted[:, None]
        for name in ("tokens", "logprobs"):
            got, expected = np.asarray(getattr(together, name))[rows, : k + 1], np.asarray(getattr(alone, name))
            np.testing.assert_allclose(got[emitted], expected[emitted], rtol=0, atol=4e-6 if name == "logprobs" else 0)


# q that is no distribution: all or some logits NaN, one +inf, none possible.
NONFINITE = [[np.nan] * 3, [0.3, np.nan, 1.0], [0.0, np.inf, 1.0], [-np.inf] * 3]


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_draft_that_is_not_finite_leaves_the_targets_distribution(rule):
    """After some first tokens q is not finite, at the first for some rollouts: error rates as above.

    Taken for a probability, a NaN q would accept its token with chance p and redraw rejected ones from p.
    """
    model, sampling = make_model("random", 3, 2), with_rule(rule)
    probs = joint(model.p(sampling)).ravel()
    for after in ([NONFINITE[0], NONFINITE[2], None], [None, NONFINITE[1], NONFINITE[3]]):
        for token, logits in enumerate(after):
            model.draft[1][token] = model.target[1][token] if logits is None else logits
        _, out = run_block(model, sampling, np.arange(50_000))
        assert_drawn_from(completed(model, sampling, out.tokens, out.num_accepted + 1), probs, at_most=0.02)
    model.draft[0][...] = NONFINITE[0]
    _, out = run_block(model, sampling, np.arange(50_000))
    assert (np.asarray(out.num_accepted) == 0).all()
    assert_drawn_from(completed(model, sampling, out.tokens, out.num_accepted + 1), probs, at_most=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("logits", NONFINITE, ids=["nan", "one nan", "inf", "impossible"])
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_draft_ends_before_a_distribution_that_is_not_finite(rule, logits):
    model, sampling, ids = make_model("random", 3, 3), with_rule(rule, "warm"), np.arange(1000)
    drafts, _ = run_block(model, sampling, ids)
    shorter = run_drafts(model, sampling, ids, np.where(np.arange(3) < 1, drafts, -1), deterministic=False)
    model.draft[1][...] = logits
    model.draft[2][1] = np.nan
    found = run_drafts(model, sampling, ids, np.asarray(drafts), deterministic=False)
    assert set(np.asarray(found.num_accepted).tolist()) == {0, 1}
    np.testing.assert_array_equal(found.num_accepted, shorter.num_accepted)
    emitted = np.arange(4) <= np.asarray(found.num_accepted)[:, None]
    for name in ("tokens", "logprobs"):
        got, expected = (np.asarray(getattr(out, name)) for out in (found, shorter))
        np.testing.assert_array_equal(got[emitted], expected[emitted])


@pytest.mark.parametrize("rule", [*RATIO_RULES, "coupled"])
def test_logprobs_of_logits_far_from_zero(rule):
    """Logits that are multiples of 1 / 64, by 1e4 larger: the same tokens with the same log-probs, to the bit."""
    model, sampling, ids = make_model("random", 3, 2), with_rule(rule), np.arange(500)
    model.target = [np.round(64 * table) / 64 for table in model.target]
    near = run_drafts(model, sampling, ids, np.full((500, 2), 1))
    model.target = [table + 1e4 for table in model.target]
    far = run_drafts(model, sampling, ids, np.full((500, 2), 1))
    jax.tree.map(np.testing.assert_array_equal, far, near)


# --- what is returned


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule, name", [*(("rejection", name) for name in SAMPLINGS), ("block", "all three"), ("coupled", "all three")]
)
def test_logprobs_are_those_of_the_distribution_that_tokens_are_sampled_from(rule, name):
    model, sampling = make_model("random", 4, 2), with_rule(rule, name)
    drafts, out = run_block(model, sampling, np.arange(5000))
    tokens, accepted = np.asarray(out.tokens), np.asarray(out.num_accepted)
    logits = model.along(model.target, np.asarray(drafts)).astype(np.float64)
    probs = np.take_along_axis(final_probs(logits, sampling), tokens[..., None], axis=-1)[..., 0]
    emitted = np.arange(3) <= accepted[:, None]
    assert emitted.sum(axis=0).min() > 20 and (probs[emitted] > 0).all()
    expected = np.log(probs, where=emitted, out=np.zeros_like(probs))
    # Logits up to 10 and a sum of 4: a few roundings of numbers near 10, each 2**-21.
    np.testing.assert_allclose(out.logprobs[emitted], expected[emitted], rtol=0, atol=4e-6)


@pytest.mark.parametrize("rule", [*RATIO_RULES, "coupled"])
def test_accepted_tokens_are_the_drafts(rule):
    model = make_model("random", 4, 3)
    drafts, out = run_block(model, with_rule(rule), np.arange(2000))
    accepted = np.arange(3) < np.asarray(out.num_accepted)[:, None]
    assert set(np.asarray(out.num_accepted).tolist()) == {0, 1, 2, 3}
    np.testing.assert_array_equal(np.asarray(out.tokens)[:, :3][accepted], np.asarray(drafts)[accepted])


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("some", [True, False])
def test_rows_without_probabilities_among_others_are_verified_as_such(rule, some):
    """Rows of both sorts in one call give what each sort gives alone."""
    model, sampling = make_model("random", 4, 2), with_rule(rule)
    mixed = (np.arange(500) % 3 == 0) & some
    _, certain = run_block(model, sampling, np.arange(500), deterministic=True)
    _, sampled = run_block(model, sampling, np.arange(500), deterministic=False)
    _, out = run_block(model, sampling, np.arange(500), deterministic=mixed)
    assert (np.asarray(certain.num_accepted) != np.asarray(sampled.num_accepted)).mean() > 0.1
    for got, a, b in zip(*map(jax.tree.leaves, (out, certain, sampled)), strict=True):
        keep = mixed.reshape(-1, *(1,) * (got.ndim - 1))
        np.testing.assert_array_equal(got, np.where(keep, a, b))


@pytest.mark.parametrize("sampling", RULES_BY_EQUALITY, ids=["rejection", "block", "coupled", "greedy"])
def test_float64_logits_stay_float64(sampling):
    """Log-probs to float64's precision, from a whole draft with probabilities."""
    rng = np.random.default_rng(3)
    target, draft = rng.normal(size=(50, 3, 5)), rng.normal(size=(50, 2, 5))
    drafts = rng.integers(0, 5, (50, 2)).astype(np.int32)
    with jax.enable_x64(True):
        noise = Noise(jnp.uint32(0), jnp.arange(50, dtype=jnp.uint32), jnp.zeros(50, jnp.int32))
        certain = jnp.arange(50) % 2 == 0
        drafted = Draft(jnp.array(drafts), jnp.array(draft), certain)
        out = jitted_verify(VerifyInputs(noise, drafted, jnp.array(target)), sampling)
    assert (out.tokens.dtype, out.num_accepted.dtype, out.logprobs.dtype) == (jnp.int32, jnp.int32, jnp.float64)
    expected = np.take_along_axis(log_softmax(target), np.asarray(out.tokens)[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(out.logprobs, expected, rtol=0, atol=1e-14)


# --- greedy


def greedy_block(target_logits, drafts):
    B = len(drafts)
    noise = Noise(jnp.uint32(0), jnp.arange(B, dtype=jnp.uint32), jnp.zeros(B, jnp.int32))
    draft = Draft(jnp.array(drafts), None, jnp.zeros(B, bool))
    return jitted_verify(VerifyInputs(noise, draft, jnp.array(target_logits)), Sampling(0.0))


def test_greedy_accepts_the_leading_matches_and_emits_the_argmax():
    best = np.array([2, 0, 3, 1])
    logits = np.broadcast_to(3.0 * np.eye(4, dtype=np.float32)[best], (5, 4, 4))
    drafts = np.array([[2, 0, 3], [2, 0, 1], [2, 1, 3], [0, 0, 3], [1, 1, 1]], np.int32)
    out = greedy_block(logits, drafts)
    assert out.num_accepted.tolist() == [3, 2, 1, 0, 0]
    np.testing.assert_array_equal(out.tokens, np.broadcast_to(best, (5, 4)))


def test_greedy_logprobs_are_at_temperature_one():
    logits = np.random.default_rng(0).normal(size=(3, 2, 6)).astype(np.float32)
    out = greedy_block(logits, np.zeros((3, 1), np.int32))
    np.testing.assert_allclose(out.logprobs, log_softmax(logits).max(axis=-1), rtol=0, atol=1e-6)


def test_greedy_with_nothing_drafted_is_the_argmax():
    logits = np.random.default_rng(1).normal(size=(7, 1, 6)).astype(np.float32)
    out = greedy_block(logits, np.zeros((7, 0), np.int32))
    np.testing.assert_array_equal(out.tokens, logits.argmax(axis=-1))
    np.testing.assert_array_equal(out.num_accepted, 0)


# --- rows


ROW_SAMPLINGS = [*(Sampling(0.8, 5, 0.9, rule=rule) for rule in [*RATIO_RULES, "coupled"]), Sampling(0.0)]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ROW_SAMPLINGS, ids=[*RATIO_RULES, "coupled", "greedy"])
def test_a_row_depends_on_nothing_but_itself(sampling):
    """Bit-equal under another order, under other neighbours, and alone; a vocabulary of more than one tile."""
    B, k, V = 48, 3, 700
    rng = np.random.default_rng(4)
    target = rng.normal(size=(B, k + 1, V)).astype(np.float32) * 3
    # Close to the target, so that all counts of accepted drafts occur.
    draft = target[:, :k] + rng.normal(size=(B, k, V)).astype(np.float32) * 0.3
    drafts = (draft + rng.gumbel(size=draft.shape)).argmax(axis=-1).astype(np.int32)
    drafts[: B // 2] = target[: B // 2, :k].argmax(axis=-1)
    ids, positions = np.arange(50, 50 + B, dtype=np.uint32), rng.integers(0, 40, B).astype(np.int32)
    deterministic = np.arange(B) % 4 == 3

    jitted = jax.jit(verify, static_argnames="sampling")

    def run(rows, **changes):
        given = {"target": target, "draft": draft, "drafts": drafts, "ids": ids} | changes
        target_rows, draft_rows, draft_tokens, id_rows = (jnp.array(x[rows]) for x in given.values())
        noise = Noise(jnp.uint32(9), id_rows, jnp.array(positions[rows]))
        drafted = Draft(draft_tokens, draft_rows, jnp.array(deterministic[rows]))
        out = jitted(VerifyInputs(noise, drafted, target_rows), sampling)
        return [np.asarray(x) for x in jax.tree.leaves(out)]

    together = run(np.arange(B))
    assert len(set(together[1].tolist())) > 1
    order = rng.permutation(B)
    for got, expected in zip(run(order), together, strict=True):
        np.testing.assert_array_equal(got, expected[order])

    even = np.arange(B) % 2 == 0
    others = {"target": target.copy(), "draft": draft.copy(), "drafts": drafts.copy(), "ids": ids.copy()}
    for array in others.values():
        array[~even] = array[~even][::-1] + 1
    others["drafts"] %= V
    for got, expected in zip(run(np.arange(B), **others), together, strict=True):
        np.testing.assert_array_equal(got[even], expected[even])

    # One row is another compiled shape: its float32 sums may be ordered otherwise, its tokens may not change.
    for row in range(B):
        tokens, accepted, logprobs, *mask = run(np.array([row]))
        emitted = int(accepted[0]) + 1
        assert emitted == together[1][row] + 1
        np.testing.assert_array_equal(tokens[0, :emitted], together[0][row, :emitted])
        np.testing.assert_allclose(logprobs[0, :emitted], together[2][row, :emitted], rtol=0, atol=1e-5)
        for got, expected in zip(mask, together[3:], strict=True):
            np.testing.assert_array_equal(got[0, :emitted], expected[row, :emitted])


# --- rows that are sampled each in its own way


OWN = {
    "whole": [Sampling(1.0), Sampling(0.3), Sampling(0.0), Sampling(2.0)],
    "truncated": [Sampling(1.0, 6), Sampling(0.7, 3, 0.8), Sampling(0.0), Sampling(1.3, 6, 0.4)],
}


def own_sampling(samplings):
    columns = zip(*[(s.temperature, s.top_k, s.top_p) for s in samplings], strict=True)
    dtypes = jnp.float32, jnp.int32, jnp.float32
    return RowSampling(*(jnp.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)))


# Interpreted, a GPU's kernel takes a minute.
OWN_CASES = list(itertools.product(OWN, [*RATIO_RULES, "coupled"], [None, "tpu", "gpu"]))
OWN_SLOW = [case for case in OWN_CASES if case[2] != "gpu" or case == ("truncated", "coupled", "gpu")]


@pytest.mark.parametrize("kind, rule, kernels", long_but([], OWN_CASES, slow=OWN_SLOW))
def test_a_row_with_a_sampling_of_its_own_is_verified_as_a_batch_that_has_it(kind, rule, kernels):
    """To the last bit of the reference; kernels: the same tokens and acceptance, and log-probs within rounding."""
    samplings, (B, k, V) = [dataclasses.replace(s, rule=rule) for s in OWN[kind]], (8, 3, 600)
    rng = np.random.default_rng(5)
    target = rng.normal(size=(B, k + 1, V)).astype(np.float32) * 3
    draft = target[:, :k] + rng.normal(size=(B, k, V)).astype(np.float32) * 0.5
    drafts = jnp.array((draft + rng.gumbel(size=draft.shape)).argmax(axis=-1), jnp.int32)
    noise = Noise(jnp.uint32(9), jnp.arange(B, dtype=jnp.uint32), jnp.arange(B, dtype=jnp.int32))
    drafted = Draft(drafts, jnp.array(draft), jnp.arange(B) % 4 == 3)
    inputs = VerifyInputs(noise, drafted, jnp.array(target))
    run = functools.partial(verify, kernels=kernels and KERNELS[kernels])
    own = inputs.__class__(noise, drafted, inputs.target_logits, own_sampling([samplings[i % 4] for i in range(B)]))
    together = run(own, samplings[0])
    assert len(set(together.num_accepted.tolist())) > 1
    for i, sampling in enumerate(samplings):
        alone = run(inputs, sampling)
        for row in (i, i + 4):
            count = int(alone.num_accepted[row]) + 1
            assert int(together.num_accepted[row]) + 1 == count
            np.testing.assert_array_equal(together.tokens[row, :count], alone.tokens[row, :count])
            found, expected = together.logprobs[row, :count], alone.logprobs[row, :count]
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 if kernels else 0)


# --- what a seed draws does not change from version to version

# Emitted at commit 2d100f0.
RECORDED = [
    (Sampling(), [[303, 471, 96, 346], [312, 14, 335], [547], [98, 325, 239, 324], [103], [585]]),
    (Sampling(rule="block"), [[303, 471, 96, 346], [312, 14, 335], [547], [98, 106], [430, 331, 504, 546], [585]]),
    (Sampling(rule="coupled"), [[303, 482], [312, 574], [301, 494], [270], [584], [72]]),
    (Sampling(0.7, 20, 0.9), [[303, 471, 445], [312, 14, 180], [547], [324], [513], [585]]),
    (Sampling(0.0), [[303, 471, 524], [312, 574], [301, 60], [270], [513], [585]]),
]


@pytest.mark.parametrize("by_row", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one sampling", "by row"])
@pytest.mark.parametrize(
    ("sampling", "recorded"), RECORDED, ids=["rejection", "block", "coupled", "truncated", "greedy"]
)
def test_a_seed_draws_what_it_drew(sampling, recorded, by_row):
    rng, (B, k, V) = np.random.default_rng(11), (6, 3, 600)
    target = (rng.normal(size=(B, k + 1, V)) * 3).astype(np.float32)
    draft = target[:, :k] + (rng.normal(size=(B, k, V)) * 0.5).astype(np.float32)
    drafts = jnp.array((draft + rng.gumbel(size=draft.shape)).argmax(axis=-1), jnp.int32)
    noise = Noise(jnp.uint32(9), jnp.arange(B, dtype=jnp.uint32), jnp.arange(B, dtype=jnp.int32))
    drafted = Draft(drafts, jnp.array(draft), jnp.arange(B) % 3 == 2)
    own = own_sampling([sampling] * B) if by_row else None
    out = verify(VerifyInputs(noise, drafted, jnp.array(target), sampling=own), sampling)
    assert [row[: n + 1] for row, n in zip(out.tokens.tolist(), out.num_accepted.tolist())] == recorded
