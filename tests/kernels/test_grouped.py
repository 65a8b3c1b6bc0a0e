"""The kernel of experts in an interpreter against its definition, which arrays it takes, and what compiles for a GPU.

The GPU's interpreter knows no transposed operand of the tensor cores: it multiplies arrays, all else is the kernel's.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.grouped import gpu, op, reference
from tests.helpers import targets
from tests.helpers.interpreted import GPU
from tests.helpers.slow import slow_but


def draw(E, D, F, J, M, seed=0):
    """Return (rows, owners, matrices by name) in bfloat16."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[1]), jnp.bfloat16)

    w = {"gate": normal(E, D, F), "up": normal(E, D, F), "down": normal(E, F, D)}
    return jnp.asarray(rng.normal(size=(J, M, D)), jnp.bfloat16), jnp.asarray(rng.integers(E, size=J), jnp.int32), w


interpreted = functools.partial(gpu.swiglu, interpret=GPU)

CASES = {
    "fewer steps than slots": {"E": 2, "D": 128, "F": 64, "J": 2, "M": 8},
    "more steps than slots": {"E": 3, "D": 640, "F": 192, "J": 4, "M": 16},
    "whole tiles": {"E": 2, "D": 256, "F": 128, "J": 3, "M": 128},
}


@pytest.mark.parametrize("name", slow_but(["fewer steps than slots"], CASES))
def test_the_kernel_is_the_definition(name):
    rows, owners, w = draw(**CASES[name])
    owners = owners.at[-1].set(len(w["gate"]))  # a tile that is not used
    found, expected = (fn(rows, owners, **w)[:-1] for fn in (interpreted, reference.swiglu))
    assert found.dtype == jnp.float32
    # Of unit normals; between the products everything is rounded once, to 8 bits.
    np.testing.assert_allclose(found, expected, atol=2e-2)
    assert np.abs(found - expected).mean() < 2e-3


@pytest.mark.slow
def test_bits_of_a_row_do_not_depend_on_the_others():
    """Nor on whether another tile is used."""
    rows, owners, w = draw(E=2, D=128, F=64, J=2, M=8)
    others, _, _ = draw(E=2, D=128, F=64, J=2, M=8, seed=1)
    whole = interpreted(rows, owners, **w)
    found = interpreted(others.at[0, 3].set(rows[0, 3]), owners.at[1].set(2), **w)
    np.testing.assert_array_equal(found[0, 3], whole[0, 3])
    assert np.any(found[0, 4] != whole[0, 4])


def test_the_kernel_takes_bfloat16_in_whole_blocks():
    def takes(D, F, dtype=jnp.bfloat16):
        def of(*shape):
            return jax.ShapeDtypeStruct(shape, dtype)

        return gpu.fits(of(16, D), of(4, D, F), of(4, D, F), of(4, F, D))

    assert takes(2048, 768) and takes(4096, 384) and takes(2048, 192)
    assert not takes(2048, 768, jnp.float32) and not takes(2048, 96) and not takes(192, 64)
    rows, owners, w = draw(E=2, D=128, F=64, J=2, M=12)
    with pytest.raises(ValueError, match="tiles of 12 rows"):
        gpu.swiglu(rows, owners, **w)


class Device:
    def __init__(self, platform, capability):
        self.platform, self.compute_capability = platform, capability


def test_devices_have_the_kernel_of_hopper_or_none():
    assert op.kernel_of(Device("gpu", "9.0")).swiglu is gpu.swiglu
    for device in (Device("gpu", "8.0"), Device("gpu", "10.0"), Device("cpu", None), Device("tpu", None)):
        assert op.kernel_of(device) is None


# --- for a GPU that is not here


def arguments(M, E, D, F, J=184):
    def of(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    matrices = of(jnp.bfloat16, E, D, F), of(jnp.bfloat16, E, D, F), of(jnp.bfloat16, E, F, D)
    return of(jnp.bfloat16, J, M, D), of(jnp.int32, J), *matrices


# M, E, D, F: Qwen3-30B-A3B in decoding and in prompts, whole and a fourth; of Qwen3-235B-A22B a part in 32.
SIZES = [(16, 128, 2048, 768), (128, 128, 2048, 768), (8, 128, 2048, 192), (32, 16, 4096, 384)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_lowers(size):
    lowered = jax.jit(gpu.swiglu).trace(*arguments(*size)).lower(lowering_platforms=("cuda",))
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
