"""Environments of five turns that answer at once, or after a while."""

import time
from collections.abc import Mapping, Sequence

from specrl_jax.rewards.environments.protocol import Step

TURNS = 5


class AtOnce:
    def reset(self, row: Mapping[str, object], seed: int) -> Sequence[dict[str, str]]:
        self._turns = 0
        return []

    def step(self, text: str) -> Step:
        self._turns += 1
        return Step(None if self._turns == TURNS else [{"role": "user", "content": "go on"}])


class Waiting(AtOnce):
    """A fifth of a second, as a tool on another machine."""

    def step(self, text: str) -> Step:
        time.sleep(0.2)
        return super().step(text)
