"""How long responses are: many short ones, a long tail, and a limit.

ln X is normal with standard deviation `spread`; a response is cut at `limit`, so E[min(X, limit)] = `mean` fixes the
other parameter. spread = 0: all are `mean` long.
"""

import dataclasses

import numpy as np
from scipy.special import ndtr, ndtri

from specrl_jax.core import InputError


@dataclasses.dataclass(frozen=True)
class LogNormalLengths:
    """Tokens of responses, the limit's share included in the mean."""

    mean: float
    limit: float  # the most a response gets
    # Standard deviation of the log: 0.8 puts the 99th percentile at 6.4 medians. LogNormalLengths of reasoning models in RL are
    # published as long-tailed figures (Seer, arXiv 2511.14617; TLT, 2511.16665), from which 0.6 to 1.1 can be read.
    spread: float = 0.8

    def __post_init__(self) -> None:
        if not 0 < self.mean <= self.limit:
            raise InputError(
                f"--mean_tokens={self.mean:g}: a mean lies above 0 and at most at the limit {self.limit:g}"
            )

    def quantile(self, share: np.ndarray) -> np.ndarray:
        """Tokens that a share of the responses does not exceed; at least one."""
        if self.spread == 0 or self.mean == self.limit:
            return np.full_like(np.asarray(share, float), self.mean)
        return np.clip(np.exp(self._location() + self.spread * ndtri(share)), 1.0, self.limit)

    def _location(self) -> float:
        """Mean of the log, by bisection on E[min(X, limit)], which rises with it."""
        low, high = np.log(self.mean) - 50, np.log(self.limit) + 50
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if self._cut_mean(middle) < self.mean else (low, middle)
        return low

    def _cut_mean(self, location: float) -> float:
        """E[min(X, limit)] = e^(m + s^2 / 2) Phi((ln M - m - s^2) / s) + M (1 - Phi((ln M - m) / s))."""
        s, edge = self.spread, (np.log(self.limit) - location) / self.spread
        return float(np.exp(location + s * s / 2) * ndtr(edge - s) + self.limit * ndtr(-edge))


@dataclasses.dataclass(frozen=True)
class EmpiricalLengths:
    """Tokens of responses that were counted, scaled to another mean."""

    counted: tuple[int, ...]
    mean: float
    limit: float

    def quantile(self, share: np.ndarray) -> np.ndarray:
        drawn = np.quantile(self.counted, share) * self.mean / np.mean(self.counted)
        return np.clip(drawn, 1.0, self.limit)


# Either
ResponseLengths = LogNormalLengths | EmpiricalLengths


def sample(lengths: ResponseLengths, count: int, of: int, jitter: float = 0.0, seed: int = 0) -> np.ndarray:
    """[count] tokens of one of the replicas that `of` responses are dealt to, in the order they are started.

    Evenly spread quantiles in random order; the longest is the longest of all `of`, since the phase ends with it.
    `jitter`, as a share, is how far a response's own pace lies from the mean: one whose drafts are refused more often
    takes as long as a longer one.
    """
    rng = np.random.default_rng(seed)
    share = (np.arange(count) + 0.5) / count
    pace = np.exp(jitter * ndtri(rng.permutation(share)) - jitter**2 / 2)
    share[-1] = max(share[-1], 1 - 0.5 / of)
    return rng.permutation(lengths.quantile(share) * pace)
