"""The learner's jitted functions of the draft: one update from the policy's features, and its predicted acceptance.

The policy's features enter behind stop_gradient, and nothing of the draft enters the policy's update: the two are
separate jitted functions. Each is a program of one microbatch of rows, as the policy's.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from specrl_jax.core import DraftTerms, Jitted, Mean, Params, stand_in
from specrl_jax.data.rows import KeptTokens, Rows
from specrl_jax.drafts.base import DraftInputs, DraftModel, TargetTables, confidence_logits
from specrl_jax.learner.microbatches import Passes, Update, make_add
from specrl_jax.learner.optimizer import apply_gradient
from specrl_jax.learner.policy_step import Features
from specrl_jax.learner.state import TrainState, state_shardings
from specrl_jax.models import decoder
from specrl_jax.models.lm_head import TargetDistribution, draft_terms
from specrl_jax.models.vocab_tiles import Tiling
from specrl_jax.rl.draft_losses import (
    confidence_loss,
    cumulative_acceptance,
    draft_loss_mask,
    step_losses,
    step_means,
    step_weights,
)
from specrl_jax.sharding import Partitioner

# A draft that is not trained is evaluated on one row in so many: enough for an alarm that fires when half of the
# acceptance is missing, and for a controller that counts for itself. All rows would cost 8 % of a train phase of
# rlzero_tiny:small, these cost 2 %.
ROWS_PER_PREDICTED = 4


@dataclasses.dataclass(frozen=True)
class DraftForward:
    """The draft's unrolled forward pass in training (TTT), and its loss."""

    draft: DraftModel
    model: decoder.DecoderConfig  # the policy's sizes
    dtype: jnp.dtype  # of activations; parameters are float32
    loss: str  # one of draft_losses.LOSSES
    ttt_steps: int  # draft steps unrolled
    vocab_tile: int  # entries of the draft vocabulary unembedded at once; 0 = all
    temperature: float  # the rollouts'
    anchor_stride: int = 1  # in an update a draft starts every n tokens


@flax.struct.dataclass
class DraftDiagnostics:
    """Statistics of the draft against the policy; each [steps] float32, a mean over supervised pairs.

    The cross-entropy to the target is target_entropy + kl: the target's own part and the part that training removes.
    """

    target_entropy: jax.Array  # on the draft vocabulary, nats
    kl: jax.Array  # KL(target || draft), nats
    acceptance: jax.Array  # share of verifications that accept draft i and all before it

    @property
    def finite(self) -> bool:
        """Return whether the draft's outputs are finite; of diagnostics on the host."""
        return bool(np.isfinite(self.acceptance).all())


@flax.struct.dataclass
class DraftMetrics:
    loss: jax.Array  # [] float32: weighted sum over draft steps
    grad_norm: jax.Array  # [] float32, before clipping
    skipped: jax.Array  # [] bool: the gradient was not finite, so nothing changed
    diagnostics: DraftDiagnostics  # before the update


# (policy params, vocab_map) -> copies of its tables
ReadTables = Jitted[[Params, jax.Array | None], TargetTables]
# (draft params, tables, features, rows) -> diagnostics whose leaves are Means
PredictStep = Jitted[[Params, TargetTables, Features, Rows], DraftDiagnostics]


class _DraftSums(NamedTuple):
    """Sums over the microbatches of an update."""

    gradient: Params
    loss: Mean  # [steps]
    diagnostics: DraftDiagnostics  # whose leaves are Means


@dataclasses.dataclass(frozen=True)
class DraftStep:
    """One update of a draft.

    Attributes:
      count: (state, rows) -> [steps] float32, what the mean of each draft step's loss is divided by.
      update: a microbatch is (tables, counts of all microbatches, features, rows).
    """

    count: Jitted[[TrainState, Rows], jax.Array]
    update: Update[TrainState, None, DraftMetrics]

    def __call__(
        self, state: TrainState, tables: TargetTables, rows: Sequence[Rows], features: Iterable[Features]
    ) -> tuple[TrainState, DraftMetrics]:
        """Return (state after an update from these microbatches, metrics). The state is donated.

        `features` may be made as they are asked for: those of one microbatch exist at a time.
        """
        counts = sum(jax.device_get([self.count(state, part) for part in rows]))
        passes, given = Passes(self.update, state), iter(features)
        for part in rows:
            passes.add(tables, counts, next(given), part)
            passes.wait()
        return passes.apply()


