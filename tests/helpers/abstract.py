"""Shapes that stand in for rows and weights, to compile programs of models too large for any machine here."""

import jax
import jax.numpy as jnp

from specrl_jax.data.rows import Rows
from specrl_jax.drafts.weights import Weights
from specrl_jax.models import qwen3
from specrl_jax.models.layers import abstract_params
from specrl_jax.rl.objectives import LossInputs


def minibatch(B, T):
    """Return (rows, loss inputs) of a policy update."""
    ints, floats = jax.ShapeDtypeStruct((B, T), jnp.int32), jax.ShapeDtypeStruct((B, T), jnp.float32)
    return Rows(ints, ints, ints, jax.ShapeDtypeStruct((B, T), jnp.bool_)), LossInputs(floats, None, floats)


def inference_weights(model, draft, dtype, partition):
    """Return the engine's weights; without a draft its parts are None."""

    def tree(specs):
        return abstract_params(specs, dtype, partition.shardings(specs))

    if draft is None:
        return Weights(tree(qwen3.inference_specs(model)), None, None, None)
    ids = jax.ShapeDtypeStruct((draft.vocab,), jnp.int32, sharding=partition.replicated)
    return Weights(tree(qwen3.inference_specs(model)), tree(draft.inference_specs), ids, None)
