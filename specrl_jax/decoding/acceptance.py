"""Running estimate of draft acceptance by position."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Self

import numpy as np

# In verifications: the weight of a prior, and the evidence below which old counts do not fade.
PRIOR, FLOOR = 8.0, 64.0
MEMORY = 2048.0  # verifications after which the weight of an observation has fallen to 1/e
SPREAD_CHUNKS = 16  # chunks that the running mean of the overdispersion covers
MAX_SQUARED_ERRORS = 36.0  # cap per chunk in that mean, so that one jump does not hide the next


def expected_tokens(accepted: np.ndarray | Sequence[float], k: int) -> np.ndarray:
    """Return [...] tokens that one verification of k drafts commits, 1 to k + 1, from a_1, a_2, ... [..., K]."""
    return 1.0 + np.asarray(accepted, float)[..., :k].sum(axis=-1)


@dataclasses.dataclass
class AcceptanceEstimate:
    """Estimates a_i, the share of verifications that accept draft i and all before it; lists are by position i."""

    tries: list[float]  # verifications that accepted all drafts before draft i; earlier ones fade
    hits: list[float]  # those of them that accepted draft i too
    # Overdispersion: variance of a chunk's share of accepted first drafts, over that of independent verifications.
    spread: float = 1.0
    predicted: list[float] = dataclasses.field(default_factory=list)  # a_1, a_2, ... by the learner

    @classmethod
    def of(cls, positions: int) -> Self:
        """Return an estimate without observations, of drafts of up to so many tokens."""
        return cls([0.0] * positions, [0.0] * positions)

    @property
    def unknown(self) -> bool:
        """Return whether there is neither an observation nor a prediction."""
        return not self.tries[0] and not self.predicted

    def cumulative(self) -> list[float]:
        """Return a_1, a_2, ...; 1 if nothing is known, so that drafting is tried once.

        Positions are estimated as ratios a_i / a_(i-1). A position without observations takes the ratio before it, and
        one observed long ago follows changes of those before it. A prediction replaces the ratio before.
        """
        ratio = self.hits[0] / self.tries[0] if self.tries and self.tries[0] else 1.0
        cumulative, before = [], 1.0
        for i, (hits, tries) in enumerate(zip(self.hits, self.tries)):
            if i < len(self.predicted):
                above = self.predicted[i - 1] if i else 1.0
                ratio = self.predicted[i] / above if above else 0.0
            ratio = (hits + PRIOR * ratio) / (tries + PRIOR)
            before *= ratio
            cumulative.append(before)
        return cumulative

    def observe(self, k: int, verifications: int, accepted: Sequence[int] | np.ndarray) -> bool:
        """Add the counts of a chunk with k drafted tokens; return whether the acceptance of a position has jumped.

        Args:
          accepted: by position, verifications that accepted this draft and all before it.
        """
        jumped = False
        reached = [verifications, *accepted]  # by position: verifications that accepted all drafts before it
        # Lookup acceptance is overdispersed: scale the threshold.
        errors = 4 * math.sqrt(max(1.0, self.spread))
        if k:
            square = _squared_errors(accepted[0], reached[0], self.hits[0], self.tries[0])
            self.spread += (min(square, MAX_SQUARED_ERRORS) - self.spread) / SPREAD_CHUNKS
        for i, (hits, tries) in enumerate(zip(self.hits, self.tries)):
            jumped = jumped or (i < k and _jumped(accepted[i], reached[i], hits, tries, errors))
            # After a jump old counts are outdated, those of later positions too.
            fade = max(math.exp(-verifications / MEMORY), min(1.0, FLOOR / tries)) if tries else 0.0
            keep = 0.0 if jumped else fade
            self.hits[i] = keep * hits + (accepted[i] if i < k else 0)
            self.tries[i] = keep * tries + (reached[i] if i < k else 0)
        return jumped


def _jumped(accepted: float, reached: float, hits: float, tries: float, errors: float) -> bool:
    """Return whether two shares differ by more than 0.1 and by `errors` standard errors (4: false alarm < 1e-4)."""
    if not reached or not tries or abs(accepted / reached - hits / tries) <= 0.1:
        return False
    return _squared_errors(accepted, reached, hits, tries) > errors**2


def _squared_errors(accepted: float, reached: float, hits: float, tries: float) -> float:
    """Return by how many standard errors two shares of independent verifications differ, squared: their deviance.

    The squared difference over its variance would be the same of many verifications. Of few, 7 kept of 10 where 0.97
    are expected, it is 24, a deviance 9, for a chance of 0.003.
    """
    if not reached or not tries:
        return 1.0
    share = (accepted + hits) / (reached + tries)
    agreed = (accepted, reached * share), (hits, tries * share)
    refused = (reached - accepted, reached * (1 - share)), (tries - hits, tries * (1 - share))
    return 2 * sum(
        observed * math.log(observed / expected) for observed, expected in (*agreed, *refused) if observed > 0
    )
