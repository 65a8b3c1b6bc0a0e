"""Log-probs and draft terms by tiles of the vocabulary, against whole logits in float64, and their memory.

References differentiate whole logits by autodiff in float64; the code under test has derivatives written by hand.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.core import DraftTerms, shift_left
from specrl_jax.models import vocab_tiles
from specrl_jax.models.lm_head import TargetDistribution, TokenScores, draft_terms, token_scores
from specrl_jax.models.vocab_tiles import Tiling
from specrl_jax.sharding import LEARNER, make_mesh, partitioner
from tests.helpers.long import slow_but

ONE = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}
EIGHT = {"data": 2, "fsdp": 2, "expert": 1, "tensor": 2}
B, T, D = 4, 6, 8
V = 31  # a prime: no tile divides it, nor does the tensor axis
# Logits of at most 40 from 8 products each: a few units of 2**-23 * 40.
CLOSE = {"rtol": 0, "atol": 2e-5}
GRADIENT = 1e-5  # of a leaf's largest entry: probabilities err as logits do, and sums go over at most 24 tokens


@functools.cache
def partition_of(mesh):
    sizes = {"one": ONE, "eight": EIGHT}[mesh]
    return partitioner(make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))]), LEARNER)


def tiling(entries=0, temperature=1.0, mesh="one"):
    return Tiling(entries, temperature, partition_of(mesh))


def assert_gradients_close(got, want, share=GRADIENT):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=share * np.abs(b).max())


@pytest.fixture
def float64(monkeypatch):
    """The code under test in float64: `matmul` rounds to float32 whatever it gets."""
    monkeypatch.setattr(vocab_tiles, "matmul", jnp.einsum)
    with jax.enable_x64(True):
        yield


# ---- log-probs of tokens


def inputs_of(vocab, seed=0):
    """hidden [B, T, D], table [V, D], targets [B, T], a cotangent [B, T] for each of the three scores."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(B, T, D)).astype(np.float32)
    table = 2 * rng.normal(size=(vocab, D)).astype(np.float32)
    targets = rng.integers(0, vocab, (B, T)).astype(np.int32)
    # The first and the last entry, in whose tiles a mistake of the tiling would be.
    targets[0, :2] = 0, vocab - 1
    return hidden, table, targets, TokenScores(*rng.normal(size=(3, B, T)).astype(np.float32))


def scores_by_hand(hidden, table, targets, cotangents, temperature):
    """(TokenScores, gradient of the logits, (of hidden, of the table)) in float64, from whole logits by autodiff."""
    hidden, table = (np.asarray(x, np.float64) for x in (hidden, table))

    def scores(logits):
        p = jax.nn.log_softmax(logits / (temperature or 1.0))
        logprobs = jnp.take_along_axis(p, jnp.asarray(targets)[..., None], axis=-1)[..., 0]
        entropy = -(jnp.exp(p) * p).sum(axis=-1)
        return TokenScores(logprobs, entropy, jax.nn.logsumexp(logits / (temperature or 1.0), axis=-1))

    with jax.enable_x64(True):
        found, pull = jax.vjp(scores, jnp.einsum("BTD,VD->BTV", hidden, table))
        (to_logits,) = pull(TokenScores(*(jnp.asarray(c, jnp.float64) for c in cotangents)))
        found, to_logits = jax.device_get((found, to_logits))
    to_hidden = np.einsum("BTV,VD->BTD", to_logits, table)
    return found, to_logits, (to_hidden, np.einsum("BTV,BTD->VD", to_logits, hidden))


def graded_scores(hidden, table, targets, cotangents, tiling):
    """(TokenScores, gradients of hidden and table) by the code under test."""

    @jax.jit
    def run(hidden, table, targets, cotangents):
        found, pull = jax.vjp(lambda hidden, table: token_scores(hidden, table, targets, tiling), hidden, table)
        return found, pull(cotangents)

    return jax.device_get(run(hidden, table, targets, cotangents))


# All at once; in tiles that divide the vocabulary; in tiles that do not; in tiles larger than it. Temperature 0 is 1.
TILINGS = [(0, V, "one"), (7, V, "one"), (10, 30, "eight"), (7, 30, "eight"), (7, V, "eight"), (64, 30, "one")]
TILINGS = [(*tiles, 0.6) for tiles in TILINGS] + [(7, V, "one", 0.0), (7, V, "one", 1.7)]


