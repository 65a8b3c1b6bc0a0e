"""Verification of drafted tokens on every platform: `verify`, the one public function of this folder."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels_pallas.verify import gpu, reference, tiled, tpu
from kernels_pallas.verify.reference import Noise, Verified
from kernels_pallas.verify.sampling import Sampling
from kernels_pallas.verify.tiled import Kernels

__all__ = ["KERNELS", "Kernels", "Noise", "Verified", "kernels_of", "verify"]

# By `jax.Device.platform`. What is not here takes the definition itself, which XLA compiles.
KERNELS = {"gpu": Kernels(gpu.statistics, gpu.excess), "tpu": Kernels(tpu.statistics, tpu.excess)}
OLDEST_GPU = 9.0  # compute capability: Hopper, whose instructions Mosaic GPU is made of


def verify(
    noise: Noise,
    draft_tokens: jax.Array,
    draft_logits: jax.Array | None,
    one_hot: jax.Array,
    vocab_map: jax.Array | None,
    target_logits: jax.Array,
    sampling: Sampling,
    mesh: Mesh | None = None,
    rows: Any = None,
    kernels: Kernels | None = None,
) -> Verified:
    """Verifies k drafted tokens per row against k + 1 target distributions, by `sampling.rule`.

    `reference` says what the rules are, `tiled` how the kernels follow them. float64 logits, which are for proofs,
    always take the definition.

    Args:
      noise, draft_tokens, draft_logits, one_hot, vocab_map, target_logits, sampling: as in `reference.verify`.
      mesh: whose devices hold the arrays; None: the default device alone.
      rows: mesh axis or axes that the B rows are split over, each with its whole vocabulary; None: not split.
      kernels: instead of those of the platform, for tests with interpreted ones.
    Raises:
      ValueError: shapes that do not fit each other.
    """
    _check_shapes(noise, draft_tokens, draft_logits, one_hot, vocab_map, target_logits)
    kernels = kernels or kernels_of(mesh.devices.flat[0] if mesh is not None else jax.devices()[0])
    if kernels is None or target_logits.dtype == jnp.float64:
        fn = functools.partial(reference.verify, sampling=sampling)
    else:
        target_logits = target_logits.astype(jnp.float32)
        draft_logits = None if draft_logits is None else draft_logits.astype(jnp.float32)
        fn = functools.partial(tiled.verify, sampling=sampling, kernels=kernels)
        if mesh is not None:
            noise_specs = Noise(P(), P(rows), P(rows))
            specs = (noise_specs, P(rows), P(rows), P(rows), P(), P(rows))
            # XLA cannot split a kernel over devices: each verifies its own rows, without communication.
            fn = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P(rows), check_vma=False)
    return fn(noise, draft_tokens, draft_logits, one_hot, vocab_map, target_logits)


def kernels_of(device: jax.Device) -> Kernels | None:
    """Those for a device; None where it takes the definition: a CPU, and a GPU that is older than the kernels."""
    if device.platform == "gpu" and float(getattr(device, "compute_capability", 0)) < OLDEST_GPU:
        return None
    return KERNELS.get(device.platform)


def _check_shapes(
    noise: Noise,
    draft_tokens: jax.Array,
    draft_logits: jax.Array | None,
    one_hot: jax.Array,
    vocab_map: jax.Array | None,
    target_logits: jax.Array,
) -> None:
    (B, k), (_, Q, V) = draft_tokens.shape, target_logits.shape
    Vd = V if vocab_map is None else len(vocab_map)
    expected = {
        "noise.rollout_id": (noise.rollout_id, (B,)),
        "noise.position": (noise.position, (B,)),
        "one_hot": (one_hot, (B,)),
        "draft_logits": (draft_logits, (B, k, Vd)),
        "target_logits": (target_logits, (B, max(Q, k + 1), V)),
    }
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"verify: {name} is {list(array.shape)}, expected {list(shape)} for draft_tokens {[B, k]}")
