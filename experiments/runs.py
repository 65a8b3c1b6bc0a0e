"""Run the entries of a sweep on this machine: one folder and one process each, at most N at the same time."""

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

from specrl_jax.errors import InputError
from specrl_jax.io.metrics import read_metrics
from specrl_jax.json_files import read_json

REPOSITORY = pathlib.Path(__file__).parents[1]
POLL = 0.1  # seconds between two polls of the processes


@dataclasses.dataclass(eq=False)
class Run:
    """One entry of a sweep and its state; the fields from `state` on describe its latest start."""

    name: str
    folder: pathlib.Path
    overrides: dict[str, Any]
    flags: list[str]  # of main.py, without the workdir: equal flags give equal results
    state: str = "waiting"  # waiting; running or queued; finished, failed or stopped
    values: dict[str, Any] = dataclasses.field(default_factory=dict)  # last metrics, for the table
    process: subprocess.Popen | None = None  # None: not started
    began: float = 0.0  # seconds, monotonic clock
    seconds: float = 0.0  # of the latest start alone
    job: str = ""  # id in a cluster's queue
    log_begin: int = 0  # bytes of output.log written by earlier starts

    @property
    def child(self) -> subprocess.Popen:
        """Return the process of a run that was started."""
        assert self.process is not None, f"{self.name} was started"
        return self.process


class Signals:
    """Records SIGINT, SIGTERM and SIGHUP instead of ending the process; the loop in run_all reads them."""

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
    """Start the waiting runs, at most `jobs` at once; call `report` for each run that starts, ends or is finished."""
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
                    run.child.send_signal(signal.SIGKILL if passed_on else signal.SIGTERM)
                passed_on += 1  # one each time: two at once are two
            while waiting and len(running) < jobs:
                running.append(waiting.pop(0))
                start(program, running[-1])
                report(running[-1])
            for run in [run for run in running if run.child.poll() is not None]:
                running.remove(run)
                end(run, stopping=passed_on > 0)
                report(run)
            time.sleep(POLL)
    finally:  # an error in this process must not leave runs without supervision
        started = [run.process for run in running if run.process]
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def command_of(program: Sequence[str], run: Run) -> list[str]:
    return [*program, *run.flags, "--workdir", str(run.folder)]


def start(program: Sequence[str], run: Run, log_name: str = "output.log") -> None:
    run.folder.mkdir(exist_ok=True)
    # The folder no longer holds the result of an earlier command.
    (run.folder / "finished.json").unlink(missing_ok=True)
    command = command_of(program, run)
    with open(run.folder / log_name, "ab") as log:
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        run.log_begin = log.tell()
        run.process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            # Buffered output of a failing run would follow its error, which must be the last line.
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A terminal sends Ctrl-C to all processes of its session; the runs must get only our SIGTERM.
            start_new_session=True,
        )
    run.began = time.monotonic()
    run.state = "running"


def end(run: Run, stopping: bool) -> None:
    run.seconds = round(time.monotonic() - run.began, 1)
    run.values = peek(run.folder)
    status = run.child.returncode
    if status == 0:
        run.state = "finished"
        date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        with atomic_write(run.folder / "finished.json") as file:
            json.dump({"command": run.flags, "seconds": run.seconds, "date": date}, file, indent=2)
    # main.py exits with 143; before its handler is set, or while it evaluates, the signal itself ends it.
    elif stopping and status in (128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL):
        run.state = "stopped"
    else:
        run.state = "failed"


def read_finished(run: Run) -> None:
    """Mark a run as finished if an earlier launch finished the same command. Raises InputError for a damaged file."""
    path = run.folder / "finished.json"
    record = read_json(str(path)) if path.exists() else {}
    if record.get("command") == run.flags:
        run.state, run.seconds, run.values = "finished", record["seconds"], peek(run.folder)


def last_line(run: Run) -> str:
    """Return the last line that the latest start of a run printed, and the log's path."""
    log = run.folder / "output.log"
    lines = log.read_bytes()[run.log_begin :].decode(errors="replace").split("\n")
    return f"{next((line for line in reversed(lines) if line.strip()), 'no output')} ({log})"


def last_values(folder: pathlib.Path) -> dict[str, Any]:
    """Return the last value that is not null of every metric of a run.

    Reads the scalars of evaluation.json where a run has no metrics (task=evaluate). Raises InputError for a damaged
    file.
    """
    rows = read_metrics(str(folder))
    if not rows and (folder / "evaluation.json").exists():
        rows = [read_json(str(folder / "evaluation.json"))]
    values: dict[str, Any] = {}
    for row in rows:
        values |= {key: value for key, value in row.items() if isinstance(value, int | float | str)}
    return values


def peek(folder: pathlib.Path) -> dict[str, Any]:
    """Return last_values, or {} for a damaged file: the live table must not end the runs; write_results reports it."""
    try:
        return last_values(folder)
    except InputError:
        return {}


@contextlib.contextmanager
def atomic_write(path: pathlib.Path) -> Iterator[TextIO]:
    """Open a temporary file that replaces `path` when the context ends without an error."""
    with open(f"{path}.tmp", "w", newline="") as file:
        yield file
    os.replace(f"{path}.tmp", path)
