"""Draft losses against plain loops in float64: masks, losses, weights, gradients, packed rows.

The losses take `DraftTerms`; these come from the real `draft_terms`, whose unembeddings are identities, so that tests
choose the logits.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lossless_certify.distributions import rejection_chances, sequences, softmax
from specrl_jax.core import DraftTerms, Mean
from specrl_jax.drafts import eagle3, mtp
from specrl_jax.drafts.eagle3 import Eagle3Draft
from specrl_jax.drafts.mtp import MTPDraft
from specrl_jax.models import decoder
from specrl_jax.models.lm_head import TargetDistribution, draft_terms
from specrl_jax.models.vocab_tiles import Tiling
from specrl_jax.rl.draft_losses import (
    DECAY,
    LOSSES,
    confidence_loss,
    cumulative_acceptance,
    draft_loss_mask,
    step_losses,
    step_means,
    step_weights,
)
from specrl_jax.sharding import LEARNER, make_mesh, partitioner
from tests.helpers.blocks import QUICKLY
from tests.helpers.exact import log_softmax
from tests.helpers.unrolled import unrolled

STEPS, B, T = 3, 4, 10
V = 9
DRAFTED = [7, 0, 4, 8, 2]  # the draft vocabulary within the target's
# Float32 sums of at most 40 losses of a few nats.
CLOSE = {"rtol": 2e-6, "atol": 2e-6}


@functools.cache
def tiling(temperature, entries=2):
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])
    return Tiling(entries, temperature, partitioner(mesh, LEARNER))


def mask_of(response):
    """Rows.mask from which tokens are response tokens [B, T]: entry t belongs to token t + 1."""
    return np.pad(response[:, 1:], ((0, 0), (0, 1)))


def learns(response, i, t):
    """A draft that starts at pair t predicts token t + 2 first, and token t + 2 + i with draft step i."""
    return t + 2 + i < len(response) and all(response[t + 2 : t + 3 + i])


@pytest.fixture(scope="module")
def batch():
    """(student [steps, B, T, Vd], target [B, T, V], response [B, T]): logits over five of nine entries and over all;
    a usual row, one that ends with the row, a short one, one without response.
    """
    rng = np.random.default_rng(0)
    response = np.zeros((B, T), bool)
    response[0, 3:8] = response[1, 1:] = response[2, 5:7] = True
    student = 2 * rng.normal(size=(STEPS, B, T, len(DRAFTED)))
    return student.astype(np.float32), 2 * rng.normal(size=(B, T, V)).astype(np.float32), response


# ---- which pairs

tokens = st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=3)


@pytest.mark.slow
@hypothesis.given(tokens)
@hypothesis.example([[False] * 7])
@hypothesis.example([[True] * 7])
@hypothesis.example([[False, False, False, False, False, False, True]])
@hypothesis.example([[False, True, True, False, True, True, False]])
def test_a_pair_learns_where_decoding_could_draft_a_response_token_from_it(rows):
    response = np.array(rows)
    found = draft_loss_mask(jnp.asarray(mask_of(response)), STEPS)
    assert found.dtype == bool
    for i in range(STEPS):
        np.testing.assert_array_equal(found[i], [[learns(row, i, t) for t in range(7)] for row in response])


@pytest.mark.slow
def test_the_first_draft_of_pair_t_learns_where_token_t_plus_2_is_a_response_token():
    """The row as it is drawn: prompt P, response r, padding .

    tokens   P P P r r r . .      the first response token is token 3: pair 1 is the first that learns, pair 3 the last
    """
    response = np.array([[0, 0, 0, 1, 1, 1, 0, 0]], bool)
    first, second, third, fourth = (row[0].nonzero()[0] for row in draft_loss_mask(jnp.asarray(mask_of(response)), 4))
    np.testing.assert_array_equal(first, [1, 2, 3])
    np.testing.assert_array_equal(second, [1, 2])
    np.testing.assert_array_equal(third, [1])
    assert fourth.size == 0


def test_masks_of_some_anchors_are_those_of_all():
    rng = np.random.default_rng(0)
    response = rng.random((4, 12)) < 0.8
    segments = jnp.asarray(np.sort(rng.integers(1, 3, (4, 12))), jnp.int32)
    mask, anchors = jnp.asarray(mask_of(response)), 1 + 3 * jnp.arange(5)
    whole, some = (draft_loss_mask(mask, STEPS, segments, anchors=a) for a in (None, anchors))
    np.testing.assert_array_equal(some, np.pad(whole, ((0, 0), (0, 0), (0, 2)))[:, :, anchors])
    assert whole.any() and not some[:, :, 4].any()


# Of each sequence in a row: tokens of its prompt, of its response.
packs = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=3)


@hypothesis.given(packs)
@hypothesis.example([(4, 6), (4, 6), (4, 6)])  # the row is full
@hypothesis.example([(1, 1), (1, 1), (1, 1)])
@hypothesis.example([(1, 6), (1, 6)])
@hypothesis.example([(2, 3), (1, 0), (2, 3)])
@hypothesis.example([(2, 3), (0, 3)])  # of the mask alone one could not tell them apart
def test_a_packed_sequence_learns_what_it_learns_alone(pack):
    """And no draft goes on into the next one: it would be the response that follows a short prompt."""
    responses = [np.array([False] * prompt + [True] * response, bool) for prompt, response in pack]
    segments = np.repeat(range(1, len(pack) + 1), [len(response) for response in responses])
    row, segments = (np.pad(x, (0, 30 - len(x)))[None] for x in (np.concatenate(responses), segments.astype(np.int32)))
    found = np.asarray(draft_loss_mask(jnp.asarray(mask_of(row)), STEPS, jnp.asarray(segments)))
    at = 0
    for response in responses:
        for i in range(STEPS):
            expected = [learns(response, i, t) for t in range(len(response))]
            np.testing.assert_array_equal(found[i, 0, at : at + len(response)], expected)
        at += len(response)
    assert not found[:, 0, at:].any()


# ---- which losses


def terms_of(student, target, temperature):
    """DraftTerms of logits: the tables are identities."""
    eye = jnp.eye(V, dtype=jnp.asarray(target).dtype)
    normaliser = jax.nn.logsumexp(jnp.asarray(target) / (temperature or 1.0), axis=-1)
    distribution = TargetDistribution(jnp.asarray(target), eye[np.array(DRAFTED)], normaliser)
    table = jnp.eye(len(DRAFTED), dtype=jnp.asarray(student).dtype)
    return draft_terms(jnp.asarray(student), table, distribution, tiling(temperature))


def _means_of(name, student, target, mask, temperature):
    """Mean [steps] of a loss, or of `cumulative_acceptance`."""
    terms = terms_of(student, target, temperature)
    values = cumulative_acceptance(terms) if name == "cumulative_acceptance" else step_losses(name, terms)
    return step_means(values, draft_loss_mask(mask, len(student)))


means_of = jax.jit(_means_of, static_argnums=(0, 4), compiler_options=QUICKLY)


def loss_of(name, student, target, mask, temperature):
    means = _means_of(name, student, target, mask, temperature)
    return jnp.sum(step_weights(name, len(student)) * means.value())


def pair_by_hand(student, target, b, t, steps, temperature):
    """{loss: its value} of the last of `steps` draft steps from pair t, in float64."""
    kept = 1.0
    for i in range(steps):
        p = softmax(target[b, t + 1 + i].astype(np.float64) / temperature)
        scaled = student[i, b, t].astype(np.float64) / temperature
        q = np.zeros(V)
        q[DRAFTED] = softmax(scaled)
        overlap = np.minimum(p, q).sum()
        kept *= overlap
    share = p[DRAFTED] / p[DRAFTED].sum()
    ce = -share @ log_softmax(scaled)
    return {
        "ce": ce,
        "kl": ce + share @ np.log(share),
        "tv": 1 - overlap,
        "e2e_tv": 1 - kept,
        "cumulative_acceptance": kept,
    }


def by_hand(name, student, target, response, temperature):
    """(totals [steps], counts [steps]) in float64."""
    totals, counts = np.zeros(STEPS), np.zeros(STEPS)
    for i, b, t in np.ndindex(STEPS, B, T):
        if learns(response[b], i, t):
            totals[i] += pair_by_hand(student, target, b, t, i + 1, temperature)[name]
            counts[i] += 1
    return totals, counts


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", [*LOSSES, "cumulative_acceptance"])
def test_each_loss_of_each_draft_step(name, temperature, batch):
    """e2e_tv and the cumulative acceptance multiply overlaps along the text; p~ is only in ce and kl."""
    student, target, response = batch
    means = means_of(name, student, target, mask_of(response), temperature)
    totals, counts = by_hand(name, student, target, response, temperature)
    assert means.total.dtype == means.count.dtype == jnp.float32
    np.testing.assert_array_equal(means.count, counts)
    assert len(set(counts)) == STEPS
    np.testing.assert_allclose(means.total, totals, **CLOSE)


def unmasked(response):
    """(draft steps [steps, B, T] that learn nothing, positions [B, T] of the target from which nothing is learnt)."""
    learning = np.array([[[learns(row, i, t) for t in range(T)] for row in response] for i in range(STEPS)])
    read = np.zeros((B, T), bool)
    for i, b, t in np.argwhere(learning):
        read[b, t + 1 + i] = True
    assert 0 < learning.sum() < learning.size and 0 < read.sum() < read.size
    return ~learning, ~read


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_what_is_not_supervised_does_not_matter(name, batch):
    student, target, response = batch
    steps, positions = unmasked(response)
    junk = np.where(steps[..., None], np.nan, student), np.where(positions[..., None], np.nan, target)
    clean, soiled = (means_of(name, *logits, mask_of(response), 1.0) for logits in ((student, target), junk))
    jax.tree.map(np.testing.assert_array_equal, soiled, clean)
    # Nor for the gradient, of which nothing goes there.
    finite = (np.where(np.isnan(x), 30.0 * y, x) for x, y in zip(junk, (student, target)))
    gradients = [graded(name)(*logits, mask_of(response), 1.0) for logits in ((student, target), finite)]
    np.testing.assert_array_equal(gradients[1], gradients[0])
    # Where no entry of the draft has more than the target gives it, or all have, tv is flat.
    assert (gradients[0][steps] == 0).all() and np.mean(np.abs(gradients[0][~steps]).max(axis=-1) > 0) > 0.8


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_supervised_is_a_loss_of_zero(name, batch):
    student, target, _ = batch
    nothing = np.zeros((B, T), bool)
    np.testing.assert_array_equal(means_of(name, student, target, nothing, 1.0).value(), 0.0)
    np.testing.assert_array_equal(graded(name)(student, target, nothing, 1.0), 0.0)


# ---- which weights


def test_later_draft_steps_weigh_less_but_where_the_products_do_it_themselves():
    loss = Mean(jnp.array([3.0, 4.0, 10.0]), jnp.array([1.0, 2.0, 5.0]))
    assert DECAY == 0.8
    for name in ("ce", "kl", "tv"):
        np.testing.assert_allclose(jnp.sum(step_weights(name, 3) * loss.value()), 3 + 0.8 * 2 + 0.64 * 2, rtol=1e-6)
    np.testing.assert_allclose(jnp.sum(step_weights("e2e_tv", 3) * loss.value()), (3 + 2 + 2) / 3, rtol=1e-6)


# ---- gradients


@functools.cache
def graded(name):
    """(student, target, mask, temperature) -> gradient of the student's logits."""
    return jax.jit(jax.grad(lambda *inputs: loss_of(name, *inputs)), static_argnums=3, compiler_options=QUICKLY)


