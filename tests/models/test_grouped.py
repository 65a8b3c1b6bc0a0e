"""What one device's experts add to its tokens, and gradients: each way against a loop over experts in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.grouped import gpu, op
from specrl_jax.models import grouped
from specrl_jax.models.quantized import quantize
from tests.helpers.grouped import by_kernel
from tests.helpers.interpreted import GPU
from tests.helpers.long import long_but

D, F, E, N, K = 12, 20, 5, 23, 3  # E of TOTAL experts are here
TOTAL = 8
WAYS = {
    "tiles": grouped.by_tiles,
    "tile by tile": functools.partial(grouped.by_tiles, at_once=1),
    "ragged_dot": grouped.by_ragged_dot,
    "kernel": by_kernel,
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)

# How the n k copies fall; E is an expert elsewhere.
FALLS = {
    "anywhere": lambda rng: np.stack([rng.permutation(TOTAL)[:K] for _ in range(N)]).clip(max=E),
    "all-on-one": lambda rng: np.full((N, K), 2),
    "none-here": lambda rng: np.full((N, K), E),
    "one-copy-here": lambda rng: np.where(np.arange(N * K).reshape(N, K) == 40, 4, E),
    "all-here": lambda rng: np.stack([rng.permutation(E)[:K] for _ in range(N)]),
}


def draw(fall, seed=0, n=N):
    rng = np.random.default_rng(0)
    x, share = rng.normal(size=(n, D)), rng.uniform(0.1, 1, size=(n, K))
    matrices = {"gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)}
    w = {name: rng.normal(size=shape) / np.sqrt(shape[1]) for name, shape in matrices.items()}
    return x, share, FALLS[fall](rng), w


def by_loop(x, share, chosen, w):
    """Every expert over every token, in the dtype that it is given."""
    out = jnp.zeros_like(x)
    for e in range(E):
        y = (jax.nn.silu(x @ w["gate"][e]) * (x @ w["up"][e])) @ w["down"][e]
        out += jnp.where(chosen == e, share, 0.0).sum(axis=1, keepdims=True) * y
    return out


def narrow(tree, dtype=jnp.float32):
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), tree)


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(way, x, share, chosen, w, direction):
    """Of the sums' product with a direction [n, D], and the sums."""

    def loss(x, share, w):
        out = way(x, share, chosen, w, TOTAL) if way is not by_loop else way(x, share, chosen, w)
        return (out * direction).sum(), out

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(x, share, w)


@every_way
@pytest.mark.parametrize(
    "fall, dtype, error", [*((fall, jnp.float32, 1e-5) for fall in FALLS), ("anywhere", jnp.float64, 1e-13)]
)
def test_sums_and_gradients_are_those_of_a_loop_over_experts(way, fall, dtype, error):
    x, share, chosen, w = draw(fall)
    direction = np.random.default_rng(1).normal(size=(N, D))
    with jax.enable_x64(True):
        wide = narrow((x, share, w, direction), jnp.float64)
        (_, exact), gradients = value_and_gradients(by_loop, *wide[:2], jnp.asarray(chosen), *wide[2:])
        assert exact.dtype == jnp.float64
    with jax.enable_x64(dtype == jnp.float64):
        x, share, w, direction = narrow((x, share, w, direction), dtype)
        (_, out), ours = value_and_gradients(way, x, share, jnp.asarray(chosen, jnp.int32), w, direction)
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves((out, ours)))
    # Three sums of at most 20 products each, numbers of a few units; gradients of matrices sum over 69 copies.
    np.testing.assert_allclose(out, exact, atol=error, rtol=0)
    for a, b in zip(*map(jax.tree.leaves, (ours, gradients)), strict=True):
        np.testing.assert_allclose(a, b, atol=error * max(1.0, float(np.abs(b).max())), rtol=0)
    if fall == "none-here":
        assert not any(np.any(leaf) for leaf in jax.tree.leaves((out, ours)))


