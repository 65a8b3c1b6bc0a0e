"""Seconds of forward passes by the roofline model, one operation at a time, from the policy's own config.

An operation that does f FLOP and moves m bytes takes

    max(f / F, m / W) + (1 - overlap) min(f / F, m / W) + kernels x kernel_seconds

with F and W the rates that the machine attains (`hardware.Attained`). Everything broadcasts: B, Q, contexts and the
machine's numbers may be arrays, one entry a configuration. Letters are those of specrl_jax.core; B counts the sequences
of one replica.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from specrl_jax.drafts.block.network import BlockConfig, block_config
from specrl_jax.drafts.eagle3.network import Eagle3Config, eagle3_config
from specrl_jax.drafts.peagle.network import PEagleConfig, peagle_config
from specrl_jax.models.qwen3 import Qwen3Config
from specrl_jax.simulator.communication import ONE_DEVICE, Parallelism, all_reduce, all_to_all
from specrl_jax.simulator.hardware import Array, Hardware
from specrl_jax.simulator.programs import MIXTURE_KERNELS

BYTES = {"float32": 4, "bfloat16": 2, "float8": 1}
STORED = {"int8": 1.0, "fp8": 1.0, "int4": 0.5}  # bytes of a weight under rollout.quantize and draft.quantize


# ---- dtypes


class Precision(NamedTuple):
    """Rollout dtypes: weights and matmuls, keys and values, activations."""

    weights: str = "bfloat16"
    cache: str = "bfloat16"
    activations: str = "bfloat16"
    quantize: str = "none"  # or a key of STORED: the matrices of the policy's layers
    lm_head: str = "none"  # or a key of STORED
    twin: str = "none"  # or a key of STORED: the policy drafts with matrices and lm_head of its own in this format

    @property
    def matrix_bytes(self) -> float:
        """Bytes of a weight in the matrices of the policy's layers."""
        return STORED.get(self.quantize, BYTES[self.weights])

    def of_twin(self) -> "Precision":
        return self._replace(quantize=self.twin, lm_head=self.twin, twin="none")


BFLOAT16 = Precision()


# ---- counts


def matmul_weights(c: Qwen3Config) -> int:
    """Count the weights in the matmuls of one token: only its own experts in a mixture, without the embedding."""
    attention = c.embed * (2 * c.heads + 2 * c.kv_heads) * c.head_dim
    mlp = 3 * c.embed * c.mlp * (c.experts_per_token if c.experts else 1) + c.embed * c.experts
    return c.layers * (attention + mlp) + c.vocab * c.embed


def parameters(c: Qwen3Config) -> int:
    """Count all weights except norms."""
    return (
        matmul_weights(c)
        + 3 * c.layers * c.embed * c.mlp * max(0, c.experts - c.experts_per_token)
        + (0 if c.tied else c.vocab * c.embed)
    )


def weight_bytes(c: Qwen3Config, p: Precision) -> float:
    """Count the bytes of the policy's weights, norms and scales excepted: tables and routers are not quantised."""
    matrices = layer_matrices(c)
    return (parameters(c) - matrices) * BYTES[p.weights] + matrices * p.matrix_bytes


def twin_bytes(c: Qwen3Config, p: Precision) -> float:
    """Count the bytes of the weights that a twin does not share with the policy; 0 without one."""
    return (layer_matrices(c) + c.vocab * c.embed) * STORED.get(p.twin, 0.0)


def layer_matrices(c: Qwen3Config) -> int:
    """Count the weights of all layers' matrices, all experts' too, without the routers."""
    return parameters(c) - (1 if c.tied else 2) * c.vocab * c.embed - c.layers * c.embed * c.experts


def forward_flops(c: Qwen3Config, tokens: Array, context: Array) -> Array:
    """Count the FLOPs of `tokens` tokens that read `context` keys in total; a multiply-add is two."""
    return 2 * matmul_weights(c) * tokens + 4 * c.layers * c.heads * c.head_dim * context


def distinct_experts(c: Qwen3Config, tokens: Array) -> Array:
    """Expected number of experts hit by `tokens` tokens under independent uniform routing: E (1 - (1 - e / E)^n).

    Real routers are less even and hit fewer.
    """
    return c.experts * (1 - (1 - c.experts_per_token / c.experts) ** np.asarray(tokens, float))


