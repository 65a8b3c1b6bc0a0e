"""Updates of the learner over rows that are split into microbatches here."""

import jax
import jax.numpy as jnp

from specrl_jax.learner.microbatches import split


def update_policy(step, state, rows, inputs, size=None):
    """Return (state, metrics, outputs of all rows) of an update in microbatches of `size` rows; None: in one."""
    state, metrics, outputs = step(state, split((rows, inputs), size or len(rows.tokens)))
    return state, metrics, together(outputs)


def update_draft(step, state, tables, features, rows, size=None):
    """Return (state, metrics) of an update in microbatches of `size` rows; None: in one."""
    given, parts = zip(*split((features, rows), size or len(rows.tokens)))
    return step(state, tables, parts, given)


def in_parts(step, params, rows, size=None):
    """Return what a step says of rows, in microbatches of `size`; None: in one."""
    return together([step(params, part) for part in split(rows, size or len(rows.tokens))])


def together(parts):
    """Return what microbatches gave by row, the microbatches one after the other."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
