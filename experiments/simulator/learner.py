"""Seconds of the learner's phases: prepare, logprob and train."""

import dataclasses
import math

import numpy as np

from experiments.simulator.communication import ONE_DEVICE, Parallelism, all_gather
from experiments.simulator.counts import Precision, twin_bytes, weight_bytes
from experiments.simulator.hardware import Hardware
from experiments.simulator.heads import learned_positions
from experiments.simulator.lengths import ResponseLengths
from specrl_jax.drafts.block import BlockConfig
from specrl_jax.drafts.sizes import Head, head_parameters, vocabulary_parameters
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.flops import BYTES, Array, forward_flops, parameters


@dataclasses.dataclass(frozen=True)
class Workload:
    """The work of one RL step."""

    rollouts: int
    group: int  # responses per prompt; a prompt is prefilled once
    prompt: float  # tokens, mean
    longest_prompt: float  # tokens
    lengths: ResponseLengths
    slots: int  # most concurrent sequences on all devices; 0: as many as fit
    cache_bytes: float = math.inf  # most of a device for pages of keys and values
    page: int = 64  # tokens of a page
    scored: int = 1  # log-prob passes, see rl.objectives.logprob_passes
    reference: bool = False  # the learner holds a float32 copy of the policy's parameters for the KL term
    epochs: int = 1  # passes of training over the rollouts; a draft learns in the first
    minibatches: int = 1  # optimizer updates of an epoch
    microbatch_tokens: float = 0  # of one forward and backward pass over all devices; 0: a minibatch
    packed: bool = False  # rollouts share learner rows; False: each has one, padded to the longest sequence
    remat: str = "full"  # as policy.remat: the backward pass computes each layer again, or nothing that counts
    gathered: bool = True  # fsdp: every microbatch gathers its parameters; False: each device keeps its shard of a copy
    ttt_steps: int = 0  # unrolled steps of a draft trained in the train phase; 0: frozen or none
    anchor_stride: int = 1  # that draft starts every n tokens, if it is of one pass
    tiled: bool = False  # logits are computed in vocabulary tiles, and again in the backward pass

    @property
    def longest(self) -> float:
        """Longest sequence, tokens."""
        return self.longest_prompt + self.lengths.limit

    def learner_tokens(self) -> tuple[float, float]:
        """Return (tokens, keys read by them) of all learner rows, each as long as the longest sequence."""
        tokens = self.rollouts * (self.prompt + self.lengths.mean if self.packed else self.longest)
        return tokens, tokens * self.longest / 2


@dataclasses.dataclass(frozen=True)
class LearnerCost:
    """The policy, its head and their parallelism in the learner; the other devices shard parameters (fsdp)."""

    model: DecoderConfig
    head: Head | None
    hardware: Hardware
    split: Parallelism = ONE_DEVICE
    dtype: str = "bfloat16"  # of activations and matmuls; parameters are float32

    def prepare(self, devices: Array, rollout: Parallelism, precision: Precision) -> Array:
        """Seconds to move weights to the rollout's layout: each rollout device gathers its part of a replica."""
        size = (weight_bytes(self.model, precision) + twin_bytes(self.model, precision)) / rollout.devices
        return all_gather(size, devices, self.hardware) + self.hardware.attained.prepare_seconds

    def logprob(self, w: Workload, devices: Array) -> Array:
        """Seconds of `scored` forwards of all rows."""
        return self._passes(w, devices, w.scored, 0)

    def train(self, w: Workload, devices: Array) -> Array:
        """Seconds of draft training and, in each epoch, of forward and backward of all rows (3 forwards, 4 with full
        remat) and updates.
        """
        seconds = self._passes(w, devices, 2 if w.remat == "full" else 1, 2)
        # The update reads float32 gradient, both moments and the parameter, and writes all but the gradient.
        state = 7 * 4 * parameters(self.model) / devices
        h = self.hardware
        updates = w.minibatches * state / (h.memory_bandwidth * h.attained.memory)
        return w.epochs * (seconds + updates) + self.draft_training(w, devices)

    def draft_training(self, w: Workload, devices: Array) -> Array:
        """Seconds of the head's forward and backward over all rows; fc once, the layers over `learned_positions`.

        With tiled logits (`lm_head.draft_terms`) the head's are computed three times instead of once, and the policy's
        on the draft vocabulary, of all rows and for all steps together, three times.
        """
        if not w.ttt_steps or self.head is None:
            return np.zeros_like(np.asarray(devices, float))
        h, (tokens, keys) = self.head, w.learner_tokens()
        passed, drafted = learned_positions(h, w.ttt_steps, w.anchor_stride)
        fc, tables = len(h.aux_layers) * h.embed * h.embed, vocabulary_parameters(h)
        # The layers of a block drafter have keys and values of the text besides those of their slots.
        text = 2 * h.layers * h.kv_heads * h.head_dim * h.embed if isinstance(h, BlockConfig) else 0
        weights = fc + text + passed * (head_parameters(h) - fc - tables) + drafted * tables
        flops = 2 * tokens * weights + passed * 4 * h.layers * h.heads * h.head_dim * keys
        again = 2 * tokens * (2 * drafted * tables + 3 * h.embed * h.draft_vocab) if w.tiled else 0.0
        return self._compute(flops + again, 2 * flops, devices) / self.hardware.attained.draft_learner

    def _passes(self, w: Workload, devices: Array, forwards: int, backwards: int) -> Array:
        """Seconds of the longer of compute and communication, which overlap.

        Under fsdp every microbatch gathers the parameters for each pass over them (a backward pass counts as two
        forwards and is one pass) and scatters its float32 gradient; else both happen once an update.
        """
        microbatches = self._microbatches(w, devices)
        flops = forward_flops(self.model, *w.learner_tokens())
        compute = self._compute(forwards * flops, backwards * flops, devices)
        passes, gradients = forwards + backwards / 2, backwards / 2
        once = passes * BYTES[self.dtype] + gradients * BYTES["float32"]
        moved = once * (microbatches if w.gathered else w.minibatches)
        # Shards of one parameter lie on devices that are split.devices apart, so the ring spans at least a domain.
        shards = np.maximum(np.asarray(devices) / self.split.devices, 1)
        bandwidth, _ = self.hardware.link(devices)
        exchange = (shards - 1) / shards * parameters(self.model) / self.split.devices * moved / bandwidth
        return np.maximum(compute, exchange)

    def _compute(self, forward: Array, backward: Array, devices: Array) -> Array:
        """Seconds of FLOPs spread over `devices`."""
        a = self.hardware.attained
        share = a.learner * (a.mixture if self.model.experts else 1.0)
        return (forward + a.backward * backward) / (devices * self.hardware.flops(self.dtype) * share)

    def _microbatches(self, w: Workload, devices: Array) -> Array:
        """Microbatches of a step; each has at least one row per device, tensor-parallel devices counting as one."""
        tokens, _ = w.learner_tokens()
        least = w.longest * np.asarray(devices) / self.split.tensor
        return np.maximum(tokens / np.maximum(w.microbatch_tokens or tokens / w.minibatches, least), w.minibatches)
