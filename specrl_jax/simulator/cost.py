"""Seconds of forwards by roofline, an operation at a time, from the policy's own config.

An operation that does f FLOP and moves m bytes takes

    max(f / F, m / W) + (1 - overlap) min(f / F, m / W) + kernels x kernel_seconds

with F and W what the machine attains (`hardware.Attained`). Everything broadcasts: B, Q, contexts and the machine's
numbers may be arrays, one entry a configuration. Letters are those of specrl_jax.core; B is sequences of one replica.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from specrl_jax.drafts.eagle3.network import Eagle3Config, eagle3_config
from specrl_jax.models.qwen3 import Qwen3Config
from specrl_jax.simulator.communication import ONE_DEVICE, Parallelism, all_reduce, all_to_all, send
from specrl_jax.simulator.hardware import Array, Hardware

BYTES = {"float32": 4, "bfloat16": 2, "float8": 1}
# Kernels of a layer, by listing what a fused decode step does: two norms, q/k/v, q/k norms with rotation, cache write,
# attention, o, gate and up, their product, down; a mixture adds the router, top-k, sort, gather and scatter of tokens.
LAYER_KERNELS, MIXTURE_KERNELS = 10, 5
# Of the unembedding, and of drawing or verifying tokens.
TAIL_KERNELS = 6


# ---- counts


def products_per_token(c: Qwen3Config) -> int:
    """Weights that a token is multiplied with: of a mixture its own experts', of the embedding none."""
    attention = c.embed * (2 * c.heads + 2 * c.kv_heads) * c.head_dim
    mlp = 3 * c.embed * c.mlp * (c.experts_per_token if c.experts else 1) + c.embed * c.experts
    return c.layers * (attention + mlp) + c.vocab * c.embed


def parameters(c: Qwen3Config) -> int:
    """All weights, norms apart."""
    return (
        products_per_token(c)
        + 3 * c.layers * c.embed * c.mlp * max(0, c.experts - c.experts_per_token)
        + (0 if c.tied else c.vocab * c.embed)
    )


def forward_flops(c: Qwen3Config, tokens: Array, context: Array) -> Array:
    """Floating-point operations of `tokens` tokens that read `context` keys in sum; a product counts two."""
    return 2 * products_per_token(c) * tokens + 4 * c.layers * c.heads * c.head_dim * context


def distinct_experts(c: Qwen3Config, tokens: Array) -> Array:
    """Experts that at least one of `tokens` tokens is sent to, expected where each chooses independently and evenly:
    E (1 - (1 - e / E)^n). Real routers are less even, and read fewer.
    """
    return c.experts * (1 - (1 - c.experts_per_token / c.experts) ** np.asarray(tokens, float))


# ---- operations


class Work(NamedTuple):
    """What one device does in an operation, or in several alike."""

    flops: Array
    weights: Array  # bytes, read once whatever the rows
    data: Array  # bytes of activations, caches, logits
    kernels: Array = 0


class Precision(NamedTuple):
    """Dtypes of the rollout: of weights and products, of keys and values, of activations."""

    weights: str = "bfloat16"
    cache: str = "bfloat16"
    activations: str = "bfloat16"


BFLOAT16 = Precision()


def seconds(work: Work, rows: Array, hardware: Hardware, dtype: str, resident: Array) -> Array:
    """Of an operation over `rows` rows whose weights are part of `resident` bytes read every iteration."""
    a = hardware.attained
    reads = np.where(np.asarray(rows) > 1, a.packing, 1.0)
    compute = work.flops / hardware.flops(dtype)
    memory = (work.weights * reads + work.data) / hardware.bandwidth(resident)
    longer, shorter = np.maximum(compute, memory), np.minimum(compute, memory)
    return longer + (1 - a.overlap) * shorter + work.kernels * a.kernel_seconds