def test_kl_has_the_gradient_of_ce(batch):
    student, target, response = batch
    ce, kl = (graded(name)(student, target, mask_of(response), 0.6) for name in ("ce", "kl"))
    np.testing.assert_array_equal(kl, ce)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_the_losses(name, batch):
    """Central differences in float64 of the loss by hand; each logit of some pairs that learn, one at a time."""
    student, target, response = batch
    temperature = 0.6
    got = graded(name)(student, target, mask_of(response), temperature)
    _, counts = by_hand(name, student, target, response, temperature)
    weights = np.full(STEPS, 1 / STEPS) if name == "e2e_tv" else 0.8 ** np.arange(STEPS)

    def of_pair(moved, b, t):
        """All that the logits of pair t enter."""
        steps = [i for i in range(STEPS) if learns(response[b], i, t)]
        return sum(weights[i] / counts[i] * pair_by_hand(moved, target, b, t, i + 1, temperature)[name] for i in steps)

    for b, t in [(0, 1), (0, 3), (1, 0), (1, 4), (1, 7), (2, 3)]:
        for i, entry in np.ndindex(STEPS, len(DRAFTED)):
            ahead, behind = student.astype(np.float64), student.astype(np.float64)
            ahead[i, b, t, entry] += 1e-6
            behind[i, b, t, entry] -= 1e-6
            slope = (of_pair(ahead, b, t) - of_pair(behind, b, t)) / 2e-6
            # Differences of two probabilities, each a few units of 2**-24.
            np.testing.assert_allclose(got[i, b, t, entry], slope, rtol=0, atol=1e-6, err_msg=f"{i, b, t, entry}")