def make_read_tables(model: decoder.DecoderConfig, partition: Partitioner, replays: bool = False) -> ReadTables:
    """Return the jitted copy of the policy's tables, which outlives an update that donates the parameters.

    `replays`: rows have sampling masks, which need the draft's vocabulary.
    """

    def read(params: Params, vocab_map: jax.Array | None) -> TargetTables:
        lm_head = decoder.lm_head_weight(params, model)
        lm_head = lm_head if vocab_map is None else lm_head[vocab_map]
        return TargetTables(params["embed"], lm_head, vocab_map if replays else None)

    shardings = TargetTables(
        embed=stand_in(partition.sharding(("vocab", "embed"))),
        lm_head=stand_in(partition.sharding((None, "embed"))),  # the draft vocabulary need not divide over `vocab`
        vocab_map=stand_in(partition.replicated),
    )
    return jax.jit(read, out_shardings=shardings)


def make_draft_step(
    forward: DraftForward, optimizer: optax.GradientTransformation, partition: Partitioner
) -> DraftStep:
    """Return the optimizer update of the draft from the microbatches of one minibatch."""

    weights = step_weights(forward.loss, forward.ttt_steps)

    def loss_sum(
        params: Params,
        state: TrainState,
        tables: TargetTables,
        counts: jax.Array,
        features: Features,
        rows: Rows,
    ) -> tuple[jax.Array, tuple[Mean, DraftDiagnostics]]:
        anchors, pairs = _pairs(forward, state, rows)
        outputs, terms = _terms(
            forward, partition, params, tables=tables, features=features, rows=rows, anchors=anchors
        )
        losses = step_losses(forward.loss, terms)
        if "confidence" in params:
            # The head reads what the draft computes, and does not shape it.
            losses += confidence_loss(confidence_logits(params, jax.lax.stop_gradient(outputs)), terms)
        loss = step_means(losses, pairs.astype(jnp.float32))
        # Divided by the counts of the whole minibatch, so that microbatches add up.
        return jnp.sum(weights * Mean(loss.total, counts).value()), (loss, _diagnostics(terms, pairs))

    def count(state: TrainState, rows: Rows) -> jax.Array:
        return _pairs(forward, state, rows)[1].astype(jnp.float32).sum(axis=(1, 2))

    def gradient(
        state: TrainState, tables: TargetTables, counts: jax.Array, features: Features, rows: Rows
    ) -> tuple[_DraftSums, None]:
        found, (loss, diagnostics) = jax.grad(loss_sum, has_aux=True)(
            state.params, state, tables, counts=counts, features=features, rows=rows
        )
        return _DraftSums(found, loss, diagnostics), None

    def apply(state: TrainState, sums: _DraftSums) -> tuple[TrainState, DraftMetrics]:
        norm = optax.tree.norm(sums.gradient)
        healthy = jnp.isfinite(norm)
        metrics = DraftMetrics(
            jnp.sum(weights * sums.loss.value()), norm, ~healthy, diagnostics=_values(sums.diagnostics)
        )
        updated, _ = apply_gradient(state, sums.gradient, optimizer, healthy)
        return dataclasses.replace(updated, step=state.step + 1), metrics

    state, alike = state_shardings(forward.draft.specs, optimizer, partition), partition.replicated
    sums = _DraftSums(state.params, Mean(stand_in(alike), stand_in(alike)), cast(DraftDiagnostics, alike))
    return DraftStep(
        count=jax.jit(count, out_shardings=alike),
        update=Update(
            gradient=jax.jit(gradient, out_shardings=(sums, None)),
            add=make_add(sums),
            apply=jax.jit(apply, donate_argnums=0, out_shardings=(state, alike)),
        ),
    )


