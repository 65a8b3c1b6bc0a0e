"""Float64 definitions for the decoding tests to compare with, written from the papers, plain and slow."""

import itertools

import numpy as np


def softmax(logits):
    logits = np.asarray(logits, np.float64)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


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


def joint(conditionals):
    """Return the joint [V, ..., V] of conditionals [V], [V, V], ... (prefix first)."""
    probs = np.ones(())
    for conditional in conditionals:
        probs = probs[..., None] * conditional
    return probs


def sequences(V, length):
    """Return every sequence, [V ** length, length] int32, in the order of `joint(...).ravel()`."""
    rows = list(itertools.product(range(V), repeat=length))
    return np.array(rows, np.int32).reshape(len(rows), length)


def flat_index(tokens, V):
    """Return the index [...] of each sequence [..., length] in `joint(...).ravel()`."""
    tokens = np.asarray(tokens, np.int64)
    return tokens @ (V ** np.arange(tokens.shape[-1])[::-1])


def rejection_chances(p, q, drafts):
    """Return rule A's acceptance probabilities [k] of drafts [k], given p [k+1, V] and q [k, V] after its prefixes."""
    return [min(1.0, p[i, x] / q[i, x]) if q[i, x] > 0 else 0.0 for i, x in enumerate(drafts)]


def block_chances(p, q, drafts):
    """Return ([k] h_i, [k+1] P_i) of rule C, Sun et al. 2403.10444, Algorithm 2."""
    k, P, h = len(drafts), [1.0], []
    for i, x in enumerate(drafts):
        P.append(min(P[-1] * p[i, x] / q[i, x], 1.0) if q[i, x] > 0 else 0.0)
    for i in range(1, k):
        S = np.maximum(P[i] * p[i] - q[i], 0).sum()
        h.append(1.0 if S + 1 - P[i] == 0 else S / (S + 1 - P[i]))
    return [*h, P[k]], P
