"""One update of the draft head from the features of the policy's own forward pass.

Nothing of the policy is differentiated, and nothing of the head enters the policy's update: two jitted functions, and
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
from specrl_jax.models import eagle3, qwen3
from specrl_jax.models.layers import product
from specrl_jax.rl.draft_losses import soft_cross_entropy, supervised_counts, unrolled_loss
from specrl_jax.sharding import Partitioner
from specrl_jax.training.state import TrainState, apply_gradient, state_shardings
from specrl_jax.training.steps import Features, accumulate


@dataclasses.dataclass(frozen=True)
class DraftLearner:
    """How the head learns."""

    head: eagle3.Eagle3Config
    dtype: jnp.dtype  # of activations; parameters are float32
    ttt_steps: int  # draft steps unrolled
    microbatch: int  # rows in one forward and backward pass; 0 = all
    temperature: float  # the rollouts'


@flax.struct.dataclass
class Tables:
    """The two tables of the policy that the head reads, as they were in the forward pass that made the features."""

    embed: jax.Array  # [V, D]
    unembed: jax.Array  # [Vd, D], the rows of the draft vocabulary


@flax.struct.dataclass
class DraftMetrics:
    loss: jax.Array  # [] float32, nats: weighted sum over draft steps
    cross_entropy: jax.Array  # [steps] float32, nats a token
    grad_norm: jax.Array  # [] float32, before clipping


def make_read_tables(model: qwen3.Qwen3Config, partition: Partitioner) -> Callable[[Any, jax.Array], Tables]:
    """(policy params, vocab_map) -> Tables. Copies, so that they outlive an update that donates the params."""

    def read(params: Any, vocab_map: jax.Array) -> Tables:
        return Tables(params["embed"], params["embed" if model.tied else "unembed"][vocab_map])

    table = partition.sharding(("vocab", "embed"))
    # The draft vocabulary need not divide over `vocab`.
    return jax.jit(read, out_shardings=Tables(table, partition.sharding((None, "embed"))))


def make_draft_step(
    learner: DraftLearner, optimizer: optax.GradientTransformation, partition: Partitioner
) -> Callable[[TrainState, Tables, Features, Rows], tuple[TrainState, DraftMetrics]]:
    """One optimizer update of the head from one minibatch; the state is donated."""

    def loss_sum(params: Any, tables: Tables, counts: jax.Array, features: Features, rows: Rows) -> Any:
        embedded = tables.embed[rows.tokens].astype(learner.dtype)
        aux, hidden = (x.astype(learner.dtype) for x in (features.aux, features.hidden))
        student = eagle3.unrolled_logits(params, learner.head, aux, embedded, learner.ttt_steps)
        teacher = product("BTD,VD->BTV", hidden, tables.unembed)
        loss = soft_cross_entropy(student, teacher, rows.mask, learner.temperature)
        # Divided by the counts of the whole minibatch, so that microbatches add up.
        return unrolled_loss(Mean(loss.total, counts)), loss

    def update(state: TrainState, tables: Tables, features: Features, rows: Rows) -> tuple[TrainState, DraftMetrics]:
        counts = supervised_counts(rows.mask, learner.ttt_steps)

        def gradient_fn(params: Any, features: Features, rows: Rows) -> Any:
            return jax.grad(loss_sum, has_aux=True)(params, tables, counts, features, rows), None

        (gradient, loss), _ = accumulate(gradient_fn, state.params, (features, rows), learner.microbatch)
        metrics = DraftMetrics(unrolled_loss(loss), loss.value(), optax.tree.norm(gradient))
        return apply_gradient(state, gradient, optimizer).replace(step=state.step + 1), metrics

    shardings = state_shardings(eagle3.param_specs(learner.head), optimizer, partition)
    return jax.jit(update, donate_argnums=0, out_shardings=(shardings, partition.replicated))