@pytest.mark.slow
@every_way
def test_bfloat16_activations_keep_float32_gradients_of_float32_matrices(way):
    """As `layers.matmul`: a gradient that would be rounded to bfloat16 has at most 8 bits."""
    x, share, chosen, w = draw("all-here")
    direction = np.random.default_rng(1).normal(size=(N, D))
    x16 = narrow(x, jnp.bfloat16)
    share, w, direction = narrow((share, w, direction))
    (_, out), (to_x, _, to_w) = value_and_gradients(way, x16, share, jnp.asarray(chosen, jnp.int32), w, direction)
    (_, exact), _ = value_and_gradients(way, narrow(x16), share, jnp.asarray(chosen, jnp.int32), w, direction)
    assert out.dtype == jnp.float32 and to_x.dtype == jnp.bfloat16
    for leaf in jax.tree.leaves(to_w):
        assert leaf.dtype == jnp.float32
        assert np.any(np.asarray(leaf) != np.asarray(leaf.astype(jnp.bfloat16), np.float32))
    # Some five roundings of 2^-9 each on the way.
    assert np.abs(out - exact).max() < 5 * 2**-8 * np.abs(exact).max()


def test_rows_of_no_group_reach_nothing(monkeypatch):
    """A kernel need not write them: whatever it leaves there, no sum and no gradient has any of it."""
    plain = jax.lax.ragged_dot

    def unwritten(x, w, sizes, **arguments):
        out = plain(x, w, sizes, **arguments)
        return jnp.where((jnp.arange(len(out)) < sizes.sum())[:, None], out, jnp.nan)

    x, share, chosen, w = draw("anywhere")
    x, share, w, direction = narrow((x, share, w, np.ones((N, D))))
    arguments = x, share, jnp.asarray(chosen, jnp.int32), w, direction
    expected = value_and_gradients(grouped.by_ragged_dot, *arguments)
    monkeypatch.setattr(jax.lax, "ragged_dot", unwritten)
    found = value_and_gradients(lambda *given: grouped.by_ragged_dot(*given), *arguments)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(a, b)


# ---- kernel


