"""Signals that ask a run to end."""

import signal
import threading


def stop_on_signal() -> threading.Event:
    """Return an event that SIGTERM, SIGUSR2 or Ctrl-C sets; the loops save and leave when they see it.

    SIGUSR2 is what a cluster's scheduler sends before it pre-empts a job or ends its time. A second Ctrl-C interrupts.
    """
    stop = threading.Event()

    def handle(number: int, _: object) -> None:
        stop.set()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, handle)
    return stop
