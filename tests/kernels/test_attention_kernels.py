"""Attention kernels in interpreters against the definition, which platform takes what, and what compiles for them.

The GPU's interpreter knows no transposed operand of the tensor cores: it multiplies arrays, all else is the kernel's.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.attention import blocks, gpu, op, reference, tpu
from specrl_jax.models.layers import rms_norm
from specrl_jax.models.rotary import Rope, rotate
from tests.helpers import targets
from tests.helpers.interpreted import GPU, TPU
from tests.helpers.long import long_but
from tests.helpers.paged import draw

INTERPRETED = {
    name: op.AttentionKernel(functools.partial(module.attend, interpret=interpret), module.fits)
    for name, module, interpret in [("gpu", gpu, GPU), ("tpu", tpu, True), ("tpu, simulated", tpu, TPU)]
}
attend = jax.jit(op.attend, static_argnames="kernel")
BOUNDS = {"float32": 2e-6, "bfloat16": 2e-2}  # unit normals; bfloat16 rounds weights and results to 8 bits
LENGTHS = [1, 127, 128, 129, 0, 300]


def case(lengths, kept="bfloat16", **kwargs):
    q, pages, table, positions = draw(lengths, **kwargs)
    return q, pages.astype(kept), table, positions


def defined(q, pages, table, positions):
    return reference.attend(q, pages.astype(jnp.float32), table, positions)


CASES = {
    "one row": {"lengths": [70], "Q": 1, "K": 1, "N": 2, "H": 64, "T": 16},
    "small pages": {"lengths": LENGTHS, "Q": 3, "K": 2, "N": 4, "H": 64, "T": 16},
    "large pages": {"lengths": LENGTHS, "Q": 1, "K": 2, "N": 8, "H": 64, "T": 256},
    "wide heads": {"lengths": [200, 64], "Q": 5, "K": 1, "N": 8, "H": 128, "T": 128},
    "two tiles of queries": {"lengths": [70], "Q": 16, "K": 1, "N": 8, "H": 64, "T": 64},
}
FAST = [("gpu", "one row", "bfloat16"), ("tpu", "small pages", "float32")]


@pytest.mark.slow
@pytest.mark.parametrize("backend, name, dtype", long_but(FAST, INTERPRETED, CASES, BOUNDS))
def test_the_kernels_are_the_definition(backend, name, dtype):
    if backend == "gpu" and dtype == "float32":
        assert not gpu.fits(*case(kept=dtype, **CASES[name])[:3])
        return
    arrays = case(kept=dtype, **CASES[name])
    found = INTERPRETED[backend].attend(*arrays)
    np.testing.assert_allclose(found, defined(*arrays), atol=BOUNDS[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("backend", INTERPRETED)
def test_bits_of_a_row_depend_neither_on_the_others_nor_on_the_pages(backend):
    """Nor on what pages of no row hold, nor on a query beside it that has no position."""
    shape = {"Q": 2, "K": 1, "N": 4, "H": 128}
    q, pages, table, positions = case([300, 65, 128], T=16, **shape)
    whole = attend(q, pages, table, positions, kernel=INTERPRETED[backend])
    free = np.setdiff1d(np.arange(len(pages)), np.asarray(table))
    spoilt = pages.at[free].set(jnp.nan)
    fewer = positions.at[0].set(-1).at[2, 0].set(-1)
    found = attend(q, spoilt, table, fewer, kernel=INTERPRETED[backend])
    assert not found[0].any() and not found[2, 0].any()
    np.testing.assert_array_equal(found[1], whole[1])
    np.testing.assert_array_equal(found[2, 1], whole[2, 1])
    others = attend(*case([300, 65, 128], T=64, pages_seed=1, **shape), kernel=INTERPRETED[backend])
    np.testing.assert_array_equal(others, whole)


@pytest.mark.slow
def test_what_no_kernel_takes_is_computed_in_blocks():
    """A piece of a prompt, float64, and pages that are no whole tiles."""
    with jax.enable_x64(True):
        shape = {"K": 1, "N": 2, "H": 128}
        for arrays in (
            case([40], Q=17, T=16, **shape),
            case([40], Q=1, T=4, **shape),
            case([40], "float64", Q=1, T=16, dtype=np.float64, **shape),
        ):
            assert not any(module.fits(*arrays[:3]) for module in (gpu, tpu)) or arrays[0].shape[1] > op.MOST_QUERIES
            for module in (gpu, tpu):
                taken = op.AttentionKernel(lambda *_: pytest.fail("the kernel ran"), module.fits)
                found = attend(*arrays, kernel=taken)
                np.testing.assert_array_equal(found, jax.jit(blocks.attend)(*arrays))


class Device:
    def __init__(self, platform, capability):
        self.platform, self.compute_capability = platform, capability


def test_devices_have_the_kernels_of_their_platform():
    assert op.kernel_of(Device("gpu", "8.0")) is None and op.kernel_of(Device("cpu", None)) is None
    assert op.kernel_of(Device("gpu", "9.0")).attend is gpu.attend
    # 'nvvm.wgmma.fence.aligned' op is not supported on sm_100a
    assert op.kernel_of(Device("gpu", "10.0")) is None and op.kernel_of(Device("gpu", "12.0")) is None
    assert op.kernel_of(Device("tpu", None)).attend is tpu.attend


# --- from a fused product

FUSED = {
    "one query": {"lengths": [70, 0], "Q": 1, "K": 1, "R": 2, "T": 16},
    "a page that others read": {"lengths": [3, 20], "Q": 2, "K": 2, "R": 1, "T": 16},
    "two tiles of queries": {"lengths": [70], "Q": 16, "K": 1, "R": 8, "T": 64},
}


def fused_case(lengths, Q, K, R, T, dtype, H=128):
    """Return (fused, heads, pages, table, positions); the fused product has unit normals."""
    _, pages, table, positions = draw(lengths, Q=Q, K=K, N=K * R, H=H, T=T)
    keys = jax.random.split(jax.random.key(0), 3)
    fused = jax.random.normal(keys[0], (len(lengths), Q, K, R + 2, H)).astype(dtype)
    scales = (1 + 0.1 * jax.random.normal(key, (H,)).astype(jnp.bfloat16) for key in keys[1:])
    own = jnp.where(jnp.arange(table.shape[1])[None] < 1, len(pages), table)
    heads = op.Heads(*scales, *Rope(1e4).angles(positions, H))
    return fused, heads, pages.astype(jnp.bfloat16), op.Table(table, own), positions


@jax.jit
def in_turn(fused, heads, pages, table, positions):
    """Norm and rotate, write, and attend by the kernel that takes queries."""
    q = fused[..., :-2, :].reshape(*fused.shape[:2], -1, fused.shape[-1])
    angles = heads.sin, heads.cos
    q, k = (rotate(rms_norm(*x, 1e-6), angles) for x in ((q, heads.q_scale), (fused[..., -2, :], heads.k_scale)))
    pages = op.write_pool(pages, table.write, positions, new=jnp.stack([k, fused[..., -1, :]], axis=3))
    return INTERPRETED["gpu"].attend(q, pages, table.read, positions), pages


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, dtype",
    long_but(
        [("one query", "bfloat16")],
        FUSED,
        BOUNDS,
    ),
)
def test_a_fused_product_is_placed_as_in_turn(shape, dtype):
    """Bits: both round at the same points. A row without a token and a page of others are not written."""
    arrays = fused_case(dtype=dtype, **FUSED[shape])
    attend_fused = jax.jit(functools.partial(gpu.attend_fused, epsilon=1e-6, interpret=GPU))
    fused, heads, *rest = arrays
    out, pages = attend_fused(fused, heads, pages=rest[0], table=rest[1], positions=rest[2])
    expected, written = in_turn(*arrays)
    np.testing.assert_array_equal(pages, written)
    np.testing.assert_array_equal(out, expected)
    assert np.any(np.asarray(written) != np.asarray(rest[0]))


# --- for devices that are not here

PLATFORMS = {"cuda": "gpu", "tpu": "tpu"}


def loop(platform, pages, q, table, positions):
    """Write and attend as a decoding loop does, pools carried."""

    def body(state):
        i, q, pages = state
        K = pages.shape[1]
        new = jnp.stack([q[:, :, :K], q[:, :, K : 2 * K]], axis=3)
        pages = op.write_pool(pages, table, positions + i, new=new)
        q = op.attend(q, pages, table, positions + i, kernel=op.KERNELS[PLATFORMS[platform]])
        return i + 1, q, pages

    return jax.lax.while_loop(lambda state: state[0] < 5, body, (jnp.int32(0), q, pages))[1:]


def arguments(T, H, Q, B=32, K=8, N=32, limit=10_240, live=2_560):
    """Return pages, q, table and positions of Qwen3-8B's shape (H = 128)."""

    def of(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    return (
        of(jnp.bfloat16, B * live // T, K, 2, T, H),
        of(jnp.bfloat16, B, Q, N, H),
        of(jnp.int32, B, limit // T),
        of(jnp.int32, B, Q),
    )


SIZES = [(16, 128, 4), (128, 64, 1), (64, 128, 16)]  # T, H, Q


BUILT = [("cuda", size) for size in SIZES] + [("tpu", size) for size in SIZES if size[1] == 128]


def fused_loop(pages, fused, heads, table, positions):
    """Write and attend from a fused product as a decoding loop does, pools carried."""

    def body(state):
        i, fused, pages = state
        out, pages = gpu.attend_fused(fused, heads, 1e-6, pages, op.Table(table, table), positions + i)
        R = fused.shape[3] - 2
        return i + 1, fused.at[..., :R, :].set(out.reshape(*fused.shape[:3], R, -1)), pages

    return jax.lax.while_loop(lambda state: state[0] < 5, body, (jnp.int32(0), fused, pages))[1:]


@pytest.mark.slow
@pytest.mark.parametrize("Q", [1, 4, 16])
def test_a_fused_product_compiles_without_a_copy_of_the_pool(Q):
    if not targets.installed("cuda"):
        pytest.skip("requirements-aot.txt is not installed")
    pages, _, table, positions = arguments(64, 128, Q)
    B, K, R, H = 32, 8, 4, 128
    shapes = {"fused": ((B, Q, K, R + 2, H), jnp.bfloat16), "scale": ((H,), jnp.bfloat16)}
    shapes["angle"] = ((B, Q, 1, H // 2), jnp.float32)
    fused, scale, angle = (jax.ShapeDtypeStruct(*shape) for shape in shapes.values())
    heads = op.Heads(scale, scale, angle, cos=angle)
    memory = targets.compiled("cuda", fused_loop, pages, fused, heads, table, positions, donate=0).memory_analysis()
    assert memory.temp_size_in_bytes < 0.25 * pages.size * pages.dtype.itemsize


@pytest.mark.parametrize("platform, size", BUILT)
def test_lowers(platform, size):
    fn = jax.jit(functools.partial(loop, platform))
    lowered = fn.trace(*arguments(*size)).lower(lowering_platforms=(platform,))
    assert {"cuda": "mosaic_gpu", "tpu": "tpu_custom_call"}[platform] in lowered.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("platform, size", BUILT)
def test_compiles_without_a_copy_of_the_pool(platform, size):
    if not targets.installed(platform):
        pytest.skip("requirements-aot.txt is not installed")
    shapes = arguments(*size)
    memory = targets.compiled(platform, functools.partial(loop, platform), *shapes, donate=0).memory_analysis()
    pool = shapes[0]
    assert memory.temp_size_in_bytes < 0.25 * pool.size * pool.dtype.itemsize
