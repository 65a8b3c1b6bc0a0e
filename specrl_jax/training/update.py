"""The updates of one step: loss inputs, policy updates by minibatch, draft updates from the features of each.

The draft's pass over a microbatch follows the policy's, so that the features of one microbatch exist at a time.
"""

import dataclasses
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax import distributed
from specrl_jax.core import Params, stand_in
from specrl_jax.data.rows import Rows
from specrl_jax.drafts.base import TargetTables
from specrl_jax.learner.batch import LearnerBatch
from specrl_jax.learner.build import Learner
from specrl_jax.learner.draft_step import DraftDiagnostics, DraftMetrics, predicted
from specrl_jax.learner.microbatches import Passes
from specrl_jax.learner.policy_step import Features, UpdateMetrics
from specrl_jax.learner.state import RunState, TrainState
from specrl_jax.rl.objectives import LossInputs

# Of so many microbatches one is compared: an estimate for an eighth of a forward pass.
MICROBATCHES_PER_COMPARED = 8


class Updates(NamedTuple):
    """The outcome of one step's updates, minibatch by minibatch."""

    policy: list[UpdateMetrics]
    draft: list[DraftMetrics]  # empty where the draft was not updated
    diagnostics: DraftDiagnostics | None  # on the host, of the draft before these updates; None: no draft with weights
    draft_seconds: float
    logprobs: np.ndarray  # [B, T] float32, nats, each row's by the policy before its first update


class Compared(NamedTuple):
    """Some rows of a step where the policy chooses its experts itself."""

    behaviour: np.ndarray  # [B, T] float32, nats, the rollouts' log-probs
    logprobs: np.ndarray  # [B, T] float32, nats, the learner's
    differing: np.ndarray  # [B, T] float32, share of the rollouts' experts that it does not choose
    mask: np.ndarray  # [B, T] bool


def compute_loss_inputs(learner: Learner, state: RunState, batch: LearnerBatch) -> LossInputs:
    """Compute what the objective needs of the policy before the first update, and wait for it."""
    o, rows = learner.objective, batch.rows
    old_logprobs = ref_logprobs = None
    if o.old_logprobs == "learner":
        old_logprobs = score(learner, learner.merged(state.policy), rows)
    elif o.old_logprobs == "rollout":
        old_logprobs = batch.behaviour
    if o.kl_coef:
        assert state.reference is not None  # set where there is a KL term
        reference = learner.forward.merge(state.reference, state.policy.frozen)
        # Another policy than that of the rollouts, which chooses its own experts.
        own = dataclasses.replace(rows, experts=None)
        ref_logprobs = score(learner, reference, own)
    behaviour = batch.behaviour if o.correction != "none" else None
    loss_mask = batch.loss_mask if learner.plan.config.grpo.leaves_out else None
    return LossInputs(
        old_logprobs=cast(jax.Array, old_logprobs),
        ref_logprobs=cast(jax.Array, ref_logprobs),
        advantages=stand_in(batch.advantages),
        behaviour=cast(jax.Array, behaviour),
        loss_mask=cast(jax.Array, loss_mask),
    )


def score(learner: Learner, params: Params, rows: Rows) -> np.ndarray:
    """Return the log-probs [B, T] of the rows' targets, float32, on the host."""
    parts = learner.microbatches(rows)
    return np.concatenate([distributed.to_host(learner.logprob_step(params, part)[0]) for part in parts])


