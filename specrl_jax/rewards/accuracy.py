"""Accuracy of a policy on a validation set: mean@n, pass@k, maj@n per problem, and intervals over problems.

`correct` is [P, n] bool: n samples of each of P problems.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000


def pass_at_k(correct: np.ndarray, k: int) -> np.ndarray:
    """Return [P] unbiased estimates of the chance that one of k samples is correct: 1 - C(n - c, k) / C(n, k) with c
    correct ones of n (Chen et al. 2107.03374, equation 1). Raises ValueError unless 1 <= k <= n.
    """
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples")
    wrong = n - correct.sum(axis=1)
    # The product of (wrong - i) / (n - i): no factorials, and 0 as soon as wrong < k.
    drawn = np.arange(k)
    return 1.0 - np.prod(np.maximum(wrong[:, None] - drawn, 0) / (n - drawn), axis=1)


def majority_at_n(correct: np.ndarray, extracted: Sequence[Sequence[str | None]]) -> np.ndarray:
    """Return [P] chance that the most frequent answer is correct; ties are broken at random.

    Args:
      extracted: [P][n], equal texts for equal answers; None does not vote.
    """
    return np.array([_majority(*row) for row in zip(correct, extracted, strict=True)], float)


def _majority(correct: np.ndarray, extracted: Sequence[str | None]) -> float:
    votes: dict[str, list[bool]] = defaultdict(list)
    for right, answer in zip(correct, extracted, strict=True):
        if answer is not None:
            votes[answer].append(bool(right))
    most = max(map(len, votes.values()), default=0)
    # Equal answers may be scored differently where a reward depends on how they are written: take the mean.
    return float(np.mean([np.mean(v) for v in votes.values() if len(v) == most])) if votes else 0.0


def interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % bootstrap percentile interval of the mean of `values` [P], resampling problems.

    It covers the variation over other problems of the same kind; with few problems it is too narrow.
    """
    rng = np.random.default_rng(seed)
    means = values[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def accuracy_metrics(correct: np.ndarray, extracted: Sequence[Sequence[str | None]], prefix: str) -> dict[str, float]:
    """Return the metrics `prefix`accuracy (mean@n), `prefix`pass_at_2, _4, ... n and `prefix`majority.

    Each has _low and _high. pass_at_* and majority need n > 1, majority at least one extracted answer. pass_at_k is
    pass@n.
    """
    n = correct.shape[1]
    by_name = {"accuracy": correct.mean(axis=1)}
    by_name |= {f"pass_at_{k}": pass_at_k(correct, k) for k in _powers(n)}
    if n > 1 and any(answer is not None for row in extracted for answer in row):
        by_name["majority"] = majority_at_n(correct, extracted)
    row: dict[str, float] = {}
    for name, values in by_name.items():
        low, high = interval(values)
        row |= {f"{prefix}{name}": float(values.mean()), f"{prefix}{name}_low": low, f"{prefix}{name}_high": high}
    return row | {f"{prefix}pass_at_k": float(correct.any(axis=1).mean())}


def _powers(n: int) -> list[int]:
    """Return 2, 4, 8, ... below n, and n; nothing for n = 1."""
    return sorted({k for k in (2**i for i in range(1, n.bit_length())) if k < n} | {n}) if n > 1 else []