# ---- operations


class Work(NamedTuple):
    """Work of one device in an operation."""

    flops: Array
    weights: Array  # bytes, read once for any number of rows
    data: Array  # bytes of activations, caches, logits
    kernels: Array = 0

    def times(self, n: Array) -> "Work":
        """Return the work of n operations."""
        return Work(n * self.flops, n * self.weights, n * self.data, n * self.kernels)

    def of_program(self, activations: Array, kernels: Array = 0) -> "Work":
        """Return the work with so many kernels, and so many times the bytes of activations; see `Programs`."""
        return self._replace(data=self.data * activations, kernels=kernels)


class Operation(NamedTuple):
    """An operation of a head's drafts."""

    work: Work
    rows: Array
    times: Array  # in an iteration
    cached: bool = True  # weights may be read from a processor's cache


Head = Eagle3Config | PEagleConfig | BlockConfig


@dataclasses.dataclass(frozen=True)
class DecoderCost:
    """Cost of the policy and its draft head in the rollout: one replica of `split` devices."""

    model: Qwen3Config
    head: Head | None  # None: a twin (precision.twin), or lookup drafts, which cost nothing on the device
    hardware: Hardware
    split: Parallelism = ONE_DEVICE
    precision: Precision = BFLOAT16
    free_verification: bool = False  # k + 1 positions cost as much as one (assumed in arXiv 2604.26779)
    # Rows (sequences times positions) on one device in the largest CUDA graph. vLLM captures up to 512.
    captured_rows: float = math.inf

    def plain(self, B: Array, context: Array) -> Array:
        """Seconds of a plain iteration: one token for each of B sequences with `context` keys each."""
        return self.speculative(B, 0, context)

    def speculative(self, B: Array, k: Array, context: Array) -> Array:
        """Seconds to draft k tokens a sequence and verify k + 1 positions; k = 0 is `plain`."""
        a, B, k = self.hardware.attained, np.asarray(B), np.asarray(k)
        positions = np.ones_like(k) if self.free_verification else k + 1
        uncaptured = rank_rows(B, self.split) * (k + 1) > self.captured_rows
        host = a.host_seconds + a.uncaptured_seconds * self.model.layers * uncaptured
        per_row = B * (a.sequence_seconds + positions * a.row_seconds)
        return self.forward(B, positions, context) + host + per_row + self._drafting(B, k, context)

    @property
    def twin(self) -> "DecoderCost | None":
        """The policy that drafts with fewer bits, by itself."""
        p = self.precision
        return None if p.twin == "none" else dataclasses.replace(self, precision=p.of_twin())

    def _drafting(self, B: Array, k: Array, context: Array) -> Array:
        a = self.hardware.attained
        if self.head:
            return self.draft(B, k, context)
        if self.twin:
            return k * (self.twin.forward(B, 1, context) + a.draft_seconds)
        return np.zeros_like(np.asarray(k), float)

    def forward(self, B: Array, Q: Array, context: Array) -> Array:
        """Device seconds of the policy over Q positions of B sequences with their caches."""
        rows = rank_rows(B, self.split) * Q
        projections, attended, mlp, last = self._forward_work(B, Q, context)
        layer = self._seconds(projections, rows)
        layer = layer + self._seconds(attended, rows, cached=False)
        layer = layer + self._seconds(mlp, rows)
        layer = layer + self._exchange(rows)
        return self.model.layers * layer + self._seconds(last, rows)

    def iteration_bytes(self, B: Array, k: Array, context: Array) -> Array:
        """Bytes that one device reads and writes in an iteration of B sequences with `context` live tokens each."""
        layer, last, drafts = self.iteration_work(B, k, context)
        total = sum(work.weights + work.data for work in (*self.model.layers * layer, last, *drafts))
        if self.twin:
            total = total + np.asarray(k) * self.twin.iteration_bytes(B, 0, context)
        return np.asarray(total)

    def iteration_work(self, B: Array, k: Array, context: Array) -> tuple[list[Work], Work, list[Work]]:
        """Return the work of a layer, of the lm_head, and of the operations of k drafts of a head."""
        k = np.asarray(k)
        *layer, last = self._forward_work(B, k + 1, context)
        if self.head is None:
            return layer, last, []
        operations = self._draft_operations(rank_rows(B, self.split), k, context)
        return layer, last, [o.work.times(o.times) for o in operations]

    def _forward_work(self, B: Array, Q: Array, context: Array) -> tuple[Work, Work, Work, Work]:
        """Return the work of a layer's projections, attention and MLP, and of the lm_head."""
        c, s, p, programs = self.model, self.split, self.precision, self.hardware.programs
        own, more = rank_rows(B, s), np.asarray(Q) - 1  # sequences of one device; positions beyond the first
        first, further = programs.layer_activations
        layer = (first + further * more) / Q
        kernels = np.where(more > 0, *programs.layer_kernels[::-1]) + (MIXTURE_KERNELS if c.experts else 0)
        return (
            attention_projections(c, own * Q, s, p).of_program(layer, kernels),
            attention(c, own, Q, context, s, p),
            # No mixture's program has been compiled: its activations are those of its matmuls.
            self._mlp(own * Q, B * Q).of_program(1.0 if c.experts else layer),
            lm_head(c.embed, c.vocab, own * Q, s, p).of_program(programs.tail_activations, programs.tail_kernels),
        )

    def draft(self, B: Array, k: Array, context: Array) -> Array:
        """Seconds of k drafts of a head: an EAGLE-3 head is applied k times, a block drafter once over all its slots.

        Before that either goes over the k + 1 positions that the policy has read since. P-EAGLE does all in one pass.
        """
        assert self.head, "lookup drafts cost nothing on the device"
        h, own, k = self.head, rank_rows(B, self.split), np.asarray(k)
        passes, rows, launched = k, own, k
        if isinstance(h, BlockConfig | PEagleConfig):
            # One graph holds all drafts of one pass.
            passes, rows, launched = (k > 0) * h.layers, own * _slots(h, k), k > 0
        size = rows * h.embed * BYTES[self.precision.activations]
        seconds = passes * 2 * all_reduce(size, self.split.tensor, self.hardware)
        for o in self._draft_operations(own, k, context):
            seconds = seconds + o.times * self._seconds(o.work, o.rows, o.cached, of=h)
        return seconds + launched * self.hardware.attained.draft_seconds

    def _draft_operations(self, own: Array, k: Array, context: Array) -> list["Operation"]:
        h, s, p, programs = self.head, self.split, self.precision, self.hardware.programs
        assert h, "lookup drafts cost nothing on the device"
        times, drafts = programs.draft_activations, k > 0
        if isinstance(h, PEagleConfig):
            return self._peagle_operations(h, own, k, context)
        pairs = feature_pairs(h, own * (k + 1), s, p).of_program(times, programs.pair_kernels)
        read = Operation(pairs, own * (k + 1), drafts)
        if not isinstance(h, BlockConfig):
            projections = head_projections(h, own, s, p).of_program(times, programs.draft_kernels)
            last = lm_head(h.embed, h.draft_vocab, own, s, p).of_program(times)
            attended = Operation(attention(h, own, 1, context, s, p), own, k, cached=False)
            return [read, Operation(projections, own, k), attended, Operation(last, own, k)]
        rows, layers = own * h.slots, drafts * h.layers
        projections = layer_projections(h, rows, s, p).of_program(times, programs.draft_kernels)
        attended = Operation(attention(h, own, h.slots, context, s, p), own, layers, cached=False)
        last = lm_head(h.embed, h.draft_vocab, own * np.maximum(k, 1), s, p).of_program(times)
        found = [read, Operation(projections, rows, layers), attended, Operation(last, own * k, drafts)]
        if h.markov_rank:
            # A drafted token's bias of every logit, and the draw of the next, one after the other.
            markov = lm_head(h.markov_rank, h.draft_vocab, own, s, p).of_program(times, programs.tail_kernels)
            found.append(Operation(markov, own, k))
        return found

    def _peagle_operations(self, h: PEagleConfig, own: Array, k: Array, context: Array) -> list["Operation"]:
        s, p, programs = self.split, self.precision, self.hardware.programs
        times, drafts, rows = programs.draft_activations, k > 0, own * _slots(h, k)
        features = matmul(len(h.aux_layers) * h.embed, h.embed / s.tensor, own * (k + 1), p)
        first = head_projections(h, rows, s, p).of_program(times, programs.draft_kernels)
        further = layer_projections(h, rows, s, p).of_program(times, programs.draft_kernels)
        attended = Operation(attention(h, own, _slots(h, k), context, s, p), own, drafts * h.layers, cached=False)
        last = lm_head(h.embed, h.draft_vocab, own * np.maximum(k, 1), s, p).of_program(times)
        return [
            Operation(features.of_program(times, programs.pair_kernels), own * (k + 1), drafts),
            Operation(first, rows, drafts),
            Operation(further, rows, drafts * (h.layers - 1)),
            attended,
            Operation(last, own * k, drafts),
        ]

    def prefill(self, tokens: Array, length: Array) -> Array:
        """Seconds to prefill prompts of `length` tokens each, `tokens` in total, on one replica; no lm_head."""
        c, s = self.model, self.split
        flops = forward_flops(c, tokens, tokens * length / 2) - 2 * c.vocab * c.embed * tokens
        compute = flops / s.devices / self.hardware.flops(self.precision.weights)
        exchanged = c.layers * self._exchange(tokens / s.expert)
        return np.where(np.asarray(tokens) > 0, compute + exchanged, 0.0)

    def _mlp(self, rows: Array, group_rows: Array) -> Work:
        """Work of one layer's MLP; the experts process the rows of all devices, `group_rows`."""
        c, s, p = self.model, self.split, self.precision
        if not c.experts:
            return matmul(3 * c.embed, c.mlp / s.tensor, rows, p, p.matrix_bytes)
        share = 1 / (s.expert * s.tensor)
        expert = 3 * c.embed * c.mlp
        return Work(
            2 * expert * group_rows * c.experts_per_token * share + 2 * rows * c.embed * c.experts,
            expert * distinct_experts(c, group_rows) * share * p.matrix_bytes + c.embed * c.experts * BYTES[p.weights],
            2 * group_rows * c.experts_per_token * (c.embed + c.mlp) * share * BYTES[p.activations],
        )

    def _exchange(self, rows: Array) -> Array:
        """Seconds of one layer's collectives: two all-reduces over `tensor`, two all-to-alls over `expert`."""
        c, s = self.model, self.split
        size = rows * c.embed * BYTES[self.precision.activations]
        reduces = 2 * all_reduce(size, s.tensor, self.hardware)
        if not c.experts:
            return reduces
        return reduces + 2 * all_to_all(size * c.experts_per_token, s.expert, s.devices, self.hardware)

    def _seconds(self, work: Work, rows: Array, cached: bool = True, of: Head | None = None) -> Array:
        """Seconds of an operation over `rows` rows; weights, of the head `of` or the policy, are read from a cache if
        the whole model fits.
        """
        a, dtype = self.hardware.attained, self.precision.weights
        size = head_parameters(of) * BYTES[dtype] if of else weight_bytes(self.model, self.precision)
        resident = size if cached else np.inf
        reads = np.where(np.asarray(rows) > 1, a.packing, 1.0)
        compute = work.flops / self.hardware.flops(dtype)
        memory = (work.weights * reads + work.data) / self.hardware.bandwidth(resident)
        longer, shorter = np.maximum(compute, memory), np.minimum(compute, memory)
        return longer + (1 - a.overlap) * shorter + work.kernels * a.kernel_seconds


