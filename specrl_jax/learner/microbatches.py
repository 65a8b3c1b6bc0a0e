"""Gradient accumulation: a minibatch split into microbatches, their sums added up, their rows put together."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from specrl_jax.core import Tree

Params = TypeVar("Params")
Sums = TypeVar("Sums")
PerRow = TypeVar("PerRow")


def fitting_rows(row_tokens: int, tokens: int, num_shards: int) -> int:
    """Return the most rows of `row_tokens` that have `tokens` in all, a multiple of num_shards, at least one of it.

    0 where `tokens` is 0: as many as there are.
    """
    return tokens and max(tokens // row_tokens // num_shards, 1) * num_shards


def microbatch_rows(shape: tuple[int, ...], tokens: int, num_shards: int) -> int:
    """Return the rows of a microbatch of [B, T] rows: of the numbers that divide B the largest that fits, see above.

    All B where none does: fewer could not be shared evenly.
    """
    B, T = shape
    most = fitting_rows(T, tokens, num_shards) or B
    return next((n for n in range(min(most, B), 0, -1) if B % n == 0 and n % num_shards == 0), B)


def accumulate(
    gradient_fn: Callable[..., tuple[Sums, PerRow]], params: Params, batch: tuple[object, ...], size: int
) -> tuple[Sums, PerRow]:
    """Apply `gradient_fn(params, *part) -> (sums, rows)` to every microbatch of `size` rows of `batch`.

    Returns the sums added up, and the per-row outputs in the order of the batch's rows.
    """
    parts = split(batch, size)
    first = jax.tree.map(lambda x: x[0], parts)
    if jax.tree.leaves(parts)[0].shape[0] == 1:
        return gradient_fn(params, *first)

    def add(total: Sums, part: tuple[object, ...]) -> tuple[Sums, PerRow]:
        sums, rows = gradient_fn(params, *part)
        return jax.tree.map(jnp.add, total, sums), rows

    shapes, _ = jax.eval_shape(gradient_fn, params, *first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    sums, rows = jax.lax.scan(add, zeros, parts)
    return sums, merge(rows)


def split(batch: Tree, size: int) -> Tree:
    """Reshape leaves [B, ...] to [B / size, size, ...].

    Rows are dealt round robin, so that every device keeps its share of each part.
    """
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(size, -1, *x.shape[1:]), 0, 1), batch)


def merge(parts: Tree) -> Tree:
    """Invert `split`: leaves [B / m, m, ...] to [B, ...]."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), parts)