@pytest.mark.slow
@pytest.mark.parametrize(("entries", "vocab", "mesh", "temperature"), TILINGS)
def test_scores_by_tiles_are_those_of_whole_logits(entries, vocab, mesh, temperature):
    """Of the eight devices two share the vocabulary where it divides, and none where it does not."""
    inputs = inputs_of(vocab)
    found, gradients = graded_scores(*inputs, tiling(entries, temperature, mesh))
    expected, _, expected_gradients = scores_by_hand(*inputs, temperature)
    assert {x.dtype for x in found} == {np.dtype("float32")}
    for name in TokenScores._fields:
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), **CLOSE, err_msg=name)
    assert_gradients_close(gradients, expected_gradients)


@pytest.mark.slow
@pytest.mark.parametrize("entries", [0, 7])
def test_in_float64_the_formulas_agree_to_the_last_digits(entries, float64):
    inputs = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, inputs_of(V))
    found, gradients = graded_scores(*inputs, tiling(entries, 0.6))
    expected, _, expected_gradients = scores_by_hand(*inputs, 0.6)
    assert found.entropy.dtype == np.float64
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-13), found, expected)
    assert_gradients_close(gradients, expected_gradients, 1e-13)


def widened(x, column):
    """x with one more column at the end."""
    return np.concatenate([x, np.broadcast_to(column, x.shape[:-1])[..., None]], axis=-1).astype(np.float32)


@pytest.mark.parametrize(("shift", "entries"), [(-768.0, 7), (512.0, 0), (1e4, 7), (-1e4, 7)])
def test_logits_far_from_zero(shift, entries):
    """Their softmax is that of logits near zero: log-probs and entropy to the bit, gradients to the usual tolerance.

    Hidden states and table are multiples of 1 / 8, so that the logits are exact wherever they lie.
    """
    hidden, table, targets, cotangents = inputs_of(V)
    hidden, table = (np.round(8 * x) / 8 for x in (hidden, table))
    further = widened(hidden, 1.0), widened(table, shift)
    near, _ = graded_scores(hidden, table, targets, cotangents, tiling(entries))
    far, gradients = graded_scores(*further, targets, cotangents, tiling(entries))
    np.testing.assert_array_equal(far.entropy, near.entropy)
    np.testing.assert_array_equal(far.logprobs, near.logprobs)
    expected, _, expected_gradients = scores_by_hand(*further, targets, cotangents, 1.0)
    # The one number that is itself that large.
    np.testing.assert_allclose(far.normaliser, expected.normaliser, rtol=2**-24)
    # Without the last column, whose derivative by a hidden state is of the size of the shift.
    without = [[x[..., :D] for x in found] for found in (gradients, expected_gradients)]
    assert_gradients_close(*without)


# Ids whose logits overflow to -inf: the whole first tile of 7, and one id in another.
IMPOSSIBLE = np.isin(np.arange(V), [*range(7), 20])


@pytest.mark.parametrize("entries", [0, 7])
def test_tokens_with_logits_of_minus_infinity_do_not_exist(entries):
    """Scores and gradients are those of the vocabulary without them; the log-prob of one is -inf, not NaN."""
    hidden, table, targets, cotangents = inputs_of(V)
    kept = np.flatnonzero(~IMPOSSIBLE)
    targets = kept[targets % len(kept)].astype(np.int32)
    huge = widened(hidden, 1e20), widened(table, np.where(IMPOSSIBLE, -1e20, 0.0))
    found, (to_hidden, to_table) = graded_scores(*huge, targets, cotangents, tiling(entries))
    expected, _, expected_gradients = scores_by_hand(
        hidden, table[kept], np.searchsorted(kept, targets), cotangents, 1.0
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), found, expected)
    assert_gradients_close((to_hidden[..., :D], to_table[kept, :D]), expected_gradients)
    np.testing.assert_array_equal(to_table[IMPOSSIBLE], 0.0)
    targets[0, 0] = 20
    found, gradients = graded_scores(*huge, targets, cotangents, tiling(entries))
    assert found.logprobs[0, 0] == -np.inf
    assert all(np.isfinite(x).all() for x in (found.entropy, *gradients))


