"""Adapters give a function of an engine's signature what it expects, and read what it returns."""

import dataclasses

import numpy as np
import pytest

from lossless_certify import Block, certify_sampler
from lossless_certify.adapters import SglangSampler, TransformersSampler, VllmKernelSampler, VllmSampler
from lossless_certify.distributions import draw, sampling_probs
from lossless_certify.hall import PositionKeyedBlock, RightSampler


def padded(rows, mask):
    """Return [B, n, ...] of the rows [T, ...] that a mask [B, n] selects; 0 elsewhere."""
    full = np.zeros((*mask.shape, *rows.shape[1:]), rows.dtype)
    full[mask] = rows
    return full


def verify(sampler, p, q, drafts, n, *, seed=0, position=0):
    """Verify by a sampler of `hall`, given logits after temperature; seed [B]: of a request."""
    B, zeros = len(n), np.zeros(len(n), np.int32)
    request, position = zeros + np.asarray(seed), zeros + position
    plain = zeros + np.float32(1)
    return sampler.verify(Block(drafts, n, p, q, None, plain, zeros, plain, request, 0, position, zeros))


class Stream(RightSampler):
    """Noise of a stream, as torch's generators are."""

    rng = np.random.default_rng(0)

    def noise(self, keys, stream, position, offset):
        return self.rng.random(np.broadcast_shapes(np.shape(position), np.shape(offset)))


def sample(logits, block, temperature=None):
    """Sample the bonus tokens, as vLLM's ordinary sampler does."""
    settings = (block.temperature if temperature is None else temperature, block.top_k, block.top_p)
    return draw(sampling_probs(logits, *(x[:, None] for x in settings)), Stream.rng.random(len(logits)))


def reject(ids, num_drafted, longest, ends, q, p, bonus, block):
    """Verify in the shapes of vLLM V1."""
    n = np.diff(ends, prepend=0)
    assert n.tolist() == num_drafted and longest == max(num_drafted)
    mask, rows = np.arange(longest) < n[:, None], np.arange(len(n))
    q = np.eye(p.shape[1])[ids] if q is None else q
    with np.errstate(divide="ignore"):
        p, q = np.log(padded(p, mask)), np.log(padded(q, mask))
    p = np.where(np.pad(mask, ((0, 0), (0, 1)))[..., None], np.pad(p, ((0, 0), (0, 1), (0, 0))), 0)
    q = np.where(mask[..., None], q, 0)
    tokens, count = verify(Stream(), p, q, padded(ids, mask), n)
    tokens[rows, n] = bonus[:, 0]
    return np.where(np.arange(longest + 1) < count[:, None], tokens, -1)
