"""A sweep: main.py once per set of overrides, here or as jobs of a Slurm cluster, and one results.csv.

    python -m experiments.launch --config configs/NAME.py[:variant] --sweep experiments/NAME/sweep.py
        [--workdir runs/sweeps/NAME] [--jobs 1] [--dry_run] [-- --config.key=value ...]
    python -m experiments.launch --config ... --sweep ... --executor slurm
        [--nodes 1] [--gpus 8] [--hours 24] [--partition NAME] [--account NAME] [--dry_run] [-- ...]

The sweep file defines `get_sweep()`: a list of dicts of config overrides, one per run, such as
`[{"seed": s, "rollout.seed": s} for s in range(3)]`. What follows `--` goes to every run. Paths are relative to the
repository's root. A mistake ends in one line and exit status 1 before anything starts.

Each run has a folder in the workdir, named after its overrides: main.py's own workdir, with output.log (of all starts)
and finished.json beside. The same launch again skips what finished with an equal command and resumes the rest; whether
the config file has changed since is not looked at. results.csv has a row per finished run.

--dry_run prints what would be started, a line each, and starts and writes nothing.

With --executor slurm every run is a job (submitit), and the launcher leaves once they are submitted. The workdir must
be on a file system that the nodes share; submitit's own files are in its folder slurm/. A job that is pre-empted, or
whose time is over, saves, leaves and is queued again; it resumes from there. The same launch again submits what neither
finished nor is still in the queue, and writes results.csv from what has finished.

A run that fails does not hold up the others; the exit status is then 1. Ctrl-C, SIGTERM and SIGHUP end the runs in good
order (SIGTERM), then the launcher, with 128 + the signal's number; a second one kills.
"""

import argparse
import contextlib
import csv
import dataclasses
import datetime
import hashlib
import json
import math
import os
import pathlib
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO

import rich.console
import rich.live
import rich.table

from specrl_jax.core import BadInput, read_json
from specrl_jax.io.metrics import read_metrics

REPOSITORY = pathlib.Path(__file__).parents[1]
PROGRAM = (sys.executable, "main.py")
# Flag, type, meaning.
SLURM_FLAGS = (
    ("nodes", int, "nodes, with one process each, which are one run together; 1 by default"),
    ("gpus", int, "GPUs of a node; 8 by default"),
    ("hours", float, "its time limit; 24 by default"),
    ("partition", str, "the cluster's default by default"),
    ("account", str, "the user's default by default"),
)
NAME_LENGTH = 100  # characters at most; file systems end at 255 bytes
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


def main(argv: Sequence[str], program: Sequence[str] = PROGRAM) -> int:
    """The exit status. `program` is what gets the flags of a run."""
    try:
        arguments, extra = parse(argv)
        runs = plan(arguments.config, load_sweep(arguments.sweep), arguments.workdir, extra)
        for run in runs:
            read_finished(run)
        if arguments.dry_run:
            print_commands(arguments, runs, program)
            return 0
        if arguments.executor == "slurm":
            return submit(arguments, runs, program)
        make_folder(arguments.workdir)
        with Signals() as signals:
            with display(runs) as report:
                run_all(program, runs, arguments.jobs, signals, report)
            for run in runs:
                if run.state == "failed":
                    status = run.process.returncode
                    print(f"failed: {run.name}: exit status {status}: {last_line(run)}", file=sys.stderr)
            write_results(arguments.workdir / "results.csv", runs)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if signals.first:
        print("stopped: the same command resumes from here", file=sys.stderr)
        return 128 + signals.first
    return int(any(run.state == "failed" for run in runs))


