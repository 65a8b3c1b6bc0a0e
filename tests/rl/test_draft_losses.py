"""What a draft learns and is expected to keep, against plain loops in float64: which pairs, from which position."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.core import Mean
from specrl_jax.rl.draft_losses import (
    DECAY,
    predicted_acceptance,
    soft_cross_entropy,
    supervised,
    supervised_counts,
    unrolled_loss,
)
from tests.helpers.exact import log_softmax, softmax

STEPS, B, T, VD = 3, 4, 10, 5
# Float32 sums of at most 40 losses of a few nats.
CLOSE = {"rtol": 2e-6, "atol": 0}


def mask_of(response):
    """Rows.mask from which tokens are response tokens [B, T]: entry t belongs to token t + 1."""
    return np.pad(response[:, 1:], ((0, 0), (0, 1)))


def learns(response, i, t):
    """A draft that starts at pair t predicts token t + 2 first, and token t + 2 + i with draft step i."""
    return t + 2 + i < len(response) and bool(response[t + 2] and response[t + 2 + i])


@pytest.fixture(scope="module")
def batch():
    """(student, teacher, response): a usual row, one that ends with the row, one with holes, one without response."""
    rng = np.random.default_rng(0)
    response = np.zeros((B, T), bool)
    response[0, 3:8] = response[1, 1:] = True
    response[2] = rng.random(T) < 0.6
    student = rng.normal(size=(STEPS, B, T, VD)).astype(np.float32) * 2
    return student, rng.normal(size=(B, T, VD)).astype(np.float32) * 2, response


def by_hand(student, teacher, response, temperature):
    """(totals [steps], counts [steps]) in float64."""
    totals, counts = np.zeros(STEPS), np.zeros(STEPS)
    for i in range(STEPS):
        for b in range(B):
            for t in range(T):
                if learns(response[b], i, t):
                    p = softmax(teacher[b, t + 1 + i].astype(np.float64) / temperature)
                    totals[i] -= p @ log_softmax(student[i, b, t].astype(np.float64) / temperature)
                    counts[i] += 1
    return totals, counts


tokens = st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=3)


@hypothesis.given(tokens)
@hypothesis.example([[False] * 7])
@hypothesis.example([[True] * 7])
@hypothesis.example([[False, False, False, False, False, False, True]])
@hypothesis.example([[False, True, True, False, True, True, False]])
def test_a_pair_learns_where_decoding_could_draft_a_response_token_from_it(rows):
    response = np.array(rows)
    counts = supervised_counts(jnp.asarray(mask_of(response)), STEPS)
    assert counts.dtype == jnp.float32
    for i in range(STEPS):
        expected = [[learns(row, i, t) for t in range(7)] for row in response]
        np.testing.assert_array_equal(supervised(jnp.asarray(mask_of(response)), i), expected)
        assert counts[i] == np.sum(expected)


def test_the_first_draft_of_pair_t_learns_where_token_t_plus_2_is_a_response_token():
    """The row as it is drawn: prompt P, response r, padding .; its first response token is no draft's to predict.

    tokens   P P P r r r . .      that is token 3, so pair 1 is the first that learns, and pair 3 the last
    """
    response = np.array([[0, 0, 0, 1, 1, 1, 0, 0]], bool)
    first, second, third, fourth = (supervised(jnp.asarray(mask_of(response)), i)[0].nonzero()[0] for i in range(4))
    np.testing.assert_array_equal(first, [1, 2, 3])
    np.testing.assert_array_equal(second, [1, 2])
    np.testing.assert_array_equal(third, [1])
    assert fourth.size == 0


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_cross_entropy_of_each_draft_step(batch, temperature):
    student, teacher, response = batch
    loss = soft_cross_entropy(jnp.asarray(student), jnp.asarray(teacher), jnp.asarray(mask_of(response)), temperature)
    totals, counts = by_hand(student, teacher, response, temperature)
    assert loss.total.dtype == loss.count.dtype == jnp.float32
    np.testing.assert_array_equal(loss.count, counts)
    assert len(set(counts)) == STEPS
    np.testing.assert_allclose(loss.total, totals, **CLOSE)


def test_temperature_0_counts_as_1(batch):
    student, teacher, response = batch
    mask = jnp.asarray(mask_of(response))
    greedy, sampled = (
        soft_cross_entropy(jnp.asarray(student), jnp.asarray(teacher), mask, temperature) for temperature in (0.0, 1.0)
    )
    jax.tree.map(np.testing.assert_array_equal, greedy, sampled)


def test_rows_add_up(batch):
    """Sums and counts, so that microbatches put together give the whole."""
    student, teacher, response = batch
    mask = mask_of(response)
    whole = soft_cross_entropy(jnp.asarray(student), jnp.asarray(teacher), jnp.asarray(mask), 1.0)
    parts = [soft_cross_entropy(student[:, b : b + 1], teacher[b : b + 1], mask[b : b + 1], 1.0) for b in range(B)]
    np.testing.assert_array_equal(np.sum([part.count for part in parts], axis=0), whole.count)
    np.testing.assert_allclose(np.sum([part.total for part in parts], axis=0), whole.total, **CLOSE)


def test_what_is_not_supervised_does_not_matter(batch):
    student, teacher, response = batch
    mask = jnp.asarray(mask_of(response))
    learning = np.array([[[learns(row, i, t) for t in range(T)] for row in response] for i in range(STEPS)])
    read = np.zeros((B, T), bool)  # positions of the target that some draft step learns from
    for i, b, t in np.argwhere(learning):
        read[b, t + 1 + i] = True
    assert 0 < learning.sum() < learning.size and 0 < read.sum() < read.size
    junk_student = np.where(learning[..., None], student, np.nan)
    junk_teacher = np.where(read[..., None], teacher, np.nan)
    clean = soft_cross_entropy(jnp.asarray(student), jnp.asarray(teacher), mask, 1.0)
    junk = soft_cross_entropy(jnp.asarray(junk_student), jnp.asarray(junk_teacher), mask, 1.0)
    jax.tree.map(np.testing.assert_array_equal, junk, clean)


def test_nothing_supervised_is_a_loss_of_zero(batch):
    student, teacher, _ = map(jnp.asarray, batch)
    loss = soft_cross_entropy(student, teacher, jnp.zeros((B, T), bool), 1.0)
    np.testing.assert_array_equal(loss.value(), 0.0)
    assert unrolled_loss(loss) == 0.0


def test_the_teacher_gets_no_gradient_and_the_student_that_of_cross_entropy(batch):
    """d/dz of -sum p log softmax(z / T) is (q - p) / T; step i weighs 0.8 ** i and is averaged over its own pairs."""
    student, teacher, response = batch
    temperature, mask = 0.6, jnp.asarray(mask_of(response))

    def loss(student, teacher):
        return unrolled_loss(soft_cross_entropy(student, teacher, mask, temperature))

    to_student, to_teacher = jax.grad(loss, argnums=(0, 1))(jnp.asarray(student), jnp.asarray(teacher))
    np.testing.assert_array_equal(to_teacher, 0.0)
    expected = np.zeros(student.shape)
    _, counts = by_hand(student, teacher, response, temperature)
    for i, b, t in np.ndindex(STEPS, B, T):
        if learns(response[b], i, t):
            q = softmax(student[i, b, t].astype(np.float64) / temperature)
            p = softmax(teacher[b, t + 1 + i].astype(np.float64) / temperature)
            expected[i, b, t] = 0.8**i * (q - p) / temperature / counts[i]
    # Differences of two probabilities, each a few units of 2**-24.
    np.testing.assert_allclose(to_student, expected, rtol=0, atol=1e-6)


def test_later_draft_steps_weigh_less():
    loss = Mean(jnp.array([3.0, 4.0, 10.0]), jnp.array([1.0, 2.0, 5.0]))
    assert DECAY == 0.8
    np.testing.assert_allclose(unrolled_loss(loss), 3.0 + 0.8 * 2.0 + 0.64 * 2.0, rtol=1e-6)


# ---- predicted acceptance

V = 9
DRAFTED = [7, 0, 4, 8, 2]  # the draft vocabulary within the target's


@pytest.fixture(scope="module")
def verified(batch):
    """(student [steps, B, T, Vd], the target's logits [B, T, V], response): drafts over five of nine words."""
    student, _, response = batch
    return student, np.random.default_rng(1).normal(size=(B, T, V)).astype(np.float32) * 2, response


def predict(student, logits, response, temperature, drafted=DRAFTED):
    normaliser = jax.nn.logsumexp(jnp.asarray(logits) / (temperature or 1.0), axis=-1)
    mask = jnp.asarray(mask_of(response))
    return predicted_acceptance(jnp.asarray(student), jnp.asarray(logits[..., drafted]), normaliser, mask, temperature)


def accepted_by_hand(student, logits, response, temperature):
    """(totals [steps], counts [steps]): chance that verification keeps drafts 0 to i, each sampled from its own q."""
    totals, counts = np.zeros(STEPS), np.zeros(STEPS)
    for b, t in np.ndindex(B, T):
        kept = 1.0
        for i in range(STEPS):
            if not learns(response[b], i, t):
                continue
            p = softmax(logits[b, t + 1 + i].astype(np.float64) / temperature)
            q = np.zeros(V)
            q[DRAFTED] = softmax(student[i, b, t].astype(np.float64) / temperature)
            kept *= np.minimum(p, q).sum()
            totals[i] += kept
            counts[i] += 1
    return totals, counts


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_predicted_acceptance_is_the_product_of_what_is_common(verified, temperature):
    """sum_v min(p, q) over the whole vocabulary, p not renormalised on the draft's, multiplied along the drafts."""
    student, logits, response = verified
    # A response without holes: with one, the first draft of a later step belongs to no draft that decoding makes.
    response = response.copy()
    response[2] = False
    accepted = predict(student, logits, response, temperature)
    totals, counts = accepted_by_hand(student, logits, response, temperature)
    assert accepted.total.dtype == accepted.count.dtype == jnp.float32
    np.testing.assert_array_equal(accepted.count, counts)
    np.testing.assert_allclose(accepted.total, totals, **CLOSE)
    rates = np.asarray(accepted.value())
    assert 0 < rates[2] < rates[1] < rates[0] < 1


def test_a_draft_that_is_the_target_keeps_all_it_can_draft(verified):
    """With the whole vocabulary, everything; on a part of it, the mass of that part where q is p renormalised."""
    _, logits, response = verified
    response = response[[0, 1, 1, 1]]
    taught = np.stack([np.pad(logits, ((0, 0), (0, 1 + i), (0, 0)))[:, 1 + i :] for i in range(STEPS)])
    whole = predict(taught, logits, response, 1.0, list(range(V)))
    np.testing.assert_allclose(whole.value(), 1.0, rtol=1e-6)
    part = predict(taught[..., DRAFTED], logits, response, 1.0)
    mass = softmax(logits)[..., DRAFTED].sum(axis=-1)
    first = [mass[b, t + 1] for b, t in np.ndindex(B, T) if learns(response[b], 0, t)]
    np.testing.assert_allclose(part.value()[0], np.mean(first), rtol=1e-6)


def test_predictions_of_rows_add_up_and_nothing_counts_as_zero(verified):
    student, logits, response = verified
    whole = predict(student, logits, response, 1.0)
    parts = [predict(student[:, b : b + 1], logits[b : b + 1], response[b : b + 1], 1.0) for b in range(B)]
    np.testing.assert_array_equal(np.sum([part.count for part in parts], axis=0), whole.count)
    np.testing.assert_allclose(np.sum([part.total for part in parts], axis=0), whole.total, **CLOSE)
    nothing = predict(student, logits, np.zeros((B, T), bool), 1.0)
    np.testing.assert_array_equal(nothing.value(), 0.0)


def test_a_prediction_has_no_gradient(verified):
    student, logits, response = verified
    gradient = jax.grad(lambda student: predict(student, logits, response, 1.0).total.sum())(jnp.asarray(student))
    np.testing.assert_array_equal(gradient, 0.0)
