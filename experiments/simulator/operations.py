"""FLOP and bytes of the operations of a policy's forward pass, on one device."""

from typing import NamedTuple

import numpy as np

from experiments.simulator.communication import Parallelism
from experiments.simulator.counts import Precision
from specrl_jax.drafts.sizes import Head
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.flops import BYTES, STORED, Array


class Work(NamedTuple):
    """Work of one device in an operation."""

    flops: Array
    weights: Array  # bytes, read once for any number of rows
    data: Array  # bytes of activations, caches, logits
    kernels: Array = 0

    def times(self, n: Array) -> "Work":
        """Return the work of n operations."""
        return Work(n * self.flops, n * self.weights, n * self.data, kernels=n * self.kernels)

    def of_program(self, activations: Array, kernels: Array = 0) -> "Work":
        """Return the work with so many kernels, and so many times the bytes of activations; see `Programs`."""
        return self._replace(data=self.data * activations, kernels=kernels)


def rank_rows(B: Array, split: Parallelism) -> Array:
    """Return the sequences on the fullest device: spread over `expert`, at least one."""
    B = np.asarray(B, float)
    return np.maximum(B / split.expert, np.minimum(B, 1.0))


def matmul(inner: Array, outer: Array, rows: Array, *, p: Precision, stored: float = 0.0) -> Work:
    """Work of multiplying rows by a weight [inner, outer]; activations are read and written once.

    `stored`: bytes of a weight; 0: those of its dtype.
    """
    weights = inner * outer
    read = weights * (stored or BYTES[p.weights])
    return Work(2 * rows * weights, read, rows * (inner + outer) * BYTES[p.activations])


def attention_projections(c: DecoderConfig, rows: Array, split: Parallelism, *, p: Precision) -> Work:
    """Work of q, k, v and o of one layer."""
    outer = (2 * c.heads + 2 * np.maximum(c.kv_heads, split.tensor)) * c.head_dim / split.tensor
    return matmul(c.embed, outer, rows, p=p, stored=p.matrix_bytes)


def attention(c: DecoderConfig | Head, B: Array, Q: Array, *, context: Array, split: Parallelism, p: Precision) -> Work:
    """Work of one layer's attention: each sequence's keys and values are read once for its Q positions."""
    heads, kv_heads = c.heads / split.tensor, np.maximum(c.kv_heads / split.tensor, 1.0)
    read = B * context * 2 * kv_heads * c.head_dim * BYTES[p.cache]
    return Work(4 * B * Q * heads * c.head_dim * context, 0.0, read)


def lm_head(embed: int, vocab: int, rows: Array, *, split: Parallelism, p: Precision) -> Work:
    """Work of the logits of all rows, written and read again in float32 to sample or verify tokens."""
    work = matmul(embed, vocab / split.tensor, rows, p=p, stored=STORED.get(p.lm_head, 0.0))
    return work._replace(data=work.data + 2 * rows * vocab / split.tensor * BYTES["float32"])
