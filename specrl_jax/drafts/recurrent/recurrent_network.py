"""Networks of draft heads of one layer: their cache, and the unrolled pass over their own outputs.

A head reads pairs: pair t = (hidden state of position t, token t + 1) predicts token t + 2, at rotary position t.
For tokens not yet processed by the target, the head's own output takes the place of the hidden state.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from specrl_jax.core import shift_left
from specrl_jax.models import cache as kv
from specrl_jax.models.attention import Queries, by_queries, query_parts
from specrl_jax.models.rotary import Rope


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """Sizes that every head has; letters as in specrl_jax.core."""

    embed: int  # D, the target's
    heads: int  # N
    kv_heads: int  # K
    head_dim: int  # H
    mlp: int  # F
    rope: Rope
    norm_epsilon: float
    max_positions: int  # tokens

    def angles(self, positions: jax.Array) -> "Angles":
        """Return the rotary angles of pairs `positions` [B, T]."""
        return self.rope.angles(positions, self.head_dim)


# (q [B, T, N, H], k [B, T, K, H], v [B, T, K, H]) -> [B, T, N, H]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Angles = tuple[jax.Array, jax.Array]


class Layer(Protocol):
    """Apply a head to hidden and embedded [B, T, D]; return a [B, T, D], the hidden of the next application."""

    def __call__(self, hidden: jax.Array, *, embedded: jax.Array, angles: Angles, attend: Attend) -> jax.Array: ...


class DraftCache(NamedTuple):
    """State of the sequences in the engine, in the pages that the target's cache has; entry t belongs to pair t.

    Memory per token: 2 K H + D numbers, against 2 L K H of the target (Qwen3-8B: 6,144 against 73,728).
    """

    hidden: jax.Array  # [C, T, D], the head's input from the target at each processed position
    pages: jax.Array  # [C, K, 2, T, H], keys and values


def init_cache(config: HeadConfig, shape: kv.PageShape) -> DraftCache:
    """Return empty pools."""
    return DraftCache(
        kv.init_tokens(config.embed, shape), kv.init_cache(1, config.kv_heads, config.head_dim, shape=shape)[0]
    )


def unroll(
    layer: Layer,
    config: HeadConfig,
    hidden: jax.Array,
    *,
    embedded: jax.Array,
    steps: int,
    positions: jax.Array,
    segments: jax.Array | None,
) -> list[jax.Array]:
    """Apply the layer to its own outputs on ground-truth tokens.

    Row t of step i is draft step i of a speculation that starts at pair t. It attends to the step-0 keys of pairs <= t,
    made from true features, and to its own row only of every later step: that speculation's provisional entries.

              keys:  step 0       step 1    step 2
        step 0       causal
        step 1       causal       diagonal
        step 2       causal       diagonal  diagonal

    Args:
      hidden: [B, T, D] from the target, of each position.
      embedded: [B, T, D] embedding of the token at each position; pair t of step i takes that of position t + 1 + i.
      positions: [B, T] int32, of the tokens in their sequence.
      segments: [B, T] int32, sequences of packed rows, which do not attend to each other; None = one sequence per row.
    Returns:
      `steps` outputs [B, T, D]; row t of output i predicts token t + 2 + i. Rows within 1 + i of the end are
      meaningless.
    """
    keys: list[jax.Array] = []
    values: list[jax.Array] = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        keys.append(k)
        values.append(v)
        return _ttt_attention(q, keys, values, segments)

    outputs = []
    for i in range(steps):
        following = shift_left(embedded, 1 + i)
        hidden = layer(hidden, embedded=following, angles=config.angles(positions + i), attend=attend)
        outputs.append(hidden)
    return outputs


def _ttt_attention(
    q: jax.Array, keys: list[jax.Array], values: list[jax.Array], segments: jax.Array | None
) -> jax.Array:
    """Attend with q [B, T, N, H] to keys[0] up to its own place and in its segment, and to every later step's own row.

    No maintained attention kernel has this mask. Of long rows some queries at a time: see models/attention.py.
    """
    T = q.shape[1]

    def attend(queries: Queries, part: tuple[jax.Array, list[jax.Array], list[jax.Array]]) -> jax.Array:
        q, own_keys, own_values = part
        readable = queries.readable(segments, T)[:, :, None]
        return _attend(q, readable, own_keys, own_values=own_values, keys=keys[0], values=values[0])

    return by_queries(attend, query_parts(T), segments, arrays=(q, keys[1:], values[1:]))


def _attend(
    q: jax.Array,
    readable: jax.Array,
    own_keys: list[jax.Array],
    own_values: list[jax.Array],
    keys: jax.Array,
    values: jax.Array,
) -> jax.Array:
    """Attend to keys [B, T, K, H] and, of each later step, to the query's own row [B, Q, K, H]; float32 softmax."""
    B, Q, N, H = q.shape
    T, K = keys.shape[1:3]
    q = q.reshape(B, Q, K, N // K, H)
    shared = jnp.einsum("BQKRH,BSKH->BKRQS", q, keys, preferred_element_type=jnp.float32)
    scores = [jnp.where(readable, shared, -jnp.inf)]
    for k in own_keys:
        own = jnp.einsum("BQKRH,BQKH->BKRQ", q, k, preferred_element_type=jnp.float32)
        scores.append(own[..., None])
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1) * H**-0.5, axis=-1).astype(q.dtype)
    out = jnp.einsum("BKRQS,BSKH->BQKRH", weights[..., :T], values)
    for j, v in enumerate(own_values):
        out = out + jnp.einsum("BKRQ,BQKH->BQKRH", weights[..., T + j], v)
    return out.reshape(B, Q, N, H)
