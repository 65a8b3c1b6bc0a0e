"""What a validation set says of a policy: mean@n, pass@k, maj@n, a value a problem each, and intervals over problems.

`correct` is [P, n] bool: n samples of each of P problems.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000


def mean_at_n(correct: np.ndarray) -> np.ndarray:
    """[P] share of the n samples that are right: the accuracy of one sample."""
    return correct.mean(axis=1)


def pass_at_k(correct: np.ndarray, k: int) -> np.ndarray:
    """[P] chance that at least one of k samples, drawn from the n without putting back, is right: unbiased for k
    fresh samples, 1 - C(n - c, k) / C(n, k) with c right ones (Chen et al. 2107.03374, equation 1).

    Raises ValueError where k is not within 1..n.
    """
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples")
    wrong = n - correct.sum(axis=1)
    # The product of (wrong - i) / (n - i): no factorials, and 0 as soon as wrong < k.
    drawn = np.arange(k)
    return 1.0 - np.prod(np.maximum(wrong[:, None] - drawn, 0) / (n - drawn), axis=1)


def majority_at_n(correct: np.ndarray, stated: Sequence[Sequence[str | None]]) -> np.ndarray:
    """[P] chance that the answer stated most often is right; among equally frequent ones each is as likely.

    Args:
      stated: [P][n], equal texts for equal answers; None states nothing and does not vote.
    """
    return np.array([_majority(*row) for row in zip(correct, stated, strict=True)], float)


def _majority(correct: np.ndarray, stated: Sequence[str | None]) -> float:
    votes: dict[str, list[bool]] = defaultdict(list)
    for right, answer in zip(correct, stated, strict=True):
        if answer is not None:
            votes[answer].append(bool(right))
    most = max(map(len, votes.values()), default=0)
    # Equal answers are judged alike, but for a verdict that depends on how an answer was written: then its share.
    return float(np.mean([np.mean(v) for v in votes.values() if len(v) == most])) if votes else 0.0


def interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap percentile interval of the mean of `values` [P], problems drawn with putting back.

    What it says is how the mean would vary over other problems of the same kind; with few problems it is too narrow.
    """
    rng = np.random.default_rng(seed)
    means = values[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def accuracy_metrics(correct: np.ndarray, stated: Sequence[Sequence[str | None]], prefix: str) -> dict[str, float]:
    """`prefix`accuracy (mean@n) with _low and _high; where n > 1 pass_at_2, _4, ... up to n, and where anything was
    stated majority; pass_at_k is that of k = n.
    """
    n = correct.shape[1]
    found = {"accuracy": mean_at_n(correct)}
    found |= {f"pass_at_{k}": pass_at_k(correct, k) for k in _powers(n)}
    if n > 1 and any(answer is not None for row in stated for answer in row):
        found["majority"] = majority_at_n(correct, stated)
    row = {}
    for name, values in found.items():
        low, high = interval(values)
        row |= {f"{prefix}{name}": float(values.mean()), f"{prefix}{name}_low": low, f"{prefix}{name}_high": high}
    return row | {f"{prefix}pass_at_k": float(correct.any(axis=1).mean())}


def _powers(n: int) -> list[int]:
    """2, 4, 8, ... below n, and n; nothing for one sample."""
    return sorted({k for k in (2**i for i in range(1, n.bit_length())) if k < n} | {n}) if n > 1 else []
