"""The updates of one step: loss inputs, policy updates by minibatch, draft updates from the features of each."""

import dataclasses
import time
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax import distributed
from specrl_jax.core import Params
from specrl_jax.data.rows import Rows
from specrl_jax.drafts.base import TargetTables
from specrl_jax.learner.batch import LearnerBatch
from specrl_jax.learner.draft_step import DraftDiagnostics, DraftMetrics
from specrl_jax.learner.policy_step import Features, UpdateMetrics
from specrl_jax.learner.state import RunState, TrainState
from specrl_jax.rl.objectives import LossInputs
from specrl_jax.training.build import Learner


class Updates(NamedTuple):
    """The outcome of one step's updates, minibatch by minibatch."""

    policy: list[UpdateMetrics]
    draft: list[DraftMetrics]  # empty where the draft was not updated
    diagnostics: DraftDiagnostics | None  # on the host, of the draft before these updates; None: no draft with weights
    draft_seconds: float
    logprobs: np.ndarray  # [B, T] float32, nats, each row's by the policy before its first update


def compute_loss_inputs(learner: Learner, state: RunState, batch: LearnerBatch) -> LossInputs:
    """Compute what the objective needs of the policy before the first update, and wait for it."""
    o, rows = learner.objective, learner.place(batch.rows)
    old_logprobs = ref_logprobs = None
    if o.old_logprobs == "learner":
        old_logprobs = distributed.to_host(learner.logprob_step(learner.merged(state.policy), rows)[0])
    elif o.old_logprobs == "rollout":
        old_logprobs = batch.behaviour
    if o.kl_coef:
        assert state.reference is not None  # set where there is a KL term
        reference = learner.forward.merge(state.reference, state.policy.frozen)
        # Another policy than that of the rollouts, which chooses its own experts.
        own = dataclasses.replace(rows, experts=None)
        ref_logprobs = distributed.to_host(learner.logprob_step(reference, own)[0])
    behaviour = batch.behaviour if o.correction != "none" else None
    loss_mask = batch.loss_mask if learner.plan.config.grpo.leaves_out else None
    found = old_logprobs, ref_logprobs, batch.advantages, behaviour, loss_mask
    return LossInputs(*[cast(jax.Array, x) for x in found])


def update(
    learner: Learner, state: RunState, rows: Rows, inputs: LossInputs, train_draft: bool
) -> tuple[RunState, Updates]:
    """Update the policy once per epoch and minibatch, and in the first epoch the draft after each of those updates,
    from the features of that update's forward.

    Minibatch i takes rows i, i + n, ...: some of every group. A draft that is not trained is only evaluated.
    """
    grpo = learner.plan.config.grpo
    policy, draft = state.policy, state.draft
    updates = Updates([], [], None, 0.0, np.zeros(rows.tokens.shape, np.float32))
    for i in range(grpo.epochs * grpo.minibatches):
        share = slice(i % grpo.minibatches, None, grpo.minibatches)
        part, part_inputs = learner.place(jax.tree.map(lambda x, share=share: x[share], (rows, inputs)))
        first_epoch = i < grpo.minibatches
        uses_draft = first_epoch and (train_draft or i == 0)
        # Copied before the update, which donates the tables and changes them.
        tables = learner.read_tables(policy.base, state.vocab_map) if draft and uses_draft else None
        policy, metrics, outputs = learner.policy_step(policy, part, part_inputs)
        updates.policy.append(metrics)
        if first_epoch:
            updates.logprobs[share] = distributed.to_host(outputs.logprobs)
        features = outputs.features
        if draft is None or tables is None or features is None:
            continue
        jax.block_until_ready(outputs)
        start = time.perf_counter()
        if train_draft:
            draft, draft_updates = _update_draft(learner, draft, tables, features, part)
            updates.draft.extend(draft_updates)
            diagnostics = draft_updates[0].diagnostics
        else:
            assert learner.predict_step is not None
            diagnostics = learner.predict_step(draft.params, tables, features, part)
        if i == 0:
            updates = updates._replace(diagnostics=jax.device_get(diagnostics))
        updates = updates._replace(draft_seconds=updates.draft_seconds + time.perf_counter() - start)
    policy = dataclasses.replace(policy, step=policy.step + 1)
    return dataclasses.replace(state, policy=policy, draft=draft), updates


def _update_draft(
    learner: Learner, draft: TrainState, tables: TargetTables, features: Features, rows: Rows
) -> tuple[TrainState, list[DraftMetrics]]:
    """Update the draft `draft.minibatches` times in each of `draft.epochs` passes over the rows."""
    d, step = learner.plan.config.draft, learner.draft_step
    assert step is not None
    found = []
    for i in range(d.epochs * d.minibatches):
        part = features, rows
        if d.minibatches > 1:
            part = jax.tree.map(lambda x, i=i: x[i % d.minibatches :: d.minibatches], part)
        draft, metrics = step(draft, tables, part[0], part[1])
        found.append(metrics)
    return jax.block_until_ready(draft), found


def copy_params(policy: TrainState) -> Params:
    """Copy the trained parameters: a reference that the policy's updates do not donate."""
    return jax.tree.map(jnp.copy, policy.params)
