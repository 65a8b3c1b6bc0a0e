"""The kernel of experts in an interpreter against its definition, which arrays it takes, and what compiles for a GPU.

The GPU's interpreter knows no transposed operand of the tensor cores: it multiplies arrays, all else is the kernel's.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.grouped import gpu, op, reference
from kernels_pallas.grouped.types import Matrices
from tests.helpers import targets
from tests.helpers.interpreted import GPU
from tests.helpers.long import long_but


def draw(E, D, F, J, M, stored="bfloat16", seed=0):
    """Return (rows, owners, matrices)."""
    rng, shapes = np.random.default_rng(seed), [(E, D, F), (E, D, F), (E, F, D)]
    drawn = [rng.normal(size=shape) / np.sqrt(shape[1]) for shape in shapes]
    scales = None
    if stored != "bfloat16":
        scales = tuple(jnp.asarray(rng.uniform(1, 2, (E, 1, s[2])) / 32, jnp.bfloat16) for s in shapes)
        drawn = [m / np.asarray(scale, np.float64) for m, scale in zip(drawn, scales)]
        drawn = [np.round(m) for m in drawn] if stored == "int8" else drawn
    w = Matrices(*[jnp.asarray(m, stored) for m in drawn], scales)
    return jnp.asarray(rng.normal(size=(J, M, D)), jnp.bfloat16), jnp.asarray(rng.integers(E, size=J), jnp.int32), w


def shapes_of(E, D, F, stored="bfloat16"):
    def of(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    scales = None
    if stored not in ("bfloat16", "float32"):
        scales = of(jnp.bfloat16, E, 1, F), of(jnp.bfloat16, E, 1, F), of(jnp.bfloat16, E, 1, D)
    return Matrices(of(stored, E, D, F), of(stored, E, D, F), of(stored, E, F, D), scales=scales)


interpreted = functools.partial(gpu.swiglu, interpret=GPU)

CASES = {
    "fewer steps than slots": {"E": 2, "D": 128, "F": 64, "J": 2, "M": 8},
    "more steps than slots": {"E": 3, "D": 640, "F": 192, "J": 4, "M": 16},
    "whole tiles": {"E": 2, "D": 256, "F": 128, "J": 3, "M": 128},
}


STORED = ["bfloat16", "int8", "float8_e4m3fn"]


@pytest.mark.parametrize("name, stored", long_but([("fewer steps than slots", "int8")], CASES, STORED))
def test_the_kernel_is_the_definition(name, stored):
    rows, owners, w = draw(**CASES[name], stored=stored)
    owners = owners.at[-1].set(len(w.gate))  # a tile that is not used
    found, expected = (fn(rows, owners, w)[:-1] for fn in (interpreted, reference.swiglu))
    assert found.dtype == jnp.float32
    # Of unit normals; between the products everything is rounded once, to 8 bits.
    np.testing.assert_allclose(found, expected, atol=2e-2)
    assert np.abs(found - expected).mean() < 2e-3


@pytest.mark.slow
def test_bits_of_a_row_do_not_depend_on_the_others():
    """Nor on whether another tile is used."""
    rows, owners, w = draw(E=2, D=128, F=64, J=2, M=8)
    others, _, _ = draw(E=2, D=128, F=64, J=2, M=8, seed=1)
    whole = interpreted(rows, owners, w)
    found = interpreted(others.at[0, 3].set(rows[0, 3]), owners.at[1].set(2), w)
    np.testing.assert_array_equal(found[0, 3], whole[0, 3])
    assert np.any(found[0, 4] != whole[0, 4])


def test_the_kernel_takes_bfloat16_and_8_bits_in_whole_blocks():
    def takes(D, F, stored="bfloat16", dtype="bfloat16"):
        return gpu.fits(jax.ShapeDtypeStruct((16, D), dtype), shapes_of(4, D, F, stored))

    assert takes(2048, 768) and takes(4096, 384) and takes(2048, 192, "int8") and takes(128, 64, "float8_e4m3fn")
    assert not takes(2048, 768, "float32", "float32") and not takes(2048, 768, "uint8")
    assert not takes(2048, 96) and not takes(192, 64)
    rows, owners, w = draw(E=2, D=128, F=64, J=2, M=12)
    with pytest.raises(ValueError, match="tiles of 12 rows"):
        gpu.swiglu(rows, owners, w)


class Device:
    def __init__(self, platform, capability):
        self.platform, self.compute_capability = platform, capability


def test_devices_have_the_kernel_of_hopper_or_none():
    assert op.kernel_of(Device("gpu", "9.0")).swiglu is gpu.swiglu
    for device in (Device("gpu", "8.0"), Device("gpu", "10.0"), Device("cpu", None), Device("tpu", None)):
        assert op.kernel_of(device) is None


# --- for a GPU that is not here


def arguments(M, E, D, F, stored, J=184):
    rows = jax.ShapeDtypeStruct((J, M, D), jnp.bfloat16)
    return rows, jax.ShapeDtypeStruct((J,), jnp.int32), shapes_of(E, D, F, stored)


# M, E, D, F: Qwen3-30B-A3B in decoding and in prompts, whole and a fourth; of Qwen3-235B-A22B a part in 32.
SIZES = [
    (16, 128, 2048, 768, "bfloat16"),
    (128, 128, 2048, 768, "bfloat16"),
    (8, 128, 2048, 192, "bfloat16"),
    (32, 16, 4096, 384, "bfloat16"),
    (16, 128, 2048, 768, "int8"),
    (128, 128, 2048, 768, "float8_e4m3fn"),
]


@pytest.mark.parametrize("M, E, D, F, stored", long_but([SIZES[0], SIZES[4]], SIZES))
def test_lowers(M, E, D, F, stored):
    lowered = jax.jit(gpu.swiglu).trace(*arguments(M, E, D, F, stored)).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_compiles_without_a_copy_of_the_experts(size):
    if not targets.installed("cuda"):
        pytest.skip("requirements-aot.txt is not installed")
    shapes = arguments(*size)
    memory = targets.compiled("cuda", gpu.swiglu, *shapes).memory_analysis()
    J, M, _ = shapes[0].shape
    assert memory.temp_size_in_bytes <= 1.01 * J * M * size[3] * 2
