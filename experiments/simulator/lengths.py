"""Distributions of response lengths: many short ones, a long tail, and a limit.

Log-normal: ln X is normal with standard deviation `spread`; a response is truncated at `limit`, and E[min(X, limit)] =
`mean` fixes the location. spread = 0: all have length `mean`.
"""

import dataclasses
from typing import Protocol

import numpy as np
from scipy.special import ndtr, ndtri

from specrl_jax.errors import InputError


class ResponseLengths(Protocol):
    """A distribution of response lengths in tokens; hashable."""

    @property
    def mean(self) -> float: ...

    @property
    def limit(self) -> float: ...

    def quantile(self, share: np.ndarray) -> np.ndarray: ...

    def __hash__(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class LogNormalLengths:
    """Response lengths in tokens; the mean includes the truncated responses."""

    mean: float
    limit: float  # longest response allowed
    # Standard deviation of the log: 0.8 puts the 99th percentile at 6.4 medians. Lengths of reasoning models in RL are
    # published as long-tailed figures (Seer, arXiv 2511.14617; TLT, 2511.16665), from which 0.6 to 1.1 can be read.
    spread: float = 0.8

    def __post_init__(self) -> None:
        if not 0 < self.mean <= self.limit:
            raise InputError(
                f"--mean_tokens={self.mean:g}: a mean lies above 0 and at most at the limit {self.limit:g}"
            )

    def quantile(self, share: np.ndarray) -> np.ndarray:
        """Return the length that a share of the responses does not exceed; at least one token."""
        if self.spread == 0 or self.mean == self.limit:
            return np.full_like(np.asarray(share, float), self.mean)
        return np.clip(np.exp(self._location() + self.spread * ndtri(share)), 1.0, self.limit)

    def _location(self) -> float:
        """Find the mean of the log by bisection on E[min(X, limit)], which increases with it."""
        low, high = np.log(self.mean) - 50, np.log(self.limit) + 50
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if self._truncated_mean(middle) < self.mean else (low, middle)
        return low

    def _truncated_mean(self, location: float) -> float:
        """E[min(X, limit)] = e^(m + s^2 / 2) Phi((ln M - m - s^2) / s) + M (1 - Phi((ln M - m) / s))."""
        s, edge = self.spread, (np.log(self.limit) - location) / self.spread
        return float(np.exp(location + s * s / 2) * ndtr(edge - s) + self.limit * ndtr(-edge))


def sample(lengths: ResponseLengths, count: int, of: int, *, jitter: float = 0.0, seed: int = 0) -> np.ndarray:
    """Return [count] lengths of one replica's responses, out of `of` in the whole batch, in the order they start.

    Evenly spaced quantiles in random order; the longest is the longest of all `of`, since the phase ends with it.

    Args:
      jitter: relative standard deviation of the verifications that responses of one length need. A response with a low
        acceptance takes as long as a longer one.
    """
    rng = np.random.default_rng(seed)
    share = (np.arange(count) + 0.5) / count
    pace = np.exp(jitter * ndtri(rng.permutation(share)) - jitter**2 / 2)
    share[-1] = max(share[-1], 1 - 0.5 / of)
    return rng.permutation(lengths.quantile(share) * pace)
