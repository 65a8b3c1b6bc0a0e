"""Whether a configuration fits its devices: sums of sizes, no compiler.

A stand-in until the dry run compiles the real programs and reads what they allocate; its answer replaces this one.
"""

from typing import NamedTuple

import numpy as np

from specrl_jax.simulator.cost import BYTES, DecoderCost, head_parameters, parameters
from specrl_jax.simulator.hardware import Array
from specrl_jax.simulator.learner import LearnerCost, Workload

USABLE = 0.9  # of the memory; the rest is the runtime's, and fragments


class Memory(NamedTuple):
    """Bytes of one device, the fullest."""

    state: Array  # the learner's parameters, gradient and two moments in float32, and what it keeps beside fsdp
    activations: Array  # of one microbatch: a layer's input each, and logits of one row in float32
    weights: Array  # the rollout's, with the head's
    cache: Array  # of all slots, each to the longest text

    def fits(self, memory_bytes: float, apart: Array) -> Array:
        """Whether the larger of learner and rollout does where they have devices of their own, else their sum."""
        learner, rollout = self.state + self.activations, self.weights + self.cache
        most = np.where(apart, np.maximum(learner, rollout), learner + rollout)
        return most <= USABLE * memory_bytes


def memory(
    w: Workload, decoder: DecoderCost, learner: LearnerCost, learner_devices: Array, rollout_devices: Array
) -> Memory:
    """Of a policy whose learner shards its state over all its devices, and whose rollout holds a copy a replica.

    Where the workload leaves the number of slots open, the cache of one is counted: it is the least.
    """
    c, p, split = decoder.model, decoder.precision, decoder.split
    total = parameters(c) + (head_parameters(decoder.head) if decoder.head else 0)
    microbatch = w.microbatch or w.rollouts / w.minibatches
    rows = np.maximum(microbatch * learner.split.tensor / learner_devices, 1)
    kept = c.layers * c.embed if w.remat else 12 * c.layers * c.embed  # without remat, what a layer's products read
    activations = rows * w.longest * kept * BYTES[learner.dtype] / learner.split.tensor
    logits = w.longest * c.vocab * BYTES["float32"] / learner.split.tensor
    # Without fsdp a copy for the products, and its gradient, are there all the time.
    beside = 0.0 if w.gathered else (BYTES[learner.dtype] + BYTES["float32"]) * total / learner.split.devices
    slots = np.maximum(np.minimum(w.slots, w.rollouts) / (rollout_devices / split.tensor), 1)
    weights = total * BYTES[p.weights] / split.devices
    sizes = (16 * total / learner_devices + beside, activations + logits, weights, slots * sequence_bytes(w, decoder))
    return Memory(*np.broadcast_arrays(*sizes))


def most_slots(m: Memory, w: Workload, decoder: DecoderCost, memory_bytes: float, apart: Array) -> Array:
    """Sequences of one replica that fit beside all else; at least one."""
    free = USABLE * memory_bytes - m.weights - np.where(apart, 0.0, m.state + m.activations)
    ranks = decoder.split.expert * decoder.split.pipeline
    return np.maximum(np.floor(free / sequence_bytes(w, decoder)) * ranks, 1)


def sequence_bytes(w: Workload, decoder: DecoderCost) -> float:
    """Of one sequence's keys and values on one device, and of what its head keeps: a hidden state, keys and values."""
    c, h, split = decoder.model, decoder.head, decoder.split
    numbers = 2 * c.layers * max(c.kv_heads / split.tensor, 1) * c.head_dim
    if h is not None:
        numbers += h.embed + 2 * max(h.kv_heads / split.tensor, 1) * h.head_dim
    return w.longest * numbers * BYTES[decoder.precision.cache]
