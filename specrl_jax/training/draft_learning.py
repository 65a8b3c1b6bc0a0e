"""One update of the draft from the features of the policy's own forward pass, and the acceptance which that predicts.

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

from specrl_jax.core import Mean
from specrl_jax.data.rows import Rows
from specrl_jax.models import qwen3
from specrl_jax.models.layers import product
from specrl_jax.rl.draft_losses import predicted_acceptance, soft_cross_entropy, supervised_counts, unrolled_loss
from specrl_jax.sharding import Partitioner
from specrl_jax.training.draft_models import DraftModel
from specrl_jax.training.state import TrainState, apply_gradient, state_shardings
from specrl_jax.training.steps import Features, accumulate, split


@dataclasses.dataclass(frozen=True)
class DraftLearner:
    """How the draft learns."""

    draft: DraftModel
    model: qwen3.Qwen3Config
    dtype: jnp.dtype  # of activations; parameters are float32
    ttt_steps: int  # draft steps unrolled
    microbatch: int  # rows in one forward and backward pass; 0 = all
    temperature: float  # the rollouts'


@flax.struct.dataclass
class Tables:
    """The policy's tables that a draft reads, as they were in the forward pass that made the features."""

    embed: jax.Array  # [V, D]
    unembed: jax.Array  # [Vd, D], the rows of the draft vocabulary


@flax.struct.dataclass
class DraftMetrics:
    loss: jax.Array  # [] float32, nats: weighted sum over draft steps
    cross_entropy: jax.Array  # [steps] float32, nats a token
    acceptance: jax.Array  # [steps] float32, predicted share of verifications that keep draft i and all before it
    grad_norm: jax.Array  # [] float32, before clipping


def make_read_tables(model: qwen3.Qwen3Config, partition: Partitioner) -> Callable[[Any, jax.Array | None], Tables]:
    """(policy params, vocab_map) -> Tables. Copies, so that they outlive an update that donates the params."""

    def read(params: Any, vocab_map: jax.Array | None) -> Tables:
        unembed = params["embed" if model.tied else "unembed"]
        return Tables(params["embed"], unembed if vocab_map is None else unembed[vocab_map])

    table = partition.sharding(("vocab", "embed"))
    # The draft vocabulary need not divide over `vocab`.
    return jax.jit(read, out_shardings=Tables(table, partition.sharding((None, "embed"))))


def make_draft_step(
    learner: DraftLearner, optimizer: optax.GradientTransformation, partition: Partitioner
) -> Callable[[TrainState, Tables, Features, Rows], tuple[TrainState, DraftMetrics]]:
    """One optimizer update of the draft from one minibatch; the state is donated."""

    def loss_sum(params: Any, tables: Tables, counts: jax.Array, features: Features, rows: Rows) -> Any:
        student, teacher = _student_and_teacher(learner, partition, params, tables, features, rows)
        loss = soft_cross_entropy(student, teacher, rows.mask, learner.temperature)
        accepted = predicted_acceptance(student, teacher, features.normaliser, rows.mask, learner.temperature)
        # Divided by the counts of the whole minibatch, so that microbatches add up.
        return unrolled_loss(Mean(loss.total, counts)), (loss, accepted)

    def update(state: TrainState, tables: Tables, features: Features, rows: Rows) -> tuple[TrainState, DraftMetrics]:
        counts = supervised_counts(rows.mask, learner.ttt_steps)

        def gradient_fn(params: Any, features: Features, rows: Rows) -> Any:
            return jax.grad(loss_sum, has_aux=True)(params, tables, counts, features, rows), None

        parts = (features, rows)
        (gradient, (loss, accepted)), _ = accumulate(gradient_fn, state.params, parts, learner.microbatch)
        metrics = DraftMetrics(unrolled_loss(loss), loss.value(), accepted.value(), optax.tree.norm(gradient))
        return apply_gradient(state, gradient, optimizer).replace(step=state.step + 1), metrics

    shardings = state_shardings(learner.draft.specs, optimizer, partition)
    return jax.jit(update, donate_argnums=0, out_shardings=(shardings, partition.replicated))


def make_predict_step(
    learner: DraftLearner, partition: Partitioner
) -> Callable[[Any, Tables, Features, Rows], jax.Array]:
    """(draft params, tables, features, rows) -> predicted acceptance [steps], of a draft that does not learn.

    Of the first microbatch: an estimate, for the price of its forward pass.
    """

    def predict(params: Any, tables: Tables, features: Features, rows: Rows) -> jax.Array:
        features, rows = jax.tree.map(lambda x: x[0], split((features, rows), learner.microbatch))
        student, teacher = _student_and_teacher(learner, partition, params, tables, features, rows)
        return predicted_acceptance(student, teacher, features.normaliser, rows.mask, learner.temperature).value()

    return jax.jit(predict, out_shardings=partition.replicated)


def _student_and_teacher(
    learner: DraftLearner, partition: Partitioner, params: Any, tables: Tables, features: Features, rows: Rows
) -> tuple[jax.Array, jax.Array]:
    """Logits [steps, B, T, Vd] of the draft and [B, T, Vd] of the target on the draft vocabulary."""
    student = learner.draft.unrolled_logits(params, tables, features, rows, learner.ttt_steps, learner.dtype, partition)
    return student, product("BTD,VD->BTV", features.hidden.astype(learner.dtype), tables.unembed)
