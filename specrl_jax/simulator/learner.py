"""Seconds of the phases that the learner runs: prepare, logprob and train."""

import dataclasses

import numpy as np

from specrl_jax.drafts.eagle3.network import Eagle3Config
from specrl_jax.models.qwen3 import Qwen3Config
from specrl_jax.simulator.communication import ONE_DEVICE, Parallelism, all_gather, pipeline_share
from specrl_jax.simulator.cost import BYTES, forward_flops, head_parameters, parameters
from specrl_jax.simulator.hardware import Array, Hardware
from specrl_jax.simulator.lengths import ResponseLengths


@dataclasses.dataclass(frozen=True)
class Workload:
    """What one RL step asks for."""

    rollouts: int
    group: int  # of one prompt, which is prefilled once
    prompt: float  # tokens, mean
    longest_prompt: float  # tokens
    lengths: ResponseLengths
    slots: int  # sequences decoded at once, on all devices; 0: as many as the memory holds
    scored: int = 1  # log-prob passes: 2 with a reference policy
    minibatches: int = 1  # optimizer updates
    microbatch: int = 0  # rows of one forward and backward pass over all devices; 0: a minibatch
    remat: bool = True  # the backward pass computes each layer's forward again
    gathered: bool = True  # fsdp: every microbatch gathers its parameters; False: each device keeps its part of a copy
    ttt_steps: int = 0  # unrolled steps of a draft that learns in the train phase; 0: frozen or none
    tiled: bool = False  # logits are unembedded some words at a time, and again in the backward pass

    @property
    def longest(self) -> float:
        """Tokens of a text with its prompt."""
        return self.longest_prompt + self.lengths.limit

    def learner_tokens(self) -> tuple[float, float]:
        """(tokens, keys that they read) of all rows of the learner, each padded to the longest text."""
        return self.rollouts * self.longest, self.rollouts * self.longest**2 / 2


@dataclasses.dataclass(frozen=True)
class LearnerCost:
    """The policy, its head and how the learner splits them; the rest of the devices share parameters (fsdp)."""

    model: Qwen3Config
    head: Eagle3Config | None
    hardware: Hardware
    split: Parallelism = ONE_DEVICE
    dtype: str = "bfloat16"  # of activations and products; parameters are float32

    def prepare(self, devices: Array, rollout: Parallelism, dtype: str) -> Array:
        """Weights to the rollout's layout: each of its devices gathers its part of a replica."""
        size = parameters(self.model) * BYTES[dtype] / rollout.devices
        return all_gather(size, devices, self.hardware) + self.hardware.attained.prepare_seconds

    def logprob(self, w: Workload, devices: Array) -> Array:
        """Forwards of all rows, `scored` times."""
        return self._passes(w, devices, w.scored, 0)

    def train(self, w: Workload, devices: Array) -> Array:
        """Forward and backward of all rows (three forwards, or four), the draft's learning, and the updates."""
        seconds = self._passes(w, devices, 2 if w.remat else 1, 2)
        seconds = seconds + self.draft_learning(w, devices)
        # Gradient, both moments and the parameter in float32: read, and all but the gradient written.
        state = 7 * 4 * parameters(self.model) / devices
        h = self.hardware
        seconds = seconds + w.minibatches * state / (h.memory_bandwidth * h.attained.memory)
        return seconds + h.attained.learner_seconds

    def draft_learning(self, w: Workload, devices: Array) -> Array:
        """Forward and backward of the head over all rows, once for each unrolled step; fc once.

        With tiled logits every unrolled step unembeds the head's again, and the policy's on the draft vocabulary twice.
        """
        if not w.ttt_steps or self.head is None:
            return np.zeros_like(np.asarray(devices, float))
        h, (tokens, keys) = self.head, w.learner_tokens()
        once = 3 * h.embed * h.embed
        step = 2 * tokens * (head_parameters(h) - once) + 4 * h.heads * h.head_dim * keys
        flops = 2 * tokens * once + w.ttt_steps * step
        again = w.ttt_steps * 3 * 2 * tokens * h.embed * h.draft_vocab if w.tiled else 0.0
        return self._compute(flops + again, 2 * flops, devices) / self.hardware.attained.draft_learner

    def _passes(self, w: Workload, devices: Array, forwards: int, backwards: int) -> Array:
        """The longer of the products and of the exchange between devices, which runs beside them.

        Under fsdp every microbatch gathers the parameters for each pass over them (a backward pass counts two forwards
        and is one) and scatters its gradient in float32; else both happen once an update.
        """
        microbatches = self._microbatches(w, devices)
        flops = forward_flops(self.model, *w.learner_tokens())
        busy = pipeline_share(self.split.pipeline, microbatches / w.minibatches)
        compute = self._compute(forwards * flops, backwards * flops, devices) / busy
        passes, gradients = forwards + backwards / 2, backwards / 2
        once = passes * BYTES[self.dtype] + gradients * BYTES["float32"]
        moved = once * (microbatches if w.gathered else w.minibatches)
        # The parts of one parameter lie on devices that are split.devices apart: over a whole domain at least.
        ways = np.maximum(np.asarray(devices) / self.split.devices, 1)
        bandwidth, _ = self.hardware.link(devices)
        exchange = (ways - 1) / ways * parameters(self.model) / self.split.devices * moved / bandwidth
        return np.maximum(compute, exchange)

    def _compute(self, forward: Array, backward: Array, devices: Array) -> Array:
        a = self.hardware.attained
        share = a.learner * (a.mixture if self.model.experts else 1.0)
        return (forward + a.backward * backward) / (devices * self.hardware.flops(self.dtype) * share)

    def _microbatches(self, w: Workload, devices: Array) -> Array:
        """Of a step; one has at least a row for each device, counting those that share a row's widths as one."""
        rows = np.maximum(w.microbatch or w.rollouts / w.minibatches, np.asarray(devices) / self.split.tensor)
        return np.maximum(w.rollouts / rows, w.minibatches)
