"""The learner's jitted functions of the policy: log-probs and features of recorded rows, and one GRPO update.

Each is a program of one microbatch of rows (learner/batch.py); the host goes over the microbatches.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import flax.struct
import jax
import jax.numpy as jnp
import optax

from specrl_jax.core import Jitted, Params, stand_in
from specrl_jax.data.rows import Rows
from specrl_jax.learner.microbatches import Update, make_add
from specrl_jax.learner.optimizer import apply_gradient
from specrl_jax.learner.state import TrainState, state_shardings
from specrl_jax.models import decoder
from specrl_jax.models.attention import RowAttention, by_xla
from specrl_jax.models.decoder.expert_record import differing
from specrl_jax.models.layers import Specs
from specrl_jax.models.lora import LoRA, adapter_specs, attach
from specrl_jax.rl.objectives import LossInputs, LossMetrics, Objective, grpo_loss
from specrl_jax.sharding import Partitioner

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class PolicyForward:
    """The learner's forward pass of the policy: sizes, precision, memory, and what it returns beside log-probs."""

    model: decoder.DecoderConfig
    dtype: jnp.dtype  # of activations; parameters are float32
    remat: str  # what the backward pass of a layer computes again, one of `remat.REMAT`
    vocab_tile: int  # vocabulary entries unembedded at once; 0 = all
    temperature: float  # of every log-prob, the rollout's; the rows say what top-k and top-p kept
    features: bool = False  # whether a draft learns from the forward pass
    aux_layers: tuple[int, ...] = ()  # layers whose inputs are returned as features
    lora: LoRA | None = None  # None: every weight is trained
    attention: RowAttention = by_xla

    @property
    def specs(self) -> Specs:
        """Return the specs of the parameters that the forward runs on."""
        specs = decoder.param_specs(self.model)
        return attach(specs, adapter_specs(specs, self.lora), self.lora) if self.lora else specs

    @property
    def trained_specs(self) -> Specs:
        """Return the specs of TrainState.params: all weights, or the adapters."""
        specs = decoder.param_specs(self.model)
        return adapter_specs(specs, self.lora) if self.lora else specs

    def merge(self, trained: Params, frozen: Params | None) -> Params:
        """Return the parameters that the forward runs on: the trained ones, or the frozen ones with their adapters."""
        return attach(frozen, trained, self.lora) if self.lora and frozen else trained

    def apply(
        self, params: Params, rows: Rows, partition: Partitioner, *, return_experts: bool = False
    ) -> decoder.Output:
        """Compute log-probs and entropy of the rows' targets, and the features."""
        r = rows
        inputs = decoder.ModelInputs(
            r.tokens, r.positions, r.segments, targets=r.targets, counted=r.mask, kept=r.kept, experts=r.experts
        )
        options = decoder.Options(
            dtype=self.dtype,
            aux_layers=self.aux_layers,
            attention=self.attention,
            remat=self.remat,
            vocab_tile=self.vocab_tile,
            temperature=self.temperature,
            return_experts=return_experts,
        )
        return decoder.forward(params, self.model, inputs, partition=partition, options=options)


@flax.struct.dataclass
class Features:
    """The draft's inputs, of every token of the rows. Behind stop_gradient."""

    aux: jax.Array | None  # [B, T, A, D], the residual stream entering aux_layers
    hidden: jax.Array  # [B, T, D], the input of the unembedding
    normaliser: jax.Array  # [B, T] float32, logsumexp of the logits / temperature


@flax.struct.dataclass
class UpdateMetrics:
    terms: LossMetrics
    grad_norm: jax.Array  # [] float32, before clipping
    skipped: jax.Array  # [] bool: loss or gradient was not finite, so nothing changed
    growth: jax.Array  # [] float32, norm of the trained parameters after the update over that before
    routing: jax.Array | None  # [L, E] float32, copies of response tokens that each expert got; None: no experts


class Unreplayed(NamedTuple):
    """The policy's tokens where it chooses its experts itself."""

    logprobs: jax.Array  # [B, T] float32, nats
    differing: jax.Array  # [B, T] float32, share of the rows' experts that it does not choose


class StepOutputs(NamedTuple):
    """Per-token outputs of a microbatch, by the policy before the update."""

    logprobs: jax.Array  # [B, T] float32, nats
    features: Features | None  # None: no draft with weights


# (policy params, rows) -> (log-probs [B, T], entropy [B, T]), float32, nats
LogprobStep = Jitted[[Params, Rows], tuple[jax.Array, jax.Array]]
UnreplayedStep = Jitted[[Params, Rows], Unreplayed]
FeatureStep = Jitted[[Params, Rows], Features]
# A microbatch is (rows, loss inputs).
PolicyStep = Update[TrainState, StepOutputs, UpdateMetrics]


class _PolicySums(NamedTuple):
    """Sums over the microbatches of an update."""

    gradient: Params
    terms: LossMetrics
    routing: jax.Array | None  # [L, E] float32, see UpdateMetrics


