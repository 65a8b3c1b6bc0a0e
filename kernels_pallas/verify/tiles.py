"""The arithmetic of one tile of the vocabulary, the same lines in every kernel.

A tile is `draws.TILE` = 512 logits, given as its two halves of `noise.HALF` = 256, because the two words of a noise
block belong to tokens that are 256 apart. Halves are [256] on a GPU and [rows, 256] on a TPU; what is known of a row is
a scalar or [rows, 1], and a tile's results have that shape.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import noise as counter
from kernels_pallas.noise import HALF
from kernels_pallas.verify.sampling import TILE

Halves = Sequence[jax.Array]


class Options(NamedTuple):
    """Static: which parts of `Statistics` are asked for."""

    V: int  # columns from here on are not the vocabulary's
    temperature: float
    cut: bool = False  # the distribution has a smallest raw logit
    outside: bool = False  # a draft vocabulary is smaller than the target's
    best: bool = False  # the best token is asked for
    noise: bool = False  # and Gumbel noise is added before

    @property
    def results(self) -> tuple[str, ...]:
        """Fields of `Statistics` that there are, in order."""
        asked = {"kept": self.cut, "outside": self.outside, "best": self.best, "token": self.best}
        return tuple(name for name in Statistics._fields if asked.get(name, True))

    def shapes(self, rows: int, tiles: int) -> list[jax.ShapeDtypeStruct]:
        """Of the results of a kernel that writes `tiles` a row."""
        dtypes = [jnp.int32 if name == "token" else jnp.float32 for name in self.results]
        return [jax.ShapeDtypeStruct((rows, tiles), dtype) for dtype in dtypes]

    def named(self, found: Sequence[jax.Array]) -> "Statistics":
        """A kernel's results, without the tiles beyond the vocabulary."""
        cropped = {name: x[:, : -(-self.V // TILE)] for name, x in zip(self.results, found, strict=True)}
        return Statistics(*(cropped.get(name) for name in Statistics._fields))


class Statistics(NamedTuple):
    """Of each tile; x = logits / temperature, and sums are of exp(x - top)."""

    top: jax.Array  # largest x; -inf where there is none
    whole: jax.Array  # sum over the tile
    kept: jax.Array | None  # over logits >= cut
    outside: jax.Array | None  # over kept tokens that the draft's vocabulary has not
    best: jax.Array | None  # largest x kept, with its noise where that is added
    token: jax.Array | None  # int32, the first that reaches it


def statistics(
    options: Options,
    logits: Halves,
    columns: Halves,
    cut: jax.Array | None,
    outside: Halves | None,
    noise: Halves | None,
    keepdims: bool,
) -> tuple[jax.Array, ...]:
    """`options.results` of one tile: two passes over it in registers, 512 exponentials.

    Args:
      logits: raw.
      columns: int32, the tokens.
      cut: smallest raw logit kept.
      outside: 1.0 at tokens that the draft's vocabulary has not, else 0.0.
      noise: added before the best is taken.
    """

    def reduced(reduce, halves: Halves, join) -> jax.Array:
        return reduce(join(*halves), axis=-1, keepdims=keepdims)

    def total(halves: Halves) -> jax.Array:
        return reduced(jnp.sum, halves, jnp.add)

    def largest(halves: Halves) -> jax.Array:
        return reduced(jnp.max, halves, jnp.maximum)

    x = [jnp.where(c < options.V, h / options.temperature, -jnp.inf) for h, c in zip(logits, columns)]
    top = largest(x)
    # A tile of impossible tokens only has no finite top.
    safe = jnp.where(top > -jnp.inf, top, 0.0)
    weights = [jnp.exp(h - safe) for h in x]
    found = [top, total(weights)]
    if options.cut:
        weights = [jnp.where(h >= cut, w, 0.0) for h, w in zip(logits, weights)]
        x = [jnp.where(h >= cut, s, -jnp.inf) for h, s in zip(logits, x)]
        found.append(total(weights))
    if options.outside:
        found.append(total([jnp.where(o > 0, w, 0.0) for w, o in zip(weights, outside)]))
    if options.best:
        x = [h + g for h, g in zip(x, noise)] if options.noise else x
        best = largest(x)
        # Columns are exact in float32, and a maximum of those is what every back end has.
        first = largest([jnp.where(h == best, -c.astype(jnp.float32), -jnp.inf) for h, c in zip(x, columns)])
        found += [best, jnp.where(best > -jnp.inf, -first, 0.0).astype(jnp.int32)]
    return tuple(found)


def excess(
    options: Options,
    target: Halves,
    draft: Halves,
    columns: Halves,
    cut: jax.Array | None,
    scale: jax.Array,
    p_norm: jax.Array,
    q_norm: jax.Array,
    keepdims: bool,
) -> jax.Array:
    """Sum over one tile of max(scale p - q, 0), p = exp(x - p_norm) where kept, q = exp(d - q_norm).

    1,024 exponentials.

    Args:
      target, draft: raw logits; -inf where the draft has no such token.
    """
    left = []
    for h, d, column in zip(target, draft, columns):
        p = jnp.exp(h / options.temperature - p_norm)
        p = jnp.where(h >= cut, p, 0.0) if options.cut else p
        q = jnp.exp(d / options.temperature - q_norm)
        left.append(jnp.where(column < options.V, jnp.maximum(scale * p - q, 0.0), 0.0))
    return jnp.sum(left[0] + left[1], axis=-1, keepdims=keepdims)


def halves_of_noise(seed: jax.Array, rollout_id: jax.Array, position: jax.Array, columns: Halves) -> Halves:
    """Gumbel noise of a tile whose first half's tokens are columns[0]: 256 blocks, about 75 integer operations each."""
    # Of tile t they begin at 2 HALF t, and its blocks at HALF t; a shift, since back ends divide by asking for signs.
    block = columns[0] - (columns[0] >> (HALF.bit_length())) * HALF
    return counter.gumbel_halves(seed, rollout_id, position, block)
