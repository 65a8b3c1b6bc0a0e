"""When a draft learns: every step, every n steps, or only while its mismatch with the policy asks for it."""

from typing import Any

# Updates without a new lowest mismatch after which a draft under `growth` rests.
PATIENCE = 5
# What counts as lower: by more than this share.
LOWER = 0.01


class DraftSchedule:
    """Of one run; host state between steps.

    The mismatch is the part of the draft's cross-entropy that learning can remove, KL(policy || draft); the policy's
    entropy is the rest and no reason to learn.

    Args:
      every: RL steps between two updates.
      growth: with 0 the draft never rests. Else it rests when its mismatch has found its level, until that has grown by
        this share.
    """

    def __init__(self, every: int, growth: float) -> None:
        self.every, self.growth = every, growth
        self._lowest, self._since, self._resting = float("inf"), 0, False

    def learns(self, step: int) -> bool:
        """Whether RL step `step`, counted from 1, updates the draft."""
        return step % self.every == 0 and not self._resting

    def observe(self, mismatch: float) -> None:
        """The mismatch of one step, in nats a token, before its update."""
        if not self.growth:
            return
        if self._resting:
            # A new reason to learn has a level of its own.
            if mismatch > (1 + self.growth) * self._lowest:
                self._resting, self._lowest, self._since = False, mismatch, 0
        elif mismatch < (1 - LOWER) * self._lowest:
            self._lowest, self._since = mismatch, 0
        else:
            self._since += 1
            self._resting = self._since >= PATIENCE * self.every

    def state(self) -> dict[str, Any]:
        return {"lowest": self._lowest, "since": self._since, "resting": self._resting}

    def restore(self, state: dict[str, Any]) -> None:
        self._lowest, self._since, self._resting = state["lowest"], state["since"], state["resting"]
