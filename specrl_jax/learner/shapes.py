"""The shapes of the learner's inputs, known before the first rollout, from which its programs can be compiled."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from specrl_jax.core import Tree, stand_in
from specrl_jax.data.rows import KeptTokens, Rows
from specrl_jax.decoding.features.router_records import RouterRecords
from specrl_jax.decoding.features.sampling_mask import most_kept_of
from specrl_jax.learner.build import Learner
from specrl_jax.models.decoder.expert_record import record_dtype
from specrl_jax.rl.objectives import LossInputs


def abstract_microbatch(learner: Learner) -> tuple[Rows, LossInputs]:
    """Return the shapes of a microbatch of a policy update, of the longest rows."""
    limits, packing, model, objective = learner.plan.limits, learner.packing, learner.plan.model, learner.objective
    T = packing.lengths[-1]
    B, sharding = packing.microbatch(T), rows_sharding(learner)

    def array(dtype: DTypeLike, *shape: int) -> jax.Array:
        return stand_in(jax.ShapeDtypeStruct((B, *shape), dtype, sharding=sharding))

    ints, floats, mask = array(jnp.int32, T), array(jnp.float32, T), array(jnp.bool_, T)
    kept = KeptTokens(array(jnp.int32, T * packing.ids), ints) if most_kept_of(limits) else None
    experts = (
        array(record_dtype(model), T, model.layers * model.experts_per_token) if limits.feature(RouterRecords) else None
    )
    rows = Rows(ints, ints, ints, mask=mask, segments=ints, kept=kept, experts=experts)
    inputs = LossInputs(
        old_logprobs=None if objective.old_logprobs == "current" else floats,
        ref_logprobs=floats if objective.kl_coef else None,
        advantages=floats,
        behaviour=floats if objective.correction != "none" else None,
        loss_mask=mask if learner.plan.config.grpo.leaves_out else None,
    )
    return rows, inputs


def rows_sharding(learner: Learner) -> NamedSharding:
    return learner.plan.learner_partition.sharding(("batch", "sequence"))


def placed_by_row(learner: Learner, tree: Tree) -> Tree:
    """Return shapes of arrays [B, T, ...] with the sharding of a microbatch's rows."""
    by_row = rows_sharding(learner)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_row), tree)
