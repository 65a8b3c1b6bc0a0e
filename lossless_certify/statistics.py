"""Decide whether counts follow a distribution, with both error rates fixed before anything is drawn.

Two statistics of N independent draws with K outcomes are compared, each with half of the chance of a false alarm:

Total variation of the empirical distribution. A right sampler reaches e with chance at most 2^K exp(-2 N e^2): it is
the largest excess over the 2^K events, each of which has Hoeffding's bound. A distribution that is d off stays below e
with chance at most exp(-2 N (d - e)^2), by the event that is d off. These two give the number of draws.

Relative entropy of the empirical distribution, sharper for a fault in few or rare outcomes. A right sampler reaches
t / N, t > K - 1, with chance at most exp(-t) (e t / (K - 1))^(K - 1) (Agrawal 2019, arXiv 1904.02291, theorem I.2).

Both bounds hold for every number of draws: no expected count is too small, and nothing is pooled. Rounding may give
impossible outcomes a chance: float32 uniforms are zero once in 2^24. Together they are allowed `ROUNDING`.
"""

import dataclasses
import math

import numpy as np
import scipy.optimize

from lossless_certify.errors import CertifyError

ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class Rates:
    """Error rates of one comparison."""

    false_alarm: float  # chance that a right sampler fails it, at most
    miss: float = 0.01  # chance that one which is `detectable` off passes it, at most


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Counts against a distribution."""

    draws: int
    total_variation: float
    total_variation_limit: float
    detectable: float  # total variation that is found with chance 1 - Rates.miss
    relative_entropy: float = 0.0  # nats
    relative_entropy_limit: float = math.inf
    impossible: int = 0  # draws of outcomes that have no chance

    @property
    def passed(self) -> bool:
        """Return whether both statistics are below their limits."""
        within = self.total_variation < self.total_variation_limit
        return within and self.relative_entropy < self.relative_entropy_limit

    @property
    def statistic(self) -> str:
        """Return the statistic that is furthest beyond, or nearest to, its limit, in words."""
        if self.impossible and not self.passed:
            return f"{self.impossible} draws of outcomes that have no chance"
        entropy = self.relative_entropy / self.relative_entropy_limit
        if entropy > self.total_variation / self.total_variation_limit:
            return f"relative entropy {self.relative_entropy:.2e}, limit {self.relative_entropy_limit:.2e} nats"
        return f"total variation {self.total_variation:.4f}, limit {self.total_variation_limit:.4f}"


def variation_limit(outcomes: int, draws: int, false_alarm: float) -> float:
    """Return the total variation that `draws` of the right distribution reach with chance at most `false_alarm`."""
    return math.sqrt((outcomes * math.log(2) + math.log(1 / false_alarm)) / (2 * draws))


def entropy_limit(outcomes: int, draws: int, false_alarm: float) -> float:
    """Return the relative entropy, in nats, that they reach with chance at most `false_alarm`; 2 outcomes or more."""
    free = max(outcomes - 1, 1)

    def excess(t: float) -> float:
        return t - free - free * math.log(t / free) - math.log(1 / false_alarm)

    top = 2 * free + 4 * math.log(1 / false_alarm) + 10
    return scipy.optimize.brentq(excess, free, top) / draws


def detectable_variation(outcomes: int, draws: int, rates: Rates) -> float:
    """Return the total variation that is found with chance 1 - rates.miss."""
    limit = variation_limit(outcomes, draws, rates.false_alarm / 2)
    return limit + math.sqrt(math.log(1 / rates.miss) / (2 * draws))


def draws_needed(outcomes: int, distance: float, rates: Rates) -> int:
    """Return the draws with which a total variation of `distance` is found with chance 1 - rates.miss.

    One more outcome is allowed for: what is none of them.
    """
    return math.ceil(detectable_variation(outcomes + 1, 1, rates) ** 2 / distance**2)


def compare(outcomes: np.ndarray, probs: np.ndarray, rates: Rates) -> Comparison:
    """Compare outcomes [N] int with their probabilities [K] float64.

    Raises:
      CertifyError: the probabilities do not sum to one.
    """
    probs = np.asarray(probs, np.float64).ravel()
    if (probs < 0).any() or not abs(probs.sum() - 1) < 1e-9:
        raise CertifyError(f"probabilities that sum to {probs.sum():.6g}, where a distribution was wanted")
    outcomes = np.minimum(np.asarray(outcomes).ravel(), len(probs))  # those that are no outcome are one more
    probs = np.append(probs, 0.0)
    none = probs == 0
    expected = np.where(none, ROUNDING / none.sum(), probs * (1 - ROUNDING))
    counts = np.bincount(outcomes, minlength=len(probs))
    drawn, share = counts > 0, counts / len(outcomes)
    entropy = float((share[drawn] * np.log(share[drawn] / expected[drawn])).sum())
    draws, half = len(outcomes), rates.false_alarm / 2
    return Comparison(
        draws=draws,
        total_variation=total_variation(outcomes, expected),
        total_variation_limit=variation_limit(len(probs), draws, half),
        detectable=detectable_variation(len(probs), draws, rates),
        relative_entropy=entropy,
        relative_entropy_limit=entropy_limit(len(probs), draws, half),
        impossible=int(counts[none].sum()),
    )


def total_variation(outcomes: np.ndarray, probs: np.ndarray) -> float:
    """Return the total variation between outcomes [N] int, below K, and probabilities [K] float64."""
    share = np.bincount(np.asarray(outcomes).ravel(), minlength=len(probs)) / np.size(outcomes)
    return 0.5 * float(np.abs(share - probs).sum())


def compare_samples(first: np.ndarray, second: np.ndarray, *, outcomes: int, rates: Rates) -> Comparison:
    """Compare outcomes [N] int of two samples of one size; relative entropy is not used.

    An event's difference of two shares is a sum of 2 N terms, each within a range of 1 / N, so it has Hoeffding's bound
    exp(-N e^2): that of N / 2 draws of a known distribution.
    """
    shares = [np.bincount(x, minlength=outcomes) / len(x) for x in (first, second)]
    distance = 0.5 * float(np.abs(shares[0] - shares[1]).sum())
    return Comparison(
        draws=len(first),
        total_variation=distance,
        total_variation_limit=variation_limit(outcomes, len(first) // 2, rates.false_alarm / 2),
        detectable=detectable_variation(outcomes, len(first) // 2, rates),
    )


def affordable_distance(seconds: float, minutes: float, what: str) -> float:
    """Return the total variation that can be found in `minutes`, where one of 1 takes `seconds`.

    Raises:
      CertifyError: none below 0.5.
    """
    distance = math.sqrt(seconds / (60 * minutes))
    if distance > 0.5:
        raise CertifyError(f"{minutes:.3g} minutes: this {what} needs at least {4 * seconds / 60:.3g}")
    return distance
