"""Submit runs as jobs of a Slurm cluster through submitit, and supervise main.py inside a job.

A job has one process per node, which starts main.py and waits for it. Before Slurm ends the job it sends SIGUSR2 (and
finally SIGTERM): the process sends SIGTERM to main.py, which saves and exits, and the job is queued again.
"""

import argparse
import dataclasses
import getpass
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Sequence
from typing import Any

from experiments import commands, runs
from specrl_jax.errors import InputError
from specrl_jax.json_files import read_json

with commands.needed("pip install -r requirements-experiments.txt"):
    import submitit
    from submitit.helpers import Checkpointable, DelayedSubmission

# Seconds before the end at which a job gets the signal: enough for the longest phase of a step and a checkpoint.
GRACE = 300
# How often a job that reaches its time limit is queued again.
MOST_TIMEOUTS = 1000
ANSWER = 60  # seconds that squeue may take
SAVED = (128 + signal.SIGTERM, -signal.SIGTERM)


@dataclasses.dataclass
class Job(Checkpointable):
    """The function that runs on each node. submitit pickles it, so it holds plain values."""

    program: tuple[str, ...]
    name: str
    folder: str
    flags: tuple[str, ...]
    child: Any = dataclasses.field(default=None, init=False)  # main.py, while it runs

    def __call__(self) -> str:
        """Run main.py; return the state of the run. Raises RuntimeError with its last line unless it finished."""
        rank = submitit.JobEnvironment().global_rank
        run = runs.Run(self.name, pathlib.Path(self.folder), {}, list(self.flags))
        before = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM)}
        runs.start(self.program, run, "output.log" if rank == 0 else f"output_{rank}.log")
        self.child = run.process
        try:
            for number, handler in before.items():
                signal.signal(number, lambda *args, handler=handler: self._pass_on(handler, *args))
            while run.child.poll() is None:
                time.sleep(runs.POLL)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if rank:
            return "finished" if run.child.returncode == 0 else "failed"
        runs.end(run, stopping=run.child.returncode in SAVED)
        if run.state != "finished":
            raise RuntimeError(f"{run.state}: exit status {run.child.returncode}: {runs.last_line(run)}")
        return run.state

    def checkpoint(self, *_: Any, **__: Any) -> DelayedSubmission | None:  # type: ignore[override]  # None: submitit asks
        """Wait until main.py has saved; return the job to queue again, or None if it failed."""
        return DelayedSubmission(dataclasses.replace(self)) if self._wait() in (*SAVED, 0) else None

    def _pass_on(self, handler: Any, *args: Any) -> None:
        """Send SIGTERM to main.py, then call submitit's handler of this signal."""
        self.child.send_signal(signal.SIGTERM)
        if callable(handler):
            handler(*args)

    def _wait(self) -> int:
        """Return the exit status. Popen.wait could deadlock here, in a signal handler, on a lock that it holds."""
        try:
            ended = os.waitid(os.P_PID, self.child.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # reaped already
            return self.child.returncode
        assert ended is not None  # without WNOHANG
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def open_cluster(arguments: argparse.Namespace) -> submitit.SlurmExecutor:
    """Return submitit's executor. Raises InputError if this machine cannot submit jobs."""
    for program in ("sbatch", "srun", "squeue"):
        if shutil.which(program) is None:
            raise InputError(f"--executor slurm: {program} is not installed; launch from a node of the cluster")
    cluster = submitit.SlurmExecutor(folder=arguments.workdir / "slurm", max_num_timeout=MOST_TIMEOUTS)
    cluster.update_parameters(**parameters(arguments))
    return cluster


def parameters(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters of sbatch under submitit's names."""
    names = {"partition": "partition", "account": "account", "gpus": "gpus_per_node", "cpus": "cpus_per_task"}
    # A cluster without GPUs may refuse even a request for none.
    chosen = {name: getattr(arguments, flag) for flag, name in names.items() if getattr(arguments, flag)}
    return chosen | {
        "job_name": f"specrl_{arguments.workdir.name}",
        "nodes": arguments.nodes,
        "ntasks_per_node": 1,
        "time": math.ceil(60 * arguments.hours),
        "signal_delay_s": GRACE,
        "additional_parameters": {"requeue": True, "chdir": str(runs.REPOSITORY)},
    }


def sbatch_line(arguments: argparse.Namespace) -> list[str]:
    """Return the equivalent sbatch command line."""
    flags = parameters(arguments)
    signal_delay, more = flags.pop("signal_delay_s"), flags.pop("additional_parameters")
    flags |= {"signal": f"USR2@{signal_delay}"} | more
    return ["sbatch"] + [
        f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}") for key, value in flags.items()
    ]


def jobs_in_queue() -> frozenset[str]:
    """Return the ids of the user's jobs that wait, run or are ending.

    Asks squeue, which works on clusters without accounting too. Raises InputError where it has no answer: a run that is
    submitted twice has two jobs that write one folder.
    """
    command = ["squeue", "--noheader", "--format=%A", f"--user={getpass.getuser()}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER)
    except subprocess.TimeoutExpired:
        raise InputError(f"--executor slurm: squeue did not answer within {ANSWER} s") from None
    if done.returncode:
        raise InputError(f"--executor slurm: squeue: {' '.join(done.stderr.split())}")
    return frozenset(done.stdout.split())


def submit(cluster: submitit.SlurmExecutor, run: runs.Run, program: Sequence[str], queue: Collection[str]) -> None:
    """Submit a run unless its job is in `queue`."""
    record = run.folder / "job.json"
    if record.exists() and (job := read_json(str(record))["id"]) in queue:
        run.state, run.job = "queued", job
        return
    submitted = cluster.submit(Job(tuple(program), run.name, str(run.folder), tuple(run.flags)))
    run.folder.mkdir(exist_ok=True)
    with runs.atomic_write(record) as file:
        json.dump({"id": submitted.job_id}, file)
    run.state, run.job = "queued", submitted.job_id
