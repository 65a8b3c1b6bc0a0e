"""Whether a configuration fits its devices: an estimate from sums of sizes, without a compiler.

`task=dry_run` compiles the real programs and reads what they allocate; prefer its answer where it is available.
"""

from typing import NamedTuple

import numpy as np

from specrl_jax.drafts.block.network import BlockConfig
from specrl_jax.models.qwen3 import Qwen3Config
from specrl_jax.simulator.cost import DecoderCost
from specrl_jax.simulator.counts import BYTES, head_layers, head_parameters, parameters, twin_bytes, weight_bytes
from specrl_jax.simulator.hardware import Array
from specrl_jax.simulator.learner import LearnerCost, Workload

USABLE = 0.9  # of the memory; the rest goes to the runtime and to fragmentation


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
    head = head_parameters(decoder.head) if decoder.head else 0
    total = parameters(c) + head
    microbatch = w.microbatch_tokens or w.learner_tokens()[0] / w.minibatches
    tokens = np.maximum(microbatch * learner.split.tensor / learner_devices, w.longest)
    activations = tokens * c.layers * kept_numbers(c, w.remat) * BYTES[learner.dtype] / learner.split.tensor
    logits = w.longest * c.vocab * BYTES["float32"] / learner.split.tensor
    # Without fsdp a compute copy of the parameters and its gradient are resident all the time.
    copies = 0.0 if w.gathered else (BYTES[learner.dtype] + BYTES["float32"]) * total / learner.split.devices
    slots = np.maximum(np.minimum(w.slots, w.rollouts) / (rollout_devices / split.tensor), 1)
    weights = (weight_bytes(c, p) + twin_bytes(c, p) + head * BYTES[p.weights]) / split.devices
    longest = w.longest * token_bytes(decoder)
    cache = np.maximum(np.minimum(slots * longest, w.cache_bytes), longest)
    state = 16 * total + (4 * parameters(c) if w.reference else 0)
    sizes = (state / learner_devices + copies, activations + logits, weights, cache)
    return DeviceBytes(*np.broadcast_arrays(*sizes))


def kept_numbers(c: Qwen3Config, remat: str) -> int:
    """Return the numbers that a layer keeps of a token for its backward pass (models/remat.py)."""
    products = 2 * (c.heads + c.kv_heads) * c.head_dim + c.embed + (0 if c.experts else 2 * c.mlp)
    # Nothing repeated: about the inputs of every product.
    return {"full": c.embed, "selective": c.embed + products, "none": 12 * c.embed}[remat]


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
    """Return the cache bytes of one token on one device: keys and values, also a draft's, and a head's hidden state."""
    c, h, split = decoder.model, decoder.head, decoder.split
    numbers = 2 * c.layers * max(c.kv_heads / split.tensor, 1) * c.head_dim
    if h is not None:
        hidden = 0 if isinstance(h, BlockConfig) else h.embed
        numbers += hidden + 2 * head_layers(h) * max(h.kv_heads / split.tensor, 1) * h.head_dim
    return numbers * BYTES[decoder.precision.cache]
