"""The operations of the drafts of a head (specrl_jax/drafts/sizes.py), and what it learns from."""

from typing import NamedTuple

import numpy as np

from experiments.simulator.communication import Parallelism
from experiments.simulator.counts import Precision
from experiments.simulator.operations import Work, attention, lm_head, matmul
from experiments.simulator.programs import Programs
from specrl_jax.drafts.block import BlockConfig
from specrl_jax.drafts.eagle3 import Eagle3Config, eagle3_config
from specrl_jax.drafts.peagle import PEagleConfig
from specrl_jax.drafts.sizes import Head
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.flops import Array


def head_config(model: DecoderConfig, draft_vocab: int) -> Eagle3Config:
    """Return a policy's EAGLE-3 head; draft_vocab 0 is the policy's."""
    return eagle3_config(model, draft_vocab or model.vocab)


class Operation(NamedTuple):
    """An operation of a head's drafts."""

    work: Work
    rows: Array
    times: Array  # in an iteration
    cached: bool = True  # weights may be read from a processor's cache


def draft_operations(
    h: Head, own: Array, k: Array, *, context: Array, s: Parallelism, p: Precision, programs: Programs
) -> list[Operation]:
    """Return the operations of k drafts of `own` sequences of one device."""
    times, drafts = programs.draft_activations, k > 0
    if isinstance(h, PEagleConfig):
        return _peagle_operations(h, own, k, context, s, p, programs)
    pairs = feature_pairs(h, own * (k + 1), s, p=p).of_program(times, programs.pair_kernels)
    read = Operation(pairs, own * (k + 1), drafts)
    if not isinstance(h, BlockConfig):
        projections = head_projections(h, own, s, p=p).of_program(times, programs.draft_kernels)
        last = lm_head(h.embed, h.draft_vocab, own, split=s, p=p).of_program(times)
        attended = Operation(attention(h, own, 1, context=context, split=s, p=p), own, k, cached=False)
        return [read, Operation(projections, own, k), attended, Operation(last, own, k)]
    rows, layers = own * h.slots, drafts * h.layers
    projections = layer_projections(h, rows, s, p=p).of_program(times, programs.draft_kernels)
    attended = Operation(attention(h, own, h.slots, context=context, split=s, p=p), own, layers, cached=False)
    last = lm_head(h.embed, h.draft_vocab, own * np.maximum(k, 1), split=s, p=p).of_program(times)
    found = [read, Operation(projections, rows, layers), attended, Operation(last, own * k, drafts)]
    if h.markov_rank:
        # A drafted token's bias of every logit, and the draw of the next, one after the other.
        markov = lm_head(h.markov_rank, h.draft_vocab, own, split=s, p=p).of_program(times, programs.tail_kernels)
        found.append(Operation(markov, own, k))
    return found


def _peagle_operations(
    h: PEagleConfig, own: Array, k: Array, context: Array, s: Parallelism, p: Precision, programs: Programs
) -> list[Operation]:
    times, drafts, rows = programs.draft_activations, k > 0, own * pass_positions(h, k)
    features = matmul(len(h.aux_layers) * h.embed, h.embed / s.tensor, own * (k + 1), p=p)
    first = head_projections(h, rows, s, p=p).of_program(times, programs.draft_kernels)
    further = layer_projections(h, rows, s, p=p).of_program(times, programs.draft_kernels)
    attended = Operation(
        attention(h, own, pass_positions(h, k), context=context, split=s, p=p), own, drafts * h.layers, cached=False
    )
    last = lm_head(h.embed, h.draft_vocab, own * np.maximum(k, 1), split=s, p=p).of_program(times)
    return [
        Operation(features.of_program(times, programs.pair_kernels), own * (k + 1), drafts),
        Operation(first, rows, drafts),
        Operation(further, rows, drafts * (h.layers - 1)),
        attended,
        Operation(last, own * k, drafts),
    ]


def head_projections(h: Eagle3Config, rows: Array, split: Parallelism, *, p: Precision) -> Work:
    """Work of one application: q, o, the MLP, and k and v of its own feature-token pair."""
    outer = (3 * h.heads + 4 * h.kv_heads) * h.head_dim + 3 * h.mlp
    return matmul(h.embed, outer / split.tensor, rows, p=p)


def layer_projections(h: BlockConfig | PEagleConfig, rows: Array, split: Parallelism, *, p: Precision) -> Work:
    """Work of one layer over slots: q, k, v, o and the MLP; P-EAGLE's first layer is EAGLE-3's instead."""
    outer = (2 * h.heads + 2 * h.kv_heads) * h.head_dim + 3 * h.mlp
    return matmul(h.embed, outer / split.tensor, rows, p=p)


def feature_pairs(h: Head, rows: Array, split: Parallelism, *, p: Precision) -> Work:
    """Work of `fc` over the features, and of their keys and values, for `rows` positions.

    An EAGLE-3 head's are those of a pair with a token; a block drafter has some of each layer.
    """
    kept = 2 * h.layers if isinstance(h, BlockConfig) else 4
    outer = len(h.aux_layers) * h.embed + kept * h.kv_heads * h.head_dim
    return matmul(h.embed, outer / split.tensor, rows, p=p)


def pass_positions(h: BlockConfig | PEagleConfig, k: Array) -> Array:
    """Return the positions of one sequence in a pass that drafts k tokens."""
    # P-EAGLE's k + 1 pairs, and masks for all drafts but the first.
    return h.slots if isinstance(h, BlockConfig) else 2 * np.maximum(k, 1)


def learned_positions(h: Head, steps: int, stride: int) -> tuple[float, float]:
    """Return the positions of a head's layers and of its lm_head in training, for each token of the text.

    An EAGLE-3 head goes over the text once for each of `steps` drafts. The others make all drafts in one pass, behind
    every `stride`-th token: P-EAGLE's has the text and steps - 1 masks behind such a token, a block drafter's the slots
    of a block, however few of them are learned.
    """
    if isinstance(h, BlockConfig):
        return h.slots / stride, steps / stride
    if isinstance(h, PEagleConfig):
        return 1 + (steps - 1) / stride, steps / stride
    return steps, steps
