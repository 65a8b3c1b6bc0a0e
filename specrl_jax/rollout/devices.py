"""Lend the rollout devices in turn to the thread that generates and to evaluations."""

import threading


class Devices:
    """The rollout devices, one thread's at a time. Who holds them sees that another waits, and may lend them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()  # also where a thread waits for other things than the devices
        self.waiting = 0
        self._held, self._lent = False, False

    def __enter__(self) -> None:
        with self.changed:
            self.waiting += 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._held)
            self._held = True
            self.waiting -= 1

    def __exit__(self, *_: object) -> None:
        with self.changed:
            # Back to who lent them: of two evaluations in a row each needs a loan, in all processes alike.
            self._held, self._lent = self._lent, False
            self.changed.notify_all()

    def lend(self) -> None:
        """Wait until another thread wants them, and until it has had them."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting)
            self._held, self._lent = False, True
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._lent)
