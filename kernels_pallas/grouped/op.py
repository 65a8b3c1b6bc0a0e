"""Experts of tiles of rows: which devices have a kernel that reads their matrices in place.

`reference.swiglu` is the definition. A device without a kernel, and arrays that one does not take, are the caller's to
compute another way (`specrl_jax.models.grouped`).
"""

import dataclasses
from collections.abc import Callable

import jax

from kernels_pallas.grouped import gpu
from kernels_pallas.grouped.types import Matrices

# (rows [J, M, D], owners [J], matrices) -> [J, M, D] float32
SwiGlu = Callable[[jax.Array, jax.Array, Matrices], jax.Array]


@dataclasses.dataclass(frozen=True)
class GroupedKernel:
    """A platform's kernel, and which of one device's arrays (x [n, D], matrices) it takes."""

    swiglu: SwiGlu
    fits: Callable[[jax.Array, Matrices], bool]


HOPPER = 9  # compute capability, major: `gpu.py` multiplies by wgmma, which Blackwell does not have
KERNEL = GroupedKernel(gpu.swiglu, gpu.fits)


def kernel_of(device: jax.Device) -> GroupedKernel | None:
    """Return a device's kernel: that of GPUs of Hopper.

    None for a TPU: its compiler makes such a kernel of `jax.lax.ragged_dot`.
    """
    hopper = device.platform == "gpu" and int(float(getattr(device, "compute_capability", 0))) == HOPPER
    return KERNEL if hopper else None
