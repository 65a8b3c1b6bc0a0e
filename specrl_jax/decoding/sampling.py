"""Options of sampling and verification."""

import dataclasses

from kernels_pallas.verify.limits import MOST_KEPT
from specrl_jax.errors import InputError

# Verification rules, defined in `kernels_pallas.verify.reference`.
RULES = ("rejection", "block", "coupled")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k, then top-p. temperature 0 = greedy, top_k 0 = off, top_p 1.0 = off; rule: of RULES.

    top_p without top_k chooses among the MOST_KEPT = 512 likeliest tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    rule: str = "rejection"

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < float("inf") and 0 <= self.top_k <= MOST_KEPT and 0 < self.top_p <= 1):
            raise InputError(
                f"rollout: temperature >= 0, top_k of 0 to {MOST_KEPT} and 0 < top_p <= 1 are needed, not {self}"
            )
        if self.rule not in RULES:
            raise InputError(f"rollout.rule={self.rule!r}: it is one of {', '.join(RULES)}")
