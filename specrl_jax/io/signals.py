"""Signals that ask a run to end."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from specrl_jax import last_words
from specrl_jax.coordinator import share_event
from specrl_jax.errors import Stopped

# SIGUSR2 is what a cluster's scheduler sends before it pre-empts a job or ends its time.
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


def stop_on_signal() -> threading.Event:
    """Return an event that SIGTERM, SIGUSR2 or Ctrl-C sets, in every process of a run.

    The engine sees it between two chunks and the loops between two steps; they save and leave. A second Ctrl-C ends the
    process at once, even while it compiles.
    """
    stop = threading.Event()
    read, write = os.pipe()
    os.set_blocking(write, False)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    # Python's own handlers wait until the main thread leaves C++, which for a compilation takes minutes.
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(read, stop), name="signals", daemon=True).start()
    share_event(stop)
    return stop


def _watch(read: int, stop: threading.Event) -> None:
    interrupts = 0
    while received := os.read(read, 1):
        interrupts += received[0] == signal.SIGINT
        if interrupts > 1:
            last_words.has_ended()
            os._exit(128 + signal.SIGINT)  # reward workers end with their parent
        if received[0] in SIGNALS:
            stop.set()


def raise_once_set(stop: threading.Event) -> Callable[[int, int], None]:
    """Return an `on_progress` for the engine that raises Stopped once `stop` is set."""

    def on_progress(done: int, total: int) -> None:
        if stop.is_set():
            raise Stopped

    return on_progress


@contextlib.contextmanager
def stopped_as(message: str) -> Iterator[None]:
    """Give a Stopped that the body raises without a message this one, which says what was saved."""
    try:
        yield
    except Stopped as error:
        raise Stopped(str(error) or message) from None
