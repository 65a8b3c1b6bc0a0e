"""Protocol by which the engine asks environments to answer the turns of a rollout."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Turn(NamedTuple):
    """A turn that the policy has ended."""

    request: int  # of the call, prompt-major
    tokens: np.ndarray  # [n] int32, what the policy wrote, the end-of-text token included
    ended: bool  # by an end-of-text token or a stop text; else cut by a limit
    eos: bool  # by an end-of-text token, its last one


class TurnAnswer(NamedTuple):
    """An environment's answer to a turn."""

    request: int
    tokens: Sequence[int] | None  # appended as they are, at least one; None: the rollout has ended
    cut: bool = False  # by a limit: the environment would have gone on


class Turns(Protocol):
    """The environments of a call's rollouts, each of which answers one turn at a time."""

    @property
    def turn_tokens(self) -> int:
        """Return the most tokens of a turn."""

    def ask(self, turn: Turn) -> None:
        """Hand over a turn; do not wait."""

    def answers(self, seconds: float) -> list[TurnAnswer]:
        """Return what has been answered since the last call; wait up to `seconds` for the first answer."""