def make_logprob_step(forward: PolicyForward, partition: Partitioner) -> LogprobStep:
    """Return the jitted log-probs and entropy of recorded rows."""

    def logprobs(params: Params, rows: Rows) -> tuple[jax.Array, jax.Array]:
        out = forward.apply(params, rows, partition)
        assert out.logprobs is not None and out.entropy is not None  # rows have targets
        return out.logprobs, out.entropy

    return _of_rows(logprobs, forward, partition)


def make_unreplayed_step(forward: PolicyForward, partition: Partitioner) -> UnreplayedStep:
    """Return the jitted comparison of rows' experts with those that the policy chooses."""

    def compare(params: Params, rows: Rows) -> Unreplayed:
        assert rows.experts is not None, "there are experts to compare with"
        out = forward.apply(params, dataclasses.replace(rows, experts=None), partition, return_experts=True)
        assert out.logprobs is not None and out.experts is not None  # rows have targets
        return Unreplayed(out.logprobs, differing(rows.experts, out.experts, forward.model))

    return _of_rows(compare, forward, partition)


def _of_rows(
    function: Callable[[Params, Rows], T], forward: PolicyForward, partition: Partitioner
) -> Jitted[[Params, Rows], T]:
    """Jit a function of the policy and rows whose results are [B, T]."""
    batch = partition.sharding(("batch", "sequence"))
    return jax.jit(function, in_shardings=(partition.shardings(forward.specs), batch), out_shardings=batch)


def make_feature_step(forward: PolicyForward, partition: Partitioner) -> FeatureStep:
    """Return the jitted features of recorded rows, for a policy that is not trained."""

    def features(params: Params, rows: Rows) -> Features:
        return _features(forward.apply(params, rows, partition))

    return jax.jit(features, out_shardings=partition.sharding(("batch", "sequence")))


def _features(out: decoder.Output) -> Features:
    assert out.normaliser is not None  # rows have targets
    return jax.lax.stop_gradient(Features(out.aux, out.hidden, out.normaliser))


def make_policy_step(
    forward: PolicyForward, objective: Objective, optimizer: optax.GradientTransformation, *, partition: Partitioner
) -> PolicyStep:
    """Return the optimizer update of the policy from the microbatches of one minibatch.

    The features of the forward are always among its outputs where a draft has weights, so that the update has the same
    bits with draft training on and off. The gradient is that of the loss *sum*, divided by the minibatch's count once,
    so the split into microbatches changes only rounding.
    """

    def loss_sum(
        trained: Params, frozen: Params | None, rows: Rows, inputs: LossInputs
    ) -> tuple[jax.Array, tuple[LossMetrics, jax.Array | None, StepOutputs]]:
        out = forward.apply(forward.merge(trained, frozen), rows, partition)
        assert out.logprobs is not None and out.entropy is not None  # rows have targets
        terms = grpo_loss(
            logprobs=out.logprobs,
            entropy=out.entropy,
            inputs=inputs,
            mask=rows.mask,
            segments=rows.segments,
            objective=objective,
        )
        logprobs = jax.lax.stop_gradient(out.logprobs)
        outputs = StepOutputs(logprobs, _features(out) if forward.features else None)
        return terms.loss.total, (terms, jax.lax.stop_gradient(out.routing), outputs)

    def gradient(state: TrainState, rows: Rows, inputs: LossInputs) -> tuple[_PolicySums, StepOutputs]:
        found, (terms, routing, outputs) = jax.grad(loss_sum, has_aux=True)(state.params, state.frozen, rows, inputs)
        return _PolicySums(found, terms, routing), outputs

    def apply(state: TrainState, sums: _PolicySums) -> tuple[TrainState, UpdateMetrics]:
        loss = sums.terms.loss
        mean = jax.tree.map(lambda g: g / jnp.maximum(loss.count, 1.0), sums.gradient)
        norm = optax.tree.norm(mean)
        healthy = jnp.isfinite(norm) & jnp.isfinite(loss.total)
        updated, growth = apply_gradient(state, mean, optimizer, healthy)
        return updated, UpdateMetrics(sums.terms, norm, ~healthy, growth=growth, routing=sums.routing)

    frozen = decoder.param_specs(forward.model) if forward.lora else None
    state = state_shardings(forward.trained_specs, optimizer, partition, frozen=frozen)
    alike = stand_in(partition.replicated)
    sums = _PolicySums(state.params, cast(LossMetrics, alike), alike)
    by_row = partition.sharding(("batch", "sequence"))
    return Update(
        gradient=jax.jit(gradient, in_shardings=(state, by_row, by_row), out_shardings=(sums, by_row)),
        add=make_add(sums),
        apply=jax.jit(apply, donate_argnums=0, in_shardings=(state, sums), out_shardings=(state, alike)),
    )
