"""Float64 definitions for the decoding tests to compare with, written from the papers, plain and slow."""

import numpy as np

from lossless_certify.distributions import softmax


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def kept(logits, temperature, top_k, top_p):
    """Return [V] bool: the tokens that top-k (512 where only top-p is on), then top-p, keep; ties by the lowest id."""
    logits = np.asarray(logits, np.float32)
    # The division is float32 in the code under test.
    scaled = (logits / np.float32(temperature)).astype(np.float64)
    order = np.argsort(-logits, kind="stable")
    if top_k or top_p < 1:
        order = order[: top_k or 512]
    if top_p < 1:
        mass_before = np.cumsum(softmax(scaled[order])) - softmax(scaled[order])
        order = order[mass_before < top_p]
    return np.isin(np.arange(len(logits)), order)


def final_probs(logits, sampling):
    """Return the distribution [..., V] that a token is sampled from, given logits [..., V]."""
    logits = np.asarray(logits, np.float64)
    rows = logits.reshape(-1, logits.shape[-1])
    keep = np.stack([kept(row, sampling.temperature, sampling.top_k, sampling.top_p) for row in rows])
    return softmax(np.where(keep, rows / sampling.temperature, -np.inf)).reshape(logits.shape)
