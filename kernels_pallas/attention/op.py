"""Attention over key/value pages on every platform: the public functions of this folder."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from kernels_pallas.attention import blocks, gpu, heads_gpu, tpu
from kernels_pallas.attention.types import Heads, Paging, Table
from kernels_pallas.mapping import on_each_device

__all__ = ["KERNELS", "AttentionKernel", "Heads", "Paging", "Shards", "Table", "attend", "attend_fused", "empty_pool"]
__all__ += ["kernel_of", "loaded", "read_pool", "write_pool"]

# (q [B, Q, N, H], pages, table [B, P], positions [B, Q]) -> [B, Q, N, H]
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
# (fused [B, Q, K, R + 2, H], heads, epsilon, pages, table, positions [B, Q]) -> ([B, Q, N, H], pages)
AttendFused = Callable[[jax.Array, Heads, float, jax.Array, Table, jax.Array], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class AttentionKernel:
    """A platform's attention, and which of one device's arrays (q, pages, table) it takes."""

    attend: Attend
    fits: Callable[[jax.Array, jax.Array, jax.Array], bool]
    # The same from a layer's fused product, and which (fused, pages) it takes beyond what `fits` asks; None: none.
    attend_fused: AttendFused | None = None
    fits_fused: Callable[[jax.Array, jax.Array], bool] = lambda fused, pages: False


# By `jax.Device.platform`; other platforms compile `blocks`.
KERNELS = {
    "gpu": AttentionKernel(gpu.attend, gpu.fits, gpu.attend_fused, fits_fused=heads_gpu.fits),
    "tpu": AttentionKernel(tpu.attend, tpu.fits),
}
HOPPER = 9  # compute capability, major: `gpu.py` multiplies by wgmma, which Blackwell does not have
MOST_QUERIES = 16  # of a row; more are a piece of a prompt, which `blocks` reads once for all of them
Axes = str | tuple[str, ...] | None

loaded = blocks.loaded


class Shards(NamedTuple):
    """Devices that hold the arrays, and the mesh axes that split them."""

    mesh: Mesh | None = None  # None: one device
    rows: Axes = None  # of the rows and, with them, the pages: the table has numbers of the row's own part
    heads: Axes = None

    @property
    def device(self) -> jax.Device:
        return jax.devices()[0] if self.mesh is None else self.mesh.devices.flat[0]

    @property
    def by_row(self) -> PartitionSpec:
        return PartitionSpec(self.rows)

    @property
    def by_head(self) -> PartitionSpec:
        """Return the sharding of arrays [B, Q, K, ...]."""
        return PartitionSpec(self.rows, None, self.heads)

    @property
    def pool(self) -> PartitionSpec:
        """Return the sharding of pages [C, K, ...]."""
        return PartitionSpec(self.rows, self.heads)


ONE_DEVICE = Shards()


def empty_pool(shape: tuple[int, ...], dtype: jnp.dtype, platform: str) -> jax.Array:
    """Return a pool of zeros, as the platform keeps values of `dtype`."""
    return jnp.zeros(shape, jnp.uint16 if platform == "cpu" and dtype == jnp.bfloat16 else dtype)


def attend(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    *,
    shards: Shards = ONE_DEVICE,
    kernel: AttentionKernel | None = None,
) -> jax.Array:
    """Attend from each query to the keys and values of its row up to its own position.

    A kernel runs on TPUs and on GPUs of Hopper, where a row has at most MOST_QUERIES queries and `fits` of
    `gpu.py` or `tpu.py` says yes: not for float64, nor for float32 on a GPU. `blocks` computes everything else.

    Args:
      q: [B, Q, N, H]; consecutive query heads share one of the K key/value heads.
      pages: [C, K, 2, T, H], keys and values (`types.py`).
      table: [B, P] int32, pages of each row.
      positions: [B, Q] int32, ascending; negative: no query, its result is 0.
      kernel: replace that of the platform; tests pass interpreted ones.
    Returns:
      [B, Q, N, H] in the dtype of q.
    """
    fn = functools.partial(_attend, kernel or kernel_of(shards.device))
    specs = (shards.by_head, shards.pool, shards.by_row, shards.by_row)
    return on_each_device(fn, shards.mesh, specs, out_specs=shards.by_head)(q, pages, table, positions)


def _attend(
    kernel: AttentionKernel | None, q: jax.Array, pages: jax.Array, table: jax.Array, positions: jax.Array
) -> jax.Array:
    """Attend on one device, by the kernel if it takes these arrays."""
    decode = q.shape[1] <= MOST_QUERIES
    fn = kernel.attend if kernel and decode and kernel.fits(q, pages, table) else blocks.attend
    return fn(q, pages, table, positions)


def attend_fused(
    fused: jax.Array,
    heads: Heads,
    *,
    epsilon: float,
    pages: jax.Array,
    table: Table,
    positions: jax.Array,
    shards: Shards = ONE_DEVICE,
) -> tuple[jax.Array, jax.Array] | None:
    """Normalise (if `heads` has scales) and rotate the heads of a fused product, write keys and values, and `attend`.

    All of it in few launches.

    Args:
      fused: [B, Q, K, R + 2, H]: of each key/value head R queries, the key, the value.
      epsilon: of the norm.
    Returns:
      [B, Q, N, H] in the dtype of `fused`, and the pages. None where no kernel does all of it.
    """
    kernel = _fused_kernel(fused, pages, table.read, device=shards.device)
    if kernel is None:
        return None

    def fn(
        fused: jax.Array, heads: tuple[Any, ...], pages: jax.Array, table: Table, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return kernel(fused, Heads(*heads), epsilon, pages, table, positions)

    by_row, replicated = shards.by_row, PartitionSpec()
    # A prefix stands for both parts of the table.
    specs = (shards.by_head, (replicated, replicated, by_row, by_row), shards.pool, by_row, by_row)
    mapped = on_each_device(fn, shards.mesh, specs, out_specs=(shards.by_head, shards.pool))
    return mapped(fused, tuple(heads), pages, table, positions)


def _fused_kernel(fused: jax.Array, pages: jax.Array, table: jax.Array, *, device: jax.Device) -> AttendFused | None:
    """Return what attends from a fused product on this device; None: nothing does.

    It takes all shapes or none of what devices hold parts of.
    """
    kernel = kernel_of(device)
    if kernel is None or fused.shape[1] > MOST_QUERIES or not kernel.fits_fused(fused, pages):
        return None
    B, Q, K, parts, H = fused.shape
    q = jax.eval_shape(lambda x: x[..., :-2, :].reshape(B, Q, K * (parts - 2), H), fused)
    return kernel.attend_fused if kernel.fits(q, pages, table) else None


def kernel_of(device: jax.Device) -> AttentionKernel | None:
    """Return a device's kernel; None where `blocks` runs: on CPUs and on GPUs other than Hopper."""
    if device.platform == "gpu" and int(float(getattr(device, "compute_capability", 0))) != HOPPER:
        return None
    return KERNELS.get(device.platform)


def write_pool(
    pool: jax.Array, table: jax.Array, positions: jax.Array, *, new: jax.Array, shards: Shards = ONE_DEVICE
) -> jax.Array:
    """Write new [B, Q, ...] at `positions` [B, Q] of the rows' pages, which `table` [B, P] names.

    Where it names no page, and at a negative position, nothing is written.

    Args:
      pool: [C, K, 2, T, H] for new [B, Q, K, 2, H], keys and values; [C, T, ...] otherwise.
    """
    by_row = shards.by_row
    pool_spec, new_spec = (shards.pool, shards.by_head) if new.ndim == 5 else (by_row, by_row)
    mapped = on_each_device(blocks.write, shards.mesh, (pool_spec, by_row, by_row, new_spec), out_specs=pool_spec)
    return mapped(pool, table, positions, new)


def read_pool(pool: jax.Array, table: jax.Array, positions: jax.Array, *, shards: Shards = ONE_DEVICE) -> jax.Array:
    """Read `positions` [B, Q] of a pool [C, T, ...]: [B, Q, ...]; zeros where the table names no page."""
    spec = shards.by_row
    return on_each_device(blocks.read, shards.mesh, (spec, spec, spec), out_specs=spec)(pool, table, positions)
