"""Initial parameters of a run, from folders or drawn from the seed, and the shapes of its state."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from specrl_jax.core import Params, stand_in
from specrl_jax.drafts.weights import Weights
from specrl_jax.io import hf
from specrl_jax.learner.build import Learner
from specrl_jax.learner.state import RunState, abstract_state, init_random_params, init_state
from specrl_jax.models import decoder
from specrl_jax.models.layers import abstract_params
from specrl_jax.models.lora import init_adapters
from specrl_jax.rollout.build import RolloutEngines


def initial_params(learner: Learner) -> Params:
    """Return the policy's float32 training parameters: from policy.path, or random from the seed."""
    config, model, partition = learner.plan.config, learner.plan.model, learner.plan.learner_partition
    if config.policy.path:
        return hf.load_params(config.policy.path, model, partition, dtype=jnp.float32)
    return init_random_params(jax.random.key(config.seed), decoder.param_specs(model), partition)


def initial_trained(learner: Learner) -> Params:
    """Return what is trained, as it begins: `initial_params`, or fresh adapters of them."""
    if not learner.forward.lora:
        return initial_params(learner)
    key, specs = jax.random.fold_in(jax.random.key(learner.plan.config.seed), 2), learner.forward.trained_specs
    shardings = learner.plan.learner_partition.shardings(specs)
    return jax.jit(functools.partial(init_adapters, specs=specs), out_shardings=shardings)(key)


def frozen_params(learner: Learner) -> Params | None:
    """Return the frozen base weights under adapters; None without adapters."""
    return initial_params(learner) if learner.forward.lora else None


def initial_draft_params(learner: Learner, policy: Params) -> Params:
    """Return the draft's float32 training parameters: from draft.path, or random, then initialised from `policy`."""
    config, draft, partition = learner.plan.config, learner.plan.draft, learner.plan.learner_partition
    assert draft is not None
    if config.draft.path:
        return draft.load(config.draft.path, partition)
    # Separate PRNG key: equal shapes would draw the policy's weights.
    key = jax.random.fold_in(jax.random.key(config.seed), 1)
    drawn = init_random_params(key, draft.specs, partition)
    # Jitted, so that no buffer of the policy's is shared: an update donates the draft's parameters.
    initialise = jax.jit(draft.initialise_from_target, donate_argnums=0, out_shardings=partition.shardings(draft.specs))
    return initialise(drawn, policy, learner.read_tables(policy, initial_vocab_map(learner)).lm_head)


def initial_vocab_map(learner: Learner) -> jax.Array | None:
    """Return target ids [Vd] int32: from draft.path, or the first ones; None: draft and policy share their ids."""
    plan = learner.plan
    assert plan.draft is not None
    ids = plan.draft.load_vocab_map(plan.config.draft.path, plan.model)
    return None if ids is None else jax.device_put(ids, plan.learner_partition.replicated)


def initial_state(learner: Learner) -> RunState:
    """Return the state before the first step. The reference of the KL term is None: `start_run` adds it."""
    partition = learner.plan.learner_partition
    policy = init_state(initial_trained(learner), learner.forward.trained_specs, learner.optimizer, partition=partition)
    policy = dataclasses.replace(policy, frozen=frozen_params(learner))
    return with_initial_draft(learner, RunState(policy, None, None))


def with_initial_draft(learner: Learner, state: RunState) -> RunState:
    """Return the state with the draft that a run begins with; its count of updates goes on."""
    plan = learner.plan
    if plan.draft is None:
        return state
    params = initial_draft_params(learner, state.policy.base)
    draft = init_state(params, plan.draft.specs, learner.draft_optimizer, partition=plan.learner_partition)
    if state.draft is not None:  # versions never repeat
        draft = dataclasses.replace(draft, step=state.draft.step)
    return dataclasses.replace(state, draft=draft, vocab_map=initial_vocab_map(learner))


def initial_weights(learner: Learner, rollout: RolloutEngines) -> Weights:
    """Return the engines' weights before training, without the optimizers' memory."""
    policy = initial_params(learner)
    draft, vocab_map = initial_draft(learner, policy)
    return rollout.prepare_step(policy, draft, vocab_map)


def initial_draft(learner: Learner, policy: Params) -> tuple[Params | None, jax.Array | None]:
    """Return the parameters and the vocabulary map of the draft that a run begins with; (None, None): it has none."""
    if learner.plan.draft is None:
        return None, None
    return initial_draft_params(learner, policy), initial_vocab_map(learner)


def abstract_run_state(learner: Learner) -> RunState:
    """Return ShapeDtypeStructs of the state as a checkpoint holds it: without `frozen` and the KL term's reference."""
    plan, partition = learner.plan, learner.plan.learner_partition
    policy = abstract_state(learner.forward.trained_specs, learner.optimizer, partition)
    if plan.draft is None:
        return RunState(policy, None, None)
    draft = abstract_state(plan.draft.specs, learner.draft_optimizer, partition)
    if not plan.draft.has_vocab_map:
        return RunState(policy, draft, None)
    ids = jax.ShapeDtypeStruct((plan.draft.vocab,), jnp.int32, sharding=partition.replicated)
    return RunState(policy, draft, stand_in(ids))


def abstract_frozen(learner: Learner) -> Params | None:
    """Return ShapeDtypeStructs of `frozen_params`."""
    if not learner.forward.lora:
        return None
    specs = decoder.param_specs(learner.plan.model)
    return abstract_params(specs, jnp.float32, learner.plan.learner_partition.shardings(specs))
