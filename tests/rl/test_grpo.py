"""The GRPO objective against float64 NumPy written from the papers' formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl_jax.core import InputError
from specrl_jax.rl.objectives import LossInputs, Objective, grpo_loss, kl_estimate

LOW, HIGH = 0.2, 0.28
PLAIN = Objective(LOW, HIGH, 0.0)
WITH_KL = Objective(LOW, HIGH, 0.3)


def reference_terms(logprobs, old, ref, advantages, mask, objective):
    """(loss sum, kl sum, clipped count, token count), token by token.

    PPO's clipped surrogate with two bounds: DeepSeekMath (arXiv 2402.03300) eq. 3 with DAPO's (arXiv 2503.14476) eq. 8;
    KL penalty inside the loss: DeepSeekMath eq. 4.
    """
    loss = kl = clipped = count = 0.0
    for b, t in zip(*np.nonzero(mask)):
        ratio = np.exp(float(logprobs[b, t]) - float(old[b, t]))
        bounded = min(max(ratio, 1 - objective.clip_low), 1 + objective.clip_high)
        surrogate = min(ratio * float(advantages[b]), bounded * float(advantages[b]))
        clipped += surrogate < ratio * float(advantages[b])
        loss -= surrogate
        if objective.kl_coef:
            inverse = float(ref[b, t]) - float(logprobs[b, t])
            kl_token = np.exp(inverse) - inverse - 1
            kl += kl_token
            loss += objective.kl_coef * kl_token
        count += 1
    return loss, kl, clipped, count


def random_batch(seed, shape=(4, 7)):
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(2.0, shape).astype(np.float32)
    old = (logprobs + rng.normal(0, 0.4, shape)).astype(np.float32)
    ref = (logprobs + rng.normal(0, 0.4, shape)).astype(np.float32)
    return logprobs, old, ref, rng.normal(size=shape[0]).astype(np.float32), rng.random(shape) < 0.7


def terms_of(batch, objective):
    logprobs, old, ref, advantages, mask = map(jnp.asarray, batch)
    return terms_from(logprobs, old, ref if objective.kl_coef else None, advantages, mask, objective)


def terms_from(logprobs, old, ref, advantages, mask, objective):
    """Of rows of one answer each."""
    signal = LossInputs(old, ref, advantages[:, None])
    return grpo_loss(logprobs, jnp.zeros_like(logprobs), signal, mask, None, objective)


@pytest.mark.parametrize("objective", [PLAIN, WITH_KL, Objective(0.0, 0.0, 0.0), Objective(0.1, 5.0, 2.0)], ids=str)
@given(seed=st.integers(0, 2**20))
def test_terms_against_float64(objective, seed):
    batch = random_batch(seed)
    terms, (loss, kl, clipped, count) = terms_of(batch, objective), reference_terms(*batch, objective)
    # At most 28 float32 terms, each a few units in size.
    np.testing.assert_allclose(terms.loss.total, loss, atol=1e-4, rtol=1e-5)
    np.testing.assert_allclose(terms.kl.total, kl, atol=1e-4, rtol=1e-5)
    assert float(terms.clip_fraction.total) == clipped
    assert float(terms.loss.count) == float(terms.kl.count) == float(terms.clip_fraction.count) == count


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient", "clipped"),
    [
        (1.0, 1.0, -1.0, -1.0, 0),
        (-1.0, 1.0, 1.0, 1.0, 0),
        # A good token that is already likelier than the bound gets no further push ...
        (1.0, 2.0, -(1 + HIGH), 0.0, 1),
        # ... one that became less likely is pulled back, however far.
        (1.0, 0.5, -0.5, -0.5, 0),
        # A bad token that is already unlikelier than the bound gets no further push ...
        (-1.0, 0.5, 1 - LOW, 0.0, 1),
        # ... one that became likelier is pushed back, however far.
        (-1.0, 2.0, 2.0, 2.0, 0),
        # The two bounds are not the same: 1.25 is inside 1.28, 0.75 outside 0.8.
        (1.0, 1.25, -1.25, -1.25, 0),
        (-1.0, 0.75, 1 - LOW, 0.0, 1),
    ],
)
def test_clipping_by_sign_of_the_advantage(advantage, ratio, loss, gradient, clipped):
    """Loss, its derivative by the log-prob (d ratio / d logprob = ratio), and whether the token counts as clipped."""
    old, mask = jnp.full((1, 1), -1.5), jnp.ones((1, 1), bool)

    def total(logprobs):
        terms = terms_from(logprobs, old, None, jnp.array([advantage]), mask, PLAIN)
        return terms.loss.total, terms

    (got, terms), got_gradient = jax.value_and_grad(total, has_aux=True)(old + jnp.log(ratio))
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    np.testing.assert_allclose(got_gradient, [[gradient]], rtol=1e-6)
    assert float(terms.clip_fraction.total) == clipped


def test_gradient_at_ratio_one_is_the_policy_gradient():
    """REINFORCE: -A grad log p, bit for bit, where old log-probs are the current ones."""
    logprobs, _, _, advantages, mask = map(jnp.asarray, random_batch(0))

    def total(values):
        return terms_from(values, jax.lax.stop_gradient(values), None, advantages, mask, PLAIN).loss.total

    np.testing.assert_array_equal(jax.grad(total)(logprobs), jnp.where(mask, -advantages[:, None], 0.0))


def test_kl_pulls_towards_the_reference():
    """d k3 / d logprob = 1 - exp(ref - logprob): positive where the policy is above the reference."""
    logprobs, ref = jnp.array([[-1.0, -2.0]]), jnp.array([[-2.0, -1.0]])
    mask = jnp.ones((1, 2), bool)

    def total(values):
        return terms_from(values, logprobs, ref, jnp.zeros((1,)), mask, WITH_KL).loss.total

    expected = 0.3 * (1 - np.exp([[-1.0, 1.0]]))
    np.testing.assert_allclose(jax.grad(total)(logprobs), expected, rtol=1e-6)


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("objective", [PLAIN, WITH_KL], ids=["plain", "with_kl"])
def test_masked_positions_carry_no_loss_and_no_gradient(junk, objective):
    logprobs, old, ref, advantages, mask = random_batch(3)
    spoiled = [np.where(mask, x, np.float32(junk)) for x in (logprobs, old, ref)]
    clean = [np.where(mask, x, np.float32(0)) for x in (logprobs, old, ref)]

    def total(values, old, ref):
        return terms_of((values, old, ref, advantages, mask), objective).loss.total

    loss, gradient = jax.value_and_grad(total)(*map(jnp.asarray, spoiled))
    expected, expected_gradient = jax.value_and_grad(total)(*map(jnp.asarray, clean))
    assert float(loss) == float(expected)
    np.testing.assert_array_equal(gradient, expected_gradient)
    np.testing.assert_array_equal(np.asarray(gradient)[~mask], 0.0)


def test_an_empty_mask_gives_zeros():
    logprobs, old, ref, advantages, mask = random_batch(4)
    terms = terms_of((logprobs, old, ref, advantages, np.zeros_like(mask)), WITH_KL)
    assert [float(mean.value()) for mean in (terms.loss, terms.kl, terms.clip_fraction)] == [0.0, 0.0, 0.0]


def test_every_token_weighs_the_same():
    """Token-level aggregation (DAPO): an answer of three tokens weighs three times an answer of one."""
    zeros = jnp.zeros((2, 3))
    mask = jnp.array([[True, True, True], [True, False, False]])
    terms = terms_from(zeros, zeros, None, jnp.array([1.0, -1.0]), mask, PLAIN)
    assert (float(terms.loss.total), float(terms.loss.count)) == (-2.0, 4.0)


def test_terms_of_parts_add_up():
    batch = random_batch(5)
    whole = terms_of(batch, WITH_KL)
    parts = [terms_of([x[i::2] for x in batch], WITH_KL) for i in range(2)]
    # Another order of 20 float32 additions.
    for got, want in zip(jax.tree.leaves(parts[0] + parts[1]), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


@given(st.floats(-50, 50, width=32))
def test_k3_is_not_negative(difference):
    value = float(
        kl_estimate(jnp.zeros((1, 1)), jnp.full((1, 1), difference, jnp.float32), jnp.ones((1, 1), bool))[0, 0]
    )
    # expm1 is right to about two units in the last place of its own value.
    assert value >= -(2**-22) * abs(difference)


def test_k3_of_equal_logprobs_is_zero():
    logprobs = jnp.array([[-0.1, -30.0, 0.0]])
    np.testing.assert_array_equal(kl_estimate(logprobs, logprobs, jnp.ones((1, 3), bool)), [[0.0, 0.0, 0.0]])


@given(st.integers(0, 2**20))
def test_k3_is_unbiased(seed):
    """The expectation over a vocabulary of 9, summed exactly: sum_x p(x) k3(x) = KL(p || q)."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(9, 0.7), size=2) + 1e-3
    p, q = p / p.sum(), q / q.sum()
    estimates = kl_estimate(
        jnp.array(np.log(p)[None], jnp.float32), jnp.array(np.log(q)[None], jnp.float32), jnp.ones((1, 9), bool)
    )
    # Nine float32 terms; exp(log q - log p) reaches 1e3 where p is small, weighed by that p.
    np.testing.assert_allclose(np.sum(p * np.asarray(estimates[0])), np.sum(p * np.log(p / q)), atol=1e-5)


@pytest.mark.parametrize(
    "values", [(-0.1, 0.2, 0.0), (1.1, 0.2, 0.0), (0.2, -0.1, 0.0), (0.2, 0.2, -1.0), (float("nan"), 0.2, 0.0)]
)
def test_nonsense_coefficients_are_refused(values):
    with pytest.raises(InputError, match=r"grpo: .*clip_low.*clip_high.*kl_coef"):
        Objective(*values)
