"""The jitted functions of the learner: log-probs of recorded rows, and one policy update from them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax

from specrl_jax.core import InputError
from specrl_jax.data.rows import Rows
from specrl_jax.learner.state import TrainState, apply_gradient, state_shardings
from specrl_jax.models import qwen3
from specrl_jax.models.attention import RowAttention, by_xla
from specrl_jax.models.lora import LoRA, adapter_specs, attach
from specrl_jax.rl.grpo import LossInputs, Objective, Terms, grpo_loss
from specrl_jax.sharding import Partitioner


@dataclasses.dataclass(frozen=True)
class Learner:
    """How the learner runs its forward pass."""

    model: qwen3.Qwen3Config
    dtype: jnp.dtype  # of activations; parameters are float32
    remat: bool
    vocab_tile: int  # words unembedded at once; 0 = all
    microbatch: int  # rows in one forward and backward pass; 0 = all
    temperature: float  # of every log-prob, the rollout's
    features: bool = False  # whether a draft learns from the forward pass
    aux_layers: tuple[int, ...] = ()  # whose inputs it reads
    lora: LoRA | None = None  # None: every weight learns
    attention: RowAttention = by_xla

    @property
    def specs(self) -> Any:
        """Of the tree that the forward runs on."""
        specs = qwen3.param_specs(self.model)
        return attach(specs, adapter_specs(specs, self.lora), self.lora) if self.lora else specs

    @property
    def trained_specs(self) -> Any:
        """Of TrainState.params."""
        specs = qwen3.param_specs(self.model)
        return adapter_specs(specs, self.lora) if self.lora else specs

    def whole(self, trained: Any, frozen: Any) -> Any:
        """The tree that the forward runs on."""
        return attach(frozen, trained, self.lora) if self.lora else trained

    def score(self, params: Any, rows: Rows, partition: Partitioner) -> qwen3.Output:
        """Log-probs and entropy of the rows' targets."""
        return qwen3.forward(
            params,
            self.model,
            rows.tokens,
            rows.positions,
            partition,
            targets=rows.targets,
            counted=rows.mask,
            temperature=self.temperature,
            aux_layers=self.aux_layers,
            dtype=self.dtype,
            remat=self.remat,
            vocab_tile=self.vocab_tile,
            segment_ids=rows.segments,
            attention=self.attention,
        )


@flax.struct.dataclass
class Features:
    """What a draft learns from, of every token of the rows. Behind stop_gradient."""

    aux: jax.Array | None  # [B, T, A, D], the residual stream entering aux_layers
    hidden: jax.Array  # [B, T, D], what the unembedding reads
    normaliser: jax.Array  # [B, T] float32, logsumexp of the logits / temperature


@flax.struct.dataclass
class UpdateMetrics:
    terms: Terms
    grad_norm: jax.Array  # [] float32, before clipping
    skipped: jax.Array  # [] bool: loss or gradient was not finite, and nothing changed
    routing: jax.Array | None  # [L, E] float32, copies of response tokens that each expert got; None: no experts


def make_logprob_step(learner: Learner, partition: Partitioner) -> Callable[[Any, Rows], tuple[jax.Array, jax.Array]]:
    """(params, rows) -> (log-probs [B, T], entropy [B, T]), microbatch by microbatch."""

    def logprobs(params: Any, rows: Rows) -> tuple[jax.Array, jax.Array]:
        def score(rows: Rows) -> tuple[jax.Array, jax.Array]:
            out = learner.score(params, rows, partition)
            return out.logprobs, out.entropy

        parts = jax.lax.map(score, split(rows, learner.microbatch))
        return jax.tree.map(_merge, parts)

    batch = partition.sharding(("batch", "sequence"))
    params = partition.tree(learner.specs)
    return jax.jit(logprobs, in_shardings=(params, batch), out_shardings=batch)


def make_feature_step(learner: Learner, partition: Partitioner) -> Callable[[Any, Rows], Features]:
    """(params, rows) -> features, of a policy that does not learn."""

    def features(params: Any, rows: Rows) -> Features:
        parts = jax.lax.map(
            lambda rows: _features(learner.score(params, rows, partition)), split(rows, learner.microbatch)
        )
        return jax.tree.map(_merge, parts)

    return jax.jit(features, out_shardings=partition.sharding(("batch", "sequence")))


