"""The unrolled pass of a recurrent head over any embeddings, not those of a vocabulary."""

import jax.numpy as jnp

from specrl_jax.data.rows import Rows
from specrl_jax.drafts.base import DraftInputs, TargetTables


def unrolled(draft, params, features, embedded, steps, positions, segments=None):
    """Return [steps, B, T, D], inputs of the lm_head, of features [B, T, ...] and embedded [B, T, D].

    Each place has a token of its own, whose embedding is the place's.
    """
    B, T, D = embedded.shape
    tokens = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
    rows, tables = (
        Rows(tokens, positions, tokens, tokens >= 0, segments),
        TargetTables(embedded.reshape(B * T, D), None),
    )
    return draft.outputs(params, DraftInputs(tables, features, features, rows=rows, steps=steps, dtype=embedded.dtype))