def rank_rows(B: Array, split: Parallelism) -> Array:
    """Return the sequences on the fullest device: spread over `expert`, at least one."""
    B = np.asarray(B, float)
    return np.maximum(B / split.expert, np.minimum(B, 1.0))


def matmul(inner: Array, outer: Array, rows: Array, p: Precision, stored: float = 0.0) -> Work:
    """Work of multiplying rows by a weight [inner, outer]; activations are read and written once.

    `stored`: bytes of a weight; 0: those of its dtype.
    """
    weights = inner * outer
    read = weights * (stored or BYTES[p.weights])
    return Work(2 * rows * weights, read, rows * (inner + outer) * BYTES[p.activations])


def attention_projections(c: Qwen3Config, rows: Array, split: Parallelism, p: Precision) -> Work:
    """Work of q, k, v and o of one layer."""
    outer = (2 * c.heads + 2 * np.maximum(c.kv_heads, split.tensor)) * c.head_dim / split.tensor
    return matmul(c.embed, outer, rows, p, p.matrix_bytes)


def attention(c: Qwen3Config | Head, B: Array, Q: Array, context: Array, split: Parallelism, p: Precision) -> Work:
    """Work of one layer's attention: each sequence's keys and values are read once for its Q positions."""
    heads, kv_heads = c.heads / split.tensor, np.maximum(c.kv_heads / split.tensor, 1.0)
    read = B * context * 2 * kv_heads * c.head_dim * BYTES[p.cache]
    return Work(4 * B * Q * heads * c.head_dim * context, 0.0, read)