@pytest.mark.parametrize("fall", long_but(["anywhere"], FALLS))
def test_more_copies_than_one_call_takes_are_summed_one_part_after_the_other(fall, monkeypatch):
    x, share, chosen, w = draw(fall)
    monkeypatch.setattr(grouped, "MOST_COPIES", 30)  # of 10 of the 23 tokens: three parts of 8
    run = jax.jit(functools.partial(by_kernel, total=TOTAL))
    found = run(*narrow((x, share)), jnp.asarray(chosen, jnp.int32), narrow(w))
    np.testing.assert_allclose(found, by_loop(x, share, chosen, w), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_sums_by_the_interpreted_kernel():
    """Widths that the kernel has, in bfloat16, and experts elsewhere; float32 there is not its to take."""
    rng = np.random.default_rng(0)
    x, share, chosen = rng.normal(size=(N, 128)), rng.uniform(0.1, 1, size=(N, K)), FALLS["anywhere"](rng)
    w = {"gate": (E, 128, 64), "up": (E, 128, 64), "down": (E, 64, 128)}
    w = narrow({name: rng.normal(size=size) / np.sqrt(size[1]) for name, size in w.items()}, jnp.bfloat16)
    x, share, chosen = narrow(x, jnp.bfloat16), narrow(share), jnp.asarray(chosen, jnp.int32)
    kernel = op.GroupedKernel(functools.partial(gpu.swiglu, interpret=GPU), gpu.fits)
    found = grouped.by_kernel(x, share, chosen, w, TOTAL, kernel)
    exact = by_loop(narrow(x), share, chosen, narrow(w))
    # The product before the last is rounded to 8 bits.
    assert np.abs(found - exact).max() < 2**-7 * np.abs(exact).max() and np.any(found != exact)


@pytest.mark.slow
def test_what_a_kernel_does_not_take_is_summed_by_tiles():
    x, share, chosen, w = draw("anywhere")
    arguments = *narrow((x, share)), jnp.asarray(chosen, jnp.int32), narrow(w), TOTAL
    kernel = op.GroupedKernel(lambda *_: pytest.fail("the kernel ran"), lambda *_: False)
    np.testing.assert_array_equal(grouped.by_kernel(*arguments, kernel=kernel), grouped.by_tiles(*arguments))


@pytest.mark.slow
@pytest.mark.parametrize("kind", long_but(["int8"], ["int8", "fp8"]))
def test_a_kernel_takes_quantised_matrices_with_their_scales(kind):
    x, share, chosen, w = draw("anywhere")
    x, share, w = narrow((x, share, w))
    stored = {name: quantize(m, (1,), kind, dtype=jnp.dtype(jnp.float32)) for name, m in w.items()}
    plain = {name: m.numbers(jnp.float32) * m.scale for name, m in stored.items()}
    found = jax.jit(functools.partial(by_kernel, total=TOTAL))(x, share, jnp.asarray(chosen, jnp.int32), stored)
    np.testing.assert_allclose(found, by_loop(x, share, chosen, plain), atol=1e-5, rtol=0)


class Device:
    def __init__(self, platform, capability=None):
        self.platform, self.compute_capability = platform, capability


def test_devices_sum_by_what_they_have():
    hopper = grouped.sum_of(Device("gpu", "9.0"))
    assert hopper.func is grouped.by_kernel and hopper.keywords == {"kernel": op.KERNEL}
    assert grouped.sum_of(Device("gpu", "10.0")) is grouped.by_tiles
    assert grouped.sum_of(Device("tpu")) is grouped.by_ragged_dot
    assert grouped.sum_of(Device("cpu")).keywords == {"at_once": 1}


# ---- tiles


@pytest.mark.slow
@pytest.mark.parametrize(
    "n, k, experts, total",
    [(1, 1, 1, 1), (3, 2, 8, 8), (500, 4, 8, 8), pytest.param(700, 8, 4, 32, marks=pytest.mark.long)],
    ids=str,
)
@pytest.mark.parametrize("crowded", [False, True])
def test_every_copy_has_one_place_in_a_tile_of_its_expert(n, k, experts, total, crowded):
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.permutation(total)[:k] for _ in range(n)]).clip(max=experts)
    if crowded:
        chosen = np.full_like(chosen, experts - 1)  # all in one: the most tiles that one expert can have
    tiles = grouped.lay_out(jnp.asarray(chosen, jnp.int32), experts, total)
    copies, owners, used = map(np.asarray, tiles[:3])
    assert len(copies) % tiles.at_once == 0
    placed = copies[copies < n * k]
    assert sorted(placed) == sorted(np.flatnonzero(chosen.ravel() < experts))
    for row, owner in zip(copies, owners):
        assert set(chosen.ravel()[row[row < n * k]]) <= {owner}
    # Those that are used are in front, and each has a copy.
    assert (copies < n * k).any(axis=1).sum() == used
    assert (copies[:used] < n * k).any(axis=1).all()


@pytest.mark.slow
def test_work_is_proportional_to_the_copies_that_are_here():
    """A device whose experts nobody chose multiplies nothing: what the worst case would need is not spent."""
    few, all_here = (
        grouped.lay_out(jnp.asarray(chosen, jnp.int32), 4, 16, at_once=64)
        for chosen in (np.full((256, 2), 4), np.arange(512).reshape(256, 2) % 4)
    )
    assert few.copies.shape == all_here.copies.shape
    assert int(few.used) == 0 and 512 // 64 <= int(all_here.used) <= 512 // 64 + 4

    def rounds(tiles):
        return int(tiles.fold(lambda copies, owners, count: count + 1, 0))

    assert rounds(few) == 0 and rounds(all_here) == -(-int(all_here.used) // all_here.at_once)


@pytest.mark.parametrize("way", [grouped.by_tiles, by_kernel], ids=["tiles", "kernel"])
def test_a_token_keeps_its_bits_whatever_its_neighbours_choose(way):
    x, share, chosen, w = draw("anywhere")
    share, w = narrow((share, w))
    run = jax.jit(lambda x, chosen: way(x, share, chosen, w, TOTAL))
    before = run(narrow(x), jnp.asarray(chosen, jnp.int32))
    for seed, fall in enumerate(FALLS):
        others = draw(fall, seed + 5)
        keep = np.arange(N)[:, None] == 7
        after = run(narrow(np.where(keep, x, others[0])), jnp.asarray(np.where(keep, chosen, others[2]), jnp.int32))
        np.testing.assert_array_equal(after[7], before[7])