@pytest.mark.slow
@pytest.mark.parametrize("narrow", ["hidden", "table"])
def test_bfloat16_operands_have_float32_scores(narrow):
    """Products are exact in float32 and the rest is float32; gradients of logits are rounded to the hidden's dtype."""
    hidden, table, targets, cotangents = inputs_of(V)
    if narrow != "table":
        hidden = hidden.astype(jnp.bfloat16)
    if narrow != "hidden":
        table = table.astype(jnp.bfloat16)
    found, gradients = graded_scores(hidden, table, targets, cotangents, tiling(7))
    assert {x.dtype for x in found} == {np.dtype("float32")}
    assert [g.dtype for g in gradients] == [hidden.dtype, table.dtype]
    # Both operands are narrowed, whichever of them was.
    rounded = hidden.astype(jnp.bfloat16), table.astype(jnp.bfloat16)
    expected, to_logits, (to_hidden, to_table) = scores_by_hand(*rounded, targets, cotangents, 1.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), found, expected)
    # One rounding of 2**-9 each for the logits' gradients, the operand and the result.
    sizes = np.abs(to_logits), *(np.abs(np.asarray(x, np.float64)) for x in rounded)
    bounds = np.einsum("BTV,VD->BTD", sizes[0], sizes[2]), np.einsum("BTV,BTD->VD", sizes[0], sizes[1])
    for got, want, bound in zip(gradients, (to_hidden, to_table), bounds, strict=True):
        assert (np.abs(np.asarray(got, np.float64) - want) <= 3 * 2**-9 * bound + 1e-6).all()


# ---- memory


def shapes_in(compiled):
    """Elements of the largest array in a compiled program."""
    shapes = re.findall(r"\b(?:f64|f32|bf16|f16|s32|u32|pred)\[([\d,]+)\]", compiled.as_text())
    return max(int(np.prod([int(size) for size in shape.split(",")])) for shape in shapes)


VOCABULARY, TOKENS, WIDTH = 151_936, (4, 2048), 64


def compiled_scores(entries):
    """Value and gradients of 8,192 tokens' log-probs over Qwen3's vocabulary; compiled, not run."""
    hidden = jax.ShapeDtypeStruct((*TOKENS, WIDTH), jnp.float32)
    table = jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32)
    targets = jax.ShapeDtypeStruct(TOKENS, jnp.int32)

    def loss(hidden, table, targets):
        scores = token_scores(hidden, table, targets, tiling(entries))
        return scores.logprobs.sum() + scores.entropy.sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(hidden, table, targets).compile()


@pytest.mark.slow
def test_no_array_of_every_token_and_entry():
    """4.6 GiB in float32. A 16th of the entries at once: logits, their gradient, and the operands of two matmuls."""
    entries, tokens = 9_496, int(np.prod(TOKENS))
    compiled = compiled_scores(entries)
    assert shapes_in(compiled) <= max(tokens * entries, VOCABULARY * WIDTH) < tokens * VOCABULARY
    # What is not a tile: hidden states and a few numbers a token.
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * (4 * tokens * entries) + 4 * (4 * tokens * WIDTH)
    # Without tiles it would be seen.
    assert shapes_in(compiled_scores(0)) >= tokens * VOCABULARY


def compiled_terms(entries):
    vocab, steps = 32_000, 3
    outputs = jax.ShapeDtypeStruct((steps, *TOKENS, WIDTH), jnp.float32)
    table = jax.ShapeDtypeStruct((vocab, WIDTH), jnp.float32)
    target = TargetDistribution(
        jax.ShapeDtypeStruct((*TOKENS, WIDTH), jnp.float32), table, jax.ShapeDtypeStruct(TOKENS, "f4")
    )

    def loss(outputs, table, target):
        terms = draft_terms(outputs, table, target, tiling(entries))
        return terms.cross_entropy.sum() + terms.overlap.sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(outputs, table, target).compile()


@pytest.mark.slow
def test_no_array_of_every_pair_and_entry_of_the_draft():
    entries, tokens = 2_000, int(np.prod(TOKENS))
    compiled = compiled_terms(entries)
    # The gradients of three steps' logits lie beside each other.
    assert shapes_in(compiled) <= 3 * tokens * entries < tokens * 32_000
    # Six tiles a step: p, p~, q, the gradient of its logits, and the operands of the two products.
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * 6 * (4 * tokens * entries) + 4 * (4 * tokens * WIDTH)


