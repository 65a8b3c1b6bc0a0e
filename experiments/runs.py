"""Runs of a sweep on this machine: each a folder, a process and what came out of it, so many of them at once."""

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from specrl_jax.core import InputError, read_json
from specrl_jax.io.metrics import read_metrics

REPOSITORY = pathlib.Path(__file__).parents[1]
POLL = 0.1  # seconds between two looks at the processes


@dataclasses.dataclass(eq=False)
class Run:
    """One entry of the sweep on its way. The last fields belong to its latest start."""

    name: str
    folder: pathlib.Path
    overrides: dict[str, Any]
    flags: list[str]  # all but the workdir: equal flags, equal results
    state: str = "waiting"  # then running, or queued; then finished, failed or stopped
    values: dict[str, Any] = dataclasses.field(default_factory=dict)  # last metrics, for the table
    process: subprocess.Popen | None = None
    began: float = 0.0  # seconds, monotonic clock
    seconds: float = 0.0  # a run that was resumed counts from there
    job: str = ""  # its id, of a run in a cluster's queue
    log_begin: int = 0  # bytes in output.log before its output


class Signals:
    """Notes SIGINT, SIGTERM and SIGHUP instead of dying of them; the loop in run_all looks."""

    def __enter__(self) -> "Signals":
        self.first = self.count = 0
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: Any) -> None:
        self.first = self.first or number
        self.count += 1


def run_all(
    program: Sequence[str], runs: list[Run], jobs: int, signals: Signals, report: Callable[[Run], None]
) -> None:
    """Starts what is waiting, at most `jobs` at once; `report` gets each run that starts or ends, or need not start."""
    for run in runs:
        if run.state == "finished":
            report(run)
    waiting = [run for run in runs if run.state == "waiting"]
    running: list[Run] = []
    passed_on = 0
    try:
        while waiting or running:
            if signals.count > passed_on:
                waiting.clear()
                for run in running:
                    run.process.send_signal(signal.SIGKILL if passed_on else signal.SIGTERM)
                passed_on = signals.count
            while waiting and len(running) < jobs:
                running.append(waiting.pop(0))
                start(program, running[-1])
                report(running[-1])
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                end(run, stopping=passed_on > 0)
                report(run)
            time.sleep(POLL)
    finally:  # an error here must not leave runs behind that nobody watches
        started = [run.process for run in running if run.process]
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def command_of(program: Sequence[str], run: Run) -> list[str]:
    return [*program, *run.flags, "--workdir", str(run.folder)]


def start(program: Sequence[str], run: Run, log_name: str = "output.log") -> None:
    run.folder.mkdir(exist_ok=True)
    # From here on the folder is no longer what an earlier command left.
    (run.folder / "finished.json").unlink(missing_ok=True)
    command = command_of(program, run)
    with open(run.folder / log_name, "ab") as log:
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        run.log_begin = log.tell()
        run.process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            # Else what a failing run has printed comes after its error, which would not be the last line.
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A terminal sends its Ctrl-C to all processes of the session; the runs get our SIGTERM alone.
            start_new_session=True,
        )
    run.began = time.monotonic()
    run.state = "running"


def end(run: Run, stopping: bool) -> None:
    run.seconds = round(time.monotonic() - run.began, 1)
    run.values = peek(run.folder)
    status = run.process.returncode
    if status == 0:
        run.state = "finished"
        date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        with atomic_write(run.folder / "finished.json") as file:
            json.dump({"command": run.flags, "seconds": run.seconds, "date": date}, file, indent=2)
    # main.py leaves with 143; before it has its handler, or while it evaluates, the signal itself ends it.
    elif stopping and status in (128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL):
        run.state = "stopped"
    else:
        run.state = "failed"


def read_finished(run: Run) -> None:
    """Marks a run that an earlier launch finished with the same command. Raises InputError for a damaged file."""
    path = run.folder / "finished.json"
    record = read_json(str(path)) if path.exists() else {}
    if record.get("command") == run.flags:
        run.state, run.seconds, run.values = "finished", record["seconds"], peek(run.folder)


def last_line(run: Run) -> str:
    """Of what its latest start has printed."""
    log = run.folder / "output.log"
    lines = log.read_bytes()[run.log_begin :].decode(errors="replace").split("\n")
    return f"{next((line for line in reversed(lines) if line.strip()), 'no output')} ({log})"


def last_values(folder: pathlib.Path) -> dict[str, Any]:
    """The last value that is not null of every metric of a run; of task=evaluate the scalars of evaluation.json.

    Raises InputError for a damaged file.
    """
    rows = read_metrics(str(folder))
    if not rows and (folder / "evaluation.json").exists():
        rows = [read_json(str(folder / "evaluation.json"))]
    values: dict[str, Any] = {}
    for row in rows:
        values |= {key: value for key, value in row.items() if isinstance(value, int | float | str)}
    return values


def peek(folder: pathlib.Path) -> dict[str, Any]:
    """last_values for the table, which must not end the runs: a damaged file is told by main.py and write_results."""
    try:
        return last_values(folder)
    except InputError:
        return {}


@contextlib.contextmanager
def atomic_write(path: pathlib.Path) -> Iterator[TextIO]:
    """A file that takes the place of `path` when it is whole."""
    with open(f"{path}.tmp", "w", newline="") as file:
        yield file
    os.replace(f"{path}.tmp", path)