# ---- the end to end loss is about what decoding keeps


def expected_kept(p, q):
    """Drafts kept of k, in expectation, from every draft there is: p [k, V] and q [k, V] by position.

    Rule A: a draft is kept with chance min(1, p / q) where all before it were.
    """
    k = len(p)
    total = 0.0
    for draft in sequences(V, k):
        chances = np.cumprod(rejection_chances(p[None], q[None], draft[None])[0])
        total += np.prod(q[range(k), draft]) * chances.sum()
    return total


@pytest.mark.slow
def test_e2e_tv_is_one_minus_the_share_of_drafts_kept():
    """Its value and its gradient, from the enumeration of the rejection rule in float64: 729 drafts of three tokens.

    One pair, in a row where the target's distribution does not depend on the text, so that all drafts have one
    distribution.
    """
    rng = np.random.default_rng(4)
    student = 1.5 * rng.normal(size=(STEPS, 1, 5, len(DRAFTED))).astype(np.float32)
    target = 1.5 * rng.normal(size=(1, 5, V)).astype(np.float32)
    # Tokens 2, 3 and 4 are the response: pair 0 drafts them all, and only it drafts three.
    mask = mask_of(np.array([[False, False, True, True, True]]))
    p = softmax(target[0, 1:4])

    def refused(logits):
        q = np.zeros((STEPS, V))
        q[:, DRAFTED] = softmax(logits)
        return 1 - expected_kept(p, q) / STEPS

    @jax.jit
    def of_pair_0(student):
        values = step_losses("e2e_tv", terms_of(student, target, 1.0))
        return jnp.sum(step_weights("e2e_tv", STEPS) * values[:, 0, 0])

    assert draft_loss_mask(mask, STEPS)[:, 0, 0].all()
    logits = student[:, 0, 0].astype(np.float64)
    value, gradient = jax.value_and_grad(of_pair_0)(student)
    assert 0.05 < value < 0.95
    np.testing.assert_allclose(value, refused(logits), rtol=1e-6)
    for i, entry in np.ndindex(logits.shape):
        ahead, behind = logits.copy(), logits.copy()
        ahead[i, entry] += 1e-5
        behind[i, entry] -= 1e-5
        slope = (refused(ahead) - refused(behind)) / 2e-5
        np.testing.assert_allclose(gradient[i, 0, 0, entry], slope, rtol=0, atol=1e-6)
    gradient = np.array(gradient)
    assert np.abs(gradient[:, 0, 0]).max(axis=-1).min() > 1e-3
    gradient[:, 0, 0] = 0
    np.testing.assert_array_equal(gradient, 0.0)