@dataclasses.dataclass(frozen=True)
class DecoderCost:
    """The policy and its draft head as the rollout runs them: one replica of `split` devices."""

    model: Qwen3Config
    head: Eagle3Config | None  # None: drafts are copied and cost nothing on the device
    hardware: Hardware
    split: Parallelism = ONE_DEVICE
    precision: Precision = BFLOAT16
    free_verification: bool = False  # k + 1 positions cost what one does (the assumption of arXiv 2604.26779)
    # Rows of one device, sequences times positions, in the largest captured graph. vLLM captures up to 512.
    captured_rows: float = math.inf

    def plain(self, B: Array, context: Array) -> Array:
        """Seconds of a plain iteration: B sequences, one token each, that read `context` keys each."""
        return self.speculative(B, 0, context)

    def speculative(self, B: Array, k: Array, context: Array) -> Array:
        """Seconds of an iteration that drafts k tokens a sequence and verifies k + 1 positions; k = 0 is `plain`."""
        a, B, k = self.hardware.attained, np.asarray(B), np.asarray(k)
        positions = np.ones_like(k) if self.free_verification else k + 1
        drafting = self.draft(B, k, context) if self.head else (k > 0) * B * context * a.lookup_seconds
        uncaptured = rank_rows(B, self.split) * (k + 1) > self.captured_rows
        host = a.host_seconds + a.uncaptured_seconds * self.model.layers * uncaptured
        small = B * (a.sequence_seconds + positions * a.row_seconds)
        return self.forward(B, positions, context) + host + small + drafting

    def forward(self, B: Array, Q: Array, context: Array) -> Array:
        """Seconds of the policy over Q positions of B sequences with their caches, on the device."""
        c, s = self.model, self.split
        own = rank_rows(B, s)  # sequences of one device
        rows = own * Q
        layer = self._seconds(attention_products(c, rows, s, self.precision), rows)
        layer = layer + self._seconds(attention(c, own, Q, context, s, self.precision), rows, cached=False)
        layer = layer + self._seconds(self._mlp(rows, B * Q / s.pipeline), rows)
        layer = layer + self._exchange(rows)
        last = self._seconds(lm_head(c.embed, c.vocab, rows, s, self.precision), rows)
        return c.layers * layer + last + self._handed_on(rows)

    def draft(self, B: Array, k: Array, context: Array) -> Array:
        """Seconds of an EAGLE-3 head: k applications to B rows, and before them `fc` and keys of k + 1 pairs."""
        h, s, p = self.head, self.split, self.precision
        own = rank_rows(B, s)
        once = self._seconds(pairs(h, own * (k + 1), s, p), own * (k + 1), of=h)
        each = self._seconds(head_products(h, own, s, p), own, of=h)
        each = each + self._seconds(attention(h, own, 1, context, s, p), own, cached=False)
        each = each + self._seconds(lm_head(h.embed, h.draft_vocab, own, s, p), own, of=h)
        each = each + 2 * all_reduce(own * h.embed * BYTES[p.activations], s.tensor, self.hardware)
        each = each + self.hardware.attained.draft_seconds
        return np.where(np.asarray(k) > 0, once, 0.0) + k * each

    def prefill(self, tokens: Array, length: Array) -> Array:
        """Seconds of filling caches with prompts, `tokens` in all of `length` each, on one replica; no unembedding."""
        c, s = self.model, self.split
        flops = forward_flops(c, tokens, tokens * length / 2) - 2 * c.vocab * c.embed * tokens
        compute = flops / s.devices / self.hardware.flops(self.precision.weights)
        exchanged = c.layers * self._exchange(tokens / s.expert)
        return np.where(np.asarray(tokens) > 0, compute + exchanged, 0.0)

    def _mlp(self, rows: Array, group_rows: Array) -> Work:
        """Of one layer; the experts' rows come from all devices of a pipeline's stage."""
        c, s, p = self.model, self.split, self.precision
        if not c.experts:
            return product(3 * c.embed, c.mlp / s.tensor, rows, p)
        share = 1 / (s.expert * s.tensor)
        expert = 3 * c.embed * c.mlp
        return Work(
            2 * expert * group_rows * c.experts_per_token * share + 2 * rows * c.embed * c.experts,
            (expert * distinct_experts(c, group_rows) * share + c.embed * c.experts) * BYTES[p.weights],
            2 * group_rows * c.experts_per_token * (c.embed + c.mlp) * share * BYTES[p.activations],
            MIXTURE_KERNELS,
        )

    def _exchange(self, rows: Array) -> Array:
        """Seconds of one layer's collectives: two all-reduces over tensor, to the experts and back over expert."""
        c, s = self.model, self.split
        size = rows * c.embed * BYTES[self.precision.activations]
        reduces = 2 * all_reduce(size, s.tensor, self.hardware)
        if not c.experts:
            return reduces
        return reduces + 2 * all_to_all(size * c.experts_per_token, s.expert, s.devices, self.hardware)

    def _handed_on(self, rows: Array) -> Array:
        """Seconds in which a pipeline's stages pass their rows on: as many groups of them as there are stages."""
        c, s = self.model, self.split
        if s.pipeline == 1:
            return 0.0
        return s.pipeline * send(rows * c.embed * BYTES[self.precision.activations], s.devices, self.hardware)

    def _seconds(
        self, work: Work, rows: Array, cached: bool = True, of: Qwen3Config | Eagle3Config | None = None
    ) -> Array:
        """`seconds` with weights that stay in a cache if all of their model does; the key/value cache never does."""
        weights = parameters(self.model) if of is None or of is self.model else head_parameters(self.head)
        resident = weights * BYTES[self.precision.weights] if cached else np.inf
        return seconds(work, rows, self.hardware, self.precision.weights, resident)


