"""Loops over the vocabulary in tiles: logits [B, T, V] never exist.

Where the vocabulary is split over devices, a table [V, D] is viewed as [W, V / W, D] and a tile takes rows of all W
parts: each device reads its own rows, and the parts are combined once at the end.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from specrl_jax.core import at_least_float32
from specrl_jax.data.rows import KeptTokens
from specrl_jax.models.layers import matmul
from specrl_jax.sharding import Partitioner

Carry = TypeVar("Carry")


class Tile(NamedTuple):
    """M rows of each of the table's W parts."""

    start: jax.Array  # [] int32, first row of the tile in each part
    ids: jax.Array  # [W, M] int32, vocabulary ids
    fresh: jax.Array  # [M] bool, false for rows that the tile before had too
    size: int  # V / W, rows of a part

    def only(self, x: jax.Array, otherwise: float = 0.0) -> jax.Array:
        """Replace entries of x [..., M] that are not fresh."""
        return jnp.where(jnp.broadcast_to(self.fresh, x.shape), x, otherwise)


class Support(NamedTuple):
    """KeptTokens with the column of each id's target: a tile's mask of them is made by scattering N booleans."""

    ids: jax.Array  # [B, N] int32; -1 where there is none
    columns: jax.Array  # [B, N] int32
    everything: jax.Array  # [B, T] bool, every token could be sampled

    @classmethod
    def of(cls, kept: KeptTokens | None) -> "Support | None":
        if kept is None:
            return None
        (_, T), N = kept.count.shape, kept.ids.shape[1]
        columns = jax.vmap(lambda count: jnp.repeat(jnp.arange(T), count, total_repeat_length=N))(kept.count)
        return cls(kept.ids, columns, kept.count == 0)

    def cut(self, logits: jax.Array, tile: Tile, partition: Partitioner) -> jax.Array:
        """Return a tile's logits [B, T, W, M], -inf at tokens that could not be sampled."""
        _, T, W, M = logits.shape
        place = self.ids % tile.size - tile.start
        place = jnp.where((self.ids >= 0) & (place >= 0), place, M)  # M is outside: dropped

        def mask_of_row(part: jax.Array, place: jax.Array, column: jax.Array) -> jax.Array:
            return jnp.zeros((T, W, M), bool).at[column, part, place].set(True, mode="drop")

        mask = jax.vmap(mask_of_row)(self.ids // tile.size, place, self.columns)
        mask = partition.constrain(mask, "batch", "sequence", "vocab" if W > 1 else None, None)
        return jnp.where(mask | self.everything[..., None, None], logits, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Options of a loop over the vocabulary. Hashable: static under jit."""

    entries: int  # vocabulary entries in a tile, over all devices; 0: all at once
    temperature: float  # of every softmax; 0 (greedy) counts as 1, in rollouts and in the learner
    partition: Partitioner

    def parts(self, table: jax.Array) -> jax.Array:
        """View a table [V, D] as [W, V / W, D]; W = 1 where the vocabulary does not divide over the devices."""
        shards = self.partition.num_shards("vocab")
        shards = 1 if table.shape[0] % shards else shards
        return table.reshape(shards, -1, table.shape[1])

    def logits(
        self, hidden: jax.Array, rows: jax.Array, tile: Tile | None = None, *, support: Support | None = None
    ) -> jax.Array:
        """Return logits / temperature [B, T, W, M], at least float32, of hidden [B, T, D] and rows [W, M, D].

        With `support`, -inf at the tokens of the tile that could not be sampled.
        """
        logits = at_least_float32(matmul("BTD,WMD->BTWM", hidden, rows)) / (self.temperature or 1.0)
        logits = self.partition.constrain(logits, "batch", "sequence", "vocab" if rows.shape[0] > 1 else None, None)
        return logits if tile is None or support is None else support.cut(logits, tile, self.partition)

    def fold(self, body: Callable[..., Carry], carry: Carry, *tables: jax.Array) -> Carry:
        """Fold `carry = body(carry, tile, rows)` over the tiles, with the rows [W, M, D] of each of `tables`."""
        shards, size, _ = tables[0].shape
        M = min(max(self.entries // shards, 1), size) if self.entries else size

        def step(i: int | jax.Array, carry: Carry) -> Carry:
            # The last tile ends with the vocabulary and overlaps the one before it.
            start = jnp.minimum(i * M, size - M)
            places = start + jnp.arange(M)
            tile = Tile(start, jnp.arange(shards)[:, None] * size + places[None], places >= i * M, size=size)
            return body(carry, tile, *[jax.lax.dynamic_slice_in_dim(table, start, M, axis=1) for table in tables])

        return step(0, carry) if size == M else jax.lax.fori_loop(0, -(-size // M), step, carry)


class Normaliser(NamedTuple):
    """logsumexp in two numbers: as one it is rounded to its own size, 5e-4 nats at 1e4."""

    peak: jax.Array  # the largest logit
    log_sum: jax.Array  # log of the sum of exp(logit - peak)

    def of_step(self, i: int) -> "Normaliser":
        """Return the normaliser of a draft's step i."""
        return Normaliser(self.peak[i], self.log_sum[i])

    def logprobs(self, logits: jax.Array) -> jax.Array:
        """Return the log-probs of logits with more axes, at the right, than the normaliser has."""
        peak, log_sum = (jnp.expand_dims(x, tuple(range(x.ndim, logits.ndim))) for x in self)
        return (logits - peak) - log_sum


def input_gradients(
    logit_gradient: Callable[..., jax.Array], hidden: jax.Array, tiling: Tiling, parts: jax.Array, *others: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of hidden [S, B, T, D] and parts [W, V / W, D], tile by tile.

    logit_gradient(tile, rows, *rows of others) -> [B, T, W, M] or [S, B, T, W, M], by logits / temperature.
    """
    temperature = tiling.temperature or 1.0

    def body(
        carry: tuple[jax.Array, jax.Array], tile: Tile, rows: jax.Array, *others: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        d_hidden, d_parts = carry
        gradient = tile.only(logit_gradient(tile, rows, *others)) / temperature
        gradient = gradient.reshape(hidden.shape[0], *gradient.shape[-4:]).astype(hidden.dtype)
        d_hidden += jnp.einsum("SBTWM,WMD->SBTD", gradient, rows.astype(hidden.dtype), preferred_element_type=dtype)
        # The left operand is transposed in memory on a CPU: the narrow one, not the logits (4,096 entries: 0.9 of the
        # seconds of an update).
        d_rows = jnp.moveaxis(jnp.einsum("SBTD,SBTWM->DWM", hidden, gradient, preferred_element_type=dtype), 0, -1)
        d_rows += jax.lax.dynamic_slice_in_dim(d_parts, tile.start, rows.shape[1], axis=1)
        return d_hidden, jax.lax.dynamic_update_slice_in_dim(d_parts, d_rows, tile.start, axis=1)

    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    return tiling.fold(body, (jnp.zeros(hidden.shape, dtype), jnp.zeros(parts.shape, dtype)), parts, *others)


def product(p: jax.Array, x: jax.Array) -> jax.Array:
    """Return p x, and 0 where p is 0, whatever x: the limit of p log p."""
    return jnp.where(p > 0, p * x, 0.0)