# ---- packed rows: several sequences in one

TARGET = decoder.DecoderConfig(24, 16, 7, heads=4, kv_heads=2, head_dim=8, mlp=24, tied=True, max_positions=64)
EAGLE, MTP = eagle3.eagle3_config(TARGET, draft_vocab=11), mtp.mtp_config(TARGET)
HEADS = {"eagle3": (EAGLE, (3,)), "mtp": (MTP, ())}  # and the shape of its features before D
DRAFTS = {"eagle3": Eagle3Draft, "mtp": MTPDraft}
LENGTHS = [[6, 7, 5], [11, 5]]  # tokens of the sequences of each packed row
ROW = 18  # the second has two tokens of padding
PROMPT = 2


def packed(arrays):
    """One array for each of the five sequences, [length, ...] -> [2, ROW, ...]; zeros where there is padding."""
    rows, arrays = [], iter(arrays)
    for lengths in LENGTHS:
        row = np.concatenate([next(arrays) for _ in lengths])
        rows.append(np.pad(row, [(0, ROW - len(row))] + [(0, 0)] * (row.ndim - 1)))
    return np.stack(rows)


def alone(arrays):
    """The same, a row each: [5, ROW, ...]."""
    return np.stack([np.pad(x, [(0, ROW - len(x))] + [(0, 0)] * (x.ndim - 1)) for x in arrays])


