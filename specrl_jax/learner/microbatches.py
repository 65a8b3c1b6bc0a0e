"""An optimizer update in programs of one microbatch: whatever the number of rows, the same few and a loop of the host.

A program of all rows would be compiled anew for every number of them.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from specrl_jax.core import Jitted, Tree

State = TypeVar("State")
Metrics = TypeVar("Metrics")
PerRow = TypeVar("PerRow")


@dataclasses.dataclass(frozen=True)
class Update(Generic[State, PerRow, Metrics]):
    """An optimizer update from any number of microbatches.

    Attributes:
      gradient: (state, *microbatch) -> (sums over the microbatch, its per-row outputs).
      add: sums of two -> sums of both; the first are donated. One microbatch needs none, and takes no memory for it.
      apply: (state, sums) -> (state after the update, metrics); the state is donated.
    """

    gradient: Jitted[..., tuple[Any, PerRow]]
    add: Jitted[[Any, Any], Any]
    apply: Jitted[[State, Any], tuple[State, Metrics]]

    def __call__(self, state: State, microbatches: Iterable[tuple]) -> tuple[State, Metrics, list[PerRow]]:
        """Return (state after the update, metrics, the per-row outputs of each microbatch). The state is donated."""
        passes = Passes(self, state)
        outputs = [passes.add(*microbatch) for microbatch in microbatches]
        return *passes.apply(), outputs


class Passes(Generic[State, PerRow, Metrics]):
    """The microbatches of one update so far."""

    def __init__(self, update: Update[State, PerRow, Metrics], state: State) -> None:
        self._update, self._state, self._sums = update, state, None

    def add(self, *microbatch: object) -> PerRow:
        """Add a microbatch; return its per-row outputs, by the state before the update."""
        sums, outputs = self._update.gradient(self._state, *microbatch)
        self._sums = sums if self._sums is None else self._update.add(self._sums, sums)
        return outputs

    def wait(self) -> None:
        """Wait until what was added is done, and its inputs may go."""
        jax.block_until_ready(self._sums)

    def apply(self) -> tuple[State, Metrics]:
        """Return (state after the update, metrics). At least one microbatch was added."""
        return self._update.apply(self._state, self._sums)


def make_add(shardings: object) -> Jitted[[Any, Any], Any]:
    """Return Update.add of sums with these shardings."""

    def add(sums: Any, others: Any) -> Any:
        return jax.tree.map(jnp.add, sums, others)

    return jax.jit(add, donate_argnums=0, out_shardings=shardings)


def split(batch: Tree, size: int) -> list[Tree]:
    """Split leaves [B, ...] into microbatches of `size` rows, which divides B."""
    B = len(jax.tree.leaves(batch)[0])
    assert B % size == 0, f"{B} rows in microbatches of {size}"
    if size == B:
        return [batch]
    return [jax.tree.map(lambda x, i=i: x[i : i + size], batch) for i in range(0, B, size)]
