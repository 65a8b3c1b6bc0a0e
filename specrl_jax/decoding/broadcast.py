"""Broadcasts among processes that run an engine in lock-step: what it needs of them. `coordinator.Agreement` is one."""

from typing import Protocol


class Broadcast(Protocol):
    """Broadcast integers from the first of the processes that run an engine in lock-step: own values -> its values."""

    def __call__(self, *values: int) -> tuple[int, ...]: ...


def alone(*values: int) -> tuple[int, ...]:
    """Return the own values: one process is its own first."""
    return values
