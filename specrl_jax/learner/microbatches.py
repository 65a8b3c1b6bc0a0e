"""An optimizer update in programs of one microbatch: whatever the number of rows, two programs and a loop of the host.

A program of all rows would be compiled anew for every number of them.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import jax

from specrl_jax.core import Jitted, Tree

State = TypeVar("State")
Metrics = TypeVar("Metrics")
PerRow = TypeVar("PerRow")


@dataclasses.dataclass(frozen=True)
class Update(Generic[State, PerRow, Metrics]):
    """An optimizer update from any number of microbatches.

    Attributes:
      begin: state -> sums of no microbatch.
      gradient: (state, sums, *microbatch) -> (sums and those of the microbatch, per-row outputs); the sums are donated.
      apply: (state, sums) -> (state after the update, metrics); the state is donated.
    """

    begin: Jitted[[State], Any]
    gradient: Jitted[..., tuple[Any, PerRow]]
    apply: Jitted[[State, Any], tuple[State, Metrics]]

    def __call__(self, state: State, microbatches: Iterable[tuple]) -> tuple[State, Metrics, list[PerRow]]:
        """Return (state after the update, metrics, the per-row outputs of each microbatch). The state is donated."""
        passes = Passes(self, state)
        outputs = [passes.add(*microbatch) for microbatch in microbatches]
        return *passes.apply(), outputs


class Passes(Generic[State, PerRow, Metrics]):
    """The microbatches of one update so far."""

    def __init__(self, update: Update[State, PerRow, Metrics], state: State) -> None:
        self._update, self._state = update, state
        self._sums = update.begin(state)

    def add(self, *microbatch: object) -> PerRow:
        """Add a microbatch; return its per-row outputs, by the state before the update."""
        self._sums, outputs = self._update.gradient(self._state, self._sums, *microbatch)
        return outputs

    def apply(self) -> tuple[State, Metrics]:
        """Return (state after the update, metrics)."""
        return self._update.apply(self._state, self._sums)


def split(batch: Tree, size: int) -> list[Tree]:
    """Split leaves [B, ...] into microbatches of `size` rows, which divides B."""
    B = len(jax.tree.leaves(batch)[0])
    assert B % size == 0, f"{B} rows in microbatches of {size}"
    if size == B:
        return [batch]
    return [jax.tree.map(lambda x, i=i: x[i : i + size], batch) for i in range(0, B, size)]