def _features(out: qwen3.Output) -> Features:
    return jax.lax.stop_gradient(Features(out.aux, out.hidden, out.normaliser))


class StepOutputs(NamedTuple):
    """Of every token of the minibatch, by the policy as it was before the update."""

    logprobs: jax.Array  # [B, T] float32, nats
    features: Features | None  # where a draft learns


def make_policy_step(
    learner: Learner, objective: Objective, optimizer: optax.GradientTransformation, partition: Partitioner
) -> Callable[[TrainState, Rows, LossInputs], tuple[TrainState, UpdateMetrics, StepOutputs]]:
    """One optimizer update from one minibatch; the state is donated. Where a draft learns, always its features.

    Gradients are those of the loss *sum*, accumulated over microbatches and divided by the minibatch's count once, so
    the split into microbatches changes nothing but rounding.
    """

    def loss_sum(trained: Any, frozen: Any, rows: Rows, signal: LossInputs) -> tuple[jax.Array, Any]:
        out = learner.score(learner.whole(trained, frozen), rows, partition)
        terms = grpo_loss(out.logprobs, out.entropy, signal, rows.mask, rows.segments, objective)
        logprobs = jax.lax.stop_gradient(out.logprobs)
        learnt = StepOutputs(logprobs, _features(out) if learner.features else None)
        return terms.loss.total, ((terms, jax.lax.stop_gradient(out.routing)), learnt)

    def update(state: TrainState, rows: Rows, signal: LossInputs) -> tuple[TrainState, UpdateMetrics, StepOutputs]:
        def gradient_fn(trained: Any, rows: Rows, signal: LossInputs) -> Any:
            gradient, (sums, learnt) = jax.grad(loss_sum, has_aux=True)(trained, state.frozen, rows, signal)
            return (gradient, sums), learnt

        parts = (rows, signal)
        (gradient, (terms, routing)), learnt = accumulate(gradient_fn, state.params, parts, learner.microbatch)
        gradient = jax.tree.map(lambda g: g / jnp.maximum(terms.loss.count, 1.0), gradient)
        norm = optax.tree.norm(gradient)
        healthy = jnp.isfinite(norm) & jnp.isfinite(terms.loss.total)
        metrics = UpdateMetrics(terms, norm, ~healthy, routing)
        return apply_gradient(state, gradient, optimizer, healthy), metrics, learnt

    frozen = qwen3.param_specs(learner.model) if learner.lora else None
    shardings = state_shardings(learner.trained_specs, optimizer, partition, frozen)
    by_row = partition.sharding(("batch", "sequence"))
    return jax.jit(
        update,
        donate_argnums=0,
        in_shardings=(shardings, by_row, by_row),
        out_shardings=(shardings, partition.replicated, by_row),
    )


def accumulate(gradient_fn: Callable[..., Any], params: Any, batch: tuple[Any, ...], microbatch: int) -> Any:
    """gradient_fn(params, *part) -> (sums, rows) over the microbatches of `batch`: sums added up, rows put together."""
    parts = split(batch, microbatch)
    first = jax.tree.map(lambda x: x[0], parts)
    if jax.tree.leaves(parts)[0].shape[0] == 1:
        return gradient_fn(params, *first)

    def add(total: Any, part: tuple[Any, ...]) -> tuple[Any, Any]:
        sums, rows = gradient_fn(params, *part)
        return jax.tree.map(jnp.add, total, sums), rows

    shapes, _ = jax.eval_shape(gradient_fn, params, *first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    sums, rows = jax.lax.scan(add, zeros, parts)
    return sums, jax.tree.map(_merge, rows)


def split(batch: Any, microbatch: int) -> Any:
    """Leaves [B, ...] -> [B / m, m, ...], rows dealt round robin so that every device keeps its share of each part."""

    def deal(x: jax.Array) -> jax.Array:
        size = microbatch or x.shape[0]
        if x.shape[0] % size:
            raise InputError(f"grpo.microbatch={size} must divide the minibatch of {x.shape[0]} rows")
        return jnp.swapaxes(x.reshape(size, -1, *x.shape[1:]), 0, 1)

    return jax.tree.map(deal, batch)


def _merge(parts: jax.Array) -> jax.Array:
    """Inverse of the split: [B / m, m, ...] -> [B, ...]."""
    return jnp.swapaxes(parts, 0, 1).reshape(-1, *parts.shape[2:])
