"""Gradient accumulation: a minibatch split into microbatches, their sums added up, their rows put together."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from specrl_jax.core import Tree
from specrl_jax.errors import InputError

Params = TypeVar("Params")
Sums = TypeVar("Sums")
PerRow = TypeVar("PerRow")


def accumulate(
    gradient_fn: Callable[..., tuple[Sums, PerRow]], params: Params, batch: tuple[object, ...], microbatch: int
) -> tuple[Sums, PerRow]:
    """Apply `gradient_fn(params, *part) -> (sums, rows)` to every microbatch of `batch`.

    Returns the sums added up, and the per-row outputs in the order of the batch's rows.
    """
    parts = split(batch, microbatch)
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


def split(batch: Tree, microbatch: int) -> Tree:
    """Reshape leaves [B, ...] to [B / m, m, ...], m = `microbatch` (0: one part).

    Rows are dealt round robin, so that every device keeps its share of each part. Raises InputError where m does not
    divide B.
    """

    def deal(x: jax.Array) -> jax.Array:
        size = microbatch or x.shape[0]
        if x.shape[0] % size:
            raise InputError(f"grpo.microbatch={size} must divide the minibatch of {x.shape[0]} rows")
        return jnp.swapaxes(x.reshape(size, -1, *x.shape[1:]), 0, 1)

    return jax.tree.map(deal, batch)


def merge(parts: Tree) -> Tree:
    """Invert `split`: leaves [B / m, m, ...] to [B, ...]."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), parts)
