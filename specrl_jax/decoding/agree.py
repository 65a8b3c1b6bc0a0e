"""How processes that run an engine in lock-step agree on what each of them found."""

from typing import Protocol


class Agree(Protocol):
    """What this process found -> what the first of the processes found that run an engine in lock-step."""

    def __call__(self, *values: int) -> tuple[int, ...]: ...


def alone(*values: int) -> tuple[int, ...]:
    """Agree as one process does."""
    return values