def lm_head(embed: int, vocab: int, rows: Array, split: Parallelism, p: Precision) -> Work:
    """Work of the logits of all rows, written and read again in float32 to sample or verify tokens."""
    work = matmul(embed, vocab / split.tensor, rows, p, STORED.get(p.lm_head, 0.0))
    return work._replace(data=work.data + 2 * rows * vocab / split.tensor * BYTES["float32"])


# ---- the draft head


ONE_PASS = ("peagle", "dspark", "dflash")  # kinds that are priced as what they are, others as an EAGLE-3 head


def head_config(model: Qwen3Config, draft_vocab: int) -> Eagle3Config:
    """Return a policy's EAGLE-3 head; draft_vocab 0 is the policy's."""
    return eagle3_config(model, draft_vocab or model.vocab)


def priced_head(kind: str, model: Qwen3Config, draft_vocab: int, slots: int, layers: int) -> Head:
    """Return what a draft with weights is priced as: a new draft of one pass of its sizes, or an EAGLE-3 head."""
    if kind == "peagle":
        return peagle_config(model, layers, draft_vocab or model.vocab)
    if kind not in ONE_PASS:
        return head_config(model, draft_vocab)
    return block_config(model, slots, layers, draft_vocab or model.vocab, markov=kind == "dspark")