# ---- terms of draft losses

STEPS, WIDE = 3, 5  # the draft's width is another than the target's
IDS = {size: np.array([7, 0, 30, 4, 8, 2, 11, 29, 16, 5, 21, 9, 3][:size]) for size in (12, 13)}
# (i, t) whose target position is in the row.
TAUGHT = np.stack([np.arange(T) < T - 1 - i for i in range(STEPS)])[:, None]


def pairs_of(drafted, temperature=1.0, seed=0, favourite=None):
    """(outputs [S, B, T, D'], table [Vd, D'], TargetDistribution, cotangents of ce and overlap), float32.

    The target has all 31 entries, the draft some of them; `favourite` is the id of most of the target's mass.
    """
    rng = np.random.default_rng(seed)
    outputs = rng.normal(size=(STEPS, B, T, WIDE)).astype(np.float32)
    table = rng.normal(size=(len(drafted), WIDE)).astype(np.float32)
    hidden = rng.normal(size=(B, T, D)).astype(np.float32)
    entries = rng.normal(size=(V, D)).astype(np.float32)
    if favourite is not None:
        hidden[..., 0] = 2.0
        entries[favourite] = [6.0] + [0.0] * (D - 1)
    logits = np.einsum("BTD,VD->BTV", hidden, entries, dtype=np.float64) / (temperature or 1.0)
    normaliser = (logits.max(-1) + np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1))).astype(np.float32)
    cotangents = np.where(TAUGHT, rng.normal(size=(2, STEPS, B, T)), 0.0).astype(np.float32)
    return outputs, table, TargetDistribution(hidden, entries[drafted], normaliser), cotangents


def terms_by_hand(student, target, temperature):
    """DraftTerms from float64 logits of the draft [S, B, T, Vd], in jax, to differentiate."""
    temperature = temperature or 1.0
    hidden, table = (jnp.asarray(x, jnp.float64) for x in target[:2])
    logits = jnp.einsum("BTD,VD->BTV", hidden, table) / temperature
    log_q = jax.nn.log_softmax(student / temperature)
    then = [shift_left(logits, 1 + i) for i in range(STEPS)]
    p = jnp.stack([x - shift_left(jnp.asarray(target.normaliser), 1 + i)[..., None] for i, x in enumerate(then)])
    log_share = jax.nn.log_softmax(jnp.stack(then))
    share = jnp.exp(log_share)
    overlap = jnp.minimum(jnp.exp(p), jnp.exp(log_q)).sum(-1)
    return DraftTerms(-(share * log_q).sum(-1), -(share * log_share).sum(-1), overlap)


def exact_terms(outputs, table, target, cotangents, temperature):
    """(DraftTerms, gradient of the draft's logits, (of outputs, of its table)) in float64 by autodiff."""
    outputs, table = (np.asarray(x, np.float64) for x in (outputs, table))
    with jax.enable_x64(True):
        student = jnp.einsum("SBTD,VD->SBTV", outputs, table)
        found, pull = jax.vjp(lambda student: terms_by_hand(student, target, temperature), student)
        crossed, overlap = (jnp.asarray(c, jnp.float64) for c in cotangents)
        (to_logits,) = pull(DraftTerms(crossed, jnp.zeros_like(crossed), overlap))
        found, to_logits = jax.device_get((found, to_logits))
    to_outputs = np.einsum("SBTV,VD->SBTD", to_logits, table)
    return found, to_logits, (to_outputs, np.einsum("SBTV,SBTD->VD", to_logits, outputs))


def graded_terms(outputs, table, target, cotangents, tiling):
    """(DraftTerms, gradients of outputs and table) by the code under test; entropy's cotangent leads nowhere."""

    @jax.jit
    def run(outputs, table, target, cotangents):
        found, pull = jax.vjp(lambda outputs, table: draft_terms(outputs, table, target, tiling), outputs, table)
        return found, pull(DraftTerms(cotangents[0], jnp.ones_like(cotangents[0]), cotangents[1]))

    return jax.device_get(run(outputs, table, target, cotangents))


