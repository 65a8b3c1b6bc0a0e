"""Attention over key/value pages on every platform: `attend` and `write` are the public functions of this folder."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from kernels_pallas.attention import blocks, gpu, heads_gpu, tpu
from kernels_pallas.attention.types import Heads, Paging, Table
from kernels_pallas.mapping import on_each_device

__all__ = ["KERNELS", "AttentionKernel", "Heads", "Paging", "Table", "attend", "attend_fused", "empty_pool"]
__all__ += ["fused_kernel", "kernel_of", "loaded", "read_pool", "write", "write_pool"]

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


def empty_pool(shape: tuple[int, ...], dtype: jnp.dtype, platform: str) -> jax.Array:
    """Return a pool of zeros, as the platform keeps values of `dtype`."""
    return jnp.zeros(shape, jnp.uint16 if platform == "cpu" and dtype == jnp.bfloat16 else dtype)


def attend(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    mesh: Mesh | None = None,
    rows: Axes = None,
    heads: Axes = None,
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
      mesh: devices that hold the arrays; None: one.
      rows: mesh axes that split the rows and, with them, the pages: the table has numbers of the row's own part.
      heads: mesh axes that split the heads.
      kernel: replace that of the platform; tests pass interpreted ones.
    Returns:
      [B, Q, N, H] in the dtype of q.
    """
    kernel = kernel or kernel_of(mesh.devices.flat[0] if mesh is not None else jax.devices()[0])
    fn = functools.partial(_attend, kernel)
    by_head, by_row = PartitionSpec(rows, None, heads), PartitionSpec(rows)
    specs = (by_head, PartitionSpec(rows, heads), by_row, by_row)
    return on_each_device(fn, mesh, specs, out_specs=by_head)(q, pages, table, positions)


def _attend(
    kernel: AttentionKernel | None, q: jax.Array, pages: jax.Array, table: jax.Array, positions: jax.Array
) -> jax.Array:
    """Attend on one device, by the kernel if it takes these arrays."""
    decode = q.shape[1] <= MOST_QUERIES
    fn = kernel.attend if kernel and decode and kernel.fits(q, pages, table) else blocks.attend
    return fn(q, pages, table, positions)


def fused_kernel(fused: jax.Array, pages: jax.Array, table: jax.Array, *, device: jax.Device) -> AttendFused | None:
    """Return what attends from a fused product [B, Q, K, R + 2, H] on this device; None: nothing does.

    It takes all shapes or none of what devices hold parts of.
    """
    kernel = kernel_of(device)
    if kernel is None or fused.shape[1] > MOST_QUERIES or not kernel.fits_fused(fused, pages):
        return None
    B, Q, K, parts, H = fused.shape
    q = jax.eval_shape(lambda x: x[..., :-2, :].reshape(B, Q, K * (parts - 2), H), fused)
    return kernel.attend_fused if kernel.fits(q, pages, table) else None


def attend_fused(
    kernel: AttendFused,
    fused: jax.Array,
    heads: Heads,
    *,
    epsilon: float,
    pages: jax.Array,
    table: Table,
    positions: jax.Array,
    mesh: Mesh | None = None,
    rows: Axes = None,
    split: Axes = None,
) -> tuple[jax.Array, jax.Array]:
    """Normalise and rotate the heads of a fused product, write keys and values, and `attend`, by a `fused_kernel`.

    Args:
      fused: [B, Q, K, R + 2, H]: of each key/value head R queries, the key, the value.
      epsilon: of the norm.
      split: mesh axes that split the heads; the other arguments are those of `attend`.
    Returns:
      [B, Q, N, H] in the dtype of `fused`; the pages.
    """

    def fn(
        fused: jax.Array, heads: tuple[jax.Array, ...], pages: jax.Array, table: Table, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return kernel(fused, Heads(*heads), epsilon, pages, table, positions)

    arrays = fused, tuple(heads), pages, table, positions
    by_head, by_row, pool = PartitionSpec(rows, None, split), PartitionSpec(rows), PartitionSpec(rows, split)
    # A prefix stands for both parts of the table.
    specs = (by_head, (PartitionSpec(), PartitionSpec(), by_row, by_row), pool, by_row, by_row)
    return on_each_device(fn, mesh, specs, out_specs=(by_head, pool))(*arrays)


def kernel_of(device: jax.Device) -> AttentionKernel | None:
    """Return a device's kernel; None where `blocks` runs: on CPUs and on GPUs other than Hopper."""
    if device.platform == "gpu" and int(float(getattr(device, "compute_capability", 0))) != HOPPER:
        return None
    return KERNELS.get(device.platform)


def write(
    pages: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mesh: Mesh | None = None,
    rows: Axes = None,
    heads: Axes = None,
) -> jax.Array:
    """Write keys and values [B, Q, K, H] at `positions` [B, Q] of the rows' pages.

    Where the table names no page, and at a negative position, nothing is written. The other arguments are those of
    `attend`.
    """
    return write_pool(pages, table, positions, new=jnp.stack([keys, values], axis=3), mesh=mesh, rows=rows, heads=heads)


def write_pool(
    pool: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    *,
    new: jax.Array,
    mesh: Mesh | None = None,
    rows: Axes = None,
    heads: Axes = None,
) -> jax.Array:
    """Write new [B, Q, ...] to one pool: [C, K, 2, T, H] for new [B, Q, K, 2, H], [C, T, ...] otherwise."""
    by_head = new.ndim == 5
    pool_spec = PartitionSpec(rows, heads) if by_head else PartitionSpec(rows)
    new_spec = PartitionSpec(rows, None, heads) if by_head else PartitionSpec(rows)
    specs = (pool_spec, PartitionSpec(rows), PartitionSpec(rows), new_spec)
    return on_each_device(blocks.write, mesh, specs, out_specs=pool_spec)(pool, table, positions, new)


def read_pool(
    pool: jax.Array, table: jax.Array, positions: jax.Array, *, mesh: Mesh | None = None, rows: Axes = None
) -> jax.Array:
    """Read `positions` [B, Q] of a pool [C, T, ...]: [B, Q, ...]; zeros where the table names no page."""
    spec = PartitionSpec(rows)
    return on_each_device(blocks.read, mesh, (spec, spec, spec), out_specs=spec)(pool, table, positions)
