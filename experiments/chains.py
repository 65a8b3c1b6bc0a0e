"""Run chains of commands side by side, each chain on a share of the CPUs, with a log of every command."""

import concurrent.futures
import csv
import datetime
import os
import pathlib
import queue
import shlex
import signal
import subprocess
import threading
import time

from experiments.runs import POLL, REPOSITORY, Signals

Command = list[str]
Chain = list[Command]  # run one after the other
# Of every command that ended: when, its seconds, exit status and CPUs.
LOGGED = ("ended", "seconds", "status", "cpus", "command")


class Runner:
    """Runs chains of commands, appends each to the file `log`, and collects the failed ones in `failed`."""

    def __init__(self, signals: Signals, log: pathlib.Path):
        self.failed: Chain = []
        self._log_path = log
        self._signals, self._began, self._writing = signals, time.monotonic(), threading.Lock()

    def stage(self, chains: list[Chain], jobs: int) -> None:
        """Run all chains, at most `jobs` at once, each on a share of this process's CPUs."""
        jobs = min(jobs, len(chains))
        if not jobs:
            return
        shares: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
        for share in cpu_shares(jobs):
            shares.put(share)
        with concurrent.futures.ThreadPoolExecutor(jobs, initializer=lambda: take_share(shares)) as pool:
            list(pool.map(self.chain, chains))

    def chain(self, chain: Chain) -> None:
        for command in chain:
            if not self._signals.count:
                self._command(command)

    def _command(self, command: Command) -> None:
        text, start = shlex.join(command), time.monotonic()
        print(f"$ {text}", flush=True)
        # In its own session: a terminal's Ctrl-C then reaches it only through this process.
        process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True)
        passed_on = 0
        while process.poll() is None:
            if self._signals.count > passed_on:
                # At a second signal the launcher kills its own runs; main.py would continue to the end of its step.
                kills = passed_on and "main.py" in command
                process.send_signal(signal.SIGKILL if kills else signal.SIGTERM)
                passed_on += 1  # one each time: two at once are two
            time.sleep(POLL)
        if process.returncode and not self._signals.count:
            self.failed.append(command)
        now = time.monotonic()
        print(f"{now - start:.0f} s, {now - self._began:.0f} s altogether: $ {text}", flush=True)
        ended = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._log(dict(zip(LOGGED, (ended, round(now - start), process.returncode, cpus(), text), strict=True)))

    def _log(self, row: dict[str, object]) -> None:
        """Append a command to the log, which outlives the process: a reproduction in several parts has one log."""
        with self._writing:
            self._log_path.parent.mkdir(exist_ok=True)
            new = not self._log_path.exists()
            with self._log_path.open("a", newline="") as file:
                writer = csv.DictWriter(file, LOGGED)
                if new:
                    writer.writeheader()
                writer.writerow(row)


def cpus() -> int:
    """Return on how many CPUs this thread's commands run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_shares(jobs: int) -> list[set[int]]:
    """Divide this process's CPUs into `jobs` sets; empty sets if the system (macOS) or their number forbids it."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    size = len(cpus) // jobs
    return [set(cpus[i * size : (i + 1) * size]) for i in range(jobs)]


def take_share(shares: "queue.SimpleQueue[set[int]]") -> None:
    """Bind the calling thread and the processes that it starts to the next share."""
    if share := shares.get():
        os.sched_setaffinity(0, share)