@pytest.mark.slow
@pytest.mark.parametrize("entries", [0, 5])
def test_terms_of_some_anchors_are_those_of_all(entries):
    """Values and gradients, where the other pairs have no cotangent; the last anchor lies behind the row's end."""
    outputs, table, target, cotangents = pairs_of(IDS[13])
    anchors = np.arange(1, T + 2, 2)
    inside = anchors[anchors < T]
    chosen = np.zeros_like(cotangents)
    chosen[..., inside] = cotangents[..., inside]
    whole, (d_outputs, d_table) = graded_terms(outputs, table, target, chosen, tiling(entries))
    padded = [np.concatenate([x, x[:, :, :1]], axis=2) for x in (outputs, *cotangents)]
    padded[1:] = [np.where(anchors < T, x[:, :, np.minimum(anchors, T)], 0) for x in padded[1:]]
    some, (d_some, d_same_table) = graded_terms(
        padded[0][:, :, np.minimum(anchors, T)],
        table,
        target._replace(anchors=jnp.asarray(anchors)),
        np.stack(padded[1:]),
        tiling(entries),
    )
    taught = TAUGHT[:, :, inside]
    for got, want in zip(some, whole, strict=True):
        got, want = (np.where(taught, x, 0) for x in (got[:, :, : len(inside)], want[:, :, inside]))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    np.testing.assert_allclose(d_some[:, :, : len(inside)], d_outputs[:, :, inside], rtol=0, atol=1e-5)
    np.testing.assert_allclose(d_same_table, d_table, rtol=0, atol=1e-4)


def assert_terms_close(found, expected, **close):
    for name in DraftTerms._fields:
        got, want = (np.where(TAUGHT, getattr(terms, name), 0.0) for terms in (found, expected))
        np.testing.assert_allclose(got, want, **close, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entries", "vocab", "mesh", "temperature"),
    [
        *((0, 13, "one", 0.6), (5, 13, "one", 0.6), (4, 12, "eight", 0.6), (5, 12, "eight", 0.6)),
        *((64, 13, "eight", 0.6), (5, 13, "one", 0.0)),
    ],
)
def test_terms_by_tiles_are_those_of_whole_logits(entries, vocab, mesh, temperature):
    pairs = pairs_of(IDS[vocab], temperature)
    found, gradients = graded_terms(*pairs, tiling(entries, temperature, mesh))
    expected, _, expected_gradients = exact_terms(*pairs, temperature)
    assert {x.dtype for x in found} == {np.dtype("float32")}
    assert_terms_close(found, expected, **CLOSE)
    assert_gradients_close(gradients, expected_gradients)


@pytest.mark.slow
@pytest.mark.parametrize("entries", [0, 5])
def test_in_float64_the_terms_agree_to_the_last_digits(entries, float64):
    pairs = jax.tree.map(lambda x: x.astype(np.float64), pairs_of(IDS[13], 0.6))
    found, gradients = graded_terms(*pairs, tiling(entries, 0.6))
    expected, _, expected_gradients = exact_terms(*pairs, 0.6)
    assert found.overlap.dtype == np.float64
    assert_terms_close(found, expected, rtol=0, atol=1e-13)
    assert_gradients_close(gradients, expected_gradients, 1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("entries", [0, 5])
def test_drafts_of_tokens_with_logits_of_minus_infinity(entries):
    """Where target and draft both rule a token out, terms and gradients are those of the vocabulary without it."""
    outputs, table, target, cotangents = pairs_of(IDS[13])
    kept = ~IMPOSSIBLE[IDS[13]]
    assert 0 < kept.sum() < len(kept)
    column = np.where(kept, 0.0, -1e20)
    huge = target._replace(hidden=widened(target.hidden, 1e20), table=widened(target.table, column))
    found, (to_outputs, to_table) = graded_terms(
        widened(outputs, 1e20), widened(table, column), huge, cotangents, tiling(entries)
    )
    few = target._replace(table=target.table[kept])
    expected, _, expected_gradients = exact_terms(outputs, table[kept], few, cotangents, 1.0)
    assert_terms_close(found, expected, **CLOSE)
    assert_gradients_close((to_outputs[..., :WIDE], to_table[kept, :WIDE]), expected_gradients)
    np.testing.assert_array_equal(to_table[~kept], 0.0)


@pytest.mark.parametrize("entries", slow_but([5], [0, 5]))
def test_drafts_with_logits_far_from_zero(entries):
    """At 1e4 the cross-entropy and its gradient are those near zero; p's own rounding is in the overlap alone."""
    outputs, table, target, cotangents = pairs_of(IDS[13])
    cotangents[1] = 0.0
    # Multiples of 1 / 8: exact wherever they lie.
    exact = [np.round(8 * x) / 8 for x in (outputs, table, target.hidden, target.table)]
    near = TargetDistribution(*exact[2:], target.normaliser)
    far = TargetDistribution(widened(exact[2], 1.0), widened(exact[3], -1e4), target.normaliser - np.float32(1e4))
    found, gradients = graded_terms(widened(exact[0], 1.0), widened(exact[1], 1e4), far, cotangents, tiling(entries))
    expected, _, expected_gradients = exact_terms(*exact[:2], near, cotangents, 1.0)
    for name in ("cross_entropy", "entropy"):
        got, want = (np.where(TAUGHT, getattr(terms, name), 0.0) for terms in (found, expected))
        np.testing.assert_allclose(got, want, **CLOSE, err_msg=name)
    assert_gradients_close([x[..., :WIDE] for x in gradients], expected_gradients)


def test_no_gradient_goes_to_the_target():
    outputs, table, target, cotangents = pairs_of(IDS[13])

    def loss(target):
        terms = draft_terms(outputs, table, target, tiling(5))
        return sum(jnp.sum(term * c) for term, c in zip(terms, (*cotangents, cotangents[0])))

    value, gradient = jax.jit(jax.value_and_grad(loss))(target)
    assert value != 0.0
    jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0.0), gradient)