# ---- what to run


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(message)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's own arguments, paths made absolute, and the flags after `--`.

    Raises BadInput for what is missing, unknown or not there.
    """
    split = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(prog="experiments.launch", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", required=True, help="configs/NAME.py[:variant]")
    parser.add_argument("--sweep", required=True, type=pathlib.Path, help="Python file with get_sweep()")
    parser.add_argument("--workdir", type=pathlib.Path, help="runs/sweeps/CONFIG_SWEEP by default")
    parser.add_argument("--jobs", type=int, help="runs at the same time on this machine; 1 by default")
    parser.add_argument("--executor", choices=("local", "slurm"), default="local")
    parser.add_argument("--dry_run", action="store_true", help="print the commands only")
    for flag, kind, text in SLURM_FLAGS:
        parser.add_argument(f"--{flag}", type=kind, help=f"of a Slurm job: {text}")
    a = parser.parse_args(argv[:split])
    check_executor(a)
    a.sweep = REPOSITORY / a.sweep
    a.workdir = REPOSITORY / (a.workdir or default_workdir(a.config, a.sweep))
    for flag, path in (("--config", a.config.partition(":")[0]), ("--sweep", a.sweep)):
        if not (REPOSITORY / path).is_file():
            raise BadInput(f"{flag}: no file '{path}'")
    return a, list(argv[split + 1 :])


def check_executor(a: argparse.Namespace) -> None:
    """Fills in defaults. Raises BadInput for numbers that cannot be, and for a flag of the other executor."""
    others = ["jobs"] if a.executor == "slurm" else [flag for flag, _, _ in SLURM_FLAGS]
    for flag in others:
        if getattr(a, flag) is not None:
            raise BadInput(f"--{flag} does not go with --executor {a.executor}")
    defaults = {"nodes": 1, "gpus": 8, "hours": 24.0} if a.executor == "slurm" else {"jobs": 1}
    for flag, default in defaults.items():
        if getattr(a, flag) is None:
            setattr(a, flag, default)
        if not 0 < getattr(a, flag) < math.inf:
            raise BadInput(
                f"--{flag}={getattr(a, flag)}: expected {'more than 0' if flag == 'hours' else 'at least 1'}"
            )


def default_workdir(config: str, sweep: pathlib.Path) -> pathlib.Path:
    """configs/a.py:smoke and experiments/b/sweep.py -> runs/sweeps/a_smoke_b; experiments/b/wide.py -> a_smoke_wide."""
    name = os.path.basename(config).replace(".py", "", 1).replace(":", "_")
    return pathlib.Path("runs/sweeps", f"{name}_{sweep.parent.name if sweep.stem == 'sweep' else sweep.stem}")


def load_sweep(path: pathlib.Path) -> list[dict[str, Any]]:
    """What get_sweep() of the file at `path` returns. Raises BadInput unless it is a list of different dicts."""
    try:
        get_sweep = runpy.run_path(str(path)).get("get_sweep")
        sweep = get_sweep() if get_sweep else None
    except Exception as error:  # whatever the user's file does wrong
        raise BadInput(f"--sweep {path}: {type(error).__name__}: {' '.join(str(error).split())}") from None
    if get_sweep is None:
        raise BadInput(f"--sweep {path}: no get_sweep() in it")
    if not isinstance(sweep, list) or not sweep:
        raise BadInput(f"--sweep {path}: get_sweep() gave {sweep!r}; expected a list with an entry per run")
    seen: dict[tuple[str, ...], int] = {}
    for index, entry in enumerate(sweep):
        if not isinstance(entry, dict) or not all(isinstance(key, str) for key in entry):
            raise BadInput(f"--sweep {path}: entry {index} is {entry!r}; expected a dict of config.key: value")
        # As text, the way main.py gets them: 1 and "1" are the same run.
        first = seen.setdefault(tuple(sorted(config_flags(entry))), index)
        if first != index:
            raise BadInput(f"--sweep {path}: entries {first} and {index} are equal: {entry}")
    return sweep


def plan(config: str, sweep: list[dict[str, Any]], workdir: pathlib.Path, extra: list[str]) -> list[Run]:
    """The runs in the sweep's order. Raises BadInput where `extra` sets what the launcher sets."""
    ours = {"config", "workdir"} | {f"config.{key}" for entry in sweep for key in entry}
    for flag in extra:
        if (name := flag.lstrip("-").partition("=")[0]) in ours:
            raise BadInput(f"{flag}: --{name} is set by the sweep, so it cannot follow --")
    runs = []
    for entry in sweep:
        name = make_name(entry)
        runs.append(Run(name, workdir / name, entry, ["--config", config, *config_flags(entry), *extra]))
    return runs


def config_flags(overrides: dict[str, Any]) -> list[str]:
    return [f"--config.{key}={value}" for key, value in overrides.items()]


def make_name(overrides: dict[str, Any]) -> str:
    """A folder name such as `seed=0,draft.kind=none`, the same for ever and another for other overrides.

    Where characters had to be replaced or cut, a hash of the overrides keeps names apart. What is cut is the front: a
    sweep's runs differ in what it sets last. No overrides: `base`.
    """
    pairs = [[key, str(value)] for key, value in overrides.items()]
    # Commas and equals signs too: {"a": "1,b=2"} is not {"a": 1, "b": 2}.
    safe = [[re.sub(r"[^A-Za-z0-9_.+-]", "_", text) for text in pair] for pair in pairs]
    name = ",".join("=".join(pair) for pair in safe) or "base"
    if safe == pairs and len(name) <= NAME_LENGTH:
        return name
    digest = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:8]
    room = NAME_LENGTH - len(digest) - 1
    if len(name) > room:
        name = name[-room - 1 :].partition(",")[2] or name[:room]
    return f"{name}-{digest}"


