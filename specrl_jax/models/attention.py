"""Causal attention of the learner over whole rows, by one of three kernels of other libraries.

    xla     `jax.nn.dot_product_attention` compiled by XLA: any device, any dtype, also rows split along their tokens.
            Materialises the scores of every head, of long rows those of some queries at a time: several times
            4 B N SCORES bytes.
    cudnn   the same by cuDNN: NVIDIA GPUs from Ampere on, bfloat16. No scores; packed rows take a bias, 2 B T^2 bytes.
    splash  jax's Pallas kernel for TPUs (jax.experimental.pallas.ops.tpu.splash_attention), heads of 128. No scores.

Forward and backward of two rows of 4,096 tokens with Qwen3-8B's heads take 0.27 GB beside their arguments with cudnn,
by the memory analysis of the compiler for an H200 (jax 0.10.2).
"""

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention

from specrl_jax.core import Tree
from specrl_jax.errors import InputError
from specrl_jax.models.remat import KEPT
from specrl_jax.sharding import Partitioner

# (q [B, T, N, H], k [B, T, K, H], v [B, T, K, H]) -> [B, T, N, H] in the dtype of q; consecutive query heads share one
# of the K.
AttendRows = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
# (segment_ids [B, T] int32, None: one sequence a row; partition) -> AttendRows
RowAttention = Callable[[jax.Array | None, Partitioner], AttendRows]

# By `jax.Device.platform`: the first choice of `auto`; elsewhere, and where that cannot run, xla.
KERNELS = {"gpu": "cudnn", "tpu": "splash"}
OLDEST_GPU = 8.0  # compute capability: Ampere, the first with cuDNN's fused attention
# The widest heads that cuDNN supports on all of these GPUs, and the width of a TPU's registers.
LARGEST_CUDNN_HEAD, LANES = 128, 128
# Tokens of a tile of splash: enough to hide its overhead at eight heads, and fitting a v5p's VMEM in both directions.
TILE = 512
# Scores of a row and head that are held at a time: all of a row of 1,448 tokens, 455 queries of one of 4,608.
SCORES = 2**21


class Queries(NamedTuple):
    """The places in their rows of some queries; their keys are those before them in the same sequence."""

    place: jax.Array  # [B, Q] int32
    segment_ids: jax.Array | None  # [B, Q] int32; None: one sequence a row

    def readable(self, segment_ids: jax.Array | None, T: int) -> jax.Array:
        """Return [B, 1, Q, T] bool: which of the row's tokens, of `segment_ids` [B, T], each query reads."""
        causal = jnp.arange(T)[None, None] <= self.place[..., None]
        if segment_ids is not None and self.segment_ids is not None:
            causal &= self.segment_ids[..., None] == segment_ids[:, None, :]
        return causal[:, None]


def by_queries(
    attend: Callable[[Queries, Tree], jax.Array],
    parts: int,
    segment_ids: jax.Array | None,
    *,
    arrays: Tree,
    places: jax.Array | None = None,
) -> jax.Array:
    """Apply `attend` to every parts-th query at a time, and again in the backward pass, so that few scores are held.

    Each part has tokens of every device where rows are split along their tokens.

    Args:
      attend: (queries, their `arrays`) -> [B, Q, ...].
      segment_ids: [B, T] int32 of the queries.
      arrays: leaves [B, T, ...], cut like the queries.
      places: [T] int32 of the queries in their rows; None: all places of a row.
    """
    B, T = jax.tree.leaves(arrays)[0].shape[:2]
    queries = Queries(jnp.broadcast_to(jnp.arange(T) if places is None else places, (B, T)), segment_ids)
    if parts == 1:
        return attend(queries, arrays)

    def split(x: jax.Array) -> jax.Array:
        """Split into [parts, B, T / parts, ...]; the last query is repeated, and cut off below."""
        x = jnp.pad(x, [(0, 0), (0, -T % parts)] + [(0, 0)] * (x.ndim - 2), mode="edge")
        return jnp.moveaxis(x.reshape(B, -1, parts, *x.shape[2:]), 2, 0)

    out = jax.lax.map(jax.checkpoint(lambda part: attend(*part)), jax.tree.map(split, (queries, arrays)))
    return jnp.moveaxis(out, 0, 2).reshape(B, -1, *out.shape[3:])[:, :T]


