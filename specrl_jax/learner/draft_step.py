"""One update of the draft from the features of the policy's own forward pass, and what that says of its drafts.

Nothing of the policy is differentiated, and nothing of the draft enters the policy's update: two jitted functions, and
what passes between them is behind stop_gradient.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from specrl_jax.core import DraftTerms, Mean
from specrl_jax.data.rows import Rows
from specrl_jax.drafts.base import DraftModel
from specrl_jax.learner.policy_step import Features, accumulate, split
from specrl_jax.learner.state import TrainState, apply_gradient, state_shardings
from specrl_jax.models import qwen3
from specrl_jax.models.lm_head import Teacher, Tiling, draft_terms
from specrl_jax.rl.draft_losses import step_losses, step_means, step_weights, supervised, survival
from specrl_jax.sharding import Partitioner

# A draft that never learns is watched on one row in so many: enough for an alarm that waits for half to be missing, and
# for a controller that counts for itself. Of all rows it would be 8 % of a train phase of rlzero_tiny:small, so 2 %.
WATCHED = 4


@dataclasses.dataclass(frozen=True)
class DraftLearner:
    """How the draft learns."""

    draft: DraftModel
    model: qwen3.Qwen3Config
    dtype: jnp.dtype  # of activations; parameters are float32
    loss: str  # one of draft_losses.LOSSES
    ttt_steps: int  # draft steps unrolled
    vocab_tile: int  # words of the draft vocabulary unembedded at once; 0 = all
    microbatch: int  # rows in one forward and backward pass; 0 = all
    temperature: float  # the rollouts'


@flax.struct.dataclass
class Tables:
    """The policy's tables that a draft reads, as they were in the forward pass that made the features."""

    embed: jax.Array  # [V, D]
    unembed: jax.Array  # [Vd, D], the rows of the draft vocabulary


@flax.struct.dataclass
class DraftDiagnostics:
    """What the learner's forward says of the draft's steps; each [steps] float32, an average over supervised pairs.

    Cross-entropy to the target is entropy plus mismatch: the first is the target's own and stays, the second is what
    learning can remove.
    """

    entropy: jax.Array  # of the target on the draft vocabulary, nats
    mismatch: jax.Array  # KL(target || draft), nats
    acceptance: jax.Array  # share of verifications that keep draft i and all before it


@flax.struct.dataclass
class DraftMetrics:
    loss: jax.Array  # [] float32: weighted sum over draft steps
    grad_norm: jax.Array  # [] float32, before clipping
    outlook: DraftDiagnostics  # before the update


def make_read_tables(model: qwen3.Qwen3Config, partition: Partitioner) -> Callable[[Any, jax.Array | None], Tables]:
    """(policy params, vocab_map) -> Tables. Copies, so that they outlive an update that donates the params."""

    def read(params: Any, vocab_map: jax.Array | None) -> Tables:
        unembed = qwen3.unembedding(params, model)
        return Tables(params["embed"], unembed if vocab_map is None else unembed[vocab_map])

    table = partition.sharding(("vocab", "embed"))
    # The draft vocabulary need not divide over `vocab`.
    return jax.jit(read, out_shardings=Tables(table, partition.sharding((None, "embed"))))


def make_draft_step(
    learner: DraftLearner, optimizer: optax.GradientTransformation, partition: Partitioner
) -> Callable[[TrainState, Tables, Features, Rows], tuple[TrainState, DraftMetrics]]:
    """One optimizer update of the draft from one minibatch; the state is donated."""

    weights = step_weights(learner.loss, learner.ttt_steps)

    def loss_sum(params: Any, tables: Tables, counts: jax.Array, features: Features, rows: Rows) -> Any:
        terms = _terms(learner, partition, params, tables, features, rows)
        pairs = supervised(rows.mask, learner.ttt_steps, rows.segments)
        loss = step_means(step_losses(learner.loss, terms), pairs)
        # Divided by the counts of the whole minibatch, so that microbatches add up.
        return jnp.sum(weights * Mean(loss.total, counts).value()), (loss, _outlook(terms, pairs))

    def update(state: TrainState, tables: Tables, features: Features, rows: Rows) -> tuple[TrainState, DraftMetrics]:
        counts = supervised(rows.mask, learner.ttt_steps, rows.segments).sum(axis=(1, 2), dtype=jnp.float32)

        def gradient_fn(params: Any, features: Features, rows: Rows) -> Any:
            return jax.grad(loss_sum, has_aux=True)(params, tables, counts, features, rows), None

        parts = (features, rows)
        (gradient, (loss, outlook)), _ = accumulate(gradient_fn, state.params, parts, learner.microbatch)
        norm = optax.tree.norm(gradient)
        metrics = DraftMetrics(jnp.sum(weights * loss.value()), norm, _averages(outlook))
        return apply_gradient(state, gradient, optimizer, jnp.isfinite(norm)).replace(step=state.step + 1), metrics

    shardings = state_shardings(learner.draft.specs, optimizer, partition)
    return jax.jit(update, donate_argnums=0, out_shardings=(shardings, partition.replicated))


def make_predict_step(
    learner: DraftLearner, partition: Partitioner, one_in: int = 1
) -> Callable[[Any, Tables, Features, Rows], DraftDiagnostics]:
    """(draft params, tables, features, rows) -> DraftDiagnostics, of a draft that does not learn.

    Of as many rows as a microbatch has, over `one_in` or what the devices of `batch` can share evenly: an estimate, for
    the price of their forward pass.
    """

    def predict(params: Any, tables: Tables, features: Features, rows: Rows) -> DraftDiagnostics:
        size, ways = learner.microbatch or len(rows.tokens), partition.ways("batch")
        parts = next((n for n in range(one_in, 0, -1) if size % (n * ways) == 0), 1)
        features, rows = jax.tree.map(lambda x: x[0], split((features, rows), size // parts))
        terms = _terms(learner, partition, params, tables, features, rows)
        return _averages(_outlook(terms, supervised(rows.mask, learner.ttt_steps, rows.segments)))

    return jax.jit(predict, out_shardings=partition.replicated)


def _terms(
    learner: DraftLearner, partition: Partitioner, params: Any, tables: Tables, features: Features, rows: Rows
) -> DraftTerms:
    outputs, unembed = learner.draft.unrolled(
        params, tables, features, rows, learner.ttt_steps, learner.dtype, partition
    )
    teacher = Teacher(features.hidden.astype(learner.dtype), tables.unembed, features.normaliser)
    return draft_terms(outputs, unembed, teacher, Tiling(learner.vocab_tile, learner.temperature, partition))


def _outlook(terms: DraftTerms, pairs: jax.Array) -> DraftDiagnostics:
    """Of Means."""
    terms = jax.lax.stop_gradient(terms)
    values = terms.entropy, terms.cross_entropy - terms.entropy, survival(terms)
    return DraftDiagnostics(*[step_means(x, pairs) for x in values])


def _averages(outlook: DraftDiagnostics) -> DraftDiagnostics:
    return DraftDiagnostics(outlook.entropy.value(), outlook.mismatch.value(), outlook.acceptance.value())
