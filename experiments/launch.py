"""Run a sweep: main.py once for each set of overrides, on this machine or as Slurm jobs, and write one results.csv.

    python -m experiments.launch --config configs/NAME.py[:variant] --sweep experiments/NAME/sweep.py
        [--workdir runs/sweeps/NAME] [--jobs 1] [--dry_run] [-- --config.key=value ...]
    python -m experiments.launch --config ... --sweep ... --executor slurm
        [--nodes 1] [--gpus 8] [--cpus N] [--hours 24] [--partition NAME] [--account NAME] [--dry_run] [-- ...]

The sweep file defines `get_sweep()`: a list of dicts of config overrides, one per run, such as
`[{"seed": s, "rollout.seed": s} for s in range(3)]`. Flags after `--` go to every run. Paths are relative to the root
of the repository. A mistake ends the launch with one line and exit status 1 before any run starts.

Each run has a folder in the workdir, named after its overrides. It is main.py's workdir and also holds output.log (of
all starts) and finished.json. The same launch again skips runs that finished with an equal command and resumes the
others; it does not notice changes of the config file. results.csv has one row per finished run.

--dry_run prints one command line per run and starts and writes nothing.

With --executor slurm every run is a job (submitit), and the launcher exits once all are submitted. The workdir must be
on a file system that the nodes share; submitit's files are in its folder slurm/. A job that is pre-empted or reaches
its time limit saves, exits, is queued again and resumes. The same launch again submits the runs that are neither
finished nor queued and writes results.csv from the finished ones.

A run that fails does not stop the others; the exit status is then 1. Ctrl-C, SIGTERM and SIGHUP send SIGTERM to the
runs and then end the launcher with 128 + the signal's number; a second signal kills the runs.
"""

import argparse
import contextlib
import csv
import math
import pathlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import rich.console
import rich.live
import rich.table

from experiments.runs import (
    REPOSITORY,
    Run,
    Signals,
    atomic_write,
    command_of,
    last_line,
    last_values,
    peek,
    read_finished,
    run_all,
)
from experiments.sweeps import default_workdir, load_sweep, plan
from specrl_jax.errors import InputError

PROGRAM = (sys.executable, "main.py")
# Flag, type, help.
SLURM_FLAGS = (
    ("nodes", int, "nodes of a run, with one process each; default: 1"),
    ("gpus", int, "GPUs per node, 0 on CPU and TPU nodes; default: 8"),
    ("cpus", int, "CPUs per node; default: the cluster's"),
    ("hours", float, "time limit; default: 24"),
    ("partition", str, "default: the cluster's"),
    ("account", str, "default: the user's"),
)


def main(argv: Sequence[str], program: Sequence[str] = PROGRAM) -> int:
    """Run the sweep and return the exit status. `program` is the command that gets the flags of a run."""
    try:
        arguments, extra = parse(argv)
        sweep = load_sweep(arguments.sweep)[: 1 if arguments.small else None]
        runs = plan(arguments.config, sweep, arguments.workdir, extra)
        if arguments.executor == "slurm" and not arguments.dry_run:
            return submit(arguments, runs, program)
        for run in runs:
            read_finished(run)
        if arguments.dry_run:
            print_commands(arguments, runs, program)
            return 0
        make_folder(arguments.workdir)
        with Signals() as signals:
            with display(runs) as report:
                run_all(program, runs, arguments.jobs, signals, report)
            for run in runs:
                if run.state == "failed":
                    status = run.child.returncode
                    print(f"failed: {run.name}: exit status {status}: {last_line(run)}", file=sys.stderr)
            write_results(arguments.workdir / "results.csv", runs)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if signals.first:
        print("stopped: the same command resumes from here", file=sys.stderr)
        return 128 + signals.first
    return int(any(run.state == "failed" for run in runs))


