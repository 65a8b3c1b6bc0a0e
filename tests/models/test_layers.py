"""Parameter declarations, norms, rotary positions and the mixed-precision product, each against numpy."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.models import layers
from specrl_jax.models.layers import ParamSpec
from specrl_jax.models.rotary import Rope, Yarn, rotate
from tests.helpers.policies import turned

BF16 = jnp.bfloat16


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def toy_specs():
    return {
        "matrix": ParamSpec((300, 200), ("embed", "mlp"), 300, hf_name="a", hf_layout="i o -> i o"),
        "other": ParamSpec((300, 200), ("embed", "mlp"), 300, hf_name="b", hf_layout="i o -> i o"),
        "norm": ParamSpec((300,), ("embed",), 0, hf_name="c", hf_layout="a -> a"),
    }


def test_initial_weights_have_variance_one_over_fan_in_and_norm_scales_are_one():
    """60,000 normal draws: the sample deviation strays by 0.3 % (one sigma), so 1.5 % false-alarms once in 2 million.

    A deviation that is wrong by 3 % escapes just as rarely.
    """
    params = layers.init_params(jax.random.key(1), toy_specs())
    assert abs(float(params["matrix"].std()) * np.sqrt(300) - 1) < 0.015
    assert abs(float(params["matrix"].mean())) * np.sqrt(300) < 5 / np.sqrt(60_000)
    np.testing.assert_array_equal(params["norm"], np.ones(300))


def test_two_weights_of_one_shape_are_drawn_independently():
    params = layers.init_params(jax.random.key(1), toy_specs())
    # Correlation of 60,000 independent pairs: one sigma is 1 / sqrt(60,000).
    assert abs(np.corrcoef(params["matrix"].ravel(), params["other"].ravel())[0, 1]) < 5 / np.sqrt(60_000)


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_abstract_params_describe_what_init_makes(dtype, partition):
    specs = toy_specs()
    shapes = layers.abstract_params(specs, dtype, partition.shardings(specs))
    made = layers.init_params(jax.random.key(0), specs, dtype)
    assert jax.tree.map(lambda s: (s.shape, s.dtype), shapes) == jax.tree.map(lambda p: (p.shape, p.dtype), made)
    assert jax.tree.map(lambda s: s.sharding, shapes) == partition.shardings(specs)


def test_bfloat16_product_accumulates_in_float32():
    """1 + 512 * 2^-9 = 2: a bfloat16 accumulator would stay at 1, whose next number is 1 + 2^-7."""
    x = jnp.array([[1.0] + [2.0**-9] * 512], BF16)
    out = layers.einsum("BD,DF->BF", x, jnp.ones((513, 1), BF16))
    assert out.dtype == BF16
    np.testing.assert_array_equal(out.astype(jnp.float32), [[2.0]])


def test_product_is_in_the_dtype_of_the_activations():
    """Float32 learner weights under bfloat16 activations: rounded to bfloat16 before the product, as on a GPU."""
    x, w = draw(3, 8), draw(8, 5, seed=1)
    out = layers.einsum("BD,DF->BF", jnp.asarray(x, BF16), jnp.asarray(w))
    rounded = np.asarray(jnp.asarray(x, BF16), np.float64) @ np.asarray(jnp.asarray(w, BF16), np.float64)
    assert out.dtype == BF16
    # One rounding to 8 bits of the result: half an ulp, 2^-8 relative; 1e-6 for entries near zero by cancellation.
    np.testing.assert_allclose(np.asarray(out, np.float64), rounded, rtol=2**-8, atol=1e-6)


def test_rms_norm_matches_the_float64_formula():
    x, scale = 7 * draw(4, 3, 50), draw(50, seed=1)
    out = layers.rms_norm(jnp.asarray(x), jnp.asarray(scale), 0.1)
    x64 = x.astype(np.float64)
    exact = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 0.1) * scale
    # A mean over 50 and four roundings: a few ulp of 2^-23.
    np.testing.assert_allclose(out, exact, rtol=1e-6)


def test_rms_norm_epsilon_keeps_a_zero_row_finite():
    np.testing.assert_array_equal(layers.rms_norm(jnp.zeros((1, 8)), jnp.ones(8), 1e-6), np.zeros((1, 8)))


def test_rms_norm_of_bfloat16_takes_statistics_in_float32_and_rounds_before_the_scale():
    x, scale = jnp.asarray(draw(6, 512), BF16), jnp.asarray(draw(512, seed=1), BF16)
    x64 = np.asarray(x, np.float64)
    normed = jnp.asarray(x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6), jnp.float32).astype(BF16)
    out = layers.rms_norm(x, scale, 1e-6)
    expected = jnp.asarray(np.asarray(normed, np.float32) * np.asarray(scale, np.float32), BF16)
    assert out.dtype == BF16
    # The order of roundings decides about one last bit in three; a tie in the float32 statistics may still flip one
    # in 2^16 values here and there.
    assert np.mean(np.asarray(out) != np.asarray(expected)) < 0.002


def test_rotary_angles_stay_float32_at_long_positions():
    """257 is not a bfloat16 number, and the last position of Qwen3 is 40,959."""
    positions = np.array([[0, 1, 257, 4095, 40_959]], np.int32)
    sin, cos = Rope(1e6).angles(jnp.asarray(positions), 128)
    assert sin.shape == cos.shape == (1, 5, 1, 64)
    assert sin.dtype == cos.dtype == jnp.float32
    angle = positions[0, :, None] * 1e6 ** (-np.arange(64) / 64.0)
    # float32 angle: the frequency carries up to 6 ulp (power, quotient, product), times an angle of up to 40,959.
    for row, bound in zip(range(5), 6 * 2.0**-24 * positions[0] + 1e-6):
        np.testing.assert_allclose(sin[0, row, 0], np.sin(angle[row]), atol=bound)
        np.testing.assert_allclose(cos[0, row, 0], np.cos(angle[row]), atol=bound)


@pytest.mark.parametrize(
    "yarn",
    [
        Yarn(4.0, 32_768),
        Yarn(2.5, 32_768, beta_fast=8.0, beta_slow=0.5, attention_factor=0.7),
        Yarn(4.0, 32_768, truncate=False),
    ],
    ids=["defaults", "own", "not truncated"],
)
def test_stretched_angles_are_those_of_the_paper(yarn):
    """Qwen3 at four times the length: which dimensions keep their frequency, which have it divided, and the scale."""
    positions = np.array([[0, 1, 257, 40_959, 131_071]], np.int32)
    sin, cos = Rope(1e6, yarn).angles(jnp.asarray(positions), 128)
    assert sin.dtype == cos.dtype == jnp.float32
    ones = np.concatenate([np.ones(64), np.zeros(64)])
    for t, position in enumerate(positions[0]):
        turn = turned(ones, int(position), TURNS(Rope(1e6, yarn), 128))
        bound = 8 * 2.0**-24 * position + 2e-6
        np.testing.assert_allclose(cos[0, t, 0], turn[:64], atol=bound)
        np.testing.assert_allclose(sin[0, t, 0], turn[64:], atol=bound)
    plain_sin, plain_cos = Rope(1e6).angles(jnp.asarray(positions), 128)
    scale = yarn.attention_factor or 0.1 * np.log(yarn.factor) + 1
    # The fastest dimensions turn as before, the slowest a factor slower: all that is left of position 131,071 / 4.
    np.testing.assert_allclose(cos[..., :8], plain_cos[..., :8] * scale, atol=8 * 2.0**-24 * 131_071)
    slower = np.sin(positions[0] * 1e6 ** (-63 / 64) / yarn.factor) * scale
    np.testing.assert_allclose(sin[0, :, 0, 63], slower, atol=1e-6)
    assert abs(plain_sin[0, 4, 0, 63] * scale - sin[0, 4, 0, 63]) > 0.05


TURNS = collections.namedtuple("Turns", ["rope", "head_dim"])


def test_a_factor_of_one_stretches_nothing():
    positions = jnp.arange(40, dtype=jnp.int32)[None]
    plain, one = (
        Rope(1e6).angles(positions, 128),
        Rope(1e6, Yarn(1.0, 8)).angles(positions, 128),
    )
    for a, b in zip(plain, one):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_position_zero_is_not_rotated():
    x = jnp.asarray(draw(2, 3, 4, 10))
    angles = Rope(1e4).angles(jnp.zeros((2, 3), jnp.int32), 10)
    np.testing.assert_array_equal(rotate(x, angles), x)


def test_rotation_turns_entry_j_against_entry_j_plus_half():
    x = draw(1, 5, 3, 10)
    positions = np.array([[0, 3, 1, 40, 7]], np.int32)
    out = rotate(jnp.asarray(x), Rope(1e4).angles(jnp.asarray(positions), 10))
    for t, position in enumerate(positions[0]):
        turn = np.exp(1j * position * 1e4 ** (-np.arange(5) / 5.0))
        turned = (x[0, t, :, :5] + 1j * x[0, t, :, 5:]) * turn
        # The angle of position 40 is off by a few ulp of 2^-23, twice 40.
        np.testing.assert_allclose(out[0, t], np.concatenate([turned.real, turned.imag], -1), atol=2e-5)


def test_rotated_products_depend_on_the_distance_only():
    q, k = jnp.asarray(draw(1, 1, 1, 10)), jnp.asarray(draw(1, 1, 1, 10, seed=1))

    def score(query_position, key_position):
        def at(x, position):
            return rotate(x, Rope(1e4).angles(jnp.full((1, 1), position, jnp.int32), 10))

        return float((at(q, query_position) * at(k, key_position)).sum())

    # Angles up to 60 in float32: a few ulp of 60, on values of order 3.
    assert abs(score(9, 4) - score(60, 55)) < 1e-4
    assert abs(score(9, 4) - score(9, 5)) > 1e-2


def test_bfloat16_rotation_rounds_once():
    x = jnp.asarray(draw(1, 6, 2, 10), BF16)
    angles = Rope(1e4).angles(jnp.arange(6, dtype=jnp.int32)[None] + 250, 10)
    out = rotate(x, angles)
    assert out.dtype == BF16
    np.testing.assert_array_equal(out, rotate(x.astype(jnp.float32), angles).astype(BF16))


@pytest.mark.parametrize("equation", ["BTD,DNH->BTNH", "BTNH,NHD->BTD", "BTD,VD->BTV", "BTD,DCF->BTCF"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_products_own_derivative_is_the_usual_one(equation, dtype):
    sizes = dict(zip("BTDNHVCF", (2, 3, 8, 2, 4, 5, 2, 6)))
    inputs, out = equation.split("->")
    rng = np.random.default_rng(0)
    x, w, ct = (rng.normal(size=[sizes[letter] for letter in names]) for names in (*inputs.split(","), out))
    x, ct = jnp.asarray(x, dtype), jnp.asarray(ct, dtype).astype(jnp.float32)
    w = jnp.asarray(w, jnp.float32)
    got, back = jax.vjp(lambda x, w: layers.matmul(equation, x, w), x, w)
    dx, dw = back(ct)
    left, right = inputs.split(",")
    # The operands as the product sees them, in the dtype of x; float64 from there on.
    x64, w64, ct64 = (np.asarray(a.astype(dtype), np.float64) for a in (x, w, ct))
    assert (got.dtype, dx.dtype, dw.dtype) == (jnp.float32, dtype, jnp.float32)
    # Sums of at most 24 terms of order one in float32; dx is rounded once more to the dtype of x.
    np.testing.assert_allclose(got, np.einsum(equation, x64, w64), atol=2e-5)
    np.testing.assert_allclose(dw, np.einsum(f"{left},{out}->{right}", x64, ct64), atol=2e-5)
    rounding = 2e-5 if dtype == jnp.float32 else 2**-8 * 16
    np.testing.assert_allclose(
        np.asarray(dx, np.float64), np.einsum(f"{out},{right}->{left}", ct64, w64), atol=rounding
    )


@pytest.mark.parametrize("sums, rounded", [(None, 1), (jnp.dtype(BF16), 4)])
def test_parts_of_four_devices_are_added_with_the_error_that_is_stated(sums, rounded):
    """`Partitioner.sums`, added one by one here: compiled for a CPU, an all-reduce adds float32 in any case."""
    x, w = (jnp.asarray(a, BF16) for a in (draw(4, 64, 128), draw(4, 128, 96, seed=1)))
    parts = [layers.matmul("BF,FD->BD", *part, sums) for part in zip(x, w)]
    assert {part.dtype for part in parts} == {sums or jnp.dtype(jnp.float32)}
    out = functools.reduce(jnp.add, parts).astype(BF16)
    exact = np.einsum("PBF,PFD->PBD", np.asarray(x, float), np.asarray(w, float))
    error = np.abs(np.asarray(out, float) - exact.sum(axis=0))
    sizes = np.abs(exact).sum(axis=0) if sums else np.abs(exact.sum(axis=0))
    # 1e-4: of float32 sums of 512 products, each of about 1.
    assert (error <= rounded / 256 * sizes + 1e-4).all()
    # Less is lost where float32 is added: the two are told apart.
    assert (error <= np.abs(exact.sum(axis=0)) / 256 + 1e-4).all() == (sums is None)
