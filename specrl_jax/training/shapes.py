"""The shapes of the learner's inputs, known before the first rollout, from which its programs can be compiled."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from specrl_jax.core import Tree, stand_in
from specrl_jax.data.rows import KeptTokens, Rows
from specrl_jax.models.qwen3.expert_record import record_dtype
from specrl_jax.rl.objectives import LossInputs
from specrl_jax.training.build import Learner


def abstract_microbatch(learner: Learner) -> tuple[Rows, LossInputs]:
    """Return the shapes of a microbatch of a policy update, of the longest rows."""
    o, rows = learner.objective, abstract_rows(learner)
    floats = stand_in(jax.ShapeDtypeStruct(rows.mask.shape, jnp.float32, sharding=rows_sharding(learner)))
    inputs = LossInputs(
        old_logprobs=None if o.old_logprobs == "current" else floats,
        ref_logprobs=floats if o.kl_coef else None,
        advantages=floats,
        behaviour=floats if o.correction != "none" else None,
        loss_mask=rows.mask if learner.plan.config.grpo.leaves_out else None,
    )
    return rows, inputs


def rows_sharding(learner: Learner) -> NamedSharding:
    return learner.plan.learner_partition.sharding(("batch", "sequence"))


def placed_by_row(learner: Learner, tree: Tree) -> Tree:
    """Return shapes of arrays [B, T, ...] with the sharding of a microbatch's rows."""
    place = rows_sharding(learner)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)


def abstract_rows(learner: Learner) -> Rows:
    """Return the shapes of a microbatch of the longest rows."""
    limits, packing = learner.plan.limits, learner.packing
    T = packing.lengths[-1]
    shape, sharding = (packing.microbatch(T), T), rows_sharding(learner)
    ints = stand_in(jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding))
    ids = stand_in(jax.ShapeDtypeStruct((shape[0], T * packing.ids), jnp.int32, sharding=sharding))
    mask = stand_in(jax.ShapeDtypeStruct(shape, jnp.bool_, sharding=sharding))
    kept = KeptTokens(ids, ints) if limits.most_kept else None
    rows = Rows(ints, ints, ints, mask=mask, segments=ints, kept=kept, drawn=mask if learner.tells_drawn else None)
    if not limits.records:
        return rows
    model = learner.plan.model
    each = (*shape, model.layers * model.experts_per_token)
    experts = jax.ShapeDtypeStruct(each, record_dtype(model), sharding=sharding)
    return dataclasses.replace(rows, experts=stand_in(experts))