@functools.cache
def head_and_sequences(kind):
    """(head's parameters with its lm_head, arrays of each sequence by name)."""
    config, features = HEADS[kind]
    rng = np.random.default_rng(6)

    def draw(spec):
        scale = rng.uniform(0.5, 1.5, spec.shape) if spec.fan_in == 0 else rng.normal(size=spec.shape) / 3
        return scale.astype(np.float32)

    params = jax.tree.map(draw, DRAFTS[kind](config).specs)
    params |= {"unembed": rng.normal(size=(11, TARGET.embed)).astype(np.float32)}
    shapes = {"features": (*features, TARGET.embed), "embedded": (TARGET.embed,), "hidden": (TARGET.embed,)}
    lengths = [length for row in LENGTHS for length in row]
    texts = {name: [rng.normal(size=(n, *shape)).astype("f4") for n in lengths] for name, shape in shapes.items()}
    # Above the logsumexp over the draft vocabulary, by the rest of the vocabulary.
    texts["normaliser"] = [5 + rng.random(n).astype("f4") for n in lengths]
    texts["positions"] = [np.arange(n, dtype=np.int32) for n in lengths]
    texts["mask"] = [(np.arange(n) >= PROMPT - 1) & (np.arange(n) < n - 1) for n in lengths]
    texts["segments"] = [np.full(n, 1 + i, np.int32) for row in LENGTHS for i, n in enumerate(row)]
    return params, texts


@functools.cache
def losses_of_rows(kind):
    """(params, rows) -> {loss: [steps, B, T]}, through the head's unrolled pass."""
    config, _ = HEADS[kind]
    table = np.random.default_rng(7).normal(size=(11, TARGET.embed)).astype("f4") / 2

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def run(params, rows):
        head = {name: w for name, w in params.items() if name != "unembed" or kind == "eagle3"}
        places = rows["positions"], rows["segments"]
        outputs = unrolled(DRAFTS[kind](config), head, rows["features"], rows["embedded"], STEPS, *places)
        distribution = TargetDistribution(rows["hidden"], table, rows["normaliser"])
        terms = draft_terms(outputs, params["unembed"], distribution, tiling(1.0, 4))
        return {name: step_losses(name, terms) for name in LOSSES}

    return run


