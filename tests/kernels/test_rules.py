"""The mathematics of the rules, in float64: enumerated over every draft, every outcome of the uniforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.verify import rules
from lossless_certify.distributions import block_chances, flat_index, joint, rejection_chances, sequences
from specrl_jax.decoding.sampling import Sampling
from tests.helpers.blocks import KINDS, QUICKLY, SAMPLINGS, make_model
from tests.helpers.long import slow_but

SIZES = [(V, k) for V in (2, 3, 4) for k in (1, 2, 3)]
RATIO_RULES = ["rejection", "block"]


def in_float64(function, *arrays):
    with jax.enable_x64(True):
        out = jax.jit(function, compiler_options=QUICKLY)(*(jnp.array(x, jnp.float64) for x in arrays))
        assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(out))
        return jax.tree.map(np.asarray, out)


def pick(rows, drafts):
    return np.take_along_axis(rows, drafts[..., None], axis=-1)[..., 0]


def outcomes(rule, p, q, drafts):
    """Return the distributions of num_accepted [N, k+1] and, given it, of the next token [N, k+1, V], per draft."""
    k = drafts.shape[1]
    p_x, q_x = pick(p[:, :k], drafts), pick(q, drafts)
    if rule == "block":
        h, scale = in_float64(rules.block_chances, p, q, p_x, q_x)
        # Number n: its own chance came up and no later one's did.
        accepted = [np.prod(1 - h[:, n:], axis=1) * (h[:, n - 1] if n else 1) for n in range(k + 1)]
    else:
        h, scale = in_float64(rules.rejection_chances, p_x, q_x), np.ones(drafts.shape)
        accepted = [np.prod(h[:, :n], axis=1) * (1 - h[:, n] if n < k else 1) for n in range(k + 1)]
    weights = in_float64(rules.residual_weights, p[:, :k], q, scale[:, :k])
    weights = np.concatenate([weights, p[:, k:]], axis=1)
    return np.stack(accepted, axis=1), weights / weights.sum(axis=-1, keepdims=True)


def emitted_distribution(rule, model, sampling):
    """Return the distribution [V ** (k+1)] of emitted tokens, completed by the target, and the mean of num_accepted."""
    V, k, drafts = model.V, model.k, sequences(model.V, model.k)
    p, q = model.p(sampling), model.q(sampling)
    accepted, following = outcomes(rule, model.along(p, drafts), model.along(q, drafts), drafts)
    mass = joint(q).reshape(-1, 1) * accepted
    distribution = np.zeros(V ** (k + 1))
    for n in range(k + 1):
        prefix = np.zeros((V**n, V))
        np.add.at(prefix, flat_index(drafts[:, :n], V), mass[:, n : n + 1] * following[:, n])
        emitted = prefix.reshape((V,) * (n + 1))
        for conditional in p[n + 1 :]:
            emitted = emitted[..., None] * conditional
        distribution += emitted.ravel()
    return distribution, (mass * np.arange(k + 1)).sum()


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("V, k", slow_but([(2, 1), (2, 3), (3, 2), (4, 3)], SIZES))
def test_emitted_tokens_have_exactly_the_targets_distribution(rule, V, k):
    # Sums of at most 4 ** 4 products in float64: a few 1e-16.
    for kind in KINDS:
        for none in (-200.0, -np.inf):
            model = make_model(kind, V, k, seed=3, none=none)
            distribution, _ = emitted_distribution(rule, model, Sampling())
            np.testing.assert_allclose(
                distribution, joint(model.p(Sampling())).ravel(), rtol=0, atol=1e-14, err_msg=kind
            )


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_distribution_is_exact_under_temperature_top_k_and_top_p(rule, name):
    for kind in ("random", "zeros", "reduced"):
        model = make_model(kind, 4, 3)
        distribution, _ = emitted_distribution(rule, model, SAMPLINGS[name])
        np.testing.assert_allclose(
            distribution, joint(model.p(SAMPLINGS[name])).ravel(), rtol=0, atol=1e-14, err_msg=kind
        )


@pytest.mark.parametrize("V, k", SIZES)
def test_the_chances_are_those_of_the_papers(V, k):
    """Against those of `lossless_certify`; the block's by its number too, so that S and P are right one by one."""
    drafts = sequences(V, k)
    for kind in ("random", "peaked", "disjoint", "zeros"):
        model = make_model(kind, V, k, none=-np.inf)
        p, q = (model.along(x, drafts) for x in (model.p(Sampling()), model.q(Sampling())))
        p_x, q_x = pick(p[:, :k], drafts), pick(q, drafts)
        h, P = in_float64(rules.block_chances, p, q, p_x, q_x)
        kept = in_float64(rules.rejection_chances, p_x, q_x)
        # A token that the draft never drafts has no chance by definition; what it is here does not matter.
        possible = (q_x > 0).all(axis=1)
        expected_h, expected_P = block_chances(p, q, drafts)
        np.testing.assert_allclose(h[possible], expected_h[possible], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(P[possible], expected_P[possible], rtol=1e-14)
        np.testing.assert_allclose(kept[possible], rejection_chances(p, q, drafts)[possible], rtol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("V, k", SIZES)
def test_block_accepts_as_many_as_rejection_or_more(V, k):
    """Of 60 random models: never fewer on average, mostly more where k > 1; the same for k = 1 and a certain draft."""
    gains = []
    for seed in range(1, 31):
        for kind in ("random", "peaked"):
            model = make_model(kind, V, k, seed)
            means = [emitted_distribution(rule, model, Sampling())[1] for rule in RATIO_RULES]
            gains.append(means[1] - means[0])
            certain = make_model("one-hot draft", V, k, seed, none=-np.inf)
            means = [emitted_distribution(rule, certain, Sampling())[1] for rule in RATIO_RULES]
            assert abs(means[1] - means[0]) < 1e-14
    assert min(gains) > -1e-14
    assert max(gains) < 1e-14 if k == 1 else np.median(gains) > 1e-3


def test_a_certain_draft_is_kept_with_the_targets_probability_by_both():
    p = np.array([[[0.2, 0.5, 0.3], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]]])
    drafts = np.array([[1, 2]])
    for rule in RATIO_RULES:
        accepted, following = outcomes(rule, p, np.eye(3)[drafts], drafts)
        np.testing.assert_allclose(accepted, [[0.5, 0.5 * 0.7, 0.5 * 0.3]], rtol=1e-15)
        np.testing.assert_allclose(following[0, 0], [0.4, 0, 0.6], rtol=1e-15)


def test_the_enumeration_sees_a_wrong_rule(monkeypatch):
    """The block rule without the scale in its residual, and with P_i for h_i: the distribution is off."""
    model, right = make_model("random", 3, 2, seed=3), rules.block_chances
    expected = joint(model.p(Sampling())).ravel()

    def without_scale(*arrays):
        h, P = right(*arrays)
        return h, jnp.ones_like(P)

    def too_willing(*arrays):
        _, P = right(*arrays)
        return P[..., 1:], P

    for wrong in (without_scale, too_willing):
        monkeypatch.setattr(rules, "block_chances", wrong)
        assert np.abs(emitted_distribution("block", model, Sampling())[0] - expected).max() > 1e-2


# --- where float32 gives out

TINY = np.float32(1e-30)


def chances(p, q, drafts):
    p, q, drafts = np.array(p, np.float32)[None], np.array(q, np.float32)[None], np.array(drafts)[None]
    p_x, q_x = pick(p[:, :-1], drafts), pick(q, drafts)
    h, P = rules.block_chances(*(jnp.array(x) for x in (p, q, p_x, q_x)))
    kept = rules.rejection_chances(jnp.array(p_x), jnp.array(q_x))
    assert h.dtype == P.dtype == kept.dtype == jnp.float32
    return h[0].tolist(), P[0].tolist(), kept[0].tolist()


def test_equal_distributions_are_kept_for_certain():
    """0 / 0 in h: P = 1, and nothing is left of p - q."""
    rows = [[0.25, 0.75], [0.5, 0.5], [0.125, 0.875]]
    assert chances(rows, rows[:2], [0, 1]) == ([1, 1], [1, 1, 1], [1, 1])


def test_equal_distributions_after_an_unlikely_token_stop_there_never():
    """P < 1 and p = q next: h = 0 / (1 - P)."""
    h, P, _ = chances([[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]], [0, 1])
    assert (h, P) == ([0, 0.5], [1, 0.5, 0.5])


def test_a_token_impossible_under_the_target_ends_the_block_for_good():
    h, P, kept = chances([[0, 1], [0.5, 0.5], [0.5, 0.5]], [[1, 0], [TINY, 1], [1, 0]][:2], [0, 0])
    assert (h, P, kept) == ([0, 0], [1, 0, 0], [0, 1])


def test_a_draft_probability_that_rounds_to_zero_gives_chance_one_or_zero():
    h, P, kept = chances([[0.25, 0.75], [0, 1], [1, 0]], [[0, 1], [0, 1]], [0, 0])
    assert kept == [1, 0] and P == [1, 1, 0] and h == [1, 0]


def test_an_underflow_of_the_scale_is_a_chance_of_zero():
    """P = 1e-60 is no float32: zero, not NaN, and the tokens after it are no worse off."""
    p, q = [[TINY, 1], [TINY, 1], [0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5]] * 3
    h, P, kept = chances(p, q, [0, 0, 1])
    assert P[2:] == [0, 0] and h[1:] == [0, 0] and kept[2] == 1
    assert np.isfinite(h + P + kept).all()


@pytest.mark.parametrize("scale", [None, 1.0])
def test_a_residual_that_rounds_to_nothing_is_the_target_itself(scale):
    p, q = jnp.array([0.0, 0.5, 0.5]), jnp.array([0.0, 0.5, 0.5]) * (1 + 2**-20)
    weights = rules.residual_weights(p, q, scale if scale is None else jnp.float32(scale))
    np.testing.assert_array_equal(weights, p)