def rank_rows(B: Array, split: Parallelism) -> Array:
    """Sequences on the fullest device: they are spread over `expert` and `pipeline`, and never cut below one."""
    B = np.asarray(B, float)
    return np.maximum(B / (split.expert * split.pipeline), np.minimum(B, 1.0))


def product(inner: Array, outer: Array, rows: Array, p: Precision) -> Work:
    """Rows times a weight of inner x outer, its activations read and written once."""
    weights = inner * outer
    return Work(2 * rows * weights, weights * BYTES[p.weights], rows * (inner + outer) * BYTES[p.activations])


def attention_products(c: Qwen3Config, rows: Array, split: Parallelism, p: Precision) -> Work:
    """q, k, v and o of one layer, with all of a layer's kernels."""
    outer = (2 * c.heads + 2 * np.maximum(c.kv_heads, split.tensor)) * c.head_dim / split.tensor
    return product(c.embed, outer, rows, p)._replace(kernels=LAYER_KERNELS)


def attention(
    c: Qwen3Config | Eagle3Config, B: Array, Q: Array, context: Array, split: Parallelism, p: Precision
) -> Work:
    """Of one layer: every sequence's keys and values are read once for its Q positions."""
    heads, kv_heads = c.heads / split.tensor, np.maximum(c.kv_heads / split.tensor, 1.0)
    read = B * context * 2 * kv_heads * c.head_dim * BYTES[p.cache]
    return Work(4 * B * Q * heads * c.head_dim * context, 0.0, read)


def lm_head(embed: int, vocab: int, rows: Array, split: Parallelism, p: Precision) -> Work:
    """Logits of all rows, written and read again in float32 to draw or verify tokens."""
    work = product(embed, vocab / split.tensor, rows, p)
    return work._replace(data=work.data + 2 * rows * vocab / split.tensor * BYTES["float32"], kernels=TAIL_KERNELS)


# ---- the draft head


def head_config(model: Qwen3Config, draft_vocab: int) -> Eagle3Config:
    """The EAGLE-3 head that goes with a policy; draft_vocab 0 is the policy's. Raises InputError: it is too shallow."""
    return eagle3_config(model, draft_vocab or model.vocab)


def head_products(h: Eagle3Config, rows: Array, split: Parallelism, p: Precision) -> Work:
    """q, o and the feed-forward of one application, and k and v of its own pair."""
    outer = (3 * h.heads + 4 * h.kv_heads) * h.head_dim + 3 * h.mlp
    return product(h.embed, outer / split.tensor, rows, p)._replace(kernels=LAYER_KERNELS)


def pairs(h: Eagle3Config, rows: Array, split: Parallelism, p: Precision) -> Work:
    """`fc` over three features, and k and v of as many pairs."""
    return product(h.embed, (3 * h.embed + 4 * h.kv_heads * h.head_dim) / split.tensor, rows, p)._replace(kernels=4)


def head_parameters(h: Eagle3Config) -> int:
    """Weights of a head, norms apart, that a drafted token is multiplied with, `fc` included."""
    per_layer = (3 * h.heads + 4 * h.kv_heads) * h.head_dim + 3 * h.mlp
    return h.embed * (per_layer + 3 * h.embed + h.draft_vocab)