def head_projections(h: Eagle3Config, rows: Array, split: Parallelism, p: Precision) -> Work:
    """Work of one application: q, o, the MLP, and k and v of its own feature-token pair."""
    outer = (3 * h.heads + 4 * h.kv_heads) * h.head_dim + 3 * h.mlp
    return matmul(h.embed, outer / split.tensor, rows, p)


def layer_projections(h: BlockConfig | PEagleConfig, rows: Array, split: Parallelism, p: Precision) -> Work:
    """Work of one layer over slots: q, k, v, o and the MLP; P-EAGLE's first layer is EAGLE-3's instead."""
    outer = (2 * h.heads + 2 * h.kv_heads) * h.head_dim + 3 * h.mlp
    return matmul(h.embed, outer / split.tensor, rows, p)


def feature_pairs(h: Head, rows: Array, split: Parallelism, p: Precision) -> Work:
    """Work of `fc` over the features, and of their keys and values, for `rows` positions.

    An EAGLE-3 head's are those of a pair with a token; a block drafter has some of each layer.
    """
    kept = 2 * h.layers if isinstance(h, BlockConfig) else 4
    outer = len(h.aux_layers) * h.embed + kept * h.kv_heads * h.head_dim
    return matmul(h.embed, outer / split.tensor, rows, p)


def _slots(h: BlockConfig | PEagleConfig, k: Array) -> Array:
    """Return the positions of one sequence in a pass that drafts k tokens."""
    # P-EAGLE's k + 1 pairs, and masks for all drafts but the first.
    return h.slots if isinstance(h, BlockConfig) else 2 * np.maximum(k, 1)


def head_parameters(h: Head) -> int:
    """Count the weights in the matmuls of a head's drafts, `fc` included, without norms."""
    if isinstance(h, BlockConfig):
        per_layer = (2 * h.heads + 2 * h.kv_heads) * h.head_dim + 3 * h.mlp
        markov = h.markov_rank * h.draft_vocab
        return h.embed * (h.layers * per_layer + len(h.aux_layers) * h.embed + h.draft_vocab) + markov
    per_layer = (3 * h.heads + 4 * h.kv_heads) * h.head_dim + 3 * h.mlp
    if isinstance(h, PEagleConfig):
        per_layer += (h.layers - 1) * ((2 * h.heads + 2 * h.kv_heads) * h.head_dim + 3 * h.mlp)
    return h.embed * (per_layer + len(h.aux_layers) * h.embed + h.draft_vocab)