def query_parts(T: int) -> int:
    """Return into how many parts the queries of a row go, for at most SCORES scores each."""
    return -(-T // max(1, SCORES // T))


def by_xla(segment_ids: jax.Array | None, partition: Partitioner) -> AttendRows:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        # Where a row is split along its tokens, each part reads the keys and values of all.
        k, v = (partition.constrain(x, "batch", None, "kv_heads", None) for x in (k, v))
        if (parts := query_parts(q.shape[1])) == 1:
            return jax.nn.dot_product_attention(q, k, v, mask=_same_segment(segment_ids), is_causal=True)

        def some(queries: Queries, q: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(q, k, v, mask=queries.readable(segment_ids, k.shape[1]))

        return by_queries(some, parts, segment_ids, arrays=q)

    return attend


def by_cudnn(segment_ids: jax.Array | None, partition: Partitioner) -> AttendRows:
    def here(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        mask = _same_segment(segment_ids)
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="cudnn")

    # cuDNN needs an even length for packed rows.
    return _on_each_device(here, 2, segment_ids, partition)


def by_splash(segment_ids: jax.Array | None, partition: Partitioner, interpret: bool = False) -> AttendRows:
    """Attend by splash; `interpret`: in Pallas' interpreter, on any platform, for tests."""

    def here(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        T, N, H = q.shape[1:]
        kernel = _splash_kernel(T, N, interpret)
        by_heads = [jnp.swapaxes(x, 1, 2) for x in ((q * H**-0.5).astype(q.dtype), k, v)]
        segments = None if segment_ids is None else splash_attention.SegmentIds(segment_ids, segment_ids)
        return jnp.swapaxes(jax.vmap(kernel)(*by_heads, segments), 1, 2)

    return _on_each_device(here, None, segment_ids, partition)


ATTENTION: dict[str, RowAttention] = {"xla": by_xla, "cudnn": by_cudnn, "splash": by_splash}


def find_attention(name: str, head_dim: int, dtype: jnp.dtype, *, partition: Partitioner) -> RowAttention:
    """Return the attention of policy.attention=`name`, for activations of `dtype` on the devices of `partition`.

    Raises InputError where the name is unknown or the kernel cannot run. `auto` always runs, and warns where it falls
    back to xla.
    """
    if name == "auto":
        name = KERNELS.get(partition.mesh.devices.flat[0].platform, "xla")
        if obstacle := _obstacle(name, head_dim, dtype, partition):
            warnings.warn(f"policy.attention: xla, which keeps scores of every head; {name}: {obstacle}", stacklevel=2)
            return by_xla
    if name not in ATTENTION:
        raise InputError(f"policy.attention: no attention '{name}'; there are auto, {', '.join(ATTENTION)}")
    if obstacle := _obstacle(name, head_dim, dtype, partition):
        raise InputError(f"policy.attention={name}: {obstacle}")
    return ATTENTION[name]


def _obstacle(name: str, head_dim: int, dtype: jnp.dtype, partition: Partitioner) -> str:
    """Return the reason why the attention cannot run, '' where it can."""
    if name == "xla":
        return ""
    device = partition.mesh.devices.flat[0]
    if KERNELS.get(device.platform) != name:
        return f"not on a {device.platform}"
    if partition.num_shards("sequence") > 1:
        return "not where rows are split along their tokens (mesh.sequence)"
    if name == "splash":
        return f"heads of {head_dim}, multiples of {LANES} are needed" if head_dim % LANES else ""
    if float(getattr(device, "compute_capability", 0)) < OLDEST_GPU:
        return f"needs compute capability {OLDEST_GPU}"
    if dtype != jnp.bfloat16:
        return f"policy.compute_dtype=bfloat16 is needed, not {jnp.dtype(dtype).name}"
    if head_dim > LARGEST_CUDNN_HEAD or head_dim % 8:
        return f"heads of {head_dim}, multiples of 8 up to {LARGEST_CUDNN_HEAD} are needed"
    return ""


def _same_segment(segment_ids: jax.Array | None) -> jax.Array | None:
    """Return a mask [B, 1, T, T], true where query and key are of one segment; None: one segment a row."""
    if segment_ids is None:
        return None
    return segment_ids[:, None, :, None] == segment_ids[:, None, None, :]


def _on_each_device(
    kernel: Callable[..., jax.Array], multiple: int | None, segment_ids: jax.Array | None, partition: Partitioner
) -> AttendRows:
    """Run `kernel` on each device's own rows and heads, padded to a multiple of a length (None: of `_tile`).

    XLA cannot split a kernel over devices. Rows are padded at their end, which no earlier token reads, and rows of
    zeros are added where they do not divide over the devices.
    """

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        B, T = q.shape[:2]
        more = (0, -B % partition.num_shards("batch")), (0, -T % (multiple or _tile(T)))

        def padded(x: jax.Array | None) -> jax.Array | None:
            return None if x is None else jnp.pad(x, more + ((0, 0),) * (x.ndim - 2))

        rows = partition.spec(("batch",))
        queries, shared = (partition.spec(("batch", None, axis, None)) for axis in ("heads", "kv_heads"))
        mapped = jax.shard_map(
            kernel,
            mesh=partition.mesh,
            in_specs=(queries, shared, shared, None if segment_ids is None else rows),
            out_specs=queries,
            check_vma=False,
        )
        return mapped(*map(padded, (q, k, v, segment_ids)))[:B, :T]

    return attend


def _tile(T: int) -> int:
    return min(TILE, -(-T // LANES) * LANES)


def _splash_kernel(T: int, heads: int, interpret: bool) -> Callable[..., jax.Array]:
    tile = _tile(T)
    sizes = splash_attention.BlockSizes(
        block_q=tile,
        block_kv=tile,
        block_kv_compute=tile,
        block_q_dkv=tile,
        block_kv_dkv=tile,
        block_kv_dkv_compute=tile,
        block_q_dq=tile,
        block_kv_dq=tile,
    )
    mask = splash_attention.MultiHeadMask([splash_attention.CausalMask((T, T))] * heads)
    make = functools.partial(splash_attention.make_splash_mha, head_shards=1, q_seq_shards=1)
    return make(mask, block_sizes=sizes, residual_checkpoint_name=KEPT, interpret=interpret)
