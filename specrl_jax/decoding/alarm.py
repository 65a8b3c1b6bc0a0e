"""Detects a draft that is worthless, which is otherwise invisible: outputs stay exact and only get slower."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

from specrl_jax.serialize import Packed, pack, unpack

COLLAPSED, RECOVERED = 0.5, 0.75  # shares of the expected accepted drafts
ERROR = 1e-6  # chance of a false alarm in one decision


@dataclasses.dataclass
class Alarm:
    """Compares the accepted drafts of each step with the learner's prediction, and trips when half are missing.

    Steps accumulate until they are decisive: until E = ln(1 / ERROR) / 0.153 x `longest` accepted drafts were expected.
    By Chernoff's bound for independent verifications that accept 0 to `longest` drafts each, a healthy drafter falls
    below half with chance at most ERROR, one at a quarter of its prediction stays above half with chance at most
    ERROR ** 0.62, and one that accepts nothing is always detected.

    A prediction that is not finite trips it at once: the draft's own outputs are not.

    Without a prediction the reference is the running mean of earlier decisions. That mean must not depend on the draft
    length: then pass the acceptance of the first draft only, with longest=1.
    """

    longest: int  # most drafts that one verification can accept
    tripped: bool = False  # while True, draft in probes only; they still call `observe`
    mean: float | None = None  # accepted drafts per verification, over decisions without a collapse
    realised: float = 0.0  # accepted drafts per verification, of the last decision
    expected: float = 0.0  # the same by the reference
    pending: tuple[float, float, int] = (0.0, 0.0, 0)  # accepted, expected, verifications, since the last decision
    is_finite: bool = True  # the last prediction

    def observe(self, realised: float, predicted: float | None, verifications: int) -> bool:
        """Add one step; return True if it trips the alarm (then show `message()`).

        Args:
          realised: accepted drafts per verification that drafted.
          predicted: the learner's prediction of it at the same draft lengths, NaN where the draft's outputs are not
            finite; None: unknown.
          verifications: those that drafted.
        """
        before, self.is_finite = self.tripped, predicted is None or math.isfinite(predicted)
        if not self.is_finite:
            self.tripped, self.pending = True, (0.0, 0.0, 0)
            return not before
        reference = next((x for x in (predicted, self.mean) if x is not None), realised)
        accepted, expected, count = self.pending
        accepted, expected = accepted + realised * verifications, expected + reference * verifications
        self.pending = accepted, expected, count + verifications
        if not expected or expected < self.decisive:
            return False
        self.realised, self.expected = accepted / self.pending[2], expected / self.pending[2]
        self.pending = (0.0, 0.0, 0)
        return self._decide()

    @property
    def decisive(self) -> float:
        """Return the expected number of accepted drafts needed for one decision."""
        return self.longest * math.log(1 / ERROR) / (COLLAPSED * math.log(COLLAPSED) + 1 - COLLAPSED)

    def _decide(self) -> bool:
        collapsed = self.realised < COLLAPSED * self.expected
        if not collapsed and (not self.tripped or self.realised > RECOVERED * self.expected):
            # The mean must not follow a collapse.
            self.mean = self.realised if self.mean is None else 0.9 * self.mean + 0.1 * self.realised
        before = self.tripped
        self.tripped = self.realised <= RECOVERED * self.expected if before else collapsed
        return self.tripped and not before

    def message(self) -> str:
        """Describe the last decision in one line."""
        if not self.is_finite:
            return (
                "the draft's outputs are not finite; speculation is off apart from probes, and rollouts are the "
                "policy's own samples as before. Likely causes: draft.learning_rate, or damaged memory"
            )
        return (
            f"acceptance collapsed: {self.realised:.2f} accepted drafts per verification, {self.expected:.2f} "
            "expected; speculation is off apart from probes. Likely causes: the draft's weights were lost or not "
            "synchronised after an update, it has another tokenizer or draft vocabulary, or it reads other layer ids"
        )

    def state(self) -> dict[str, object]:
        """Return the state as JSON values."""
        return pack(self).values

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Self:
        """Rebuild the alarm of `state`."""
        return unpack(cls, Packed(state, {}))
