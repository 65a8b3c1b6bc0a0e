"""Progress on the terminal: a bar for the run and one for the phase; the clock of the phases."""

import contextlib
import threading
import time
from collections.abc import Iterator

import rich.console
import rich.progress

from specrl_jax.io.signals import raise_once_set


class Display:
    """Two live bars on a terminal, or one line per step in a file; nothing if not `shown`.

    Once `stop` is set, `update_phase` and `say_compiled` raise Stopped: they are called wherever a phase can end early.
    """

    def __init__(self, steps: int, done: int, stop: threading.Event, shown: bool = True) -> None:
        self._raise_once_set = raise_once_set(stop)
        self.console = rich.console.Console(quiet=not shown)
        columns = (
            rich.progress.TextColumn("{task.description:<10}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TextColumn("{task.fields[note]}"),
        )
        live = self.console.is_terminal
        self._bars = rich.progress.Progress(*columns, console=self.console, disable=not live)
        self._run = self._bars.add_task("run", total=steps, completed=done, note="")
        self._phase = self._bars.add_task("", total=None, note="")

    def __enter__(self) -> "Display":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def start_phase(self, name: str) -> None:
        # A new bar: rich's reset keeps the previous total.
        self._bars.remove_task(self._phase)
        self._phase = self._bars.add_task(name, total=None, note="")

    def say(self, line: str) -> None:
        # Messages of rewards and files are literal text, not markup.
        self.console.print(line, highlight=False, markup=False)

    def say_compiled(self, program: object, seconds: float) -> None:
        self.say(f"engine program {program}: {seconds:.1f} s")
        self._raise_once_set(0, 0)

    def update_phase(self, done: int, total: int) -> None:
        self._raise_once_set(done, total)
        self._bars.update(self._phase, completed=done, total=total)

    def finish_step(self, step: int, note: str) -> None:
        self._bars.update(self._run, completed=step, note=note)
        if not self.console.is_terminal:
            self.console.print(f"step {step}  {note}", highlight=False)


class PhaseClock:
    """Measures the seconds of each phase of one step."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase. The body must block until its results are ready."""
        self._display.start_phase(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def total(self) -> float:
        """Return the seconds since the step began."""
        return time.perf_counter() - self._start
