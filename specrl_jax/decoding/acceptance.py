"""Running estimate of draft acceptance by position."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Self

import numpy as np

# In verifications: the weight of a prior, and the evidence below which old counts do not fade.
PRIOR, FLOOR = 8.0, 64.0
MEMORY = 2048.0  # verifications after which the weight of an observation has fallen to 1/e
# A share of a chunk that differs by so much from the estimate, both of so many verifications, makes old counts
# outdated: a head was lost or replaced. Copies come in stretches, so less is no jump.
JUMP, JUMP_EVIDENCE = 0.3, 32


def expected_tokens(accepted: np.ndarray | Sequence[float], k: int) -> np.ndarray:
    """Return [...] tokens that one verification of k drafts commits, 1 to k + 1, from a_1, a_2, ... [..., K]."""
    return 1.0 + np.asarray(accepted, float)[..., :k].sum(axis=-1)


@dataclasses.dataclass
class AcceptanceEstimate:
    """Estimates a_i, the share of verifications that accept draft i and all before it; lists are by position i."""

    tries: list[float]  # verifications that accepted all drafts before draft i; earlier ones fade
    hits: list[float]  # those of them that accepted draft i too
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
        for i, (hits, tries) in enumerate(zip(self.hits, self.tries)):
            jumped = jumped or (i < k and _jumped(accepted[i], reached[i], hits, tries))
            # After a jump old counts are outdated, those of later positions too.
            fade = max(math.exp(-verifications / MEMORY), min(1.0, FLOOR / tries)) if tries else 0.0
            keep = 0.0 if jumped else fade
            self.hits[i] = keep * hits + (accepted[i] if i < k else 0)
            self.tries[i] = keep * tries + (reached[i] if i < k else 0)
        return jumped


def _jumped(accepted: float, reached: float, hits: float, tries: float) -> bool:
    evident = min(reached, tries) >= JUMP_EVIDENCE
    return evident and abs(accepted / reached - hits / tries) > JUMP