@pytest.mark.slow
def test_the_overlap_is_with_p_not_renormalised():
    """Nearly all of p is outside the draft vocabulary: a draft q = p~ is accepted with p's mass on that vocabulary.

    With p renormalised it would always be accepted. Neither loss has a gradient there.
    """
    entries = 5
    drafted = IDS[13]
    _, _, target, cotangents = pairs_of(drafted, favourite=1)
    assert 1 not in drafted
    outputs = np.stack([shift_left(jnp.asarray(target.hidden), 1 + i) for i in range(STEPS)])
    found, gradients = graded_terms(outputs, target.table, target, cotangents, tiling(entries))
    z = target.hidden.astype(np.float64) @ target.table.T.astype(np.float64)
    mass = np.exp(z - target.normaliser[..., None]).sum(axis=-1)
    assert mass.max() < 0.3 and np.median(mass) < 0.02
    for i in range(STEPS):
        np.testing.assert_allclose(found.overlap[i, :, : T - 1 - i], mass[:, 1 + i :], rtol=1e-5)
    np.testing.assert_allclose(
        np.where(TAUGHT, found.cross_entropy, 0), np.where(TAUGHT, found.entropy, 0), rtol=0, atol=1e-6
    )
    for gradient in gradients:
        np.testing.assert_allclose(gradient, 0.0, atol=1e-5)


def test_bfloat16_outputs_have_float32_terms():
    outputs, table, target, cotangents = pairs_of(IDS[13])
    halved = outputs.astype(jnp.bfloat16), table, target._replace(hidden=target.hidden.astype(jnp.bfloat16))
    found, gradients = graded_terms(*halved, cotangents, tiling(5))
    assert {x.dtype for x in found} == {np.dtype("float32")}
    assert [g.dtype for g in gradients] == [jnp.dtype("bfloat16"), np.dtype("float32")]

    def narrowed(x):
        return np.asarray(x).astype(jnp.bfloat16).astype(np.float32)

    rounded = (
        narrowed(outputs),
        narrowed(table),
        target._replace(hidden=narrowed(target.hidden), table=narrowed(target.table)),
    )
    expected, to_logits, expected_gradients = exact_terms(*rounded, cotangents, 1.0)
    assert_terms_close(found, expected, **CLOSE)
    # As for the scores: gradient of the logits, operand, result.
    sizes = np.abs(to_logits), *(np.abs(x).astype(np.float64) for x in rounded[:2])
    bounds = np.einsum("SBTV,VD->SBTD", sizes[0], sizes[2]), np.einsum("SBTV,SBTD->VD", sizes[0], sizes[1])
    for got, want, bound in zip(gradients, expected_gradients, bounds, strict=True):
        assert (np.abs(np.asarray(got, np.float64) - want) <= 3 * 2**-9 * bound + 1e-6).all()
