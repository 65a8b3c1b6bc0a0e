"""Lines that a run prints beside its results, through the logger `specrl_jax`."""

import contextlib
import logging
from collections.abc import Iterator

from specrl_jax.errors import printable

LOGGER = logging.getLogger("specrl_jax")


class _Printed(logging.Handler):
    """Prints to what the standard output is at that moment, which notebooks and tests replace."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), flush=True)


LOGGER.addHandler(_Printed())
LOGGER.setLevel(logging.INFO)
LOGGER.propagate = False


def say(line: str) -> None:
    """Print a line, as text that steers no terminal, unless the logger is told to be quieter."""
    LOGGER.info("%s", printable(line))


def is_heard() -> bool:
    """Return whether anybody sees what `say` says."""
    return LOGGER.isEnabledFor(logging.INFO)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Say nothing until the body ends."""
    level = LOGGER.level
    LOGGER.setLevel(logging.WARNING)
    try:
        yield
    finally:
        LOGGER.setLevel(level)