def rows_of(texts, arrange):
    rows = {name: arrange(arrays) for name, arrays in texts.items()}
    # A row by itself needs none.
    return rows if arrange is packed else rows | {"segments": None}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", pytest.param("mtp", marks=pytest.mark.long)])
def test_sequences_packed_into_rows_learn_what_they_learn_alone(kind):
    """Totals, counts and gradients of every loss: attention, rotary positions and shifts stay within a sequence."""
    params, texts = head_and_sequences(kind)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    @functools.partial(jax.value_and_grad, has_aux=True)
    def summed(params, rows):
        losses = losses_of_rows(kind).__wrapped__(params, rows)
        pairs = draft_loss_mask(rows["mask"], STEPS, rows["segments"])
        means = {name: step_means(loss, pairs) for name, loss in losses.items()}
        # Each by another factor, so that none hides another.
        return sum((1 + i) * means[name].total.sum() for i, name in enumerate(LOSSES)), means

    (_, means), gradient = summed(params, rows_of(texts, packed))
    (_, apart), gradient_apart = summed(params, rows_of(texts, alone))
    for name in LOSSES:
        np.testing.assert_array_equal(means[name].count, apart[name].count)
        # 24 pairs, each of a few float32 layers over other shapes.
        np.testing.assert_allclose(means[name].total, apart[name].total, rtol=2e-5, err_msg=name)
    # Responses of 4, 5, 3, 9 and 3 tokens.
    np.testing.assert_array_equal(apart["ce"].count, [24, 19, 14])
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(gradient_apart), strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max())


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_no_other_sequence_of_a_packed_row_changes_a_bit(kind):
    """The losses of each sequence stay bit for bit the same with other values in the other sequences of its row."""
    params, texts = head_and_sequences(kind)
    rows = rows_of(texts, packed)
    clean, pairs = losses_of_rows(kind)(params, rows), draft_loss_mask(rows["mask"], STEPS, rows["segments"])
    for segment in (1, 2, 3):
        own = rows["segments"] == segment
        changed = dict(rows)
        for name in ("features", "embedded", "hidden", "normaliser"):
            keep = own.reshape(own.shape + (1,) * (rows[name].ndim - 2))
            changed[name] = np.where(keep, rows[name], rows[name] + 3).astype(np.float32)
        found = losses_of_rows(kind)(params, changed)
        learning = np.asarray(pairs & own[None])
        assert learning.any()
        for name in LOSSES:
            np.testing.assert_array_equal(found[name][learning], clean[name][learning])
            assert (np.asarray(found[name] != clean[name])[np.asarray(pairs & ~own[None])]).any()


# --- the confidence head


def test_a_confidence_head_learns_the_chance_that_a_draft_is_kept():
    """Binary cross-entropy to 1 - TV, by hand; its gradient is sigmoid - (1 - TV), and none reaches the draft."""
    rng = np.random.default_rng(5)
    kept, logits = rng.random((STEPS, B, T)), 3 * rng.normal(size=(STEPS, B, T))
    zeros = np.zeros_like(kept)

    def total(logits, overlap):
        return confidence_loss(logits, DraftTerms(zeros, zeros, overlap)).sum()

    chance = 1 / (1 + np.exp(-logits))
    expected = -(kept * np.log(chance) + (1 - kept) * np.log(1 - chance))
    found = confidence_loss(jnp.array(logits), DraftTerms(zeros, zeros, jnp.array(kept)))
    np.testing.assert_allclose(found, expected, **CLOSE)
    of_head, of_draft = jax.grad(total, argnums=(0, 1))(jnp.array(logits), jnp.array(kept))
    np.testing.assert_allclose(of_head, chance - kept, **CLOSE)
    assert not np.asarray(of_draft).any()
