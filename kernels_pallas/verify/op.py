"""Verification of drafted tokens on every platform: `verify` is the public function of this folder."""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from kernels_pallas.mapping import on_each_device
from kernels_pallas.verify import gpu, reference, tiled, tpu
from kernels_pallas.verify.tiled import Kernels
from kernels_pallas.verify.types import Draft, Noise, RowSampling, SamplingMask, SamplingParams, Verified, VerifyInputs

__all__ = ["KERNELS", "Draft", "Kernels", "Noise", "RowSampling", "SamplingMask", "Verified", "VerifyInputs"]
__all__ += ["kernels_of", "verify"]

# By `jax.Device.platform`; other platforms compile the reference.
KERNELS = {"gpu": Kernels(gpu.statistics, gpu.residual), "tpu": Kernels(tpu.statistics, tpu.residual)}
OLDEST_GPU = 9.0  # compute capability: Mosaic GPU needs the instructions of Hopper


def verify(
    inputs: VerifyInputs,
    sampling: SamplingParams,
    *,
    mesh: Mesh | None = None,
    rows: str | tuple[str, ...] | None = None,
    kernels: Kernels | None = None,
) -> Verified:
    """Verify k drafted tokens per row against k + 1 target distributions, by `sampling.rule`.

    `reference` defines the rules, `tiled` computes them with kernels. float64 logits, used in proofs, always take the
    reference.

    Args:
      mesh: devices that hold the arrays; None: the default device alone.
      rows: mesh axes that split the B rows, each row with its whole vocabulary; None: not split.
      kernels: replace those of the platform; tests pass interpreted ones.

    Raises:
      ValueError: shapes do not fit each other.

    Examples:
      Greedy verification of two drafted tokens, of which the first is the target's choice:

      >>> import jax.numpy as jnp
      >>> from specrl_jax import Draft, Noise, Sampling, VerifyInputs, verify
      >>> logits = jnp.zeros((1, 3, 5)).at[:, :, 4].set(1.0)  # [B, k + 1, V]: token 4 everywhere
      >>> noise = Noise(jnp.uint32(0), jnp.zeros(1, jnp.uint32), jnp.zeros(1, jnp.int32))
      >>> draft = Draft(jnp.array([[4, 2]]), logits=None, deterministic=jnp.array([True]))
      >>> out = verify(VerifyInputs(noise, draft, logits), Sampling(temperature=0.0))
      >>> out.num_accepted.tolist(), out.tokens[0, :2].tolist()
      ([1], [4, 4])
    """
    _check_shapes(inputs)
    kernels = kernels or kernels_of(mesh.devices.flat[0] if mesh is not None else jax.devices()[0])
    if kernels is None or inputs.target_logits.dtype == jnp.float64:
        return reference.verify(inputs, sampling)
    draft = dataclasses.replace(inputs.draft, confidence=None)
    if draft.logits is not None:
        draft = dataclasses.replace(draft, logits=draft.logits.astype(jnp.float32))
    inputs = VerifyInputs(inputs.noise, draft, inputs.target_logits.astype(jnp.float32), sampling=inputs.sampling)
    fn = functools.partial(tiled.verify, sampling=sampling, kernels=kernels)
    # XLA cannot split a kernel over devices: each device verifies its own rows, without communication.
    row, replicated = _spec(rows), _spec(None)
    sampled = None if inputs.sampling is None else RowSampling(row, row, row)
    specs = VerifyInputs(
        Noise(replicated, row, row), Draft(row, row, row, vocab_map=replicated, num_drafted=row), row, sampling=sampled
    )
    return cast(Verified, on_each_device(fn, mesh, (specs,), out_specs=PartitionSpec(rows))(inputs))


def _spec(rows: str | tuple[str, ...] | None) -> jax.Array:
    """Return the sharding of an array's first axis, typed as the array whose place it takes in a tree of shardings."""
    return cast(jax.Array, PartitionSpec(rows) if rows else PartitionSpec())


def kernels_of(device: jax.Device) -> Kernels | None:
    """Return a device's kernels; None where the reference runs: on CPUs and on GPUs older than Hopper."""
    if device.platform == "gpu" and float(getattr(device, "compute_capability", 0)) < OLDEST_GPU:
        return None
    return KERNELS.get(device.platform)


def _check_shapes(inputs: VerifyInputs) -> None:
    noise, draft = inputs.noise, inputs.draft
    (B, k), (_, Q, V) = draft.tokens.shape, inputs.target_logits.shape
    Vd = V if draft.vocab_map is None else len(draft.vocab_map)
    expected = {
        "noise.rollout_id": (noise.rollout_id, (B,)),
        "noise.position": (noise.position, (B,)),
        "draft.logits": (draft.logits, (B, k, Vd)),
        "draft.deterministic": (draft.deterministic, (B,)),
        "draft.num_drafted": (draft.num_drafted, (B,)),
        "target_logits": (inputs.target_logits, (B, max(Q, k + 1), V)),
    }
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"verify: {name} is {list(array.shape)}, expected {list(shape)} for draft.tokens {[B, k]}")
