"""Shapes that stand in for rows and weights, to compile programs of models too large for any machine here."""

import jax
import jax.numpy as jnp

from specrl_jax.data.rows import Rows
from specrl_jax.drafts.weights import Weights
from specrl_jax.models import decoder
from specrl_jax.models.layers import abstract_params
from specrl_jax.rl.objectives import LossInputs


def minibatch(B, T):
    """Return (rows, loss inputs) of a policy update."""
    ints, floats = jax.ShapeDtypeStruct((B, T), jnp.int32), jax.ShapeDtypeStruct((B, T), jnp.float32)
    return Rows(ints, ints, ints, mask=jax.ShapeDtypeStruct((B, T), jnp.bool_)), LossInputs(floats, None, floats)


def inference_weights(model, draft, dtype, partition, quantize="none"):
    """Return the engine's weights; without a draft its parts are None."""
    policy = policy_weights(model, dtype, partition, quantize)
    if draft is None:
        return Weights(policy, None, None, checksum=None)
    ids = jax.ShapeDtypeStruct((draft.vocab,), jnp.int32, sharding=partition.replicated)
    specs = draft.inference_specs
    return Weights(policy, abstract_params(specs, dtype, partition.shardings(specs)), ids, checksum=None)


def policy_weights(model, dtype, partition, quantize="none"):
    """Return the policy in the inference layout, its layers' matrices quantised as rollout.quantize says."""
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), decoder.param_specs(model))
    shapes = jax.eval_shape(lambda params: decoder.inference_params(params, model, dtype, kind=quantize), params)
    shardings = partition.shardings(decoder.inference_specs(model, quantize))
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
