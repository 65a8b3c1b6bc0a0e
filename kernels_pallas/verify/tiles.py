"""Arithmetic of one tile of the vocabulary, shared by all kernels.

A tile is `sampling.TILE` = 512 logits, given as its two halves of `noise.HALF` = 256, because the two words of a noise
block belong to tokens that are 256 apart. Halves are [256] on a GPU and [rows, 256] on a TPU; values per row are
scalars or [rows, 1], and a tile's results have that shape.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import noise as counter
from kernels_pallas.noise import HALF
from kernels_pallas.verify.sampling import TILE
from kernels_pallas.verify.types import Noise

Halves = Sequence[jax.Array]
Reduce = Callable[..., jax.Array]


class TileOptions(NamedTuple):
    """Static: width and the requested fields of `Statistics`."""

    V: int  # vocabulary entries; columns beyond it are padding
    outside: bool = False  # sum what the draft's vocabulary lacks
    best: bool = False  # find the best token
    noise: bool = False  # add Gumbel noise before taking the best

    @property
    def results(self) -> tuple[str, ...]:
        """Return the names of the requested fields of `Statistics`, in order."""
        asked = {"outside": self.outside, "best": self.best, "token": self.best}
        return tuple(name for name in Statistics._fields if asked.get(name, True))

    def shapes(self, rows: int, tiles: int) -> list[jax.ShapeDtypeStruct]:
        """Return the results' shapes for a kernel that writes `tiles` per row."""
        dtypes = [jnp.int32 if name == "token" else jnp.float32 for name in self.results]
        return [jax.ShapeDtypeStruct((rows, tiles), dtype) for dtype in dtypes]

    def named(self, found: Sequence[jax.Array]) -> "Statistics":
        """Return a kernel's results as `Statistics`, without tiles beyond the vocabulary."""
        return Statistics(**{name: x[:, : -(-self.V // TILE)] for name, x in zip(self.results, found, strict=True)})


class Statistics(NamedTuple):
    """Values per tile; x = logits / temperature, sums are of exp(x - top)."""

    top: jax.Array  # largest x; -inf in a tile without any
    total: jax.Array  # sum over the tile
    outside: jax.Array | None = None  # sum over tokens outside the draft's vocabulary
    best: jax.Array | None = None  # largest x, plus its noise if noise is added
    token: jax.Array | None = None  # int32, first token that reaches it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResidualTerms:
    """Values per row of the residual max(scale p - q, 0)."""

    temperature: jax.Array  # float32, positive
    scale: jax.Array  # float32
    p_norm: jax.Array  # float32, log-sum-exp of the target's logits / temperature
    q_norm: jax.Array  # float32, log-sum-exp of the draft's logits / temperature


def statistics(
    options: TileOptions,
    logits: Halves,
    temperature: jax.Array,
    *,
    columns: Halves,
    outside: Halves | None,
    noise: Halves | None,
    keepdims: bool,
) -> tuple[jax.Array, ...]:
    """Return `options.results` of one tile: two passes over it in registers, 512 exponentials.

    Args:
      logits: raw.
      temperature: of the row; 0: greedy, the best token is the likeliest.
      columns: int32, the token ids.
      outside: 1.0 at tokens outside the draft's vocabulary, else 0.0.
      noise: added before the best is taken.
    """

    def reduced(reduce: Reduce, halves: Halves, join: Reduce) -> jax.Array:
        return reduce(join(*halves), axis=-1, keepdims=keepdims)

    def total(halves: Halves) -> jax.Array:
        return reduced(jnp.sum, halves, jnp.add)

    def largest(halves: Halves) -> jax.Array:
        return reduced(jnp.max, halves, jnp.maximum)

    greedy = temperature == 0
    divisor = jnp.where(greedy, 1.0, temperature)
    x = [jnp.where(c < options.V, h / divisor, -jnp.inf) for h, c in zip(logits, columns)]
    top = largest(x)
    # A tile of impossible tokens only has no finite top.
    safe = jnp.where(top > -jnp.inf, top, 0.0)
    weights = [jnp.exp(h - safe) for h in x]
    found = [top, total(weights)]
    if outside is not None:
        found.append(total([jnp.where(o > 0, w, 0.0) for w, o in zip(weights, outside)]))
    if options.best:
        x = x if noise is None else [h + jnp.where(greedy, 0.0, g) for h, g in zip(x, noise)]
        best = largest(x)
        # Columns are exact in float32, and every backend has a maximum of float32.
        first = largest([jnp.where(h == best, -c.astype(jnp.float32), -jnp.inf) for h, c in zip(x, columns)])
        found += [best, jnp.where(best > -jnp.inf, -first, 0.0).astype(jnp.int32)]
    return tuple(found)


def residual(
    options: TileOptions, target: Halves, draft: Halves, *, columns: Halves, terms: ResidualTerms, keepdims: bool
) -> jax.Array:
    """Return the sum over one tile of max(scale p - q, 0), p = exp(x - p_norm), q = exp(d - q_norm).

    1,024 exponentials.

    Args:
      target, draft: raw logits; -inf at tokens outside the draft's vocabulary.
    """
    left = []
    for h, d, column in zip(target, draft, columns):
        p = jnp.exp(h / terms.temperature - terms.p_norm)
        q = jnp.exp(d / terms.temperature - terms.q_norm)
        left.append(jnp.where(column < options.V, jnp.maximum(terms.scale * p - q, 0.0), 0.0))
    return jnp.sum(left[0] + left[1], axis=-1, keepdims=keepdims)


def arrays_read(temperature: jax.Array, noise: Noise | None, outside: jax.Array | None) -> dict[str, jax.Array]:
    """Return what `statistics` reads beside the logits, by name: [R] each, the seed [1], outside [V]."""
    arrays = {"temperature": temperature}
    if noise is not None:
        arrays |= {"ids": noise.rollout_id, "positions": noise.position.astype(jnp.uint32)}
        arrays["seed"] = noise.seed.astype(jnp.uint32).reshape(1)
    return arrays if outside is None else arrays | {"outside": outside}


def halves_of_noise(seed: jax.Array, rollout_id: jax.Array, position: jax.Array, *, columns: Halves) -> Halves:
    """Return the Gumbel noise of a tile whose first half's tokens are columns[0].

    256 blocks, about 75 integer operations each.
    """
    # Tokens of tile t start at 2 HALF t, its blocks at HALF t; a shift, since backends divide by looking at signs.
    block = columns[0] - (columns[0] >> (HALF.bit_length())) * HALF
    return counter.gumbel_halves(seed, rollout_id, position, block=block)
