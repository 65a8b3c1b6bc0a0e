"""The kernels at the shapes of Qwen3-8B, for real targets that are not here: lowered everywhere, compiled with wheels.

Compiling refuses blocks beyond shared memory or VMEM: `pip install -r requirements-aot.txt` for that.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.verify import tiled
from kernels_pallas.verify.op import KERNELS, Draft, Noise, VerifyInputs
from specrl_jax.decoding.sampling import Sampling
from tests.helpers import targets
from tests.helpers.long import long_but

B, V, VD = 64, 151_936, 32_000  # Qwen3-8B
BACKENDS = {"cuda": KERNELS["gpu"], "tpu": KERNELS["tpu"]}
CASES = {
    "rejection": Sampling(),
    "block": Sampling(rule="block"),
    "coupled": Sampling(rule="coupled"),
    "greedy": Sampling(0.0),
    "cut": Sampling(0.7, 20, 0.95),
}


def arguments(k):
    def of(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    noise = Noise(of(jnp.uint32), of(jnp.uint32, B), of(jnp.int32, B))
    draft = Draft(of(jnp.int32, B, k), of(jnp.float32, B, k, VD), of(jnp.bool_, B), vocab_map=of(jnp.int32, VD))
    return (VerifyInputs(noise, draft, of(jnp.float32, B, k + 1, V)),)


def verification(platform, sampling):
    return functools.partial(tiled.verify, sampling=sampling, kernels=BACKENDS[platform])


@pytest.mark.parametrize(
    "platform, name, k", long_but([("cuda", "block", 3), ("tpu", "block", 3)], BACKENDS, CASES, [3, 7])
)
def test_lowers(platform, name, k):
    lowered = jax.jit(verification(platform, CASES[name])).trace(*arguments(k)).lower(lowering_platforms=(platform,))
    kernel = {"cuda": "mosaic_gpu", "tpu": "tpu_custom_call"}[platform]
    assert kernel in lowered.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("k", [3, 7])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("platform", BACKENDS)
def test_compiles(platform, name, k):
    if not targets.installed(platform):
        pytest.skip("requirements-aot.txt is not installed")
    memory = targets.compiled(platform, verification(platform, CASES[name]), *arguments(k)).memory_analysis()
    logits = 4 * B * (k + 1) * V
    # Nothing of the target's size beside it, unless it is sorted for top-p. A TPU copies [B, k+1, V] to [B (k+1), V]
    # where k + 1 is less than the eight rows of its tiles.
    assert platform == "tpu" or name == "cut" or memory.temp_size_in_bytes < 0.9 * logits