def compare_experts(learner: Learner, state: RunState, batch: LearnerBatch) -> Compared | None:
    """Score one microbatch in MICROBATCHES_PER_COMPARED, of rows that lie apart, with the policy's own experts.

    None where none are replayed.
    """
    if batch.rows.experts is None:
        return None
    (B, T), params = batch.rows.tokens.shape, learner.merged(state.policy)
    size = learner.packing.microbatch(T)
    compared = -(-B // size // MICROBATCHES_PER_COMPARED) * size
    rows, behaviour = jax.tree.map(lambda x: x[:: B // compared][:compared], (batch.rows, batch.behaviour))
    found = [learner.unreplayed_step(params, part) for part in learner.microbatches(rows)]
    logprobs, differing = (np.concatenate([distributed.to_host(x) for x in parts]) for parts in zip(*found))
    return Compared(behaviour, logprobs, differing, mask=rows.mask)


def update(
    learner: Learner, state: RunState, rows: Rows, *, inputs: LossInputs, train_draft: bool
) -> tuple[RunState, Updates]:
    """Update the policy once per epoch and minibatch, and in the first epoch the draft beside each of those updates,
    from the features of its forward, microbatch by microbatch.

    Minibatch i takes rows i, i + n, ...: some of every group. Of these the draft's update j takes rows j, j + m, ...,
    in microbatches that are the policy's too. A draft that is not trained is only evaluated.
    """
    grpo, policy, draft = learner.plan.config.grpo, state.policy, state.draft
    n, m = grpo.minibatches, learner.plan.config.draft.minibatches if draft else 1
    updates = Updates([], [], None, draft_seconds=0.0, logprobs=np.zeros(rows.tokens.shape, np.float32))
    for i in range(grpo.epochs * n):
        passes, beside = _PolicyPasses(learner, policy), None
        if draft and i < n and (train_draft or i == 0):
            # The tables are copied before the update, which donates and changes them.
            tables = learner.read_tables(policy.base, state.vocab_map)
            beside = DraftBeside(learner, draft, tables, learns=train_draft)
        for j in range(m):
            share = slice(i % n + j * n, None, m * n)
            part = learner.microbatches(jax.tree.map(lambda x, share=share: x[share], (rows, inputs)))
            features, start = passes.features(part), len(passes.logprobs)
            if beside:
                beside.take([rows for rows, _ in part], features)
            for _ in features:  # those that no draft has asked for
                pass
            if i < n:
                updates.logprobs[share] = np.concatenate(passes.logprobs[start:])
        if beside:
            draft, found, diagnostics = beside.finish()
            updates.draft.extend(found)
            seconds = updates.draft_seconds + beside.seconds - passes.seconds
            updates = updates._replace(draft_seconds=seconds)
            updates = updates._replace(diagnostics=jax.device_get(diagnostics)) if i == 0 else updates
        policy, metrics = passes.apply()
        updates.policy.append(metrics)
    policy = dataclasses.replace(policy, step=policy.step + 1)
    return dataclasses.replace(state, policy=policy, draft=draft), updates


class _PolicyPasses:
    """The forward and backward passes of one update of the policy."""

    def __init__(self, learner: Learner, policy: TrainState) -> None:
        self._passes = Passes(learner.policy_step, policy)
        self.logprobs = list[np.ndarray]()  # [rows, T] of each microbatch so far
        self.seconds = 0.0
        self.apply = self._passes.apply

    def features(self, microbatches: list[tuple[Rows, LossInputs]]) -> Iterator[Features | None]:
        """Yield the features of each microbatch, whose pass is made when they are asked for."""
        for microbatch in microbatches:
            yield self._pass(microbatch)  # kept by no name here

    def _pass(self, microbatch: tuple[Rows, LossInputs]) -> Features | None:
        start, (rows, inputs) = time.perf_counter(), microbatch
        outputs = jax.block_until_ready(self._passes.add(rows, inputs))
        self.logprobs.append(distributed.to_host(outputs.logprobs))
        self.seconds += time.perf_counter() - start
        return outputs.features


class DraftBeside:
    """The draft beside one update of the policy: it learns from that update's forward, or is evaluated.

    Attributes:
      seconds: the policy's passes included.
    """

    def __init__(self, learner: Learner, draft: TrainState, tables: TargetTables, *, learns: bool) -> None:
        self._learner, self._draft, self._tables, self._learns = learner, draft, tables, learns
        self._updates, self._predicted = list[DraftMetrics](), list[DraftDiagnostics]()
        self._again = list[tuple[list[Rows], list[Features]]]()  # minibatches of further epochs
        self.seconds = 0.0

    def take(self, rows: list[Rows], features: Iterator[Features | None]) -> None:
        """Take the microbatches of one update of the draft."""
        start, given = time.perf_counter(), cast(Iterator[Features], features)
        if not self._learns:
            ask, params = self._learner.predict_step, self._draft.params
            assert ask is not None
            for part in rows:
                self._predicted.append(jax.block_until_ready(ask(params, self._tables, next(given), part)))
        elif self._learner.plan.config.draft.epochs > 1:
            kept = list(given)
            self._again.append((rows, kept))
            self._update(rows, kept)
        else:
            self._update(rows, given)
        self.seconds += time.perf_counter() - start

    def finish(self) -> tuple[TrainState, list[DraftMetrics], DraftDiagnostics]:
        """Return (the draft after its updates, their metrics, diagnostics before them)."""
        start = time.perf_counter()
        for _ in range(self._learner.plan.config.draft.epochs - 1):
            for rows, features in self._again:
                self._update(rows, features)
        found = self._updates[0].diagnostics if self._learns else predicted(self._predicted)
        draft = jax.block_until_ready(self._draft)
        self.seconds += time.perf_counter() - start
        return draft, self._updates, found

    def _update(self, rows: list[Rows], features: Iterable[Features]) -> None:
        assert self._learner.draft_step is not None
        self._draft, metrics = self._learner.draft_step(self._draft, self._tables, rows, features)
        self._updates.append(metrics)


def copy_params(policy: TrainState) -> Params:
    """Copy the trained parameters: a reference that the policy's updates do not donate."""
    return jax.tree.map(jnp.copy, policy.params)
