"""Whether a configuration fits its devices: an estimate from sums of sizes, without a compiler.

`task=dry_run` compiles the real programs and reads what they allocate; prefer its answer where it is available.
"""

from typing import NamedTuple

import numpy as np

from specrl_jax.simulator.cost import BYTES, DecoderCost, head_parameters, parameters
from specrl_jax.simulator.hardware import Array
from specrl_jax.simulator.learner import LearnerCost, Workload

USABLE = 0.9  # of the memory; the rest goes to the runtime and to fragmentation


class DeviceBytes(NamedTuple):
    """Bytes on the fullest device."""

    state: Array  # the learner's float32 parameters, gradient and two moments, and its unsharded copies
    activations: Array  # of one microbatch: the input of each layer, and float32 logits of one row
    weights: Array  # the rollout's, with the head's
    cache: Array  # of all slots, each at the longest sequence

    def fits(self, memory_bytes: float, disaggregated: Array) -> np.ndarray:
        """Return whether it fits: on separate devices the larger of learner and rollout, else their sum."""
        learner, rollout = self.state + self.activations, self.weights + self.cache
        most = np.where(disaggregated, np.maximum(learner, rollout), learner + rollout)
        return most <= USABLE * memory_bytes


def estimate_bytes(
    w: Workload, decoder: DecoderCost, learner: LearnerCost, learner_devices: Array, rollout_devices: Array
) -> DeviceBytes:
    """Estimate the memory of a learner that shards its state over all its devices and a rollout with one copy of the
    weights a replica.

    With w.slots = 0 (as many as fit) the cache of a single sequence is counted.
    """
    c, p, split = decoder.model, decoder.precision, decoder.split
    total = parameters(c) + (head_parameters(decoder.head) if decoder.head else 0)
    microbatch = w.microbatch_tokens or w.learner_tokens()[0] / w.minibatches
    tokens = np.maximum(microbatch * learner.split.tensor / learner_devices, w.longest)
    kept = c.layers * c.embed if w.remat else 12 * c.layers * c.embed  # without remat, the inputs of every matmul
    activations = tokens * kept * BYTES[learner.dtype] / learner.split.tensor
    logits = w.longest * c.vocab * BYTES["float32"] / learner.split.tensor
    # Without fsdp a compute copy of the parameters and its gradient are resident all the time.
    copies = 0.0 if w.gathered else (BYTES[learner.dtype] + BYTES["float32"]) * total / learner.split.devices
    slots = np.maximum(np.minimum(w.slots, w.rollouts) / (rollout_devices / split.tensor), 1)
    weights = total * BYTES[p.weights] / split.devices
    sizes = (16 * total / learner_devices + copies, activations + logits, weights, slots * sequence_bytes(w, decoder))
    return DeviceBytes(*np.broadcast_arrays(*sizes))


def max_slots(
    sizes: DeviceBytes, w: Workload, decoder: DecoderCost, memory_bytes: float, disaggregated: Array
) -> np.ndarray:
    """Return how many sequences of one replica fit beside everything else; at least one."""
    free = USABLE * memory_bytes - sizes.weights - np.where(disaggregated, 0.0, sizes.state + sizes.activations)
    return np.maximum(np.floor(free / sequence_bytes(w, decoder)) * decoder.split.expert, 1)


def sequence_bytes(w: Workload, decoder: DecoderCost) -> float:
    """Return the cache bytes of one sequence on one device: keys and values, and the head's hidden state and cache."""
    c, h, split = decoder.model, decoder.head, decoder.split
    numbers = 2 * c.layers * max(c.kv_heads / split.tensor, 1) * c.head_dim
    if h is not None:
        numbers += h.embed + 2 * max(h.kv_heads / split.tensor, 1) * h.head_dim
    return w.longest * numbers * BYTES[decoder.precision.cache]
