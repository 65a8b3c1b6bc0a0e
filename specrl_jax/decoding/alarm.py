"""Notices when the drafts' acceptance collapses: drafting goes on losslessly, only slower, so nothing else would."""

import dataclasses
import math
from typing import Any

COLLAPSED, RECOVERED = 0.5, 0.75  # of what was expected


@dataclasses.dataclass
class Alarm:
    """Compares the accepted drafts of each step with what the learner predicted, and trips when half are missing.

    Steps are added up until they are decisive, that is until E = ln(1 / error) / 0.153 x `longest` accepted drafts were
    expected. Chernoff's bound for verifications that accept 0 to `longest` drafts each, taken as independent:
    a healthy drafter falls below half with chance at most `error`, one at a quarter of its prediction stays above half
    with chance at most error ** 0.62, and one that accepts nothing is always seen.

    Without a prediction the reference is the running mean of earlier decisions. The length must not move that mean:
    then give the first draft's acceptance alone, with longest=1.
    """

    longest: int  # drafts that one verification can accept
    error: float = 1e-6  # chance of a false alarm in one decision
    patience: int = 1  # collapsed decisions in a row that trip it
    tripped: bool = False  # while True, draft in probes only; they keep feeding `observe`
    mean: float | None = None  # accepted drafts per verification, over decisions that were no collapse
    realised: float = 0.0  # accepted drafts per verification, of the last decision
    expected: float = 0.0  # the same, by its reference
    collapses: int = 0  # in a row
    pending: tuple[float, float, int] = (0.0, 0.0, 0)  # accepted, expected, verifications, since the last decision

    def observe(self, realised: float, predicted: float | None, verifications: int) -> bool:
        """One step; True where it trips the alarm, which is when to show `message()`.

        Args:
          realised: accepted drafts per verification that drafted.
          predicted: the same at the same lengths, by the learner; None where it does not know.
          verifications: that drafted; 0 is no evidence.
        """
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
        """Expected accepted drafts that one decision needs."""
        return self.longest * math.log(1 / self.error) / (COLLAPSED * math.log(COLLAPSED) + 1 - COLLAPSED)

    def _decide(self) -> bool:
        collapsed = self.realised < COLLAPSED * self.expected
        self.collapses = self.collapses + 1 if collapsed else 0
        if not collapsed and (not self.tripped or self.realised > RECOVERED * self.expected):
            # A collapse must not become the new normal.
            self.mean = self.realised if self.mean is None else 0.9 * self.mean + 0.1 * self.realised
        before = self.tripped
        threshold = RECOVERED * self.expected
        self.tripped = self.realised <= threshold if before else self.collapses >= self.patience
        return self.tripped and not before

    def message(self) -> str:
        """One line about the last decision, for people."""
        return (
            f"acceptance collapsed: {self.realised:.2f} accepted drafts per verification, {self.expected:.2f} "
            "expected; speculation is off apart from probes. Likely causes: the draft's weights were lost or not "
            "synchronised after an update, it has another tokenizer or draft vocabulary, or it reads other layer ids"
        )

    def state(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return dataclasses.asdict(self) | {"pending": list(self.pending)}

    @classmethod
    def restore(cls, state: dict[str, Any]) -> "Alarm":
        return cls(**state | {"pending": tuple(state["pending"])})
