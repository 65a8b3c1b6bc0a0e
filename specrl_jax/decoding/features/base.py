"""The hooks by which the engine calls the features that are on, `EngineConfig.features`, in their order."""

from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from kernels_pallas.verify.op import Verified
from specrl_jax.decoding.state import EngineConfig, PrefillBatch, Slots

Lowerable = tuple[jax.stages.Wrapped, tuple[object, ...]]  # a jitted function and the arguments to lower it with


class Committed(NamedTuple):
    """Tokens that an iteration commits, of those that it emits."""

    verified: Verified
    here: jax.Array  # [B, Q] bool, the first `number`
    number: jax.Array  # [B] int32
    where: jax.Array  # [B, Q] int32, their columns; S elsewhere


class Feature:
    """An optional feature of the engine, whose hooks do nothing here; `state` is its part of `Slots.features`."""

    name: ClassVar[str]  # of its part of `Slots.features`, and of `PrefillBatch.features`
    once: ClassVar[tuple[str, ...]] = ()  # kinds of its programs for the largest batch size
    by_size: ClassVar[tuple[str, ...]] = ()  # those for every batch size
    parts: ClassVar[tuple[str, ...]] = ()  # what it gives to `RolloutBuffer.append`
    keeps_pages: ClassVar[bool] = False  # of rows that have ended, until the host has collected them

    # Traced into the engine's programs, in this order.

    def empty(self, config: EngineConfig, longest: int) -> Any:
        """Return the state of finished slots, arrays by row; `longest`: tokens of the longest draft."""

    def start(self, state: Any, batch: PrefillBatch, length: jax.Array) -> Any:
        """Return the state after a refill, whose fresh rows answer prompts of `length` [B]."""
        return state

    def begin(self, state: Any, slots: Slots) -> Any:
        """Return the state as a chunk begins."""
        return state

    def has_room(self, state: Any, emitted: int) -> bool | jax.Array:
        """Return whether it can take an iteration that emits up to so many tokens of each row."""
        return True

    def look(self, state: Any, tokens: jax.Array) -> tuple[Any, jax.Array | None]:
        """Look at emitted tokens [B, Q]; return what `commit` gets as state, and which [B, Q] bool end a turn."""
        return state, None

    def commit(self, state: Any, committed: Committed) -> Any:
        """Return the state after an iteration."""
        return state

    def end(self, state: Any, slots: Slots) -> Any:
        """Return the state after a chunk, before finished rows lose their pages."""
        return state

    # On the host. Requests, programs and the `ActiveBatch` are above this module, which leaves their types to features.

    def at_once(self, config: EngineConfig) -> int:
        """Return the most drafts of a row that an iteration of its own programs verifies."""
        return 0

    def describe(self, programs: Any, program: Any, params: Any) -> Lowerable:
        """Return one of its programs."""
        raise NotImplementedError(program.kind)

    def refill_input(self, config: EngineConfig, requests: Any, starts: dict[int, int]) -> Any:
        """Return its part of a refill's input, host arrays; `starts`: row -> request."""

    def entered(self, batch: Any, state: Any, length: Any) -> None:
        """Act on rows of `length` tokens that have entered the slots; `state`: its part of what was put there."""

    def after_chunk(self, batch: Any) -> None:
        """Copy to the host what a chunk has left in the state."""

    def columns(self, state: Any) -> dict[str, Any]:
        """Return what rollouts keep of the state, by its name in `Rollouts.features`."""
        return {}

    def collect(self, batch: Any, rows: np.ndarray) -> None:
        """Copy to the host what finished rows have left elsewhere."""

    def ended(self, tokens: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray | bool:
        """Say which turns [R] bool it has ended: columns `start` to `length` of tokens [R, S]."""
        return False
