"""The jitted functions of the learner: log-probs of recorded rows, and one policy update from them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from specrl_jax.core import BadInput, Mean, masked_mean
from specrl_jax.data.rows import Rows
from specrl_jax.models import qwen3
from specrl_jax.rl.grpo import Objective, Terms, objective_terms
from specrl_jax.sharding import Partitioner
from specrl_jax.training.state import TrainState, apply_gradient, param_shardings, state_shardings


@dataclasses.dataclass(frozen=True)
class Learner:
    """How the learner runs its forward pass."""

    model: qwen3.Qwen3Config
    dtype: jnp.dtype  # of activations; parameters are float32
    remat: bool
    logits_chunk: int  # positions unembedded at once; 0 = all
    microbatch: int  # rows in one forward and backward pass; 0 = all
    temperature: float  # of every log-prob, the rollout's

    def score(self, params: Any, rows: Rows, partition: Partitioner) -> qwen3.Output:
        """Log-probs and entropy of the rows' targets."""
        return qwen3.forward(
            params,
            self.model,
            rows.tokens,
            rows.positions,
            partition,
            targets=rows.targets,
            temperature=self.temperature,
            dtype=self.dtype,
            remat=self.remat,
            logits_chunk=self.logits_chunk,
        )


@flax.struct.dataclass
class Signal:
    """What the policy learns from, beside the rows."""

    old_logprobs: jax.Array  # [B, T] float32, nats
    ref_logprobs: jax.Array | None  # [B, T] float32, nats
    advantages: jax.Array  # [B] float32


@flax.struct.dataclass
class UpdateMetrics:
    terms: Terms
    entropy: Mean  # nats per response token
    grad_norm: jax.Array  # [] float32, before clipping


def make_logprob_step(learner: Learner, partition: Partitioner) -> Callable[[Any, Rows], tuple[jax.Array, jax.Array]]:
    """(params, rows) -> (log-probs [B, T], entropy [B, T]), microbatch by microbatch."""

    def logprobs(params: Any, rows: Rows) -> tuple[jax.Array, jax.Array]:
        def score(rows: Rows) -> tuple[jax.Array, jax.Array]:
            out = learner.score(params, rows, partition)
            return out.logprobs, out.entropy

        parts = jax.lax.map(score, _split(rows, learner.microbatch))
        return jax.tree.map(_merge, parts)

    batch = partition.sharding(("batch", "sequence"))
    return jax.jit(logprobs, in_shardings=(param_shardings(learner.model, partition), batch), out_shardings=batch)


def make_policy_step(
    learner: Learner, objective: Objective, optimizer: optax.GradientTransformation, partition: Partitioner
) -> Callable[[TrainState, Rows, Signal], tuple[TrainState, UpdateMetrics]]:
    """One optimizer update from one minibatch; the state is donated.

    Gradients are those of the loss *sum*, accumulated over microbatches and divided by the minibatch's token count
    once, so the split into microbatches changes nothing but rounding.
    """

    def loss_sum(params: Any, rows: Rows, signal: Signal) -> tuple[jax.Array, tuple[Terms, Mean]]:
        out = learner.score(params, rows, partition)
        terms = objective_terms(
            out.logprobs, signal.old_logprobs, signal.ref_logprobs, signal.advantages, rows.mask, objective
        )
        return terms.loss.total, (terms, masked_mean(jax.lax.stop_gradient(out.entropy), rows.mask))

    def update(state: TrainState, rows: Rows, signal: Signal) -> tuple[TrainState, UpdateMetrics]:
        gradient, (terms, entropy) = accumulate(
            jax.grad(loss_sum, has_aux=True), state.params, (rows, signal), learner.microbatch
        )
        gradient = jax.tree.map(lambda g: g / jnp.maximum(terms.loss.count, 1.0), gradient)
        metrics = UpdateMetrics(terms, entropy, optax.tree.norm(gradient))
        return apply_gradient(state, gradient, optimizer), metrics

    shardings = state_shardings(learner.model, optimizer, partition)
    rows_sharding = partition.sharding(("batch", "sequence"))
    batch = partition.sharding(("batch",))
    signal = Signal(rows_sharding, rows_sharding if objective.kl_coef else None, batch)
    return jax.jit(
        update,
        donate_argnums=0,
        in_shardings=(shardings, rows_sharding, signal),
        out_shardings=(shardings, partition.replicated),
    )


def accumulate(gradient_fn: Callable[..., Any], params: Any, batch: tuple[Any, ...], microbatch: int) -> Any:
    """Sum of gradient_fn(params, *part) over the microbatches of `batch`."""
    parts = _split(batch, microbatch)
    first = jax.tree.map(lambda x: x[0], parts)
    if jax.tree.leaves(parts)[0].shape[0] == 1:
        return gradient_fn(params, *first)

    def add(total: Any, part: tuple[Any, ...]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient_fn(params, *part)), None

    shapes = jax.eval_shape(gradient_fn, params, *first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(add, zeros, parts)[0]


def _split(batch: Any, microbatch: int) -> Any:
    """Leaves [B, ...] -> [B / m, m, ...], rows dealt round robin so that every device keeps its share of each part."""

    def split(x: jax.Array) -> jax.Array:
        size = microbatch or x.shape[0]
        if x.shape[0] % size:
            raise BadInput(f"grpo.microbatch={size} must divide the minibatch of {x.shape[0]} rows")
        return jnp.swapaxes(x.reshape(size, -1, *x.shape[1:]), 0, 1)

    return jax.tree.map(split, batch)


def _merge(parts: jax.Array) -> jax.Array:
    """Inverse of the split: [B / m, m, ...] -> [B, ...]."""
    return jnp.swapaxes(parts, 0, 1).reshape(-1, *parts.shape[2:])