def make_folder(path: pathlib.Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--workdir {path}: {error.strerror}") from None


# ---- a cluster


def print_commands(arguments: argparse.Namespace, runs: list[Run], program: Sequence[str]) -> None:
    """One line for each run that would be started."""
    prefix = ""
    if arguments.executor == "slurm":
        from experiments import slurm

        prefix = f"{shlex.join(slurm.sbatch_line(arguments))} "
    for run in runs:
        if run.state == "waiting":
            print(prefix + shlex.join(command_of(program, run)))


def submit(arguments: argparse.Namespace, runs: list[Run], program: Sequence[str]) -> int:
    """Submits what is neither finished nor in the queue; the exit status."""
    # Here, since a sweep on this machine needs nothing of it.
    from experiments import slurm

    cluster = slurm.open_cluster(arguments)
    make_folder(arguments.workdir)
    for run in runs:
        if run.state == "waiting":
            slurm.submit(cluster, run, program)
        print(f"{run.state:<8}  {run.name}" + (f"  job {run.job}" if run.job else ""), flush=True)
    write_results(arguments.workdir / "results.csv", runs)
    return 0


# ---- running


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
        with replacing(run.folder / "finished.json") as file:
            json.dump({"command": run.flags, "seconds": run.seconds, "date": date}, file, indent=2)
    # main.py leaves with 143; before it has its handler, or while it evaluates, the signal itself ends it.
    elif stopping and status in (128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL):
        run.state = "stopped"
    else:
        run.state = "failed"


def read_finished(run: Run) -> None:
    """Marks a run that an earlier launch finished with the same command. Raises BadInput for a damaged file."""
    path = run.folder / "finished.json"
    record = read_json(str(path)) if path.exists() else {}
    if record.get("command") == run.flags:
        run.state, run.seconds, run.values = "finished", record["seconds"], peek(run.folder)


def last_line(run: Run) -> str:
    """Of what its latest start has printed."""
    log = run.folder / "output.log"
    lines = log.read_bytes()[run.log_begin :].decode(errors="replace").split("\n")
    return f"{next((line for line in reversed(lines) if line.strip()), 'no output')} ({log})"


# ---- what came out


def last_values(folder: pathlib.Path) -> dict[str, Any]:
    """The last value that is not null of every metric of a run; of task=evaluate the scalars of evaluation.json.

    Raises BadInput for a damaged file.
    """
    rows = read_metrics(str(folder))
    if not rows and (folder / "evaluation.json").exists():
        rows = [read_json(str(folder / "evaluation.json"))]
    values: dict[str, Any] = {}
    for row in rows:
        values |= {key: value for key, value in row.items() if isinstance(value, int | float | str)}
    return values


def write_results(path: pathlib.Path, runs: list[Run]) -> None:
    """results.csv: a row per finished run in the sweep's order. Columns: run, the overrides, seconds, the metrics."""
    keys = dict.fromkeys(key for run in runs for key in run.overrides)
    finished = [run for run in runs if run.state == "finished"]
    metrics = [last_values(run.folder) for run in finished]
    names = sorted({name for row in metrics for name in row} - {"run", "seconds", *keys})
    with replacing(path) as file:
        writer = csv.DictWriter(file, ["run", *keys, "seconds", *names], extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for run, row in zip(finished, metrics, strict=True):
            writer.writerow(row | run.overrides | {"run": run.name, "seconds": run.seconds})


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[TextIO]:
    """A file that takes the place of `path` when it is whole."""
    with open(f"{path}.tmp", "w", newline="") as file:
        yield file
    os.replace(f"{path}.tmp", path)


@contextlib.contextmanager
def display(runs: list[Run]) -> Iterator[Callable[[Run], None]]:
    """A live table on a terminal. Yields what is told each change of a state: a line each where output is a file."""
    console = rich.console.Console()
    if console.is_terminal:
        with rich.live.Live(console=console, get_renderable=lambda: make_table(runs), refresh_per_second=1):
            yield lambda run: None
    else:
        yield print_state


def print_state(run: Run) -> None:
    print(f"{run.state:<8}  {run.name}" + (f"  {run.seconds:.0f} s" if run.state != "running" else ""), flush=True)


def make_table(runs: list[Run]) -> rich.table.Table:
    """What runs comes first: rich cuts a table that is longer than the screen."""
    table = rich.table.Table("run", "state")
    for name in ("step", "seconds", "reward", "accuracy"):
        table.add_column(name, justify="right")
    for run in sorted(runs, key=lambda run: run.state != "running"):
        values, seconds = run.values, run.seconds
        if run.state == "running":
            values, seconds = peek(run.folder), time.monotonic() - run.began
        cells = (values.get("step"), round(seconds), values.get("reward/mean"), values.get("eval/accuracy"))
        table.add_row(
            run.name, run.state, *(f"{c:.3f}" if isinstance(c, float) else "" if c is None else str(c) for c in cells)
        )
    return table


def peek(folder: pathlib.Path) -> dict[str, Any]:
    """last_values for the table, which must not end the runs: a damaged file is told by main.py and write_results."""
    try:
        return last_values(folder)
    except BadInput:
        return {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
