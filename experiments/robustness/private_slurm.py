"""Start a private Slurm on this machine, run a command with it, and stop it.

    python -m experiments.robustness.private_slurm [--nodes 2] -- python -m experiments.launch --executor slurm ...

One controller and several nodes, all on the loopback address, with a key, ports and folders of their own; an installed
cluster is not touched. There is no accounting (no sacct). It needs munged, slurmctld and slurmd (Debian: slurm-wlm and
munge), built for several nodes on a machine as Debian's are. Each node has one CPU to give away.
"""

import argparse
import contextlib
import getpass
import os
import pathlib
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
# Debian installs daemons where a user's PATH does not look.
SEARCHED = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
NODE = "PRIVATE_SLURM_NODE"  # marks what a node's daemon has started
LIMIT = 60  # seconds until the nodes must be ready

CONFIGURATION = """\
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
ReturnToService=2
SlurmdTimeout=5
SchedulerParameters=sched_interval=2
PartitionName=private Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


class PrivateSlurm(NamedTuple):
    """A running private cluster."""

    folder: pathlib.Path  # logs and state
    nodes: dict[str, subprocess.Popen]  # slurmd by node
    environment: dict[str, str]  # what a command needs to use the cluster

    def call(self, *command: str) -> str:
        """Return what a Slurm command prints. Raises subprocess.CalledProcessError where it fails."""
        done = subprocess.run(
            command, env=os.environ | self.environment, check=True, capture_output=True, text=True, timeout=LIMIT
        )
        return done.stdout.strip()

    def crash(self, node: str) -> None:
        """Kill a node as a loss of power does: its daemon and all that it has started."""
        self.nodes[node].kill()
        self.nodes[node].wait()
        _kill(self._supervisors(node))  # first, or they would report how the jobs ended
        _kill(self.processes([node]))

    def start(self, node: str) -> None:
        """Start the daemon of a node; its output is in slurmd.out."""
        with open(self.folder / "slurmd.out", "ab") as out:
            command = [_program("slurmd"), "-D", "-N", node]
            environment = os.environ | self.environment | {NODE: node}
            self.nodes[node] = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def processes(self, nodes: Collection[str]) -> list[int]:
        """Return the living processes that jobs on these nodes have started."""
        return [
            pid for pid, its in self._environments() if "SLURM_JOB_ID" in its and its.get("SLURMD_NODENAME") in nodes
        ]

    def _supervisors(self, node: str) -> list[int]:
        """Return the slurmstepd of a node, which have its daemon's environment."""
        return [pid for pid, its in self._environments() if its.get(NODE) == node]

    def _environments(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield (process id, environment) of all processes that use this cluster."""
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = dict(part.partition("=")[::2] for part in (folder / "environ").read_text().split("\0"))
                if variables.get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    yield int(folder.name), variables

    def stop(self) -> None:
        """End what runs on the nodes, and the nodes."""
        for node in self.nodes.values():
            node.terminate()
        for name, node in self.nodes.items():
            _end(node)
            _kill(self._supervisors(name))
        _kill(self.processes(self.nodes))


def missing() -> str:
    """Return the first program that is not installed; "" where all are."""
    return next((name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None), "")


@contextlib.contextmanager
def private_slurm(folder: pathlib.Path, nodes: int = 2) -> Iterator[PrivateSlurm]:
    """Start a cluster whose files are in `folder`; stop it, and what runs on it, when the context ends.

    The nodes are called node1, node2 and so on. Raises RuntimeError, with the end of the logs, where they
    are not ready within LIMIT.
    """
    names = [f"node{i}" for i in range(1, nodes + 1)]
    environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": SEARCHED}
    folder.chmod(0o755)  # munged wants to reach its socket
    _write_configuration(folder, names)
    with contextlib.ExitStack() as ending:
        ending.enter_context(_daemon(folder, environment, *_munged(folder)))
        _wait(folder, (folder / "munge.socket").exists)
        ending.enter_context(_daemon(folder, environment, "slurmctld", "-D"))
        cluster = PrivateSlurm(folder, {}, environment)
        ending.callback(cluster.stop)
        for name in names:
            cluster.start(name)
        _wait(folder, lambda: _idle(cluster) == nodes)
        yield cluster


def _write_configuration(folder: pathlib.Path, names: Sequence[str]) -> None:
    ports = _free_ports(len(names) + 1)
    host = socket.gethostname()
    text = CONFIGURATION.format(host=host, port=ports[0], user=getpass.getuser(), folder=folder)
    for name, port in zip(names, ports[1:]):
        text += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 State=UNKNOWN\n"
        (folder / name).mkdir()
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(text)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _munged(folder: pathlib.Path) -> list[str]:
    # --force: a temporary folder may be writable by others, and then munged only warns.
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "seed-file": "munge.seed"}
    return ["munged", "--foreground", "--force", *(f"--{flag}={folder / name}" for flag, name in files.items())]


@contextlib.contextmanager
def _daemon(folder: pathlib.Path, environment: dict[str, str], name: str, *flags: str) -> Iterator[subprocess.Popen]:
    """Run a daemon in the foreground; its output is in NAME.out. End it with the context."""
    with open(folder / f"{name}.out", "ab") as out:
        process = subprocess.Popen(
            [_program(name), *flags], env=os.environ | environment, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.terminate()
        _end(process)


def _end(process: subprocess.Popen) -> None:
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _kill(pids: Collection[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _program(name: str) -> str:
    found = shutil.which(name, path=SEARCHED)
    if found is None:
        raise RuntimeError(f"{name} is not installed")
    return found


def _idle(cluster: PrivateSlurm) -> int:
    with contextlib.suppress(subprocess.SubprocessError):
        return cluster.call("sinfo", "--noheader", "--Node", "--format=%T").split().count("idle")
    return 0


def _wait(folder: pathlib.Path, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not ready():
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text(errors="replace")[-1000:] for path in folder.glob("*.out"))
            raise RuntimeError(f"the private Slurm is not ready after {LIMIT} s:\n{logs}")
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("command", nargs="+", help="after --")
    arguments = parser.parse_args()
    if program := missing():
        print(f"error: {program} is not installed (Debian: slurm-wlm, munge)", file=sys.stderr)
        return 1
    with (
        tempfile.TemporaryDirectory(prefix="slurm_") as folder,
        private_slurm(pathlib.Path(folder), arguments.nodes) as cluster,
    ):
        return subprocess.run(arguments.command, env=os.environ | cluster.environment).returncode


if __name__ == "__main__":
    sys.exit(main())