# ---- the command line


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the launcher's arguments with absolute paths, and the flags after `--`.

    Raises InputError for a missing or unknown argument and for a file that does not exist.
    """
    split = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(prog="experiments.launch", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", required=True, help="configs/NAME.py[:variant]")
    parser.add_argument("--sweep", required=True, type=pathlib.Path, help="Python file with get_sweep()")
    parser.add_argument("--workdir", type=pathlib.Path, help="default: runs/sweeps/CONFIG_SWEEP")
    parser.add_argument("--jobs", type=int, help="runs at the same time on this machine; default: 1")
    parser.add_argument("--executor", choices=("local", "slurm"), default="local")
    parser.add_argument("--dry_run", action="store_true", help="print the commands only")
    parser.add_argument("--small", action="store_true", help="the first run alone, of the config's variant smoke")
    for flag, kind, text in SLURM_FLAGS:
        parser.add_argument(f"--{flag}", type=kind, help=f"Slurm only: {text}")
    a = parser.parse_args(argv[:split])
    check_executor(a)
    if a.small:
        a.config = f"{a.config.partition(':')[0]}:smoke"
    a.sweep = REPOSITORY / a.sweep
    a.workdir = REPOSITORY / (a.workdir or default_workdir(a.config, a.sweep))
    for flag, path in (("--config", a.config.partition(":")[0]), ("--sweep", a.sweep)):
        if not (REPOSITORY / path).is_file():
            raise InputError(f"{flag}: no file '{path}'")
    return a, list(argv[split + 1 :])


def check_executor(a: argparse.Namespace) -> None:
    """Fill in defaults. Raises InputError for a number out of range and for a flag of the other executor."""
    others = ["jobs"] if a.executor == "slurm" else [flag for flag, _, _ in SLURM_FLAGS]
    for flag in others:
        if getattr(a, flag) is not None:
            raise InputError(f"--{flag} cannot be combined with --executor {a.executor}")
    defaults = {"nodes": 1, "gpus": 8, "hours": 24.0} if a.executor == "slurm" else {"jobs": 1}
    for flag, default in defaults.items():
        if getattr(a, flag) is None:
            setattr(a, flag, default)
    for flag, low in (("jobs", 1), ("nodes", 1), ("gpus", 0), ("cpus", 1)):
        if (value := getattr(a, flag)) is not None and value < low:
            raise InputError(f"--{flag}={value}: expected at least {low}")
    if a.hours is not None and not 0 < a.hours < math.inf:
        raise InputError(f"--hours={a.hours}: expected more than 0")


def make_folder(path: pathlib.Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--workdir {path}: {error.strerror}") from None


# ---- a cluster


def print_commands(arguments: argparse.Namespace, runs: list[Run], program: Sequence[str]) -> None:
    """Print one command line for each run that would be started."""
    prefix = ""
    if arguments.executor == "slurm":
        from experiments import slurm

        prefix = f"{shlex.join(slurm.sbatch_line(arguments))} "
    for run in runs:
        if run.state == "waiting":
            print(prefix + shlex.join(command_of(program, run)))


def submit(arguments: argparse.Namespace, runs: list[Run], program: Sequence[str]) -> int:
    """Submit the runs that are neither finished nor queued; return the exit status."""
    # Imported here, since a sweep on this machine does not need submitit.
    from experiments import slurm

    cluster = slurm.open_cluster(arguments)
    # First, so that a job which ends meanwhile is found finished.
    queue = slurm.jobs_in_queue()
    make_folder(arguments.workdir)
    for run in runs:
        read_finished(run)
        if run.state == "waiting":
            slurm.submit(cluster, run, program, queue)
        print(f"{run.state:<8}  {run.name}" + (f"  job {run.job}" if run.job else ""), flush=True)
    write_results(arguments.workdir / "results.csv", runs)
    return 0


# ---- results


def write_results(path: pathlib.Path, runs: list[Run]) -> None:
    """Write one row per finished run in the sweep's order: run, overrides, seconds, last values of the metrics."""
    keys = dict.fromkeys(key for run in runs for key in run.overrides)
    finished = [run for run in runs if run.state == "finished"]
    metrics = [last_values(run.folder) for run in finished]
    names = sorted({name for row in metrics for name in row} - {"run", "seconds", *keys})
    with atomic_write(path) as file:
        writer = csv.DictWriter(file, ["run", *keys, "seconds", *names], extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for run, row in zip(finished, metrics, strict=True):
            writer.writerow(row | run.overrides | {"run": run.name, "seconds": run.seconds})


@contextlib.contextmanager
def display(runs: list[Run]) -> Iterator[Callable[[Run], None]]:
    """Show a live table on a terminal. Yields a function to call at each change of state, which prints to a file."""
    console = rich.console.Console()
    if console.is_terminal:
        with rich.live.Live(console=console, get_renderable=lambda: make_table(runs), refresh_per_second=1):
            yield lambda run: None
    else:
        yield print_state


def print_state(run: Run) -> None:
    print(f"{run.state:<8}  {run.name}" + (f"  {run.seconds:.0f} s" if run.state != "running" else ""), flush=True)


def make_table(runs: list[Run]) -> rich.table.Table:
    """Return the table with the running runs first, since rich cuts a table longer than the screen."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
