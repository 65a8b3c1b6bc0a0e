"""Seconds of forward passes by the roofline model, one operation at a time, from the policy's own config.

An operation that does f FLOP and moves m bytes takes

    max(f / F, m / W) + (1 - overlap) min(f / F, m / W) + kernels x kernel_seconds

with F and W the rates that the machine attains (`hardware.Attained`). Everything broadcasts: B, Q, contexts and the
machine's numbers may be arrays, one entry a configuration. Letters are those of specrl_jax.core; B counts the sequences
of one replica.
"""

import dataclasses
import math

import numpy as np

from experiments.simulator.communication import ONE_DEVICE, Parallelism, all_reduce, all_to_all
from experiments.simulator.counts import BFLOAT16, Precision, distinct_experts, weight_bytes
from experiments.simulator.hardware import Hardware
from experiments.simulator.heads import Operation, draft_operations, pass_positions
from experiments.simulator.operations import Work, attention, attention_projections, lm_head, matmul, rank_rows
from experiments.simulator.programs import MIXTURE_KERNELS
from specrl_jax.drafts.block import BlockConfig
from specrl_jax.drafts.peagle import PEagleConfig
from specrl_jax.drafts.sizes import Head, head_parameters
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.flops import BYTES, Array, forward_flops


@dataclasses.dataclass(frozen=True)
class DecoderCost:
    """Cost of the policy and its draft head in the rollout: one replica of `split` devices."""

    model: DecoderConfig
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
        operations = self._drafts(self.head, rank_rows(B, self.split), k, context)
        return layer, last, [o.work.times(o.times) for o in operations]

    def _forward_work(self, B: Array, Q: Array, context: Array) -> tuple[Work, Work, Work, Work]:
        """Return the work of a layer's projections, attention and MLP, and of the lm_head."""
        c, s, p, programs = self.model, self.split, self.precision, self.hardware.programs
        own, more = rank_rows(B, s), np.asarray(Q) - 1  # sequences of one device; positions beyond the first
        first, further = programs.layer_activations
        layer = (first + further * more) / Q
        kernels = np.where(more > 0, *programs.layer_kernels[::-1]) + (MIXTURE_KERNELS if c.experts else 0)
        return (
            attention_projections(c, own * Q, s, p=p).of_program(layer, kernels),
            attention(c, own, Q, context=context, split=s, p=p),
            # No mixture's program has been compiled: its activations are those of its matmuls.
            self._mlp(own * Q, B * Q).of_program(1.0 if c.experts else layer),
            lm_head(c.embed, c.vocab, own * Q, split=s, p=p).of_program(
                programs.tail_activations, programs.tail_kernels
            ),
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
            passes, rows, launched = (k > 0) * h.layers, own * pass_positions(h, k), k > 0
        size = rows * h.embed * BYTES[self.precision.activations]
        seconds = passes * 2 * all_reduce(size, self.split.tensor, self.hardware)
        for o in self._drafts(h, own, k, context):
            seconds = seconds + o.times * self._seconds(o.work, o.rows, o.cached, of=h)
        return seconds + launched * self.hardware.attained.draft_seconds

    def _drafts(self, h: Head, own: Array, k: Array, context: Array) -> list[Operation]:
        return draft_operations(
            h, own, k, context=context, s=self.split, p=self.precision, programs=self.hardware.programs
        )

    def prefill(self, tokens: Array, length: Array) -> Array:
        """Seconds to prefill prompts of `length` tokens each, `tokens` in total, on one replica; no lm_head."""
        c, s = self.model, self.split
        flops = forward_flops(c, tokens, tokens * length / 2) - 2 * c.vocab * c.embed * tokens
        compute = flops / s.devices / self.hardware.flops(self.precision.weights)
        exchanged = c.layers * self._exchange(tokens / s.expert)
        return np.where(np.asarray(tokens) > 0, compute + exchanged, 0.0)

    def verification(self, tokens: Array, length: Array) -> Array:
        """Seconds to verify texts of `length` tokens each, `tokens` in total, on one replica: a prefill with logits."""
        c, s = self.model, self.split
        rows = rank_rows(tokens, s)
        return self.prefill(tokens, length) + self._seconds(
            lm_head(c.embed, c.vocab, rows, split=s, p=self.precision), rows
        )

    def _mlp(self, rows: Array, group_rows: Array) -> Work:
        """Work of one layer's MLP; the experts process the rows of all devices, `group_rows`."""
        c, s, p = self.model, self.split, self.precision
        if not c.experts:
            return matmul(3 * c.embed, c.mlp / s.tensor, rows, p=p, stored=p.matrix_bytes)
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
        return reduces + 2 * all_to_all(size * c.experts_per_token, s.expert, s.devices, hardware=self.hardware)

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
