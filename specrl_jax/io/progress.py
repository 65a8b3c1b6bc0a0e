"""Progress on the terminal: a line for each finished step, a live one for the phase; the clock of the phases."""

import collections
import contextlib
import datetime
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
import rich.console
import rich.progress

from specrl_jax.errors import printable
from specrl_jax.io.memory import within_memory
from specrl_jax.io.signals import raise_once_set
from specrl_jax.logs import is_heard

RECENT = 20  # steps whose seconds say how long the others take
COMPILES = 0.05  # a step in which a larger share is spent compiling says nothing about the others


def compiles(row: Mapping[str, float]) -> bool:
    """Return whether a step, by its metrics, says nothing of the time of others since it compiled."""
    return row.get("time/compile", 0.0) > COMPILES * row["time/total"]


class CompileClock:
    """Notes when anything is traced or compiled, in any thread, while it is open."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []  # beginning and end, of which some lie within or beside others

    def listen(self, event: str, duration_secs: float, **_: object) -> None:
        """Note an event of jax that has just ended."""
        if event.startswith("/jax/core/compile/"):
            now = time.perf_counter()
            self._spans.append((now - duration_secs, now))

    def seconds(self, since: float) -> float:
        """Return the seconds after `since` in which something was compiled."""
        total = 0.0
        for begin, end in sorted(self._spans):
            total += max(0.0, end - max(begin, since))
            since = max(since, end)
        return total

    def __enter__(self) -> "CompileClock":
        jax.monitoring.register_event_duration_secs_listener(self.listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self.listen)


class Pace:
    """Estimates how long the steps to come take, from the median of recent ones.

    Left out are the first, which is short where a run is resumed within it, and those that compile.
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None  # step, seconds
        self._recent: collections.deque[float] = collections.deque(maxlen=RECENT)

    def finish(self, step: int, now: float, aside: float = 0.0, *, compiled: float = 0.0) -> None:
        """Note a step that ended at `now`, in seconds.

        Args:
          aside: seconds since the one before that were not a step's own.
          compiled: seconds since then in which something was compiled.
        """
        if self._last:
            before, then = self._last
            if compiled <= COMPILES * (seconds := now - then - aside):
                self._recent.append(seconds / (step - before))
        self._last = step, now

    def left(self, steps: int) -> float | None:
        """Return the seconds of `steps` more steps; None where it is not known yet."""
        return steps * float(np.median(self._recent)) if self._recent else None


LONG = 10.0  # seconds


class Display:
    """On a terminal a line for each finished step above a live one, the progress of the phase; nothing if not `shown`
    or where the logger is silenced.

    A file gets the lines of the steps, each whole, however long.

    Once `stop` is set, `update_phase` and `say_compiled` raise Stopped: they are called wherever a phase can end early.
    """

    def __init__(self, steps: int, done: int, stop: threading.Event, *, shown: bool = True) -> None:
        self._raise_once_set = raise_once_set(stop)
        shown = shown and is_heard()
        self._steps, self._done, self._pace = steps, done, Pace()
        self.compiling, self._finished = CompileClock(), time.perf_counter()
        # Messages of rewards and files are literal text.
        self.console = rich.console.Console(quiet=not shown, highlight=False, markup=False, emoji=False)
        columns = (
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.fields[count]}"),
            rich.progress.TimeElapsedColumn(),
        )
        live = shown and self.console.is_terminal
        self._bars = rich.progress.Progress(*columns, console=self.console, disable=not live, transient=True)
        self._phase = self._add_phase("")

    def __enter__(self) -> "Display":
        self.compiling.__enter__()
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()
        self.compiling.__exit__()

    def _add_phase(self, name: str) -> rich.progress.TaskID:
        step = min(self._done + 1, self._steps)
        return self._bars.add_task(f"step {step}/{self._steps} {name}", total=None, count="")

    def start_phase(self, name: str) -> None:
        # A new bar: rich's reset keeps the previous total.
        self._bars.remove_task(self._phase)
        self._phase = self._add_phase(name)

    def say(self, line: str) -> None:
        """Print a line above the live one, unbroken: a terminal wraps it where it must."""
        self.console.print(printable(line), soft_wrap=True)

    def say_wait(self, line: str, seconds: float) -> None:
        """Print what a wait of LONG seconds or more is for; of one whose length is not known yet too."""
        if not seconds or seconds >= LONG:
            self.say(line)

    def say_compiled(self, program: object, seconds: float) -> None:
        self.say(f"engine program {program}: {seconds:.1f} s")
        self._raise_once_set(0, 0)

    def say_begun(self, engine: str, programs: Sequence[object], about: float) -> None:
        names = ", ".join(map(str, programs))
        self.say(f"compiling {names}, {engine}: about {about:.0f} s, less where an earlier run has left them")

    def say_engine_program(self, engine: str, program: object, seconds: float) -> None:
        self.say(f"engine program {program}, {engine}: {seconds:.1f} s")

    def say_learner_program(self, program: str, seconds: float) -> None:
        self.say(f"learner program {program}: {seconds:.1f} s")

    def update_phase(self, done: int, total: int) -> None:
        self._raise_once_set(done, total)
        self._bars.update(self._phase, completed=done, total=total, count=f"{done}/{total}")

    def finish_step(self, step: int, note: str, aside: float = 0.0, *, ahead: float = 0.0) -> None:
        """Print the line of a finished step, with the time left.

        Args:
          aside: seconds since the last finished step that were not a step's own, as an evaluation's.
          ahead: seconds that the run needs besides its other steps, as evaluations to come.
        """
        now = time.perf_counter()
        if step > self._done:  # neither the evaluation before training nor a second line of one step
            self._pace.finish(step, now, aside, compiled=self.compiling.seconds(self._finished))
        self._done, self._finished = step, now
        remaining = self._pace.left(self._steps - step)
        ends = ""
        if remaining is not None and step < self._steps:
            ends = f"{datetime.timedelta(seconds=round(remaining + ahead))} left  "
        self.say(f"step {step}/{self._steps}  {ends}{note}")


class PhaseClock:
    """Measures the seconds of each phase of one step."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase. The body must block until its results are ready.

        Raises InputError where it needs more memory than there is.
        """
        self._display.start_phase(name)
        start = time.perf_counter()
        with within_memory(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def total(self) -> float:
        """Return the seconds since the step began."""
        return time.perf_counter() - self._start

    def compiled(self) -> float:
        """Return those of them in which something was compiled."""
        return self._display.compiling.seconds(self._start)
