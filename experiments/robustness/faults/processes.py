"""Two processes that differ, do not find each other, or get a signal: each must end, in one line, and none may hang."""

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.robustness.faults.catalogue import ROOT, Ended, Finding, finish, is_refused

CONFIG = f"{ROOT}/configs/rlzero_tiny.py:smoke"
SMALL = {"policy.preset": "nano", "draft.kind": "none", "reward.workers": 1}
# Seconds that processes wait for each other here; users wait for minutes.
JOIN_SECONDS = 8
COMMAND = "import sys; from specrl_jax import cli, distributed; {before}; sys.exit(cli.main(sys.argv))"
PATIENT = f"distributed.JOIN_SECONDS = {JOIN_SECONDS}"


class Job:
    """Two processes of one run, which differ in what is given for each."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.address, self.processes = folder, f"127.0.0.1:{free_port()}", list[subprocess.Popen[str]]()

    def start(
        self,
        overrides: Mapping[str, object] | None = None,
        *,
        workdir: str = "run",
        before: str = "pass",
        address: str = "",
        tree: pathlib.Path = ROOT,
        inside: str = ".",
    ) -> None:
        """Start the next process, in the folder `inside`, from the checkout `tree`; `before`: Python to run first."""
        command = [sys.executable, "-c", COMMAND.format(before=before), "--config", CONFIG]
        command += ["--workdir", str(self.folder / workdir)]
        command += [f"--config.{key}={value}" for key, value in {**SMALL, **(overrides or {})}.items()]
        environment = {
            "JAX_PLATFORMS": "cpu",
            "JAX_COORDINATOR_ADDRESS": address or self.address,
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(len(self.processes)),
            "PYTHONPATH": str(tree),
            "PYTHONUNBUFFERED": "1",
        }
        directory = self.folder / inside
        directory.mkdir(parents=True, exist_ok=True)
        with open(self.log(len(self.processes)), "w") as out:
            process = subprocess.Popen(
                command,
                cwd=directory,
                env=os.environ | environment,
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        self.processes.append(process)

    def log(self, i: int) -> pathlib.Path:
        return self.folder / f"output_{i}.log"

    def finish(self) -> list[Ended]:
        return [finish(p)._replace(stdout=self.log(i).read_text()) for i, p in enumerate(self.processes)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def findings(folder: pathlib.Path) -> Iterator[Finding]:
    tree = other_checkout(folder / "checkout")
    other_version = "import specrl_jax; specrl_jax.__version__ = '0.0.9'"
    other_jax = "import jax; jax.__version__ = '0.9.9'"
    # What differs -> (of the second process, what both say).
    differing: dict[str, tuple[dict[str, Any], str]] = {
        "learning rate": (changed("optimizer.learning_rate", 0.5), "learning_rate: 0.0001 in process 0; 0.5 in"),
        "seed": (changed("seed", 7), "differ in seed: 0 in process 0; 7 in process 1"),
        "steps": (changed("steps", 9), "differ in steps: 3 in process 0; 9 in process 1"),
        "a value out of bounds": (changed("steps", -1), "steps=-1"),
        "an unknown key": (changed("optimizer.rate", 1), "rate"),
        "a missing policy": (changed("policy.path", "nowhere"), "differ in policy.path"),
        "workdir": ({"workdir": "other"}, "differ in --workdir"),
        "version": ({"before": other_version}, "differ in the version of specrl_jax"),
        "jax": ({"before": other_jax}, "differ in the version of jax"),
        "a line of the source": ({"tree": tree}, "differ in the source of specrl_jax"),
    }
    for number, (name, (second, named)) in enumerate(differing.items()):
        job = Job(folder / f"differing_{number}")
        job.start()
        job.start(**second)
        yield judged(f"two processes differ: {name}", job.finish(), named)
    yield from data(folder / "data")
    yield alone(folder / "alone", [""], "one of two processes is missing")
    yield alone(folder / "ports", ["", f"127.0.0.1:{free_port()}"], "two processes with different ports")
    yield listens(folder / "listens")
    yield signalled(folder / "signal")


def changed(key: str, value: object) -> dict[str, Any]:
    return {"overrides": {key: value}}


def judged(tried: str, ended: Sequence[Ended], named: str) -> Finding:
    """Return the worst of what is_refused finds for each process."""
    found = [is_refused(tried, one, named) for one in ended]
    bad = [(i, one) for i, one in enumerate(found) if one.outcome != "refused"]
    return bad[0][1]._replace(said=f"process {bad[0][0]}: {bad[0][1].said}") if bad else found[0]


def other_checkout(folder: pathlib.Path) -> pathlib.Path:
    """Return a copy of the source with one line more."""
    for name in ("specrl_jax", "kernels_pallas", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "specrl_jax/rl/objectives.py"
    path.write_text(path.read_text() + "\nUNUSED = 1\n")
    return folder


def data(folder: pathlib.Path) -> Iterator[Finding]:
    """Each process has a file of one name in its own current folder."""
    row, other = '{"prompt": "1+1", "answer": "2"}\n', '{"prompt": "1+1", "answer": "3"}\n'
    for name, second in (("another answer", other), ("longer", row + row), ("missing", None)):
        job = Job(folder / name.replace(" ", "_"))
        for i, content in enumerate((row, second)):
            (job.folder / str(i)).mkdir(parents=True)
            if content:
                (job.folder / str(i) / "rows.jsonl").write_text(content)
            job.start({"data.path": "rows.jsonl"}, inside=str(i))
        yield judged(f"two processes differ: a data file, {name}", job.finish(), "the content of data.path=rows.jsonl")


def alone(folder: pathlib.Path, addresses: Sequence[str], tried: str) -> Finding:
    """Processes that do not find each other give up after JOIN_SECONDS."""
    job = Job(folder)
    for address in addresses:
        job.start(before=PATIENT, address=address)
    return judged(tried, job.finish(), f"within {JOIN_SECONDS} s")


def listens(folder: pathlib.Path) -> Finding:
    """The first process listens on the address that it was given, and on no other."""
    job = Job(folder)
    job.start(before=PATIENT)
    port, tried = int(job.address.rpartition(":")[2]), "addresses on which the coordinator listens"
    found: set[str] = set()
    while job.processes[0].poll() is None and not found:
        found = listening(port)
        time.sleep(0.05)
    job.finish()
    if found == {"127.0.0.1"}:
        return Finding(tried, "survived", "127.0.0.1 alone")
    return Finding(tried, "failed", ", ".join(sorted(found)) or "none")


def listening(port: int) -> set[str]:
    """Return the local addresses with a listening socket on a port (Linux)."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in pathlib.Path("/proc/net", name).read_text().splitlines()[1:]:
            (address, used), state = line.split()[1].split(":"), line.split()[3]
            if int(used, 16) == port and state == "0A":
                # The last four bytes, in the order of a little-endian word; before them :: or ::ffff:
                mapped = len(address) == 8 or address[:24] == "0000000000000000FFFF0000"
                found.add(".".join(str(b) for b in bytes.fromhex(address[-8:])[::-1]) if mapped else address)
    return found


def signalled(folder: pathlib.Path) -> Finding:
    """A signal to the second of two processes, in an evaluation of minutes, ends both within 20 s."""
    tried, job = "SIGTERM to one of two processes in an evaluation", Job(folder)
    for _ in range(2):
        job.start({"eval.samples": 4000})
    while "engine program decode" not in job.log(0).read_text() and job.processes[0].poll() is None:
        time.sleep(0.1)
    time.sleep(4)
    begun = time.monotonic()
    job.processes[1].send_signal(signal.SIGTERM)
    ended = job.finish()
    seconds, statuses = time.monotonic() - begun, [one.status for one in ended]
    if statuses == [143, 143] and seconds <= 20 and not any(one.traceback for one in ended):
        return Finding(tried, "survived", f"{seconds:.1f} s; {ended[0].stderr.strip().splitlines()[-1]}")
    return Finding(tried, "failed", f"exit statuses {statuses} after {seconds:.0f} s; {ended[0].stderr.strip()[-300:]}")
