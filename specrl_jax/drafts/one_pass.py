"""Slots of drafts made in one pass: the token of an empty one, their attention in training, layers over pages.

In training a draft starts at each token of a row, or at some of them, the anchors: its slots stand behind these.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specrl_jax.core import Params, ahead
from specrl_jax.drafts.head import Angles
from specrl_jax.models import cache as kv
from specrl_jax.models import decoder
from specrl_jax.models.attention import SCORES, Queries, by_queries
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.sharding import Partitioner

QWEN3_MASK = 151_669  # an id that Qwen3's tokenizer does not use


def default_mask_token(target: DecoderConfig) -> int:
    """Return the token of an empty slot of a new draft; a smaller vocabulary gives its last one."""
    return min(QWEN3_MASK, target.vocab - 1)


def slot_attention(
    q: jax.Array,
    own: tuple[jax.Array, jax.Array],
    shared: tuple[jax.Array, jax.Array],
    *,
    segments: jax.Array | None,
    anchors: jax.Array | None = None,
    readable: jax.Array | None = None,
) -> jax.Array:
    """Attend with the slots behind some tokens to the row up to that token, and to the slots of their own draft.

    Args:
      q: [B, A, S, N, H], slots behind A of the row's T tokens.
      own: k, v [B, A, P, K, H] of the drafts' own slots.
      shared: k, v [B, T, K, H] of the row's tokens.
      segments: [B, T] int32, sequences of packed rows; None = one sequence per row.
      anchors: [A] int32, the tokens that the slots stand behind; None = all T.
      readable: [S, P] bool, the own keys that each slot reads; None = all.
    Returns:
      [B, A S, N, H]. No maintained attention kernel has this mask.
    """
    B, A, S, N, H = q.shape
    k, v = shared
    T, K = k.shape[1:3]

    def attend(queries: Queries, part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, own_k, own_v = part
        q = q.reshape(*q.shape[:3], K, N // K, H)
        scores = jnp.einsum("BQSKRH,BUKH->BKRSQU", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(queries.readable(segments, T)[:, :, None, None], scores, -jnp.inf)
        own_scores = jnp.einsum("BQSKRH,BQPKH->BKRSQP", q, own_k, preferred_element_type=jnp.float32)
        if readable is not None:
            own_scores = jnp.where(readable[None, None, None, :, None], own_scores, -jnp.inf)
        weights = jnp.concatenate([scores, own_scores], axis=-1) * H**-0.5
        weights = jax.nn.softmax(weights, axis=-1).astype(q.dtype)
        out = jnp.einsum("BKRSQU,BUKH->BQSKRH", weights[..., :T], v)
        out += jnp.einsum("BKRSQP,BQPKH->BQSKRH", weights[..., T:], own_v)
        return out.reshape(*out.shape[:3], N, H)

    parts = -(-A // max(1, SCORES // (T * S)))
    of_queries = None if segments is None else ahead(segments, 0, anchors)
    return by_queries(attend, parts, of_queries, arrays=(q, *own), places=anchors).reshape(B, A * S, N, H)


@functools.partial(jax.jit, static_argnames=("block", "partition"))
def paged_layer(
    x: jax.Array,
    w: Params,
    pages: jax.Array,
    *,
    angles: Angles,
    paging: kv.Paging,
    block: DecoderConfig,
    partition: Partitioner,
    last: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Apply a decoder's layer to x [B, Q, D] over its pages; return both. Jitted: all layers are traced once.

    Args:
      last: [B, Q], the position up to which each of Q attends; None: its own.
    """
    attend = kv.PagedAttention(pages, paging, partition, last=last)
    x, _ = decoder.layer(x, w, block, angles=angles, attend=attend)
    return x, attend.pages


def paged_layers(
    x: jax.Array, layers: Sequence[Params], cache: kv.KVCache, **where: Any
) -> tuple[jax.Array, kv.KVCache]:
    """Apply `paged_layer` with each layer and its pages; return x [B, Q, D] and the cache."""
    written = list[jax.Array]()
    for w, pages in zip(layers, cache, strict=True):
        x, pages = paged_layer(x, w, pages, **where)
        written.append(pages)
    return x, tuple(written)
