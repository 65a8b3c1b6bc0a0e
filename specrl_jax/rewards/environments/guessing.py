"""A game with a verifiable end: find a number by guesses that are answered with `>` (higher) or `<` (lower)."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from specrl_jax.rewards.environments.protocol import Step

# A guess is the last number of a turn.
_NUMBER = re.compile(r"\d{1,9}")


class Guessing:
    """The row's answer is the number, its prompt says the range. Reward 1 for a hit; `higher`, `lower` are > and <.

    How many guesses there are, `environment.turns` says. A turn without a number is lost.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[dict[str, str]]:
        self._number = int(row["answer"])
        return []

    def step(self, text: str) -> Step:
        numbers = _NUMBER.findall(text)
        if not numbers:
            return Step([{"role": "user", "content": "!"}], info={"lost": 1})
        guess = int(numbers[-1])
        if guess == self._number:
            return Step(None, 1.0, True)
        return Step([{"role": "user", "content": ">" if self._number > guess else "<"}], correct=False)
