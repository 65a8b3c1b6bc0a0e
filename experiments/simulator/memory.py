"""Whether a configuration fits its devices: the sums of specrl_jax/planning/memory.py, and the pages of all slots."""

from typing import NamedTuple

import numpy as np

from experiments.simulator.cost import DecoderCost
from experiments.simulator.counts import twin_bytes, weight_bytes
from experiments.simulator.learner import LearnerCost, Workload
from specrl_jax.drafts.sizes import head_parameters
from specrl_jax.models.flops import BYTES, Array, parameters
from specrl_jax.planning import memory
from specrl_jax.planning.memory import USABLE, activation_bytes, state_bytes


class DeviceBytes(NamedTuple):
    """Bytes on the fullest device."""

    state: Array  # the learner's float32 parameters, gradient, two moments and reference, and its unsharded copies
    activations: Array  # of one microbatch: the input of each layer, and float32 logits of one row
    weights: Array  # the rollout's, with the head's or the twin's
    cache: Array  # the pages of keys and values

    def fits(self, memory_bytes: float, disaggregated: Array) -> np.ndarray:
        """Return whether it fits: on separate devices the larger of learner and rollout, else their sum."""
        learner, rollout = self.state + self.activations, self.weights + self.cache
        most = np.where(disaggregated, np.maximum(learner, rollout), learner + rollout)
        return most <= USABLE * memory_bytes


def estimate_bytes(
    w: Workload, decoder: DecoderCost, learner: LearnerCost, *, learner_devices: Array, rollout_devices: Array
) -> DeviceBytes:
    """Estimate the memory of a learner that shards its state over all its devices and a rollout with one copy of the
    weights a replica.

    Pages are as many as all slots can fill, at most w.cache_bytes, and enough for one longest sequence; with w.slots =
    0 (as many as fit) those of a single sequence are counted.
    """
    c, p, split = decoder.model, decoder.precision, decoder.split
    own, head = parameters(c), head_parameters(decoder.head) if decoder.head else 0
    microbatch = w.microbatch_tokens or w.learner_tokens()[0] / w.minibatches
    activations = activation_bytes(
        c,
        np.maximum(microbatch * learner.split.tensor / learner_devices, w.longest),
        w.longest,
        remat=w.remat,
        dtype=learner.dtype,
        tensor=learner.split.tensor,
    )
    # Without fsdp a compute copy of the parameters and its gradient are resident all the time.
    copies = 0.0 if w.gathered else (BYTES[learner.dtype] + BYTES["float32"]) * (own + head) / learner.split.devices
    slots = np.maximum(np.minimum(w.slots, w.rollouts) / (rollout_devices / split.tensor), 1)
    weights = (weight_bytes(c, p) + twin_bytes(c, p) + head * BYTES[p.weights]) / split.devices
    longest = w.longest * token_bytes(decoder)
    cache = np.maximum(np.minimum(slots * longest, w.cache_bytes), longest)
    state = state_bytes(own, head, w.reference) / learner_devices + copies
    return DeviceBytes(*np.broadcast_arrays(state, activations, weights, cache))


def sequences_at_once(
    sizes: DeviceBytes, w: Workload, decoder: DecoderCost, *, memory_bytes: float, disaggregated: Array, replicas: Array
) -> np.ndarray:
    """Return how many sequences of one replica run at once: as many as its pages hold, at most its slots; at least one.

    With w.slots = 0 the pages take all the memory that everything else leaves, at most w.cache_bytes.
    """
    free = USABLE * memory_bytes - sizes.weights - np.where(disaggregated, 0.0, sizes.state + sizes.activations)
    pages = sizes.cache if w.slots else np.minimum(free, w.cache_bytes)
    held = np.floor(pages / (live_tokens(w) * token_bytes(decoder))) * decoder.split.expert
    return np.maximum(np.minimum(held, np.ceil(w.slots / replicas)) if w.slots else held, 1)


def live_tokens(w: Workload) -> float:
    """Return the tokens that a running sequence takes pages for, on average while most are taken.

    Siblings hold the pages of their prompt together; beyond them a sequence has a page in part at either end. With
    lengths L, its response has E[L^2] / (2 E[L]) tokens where slots are refilled, and where all start together t P(L >
    t) of every sequence that started: the larger of the two is taken. A sequence that finds no page waits on the host.
    """
    shares = (np.arange(512) + 0.5) / 512
    drawn = w.lengths.quantile(shares)
    refilled = (drawn**2).mean() / drawn.mean() / 2
    together = (drawn * (1 - shares)).max()
    return min(w.prompt / w.group + float(max(refilled, together)) + w.page, w.longest)


def token_bytes(decoder: DecoderCost) -> float:
    """Return the cache bytes of one token on one device."""
    return memory.token_bytes(decoder.model, decoder.head, decoder.precision.cache, tensor=decoder.split.tensor)
