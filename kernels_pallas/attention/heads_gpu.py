"""New queries, keys and values on NVIDIA GPUs of Hopper, from a layer's fused product to where attention reads them.

One launch for what XLA makes three of: the norm, the rotation of queries, and the write of keys and values. A warpgroup
takes one key/value head of one token, a lane for each of its H numbers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.attention.types import KEYS, VALUES, Heads, find

LANES = 128  # of a warpgroup
HALF = LANES // 2


def fits(fused: jax.Array, pages: jax.Array) -> bool:
    """Return whether `place` takes these arrays: heads of 128, and no float64, as the kernel of attention."""
    return pages.dtype == jnp.bfloat16 and fused.shape[-1] == LANES and fused.dtype != jnp.float64


def place(
    fused: jax.Array,
    heads: Heads,
    epsilon: float,
    *,
    pages: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    rows: int,
    interpret: object = None,
) -> tuple[jax.Array, jax.Array]:
    """Normalise queries and keys where `heads` has scales, rotate them, and write keys and values to the rows' pages.

    Computes as RMSNorm over H and `rotate` of a network do: statistics and rotation in float32, each result rounded to
    the dtype of `fused`.

    Args:
      fused: [B, Q, K, R + 2, H]: of each key/value head R queries, the key, the value.
      table: [B, P] int32, the pages that may be written.
      rows: of the result, for the Q R queries of a key/value head.
    Returns:
      [B, K, rows, H] in the dtype of the pages, of which those beyond Q R hold anything; the pages [C, K, 2, T, H].
    """
    B, Q, K, parts, H = fused.shape
    page, offset = find(table, positions, len(pages), T=pages.shape[3])
    sin, cos = (x.reshape(B, Q, HALF) for x in (heads.sin, heads.cos))
    # Lane i is turned with lane i + 64, and that with -sin. All layers share this array, and what says which is which.
    low = jnp.concatenate([jnp.ones_like(sin), jnp.zeros_like(sin)], -1)
    turn = jnp.stack([jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1), low], axis=2)
    scales = [scale.astype(fused.dtype) for scale in (heads.q_scale, heads.k_scale) if scale is not None]
    pool = jax.new_ref(pages, memory_space=plgpu.GMEM)
    scratch = [
        # Half a vector more at both ends: `_other_half` reads from the middle of one to the middle of the next.
        plgpu.SMEM(((parts + 1) * LANES,), fused.dtype),
        plgpu.SMEM((3 * LANES,), fused.dtype),
        plgpu.Barrier(num_arrivals=parts + len(scales)),
    ]

    def kernel(fused: Any, *refs: Any) -> None:
        given, others = refs[: len(scales)] or (None, None), refs[len(scales) :]
        pl.run_scoped(lambda *scratch: _place(epsilon, PlaceRefs._make((fused, *given, *others, *scratch))), *scratch)

    # Not `plgpu.kernel`, which takes no reference that it could write to.
    queries = pl.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((B, K, rows, H), pages.dtype),
        mesh=plgpu.Mesh(grid=(B, Q, K), grid_names=("row", "query", "head")),
        interpret=interpret,
    )(fused, *scales, turn, page, offset, pool)
    return queries, jax.freeze(pool)


class PlaceRefs(NamedTuple):
    """Arguments, results and scratch of `_place`, in the order of the kernel's."""

    fused: Any
    q_scale: Any  # None, as k_scale: no norm
    k_scale: Any
    turn: Any
    page: Any
    offset: Any
    pages: Any
    out: Any
    vectors: Any
    scales: Any
    barrier: Any


def _place(epsilon: float, refs: PlaceRefs) -> None:
    """Place the heads of one key/value head of one token."""
    row, query, head = (jax.lax.axis_index(name) for name in ("row", "query", "head"))
    parts, dtype = refs.fused.shape[3], refs.out.dtype
    R = parts - 2
    for i in range(parts):
        plgpu.copy_gmem_to_smem(refs.fused.at[row, query, head, i], _vector(refs.vectors, i), refs.barrier)
    normalised = refs.q_scale is not None
    for i, ref in enumerate((refs.q_scale, refs.k_scale) if normalised else ()):
        plgpu.copy_gmem_to_smem(ref, _vector(refs.scales, i), refs.barrier)
    plgpu.barrier_wait(refs.barrier)
    cos, sin, low = (refs.turn[row, query, i] for i in range(3))
    low = low > 0

    def turned(i: int, which: int) -> jax.Array:
        x, other = _vector(refs.vectors, i)[...], _other_half(refs.vectors, i, low)
        wide, across = x.astype(jnp.float32), other.astype(jnp.float32)
        if normalised:
            scale, other_scale = _vector(refs.scales, which)[...], _other_half(refs.scales, which, low)
            shrink = jax.lax.rsqrt(jnp.sum(wide * wide) / LANES + epsilon)
            wide = (scale * (wide * shrink).astype(x.dtype)).astype(jnp.float32)
            across = (other_scale * (across * shrink).astype(x.dtype)).astype(jnp.float32)
        return (wide * cos + across * sin).astype(x.dtype).astype(dtype)

    for r in range(R):
        refs.out[row, head, query * R + r] = turned(r, 0)
    page, offset = refs.page[row, query], refs.offset[row, query]

    @pl.when(page < refs.pages.shape[0])
    def _() -> None:
        refs.pages[page, head, KEYS, offset] = turned(R, 1)
        refs.pages[page, head, VALUES, offset] = _vector(refs.vectors, R + 1)[...].astype(dtype)


def _vector(buffer: Any, i: int, shift: int = 0) -> Any:
    return buffer.at[pl.ds(HALF + i * LANES + shift, LANES)]


def _other_half(buffer: Any, i: int, low: jax.Array) -> jax.Array:
    """Return in each lane the number that is half a vector away."""
    return jnp.where(low, _vector(buffer, i, HALF)[...], _vector(buffer, i, -HALF)[...])
