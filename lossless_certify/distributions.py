"""Probabilities in float64: the sampling distribution of logits, and the joint distribution of tokens."""

import itertools

import numpy as np


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the float64 softmax over the last axis; -inf is probability zero."""
    logits = np.asarray(logits, np.float64)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def sampling_probs(
    logits: np.ndarray,
    temperature: np.ndarray | float,
    *,
    top_k: np.ndarray | int = 0,
    top_p: np.ndarray | float = 1.0,
) -> np.ndarray:
    """Return the distribution [..., V] that a token is sampled from: temperature, then top-k, then top-p.

    Top-p keeps each token before which less than top_p of the mass lies, so at least one; of equally likely tokens the
    lowest ids are kept. At temperature 0 the likeliest token is certain.

    Args:
      logits: [..., V].
      temperature, top_k (0: off), top_p (1: off): numbers, or arrays that broadcast to [..., 1].
    """
    temperature, top_k, top_p = (np.asarray(x) for x in (temperature, top_k, top_p))
    if (temperature == 1).all() and (top_k == 0).all() and (top_p >= 1).all():
        return softmax(logits)
    greedy = temperature == 0
    probs = softmax(np.asarray(logits, np.float64) / np.where(greedy, 1, temperature))
    if greedy.any() or (top_k > 0).any() or (top_p < 1).any():
        order = np.argsort(-probs, axis=-1, kind="stable")
        ranked = np.take_along_axis(probs, order, axis=-1)
        place = np.arange(probs.shape[-1])
        ranked = np.where(place < np.where(greedy, 1, np.where(top_k > 0, top_k, probs.shape[-1])), ranked, 0)
        ranked /= ranked.sum(axis=-1, keepdims=True)
        ranked = np.where(np.cumsum(ranked, axis=-1) - ranked < top_p, ranked, 0)
        np.put_along_axis(probs, order, ranked / ranked.sum(axis=-1, keepdims=True), axis=-1)
    return probs


def spread(probs: np.ndarray, vocab_map: np.ndarray | None, V: int) -> np.ndarray:
    """Return [..., V] probabilities of target ids from [..., Vd] of the draft's ids."""
    if vocab_map is None:
        return probs
    full = np.zeros((*probs.shape[:-1], V), probs.dtype)
    full[..., vocab_map] = probs
    return full


def draw(weights: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return indices [...] drawn in proportion to weights [..., V] by the inverse CDF at uniforms [...] in [0, 1)."""
    edges = np.cumsum(weights, axis=-1)
    return (edges <= (uniforms * edges[..., -1])[..., None]).sum(axis=-1).clip(max=weights.shape[-1] - 1)


def joint(conditionals: list[np.ndarray]) -> np.ndarray:
    """Return the joint distribution [V, ..., V] of conditionals [V], [V, V], ... (prefix first)."""
    probs = np.ones(())
    for conditional in conditionals:
        probs = probs[..., None] * conditional
    return probs


def sequences(V: int, length: int) -> np.ndarray:
    """Return every sequence, [V ** length, length] int32, in the order of `joint(...).ravel()`."""
    rows = list(itertools.product(range(V), repeat=length))
    return np.array(rows, np.int32).reshape(len(rows), length)


def flat_index(tokens: np.ndarray, V: int) -> np.ndarray:
    """Return the index [...] of each sequence [..., length] in `joint(...).ravel()`."""
    tokens = np.asarray(tokens, np.int64)
    return tokens @ (V ** np.arange(tokens.shape[-1])[::-1])


def rejection_chances(p: np.ndarray, q: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """Return the chances [N, k] to keep each of drafts [N, k], given p [N, k + 1, V] and q [N, k, V] along them.

    Leviathan, Kalman, Matias 2211.17192: min(1, p(x) / q(x)); 0 where the draft never drafts x.
    """
    p_x, q_x = (np.take_along_axis(x, drafts[..., None], axis=-1)[..., 0] for x in (p[:, : drafts.shape[1]], q))
    return np.minimum(1, np.divide(p_x, q_x, out=np.zeros_like(p_x), where=q_x > 0))


def block_chances(p: np.ndarray, q: np.ndarray, drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (h [N, k], P [N, k + 1]) of block verification: Sun et al. 2403.10444, Algorithm 2.

    h_i is the chance with which a block is kept up to token i or further, each i with a uniform of its own; after a
    block of i tokens the next is drawn in proportion to max(P_i p - q, 0).
    """
    k = drafts.shape[1]
    P, h = np.ones((len(drafts), k + 1)), np.ones((len(drafts), k))
    p_x, q_x = (np.take_along_axis(x, drafts[..., None], axis=-1)[..., 0] for x in (p[:, :k], q))
    for i in range(k):
        ratio = np.divide(p_x[:, i], q_x[:, i], out=np.zeros_like(p_x[:, i]), where=q_x[:, i] > 0)
        P[:, i + 1] = np.minimum(P[:, i] * ratio, 1)
    for i in range(1, k):
        excess = np.maximum(P[:, i, None] * p[:, i] - q[:, i], 0).sum(axis=-1)
        total = excess + 1 - P[:, i]
        h[:, i - 1] = np.divide(excess, total, out=np.ones_like(total), where=total > 0)
    h[:, k - 1 :] = P[:, k:]
    return h, P


def accepted_distribution(rule: str, drafts: np.ndarray, *, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the distribution [N, k + 1] of the number of tokens that `rejection` or `block` keeps of drafts [N, k]."""
    k = drafts.shape[1]
    if rule == "block":
        h = block_chances(p, q, drafts)[0]
        kept = [np.prod(1 - h[:, n:], axis=1) * (h[:, n - 1] if n else 1) for n in range(k + 1)]
    else:
        h = rejection_chances(p, q, drafts)
        kept = [np.prod(h[:, :n], axis=1) * (1 - h[:, n] if n < k else 1) for n in range(k + 1)]
    return np.stack(kept, axis=1)