def _pairs(forward: DraftForward, state: TrainState, rows: Rows) -> tuple[jax.Array | None, jax.Array]:
    """Return (anchors, the mask [steps, B, A] of the pairs that learn)."""
    anchors = _anchors(rows.tokens.shape[1], forward.anchor_stride, state.step)
    return anchors, draft_loss_mask(rows.mask, forward.ttt_steps, rows.segments, anchors=anchors)


def make_predict_step(forward: DraftForward, partition: Partitioner, rows_per_predicted: int = 1) -> PredictStep:
    """Return the jitted diagnostics of a draft that is not trained in this step, as sums: see `predicted`.

    Evaluates one row in `rows_per_predicted` of a microbatch (fewer where the devices of `batch` could not share them
    evenly): an estimate for the cost of their forward pass.
    """

    def predict(params: Params, tables: TargetTables, features: Features, rows: Rows) -> DraftDiagnostics:
        size, num_shards = len(rows.tokens), partition.num_shards("batch")
        every = next((n for n in range(rows_per_predicted, 0, -1) if size % (n * num_shards) == 0), 1)
        features, rows = jax.tree.map(lambda x: x[::every], (features, rows))
        _, terms = _terms(forward, partition, params, tables=tables, features=features, rows=rows)
        return _diagnostics(terms, draft_loss_mask(rows.mask, forward.ttt_steps, rows.segments))

    return jax.jit(predict, out_shardings=partition.replicated)


def predicted(sums: Iterable[DraftDiagnostics]) -> DraftDiagnostics:
    """Return the diagnostics, on the host, of what the prediction step returned of each microbatch."""
    return _values(jax.tree.map(lambda *x: sum(x), *jax.device_get(list(sums))))


def _anchors(T: int, stride: int, step: jax.Array) -> jax.Array | None:
    """Return [A] int32, the tokens that start a draft in this update; None = all T.

    The first one moves on from update to update, so that every token has its turn. Those behind a row's end are masked.
    """
    return None if stride == 1 else step % stride + stride * jnp.arange(-(-T // stride))


def _terms(
    forward: DraftForward,
    partition: Partitioner,
    params: Params,
    tables: TargetTables,
    features: Features,
    rows: Rows,
    anchors: jax.Array | None = None,
) -> tuple[jax.Array, DraftTerms]:
    """Return the draft's outputs [steps, B, T, D] and the terms of its losses."""
    inputs = DraftInputs(
        tables, features.aux, features.hidden, rows=rows, steps=forward.ttt_steps, dtype=forward.dtype, anchors=anchors
    )
    outputs, lm_head = forward.draft.unrolled(params, inputs, partition)
    hidden, kept = features.hidden.astype(forward.dtype), _in_draft_vocabulary(rows.kept, tables)
    target = TargetDistribution(hidden, tables.lm_head, features.normaliser, kept=kept, anchors=anchors)
    return outputs, draft_terms(outputs, lm_head, target, Tiling(forward.vocab_tile, forward.temperature, partition))


def _in_draft_vocabulary(kept: KeptTokens | None, tables: TargetTables) -> KeptTokens | None:
    """Return `kept` with the draft's ids; -1 for tokens that its vocabulary lacks."""
    if kept is None or tables.vocab_map is None:
        return kept
    V, Vd = len(tables.embed), len(tables.lm_head)
    draft_id = jnp.full(V, -1, jnp.int32).at[tables.vocab_map].set(jnp.arange(Vd, dtype=jnp.int32))
    return dataclasses.replace(kept, ids=jnp.where(kept.ids < 0, -1, draft_id[kept.ids]))


def _diagnostics(terms: DraftTerms, pairs: jax.Array) -> DraftDiagnostics:
    """Return diagnostics whose leaves are Means, so that microbatches add up."""
    terms = jax.lax.stop_gradient(terms)
    values = DraftDiagnostics(terms.entropy, terms.cross_entropy - terms.entropy, cumulative_acceptance(terms))
    return jax.tree.map(lambda x: step_means(x, pairs), values)


def _values(sums: DraftDiagnostics) -> DraftDiagnostics:
    return jax.tree.map(Mean.value, sums, is_leaf=lambda x: isinstance(x, Mean))
