"""Two hosts on one machine: namespaces with a name, an address, processes and files of their own, joined by a switch.

Needs root, network and mount namespaces, and `ip`, `tc`, `unshare`, `nsenter` (Debian: iproute2, util-linux).
"""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import psutil

from experiments.commands import REPOSITORY
from specrl_jax.errors import InputError

PROGRAMS = ("ip", "tc", "unshare", "nsenter")
SHARED = "/mnt"  # on both hosts, the file system that they share
ADDRESSES = {"hosta": "10.213.0.1", "hostb": "10.213.0.2"}
# What a host does when it starts: its own changes of the repository and its own /tmp, and what is shared.
START = """set -e
hostname {name}
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/shared {shared}
mount -t overlay overlay -o lowerdir={root},upperdir={folder}/{name}/upper,workdir={folder}/{name}/work {root}
mount -t tmpfs tmpfs /tmp
echo started
exec sleep infinity
"""
# The first that the kernel has; the second has no delay.
SHAPES = (("netem", "delay", "20ms", "rate", "1gbit"), ("tbf", "rate", "1gbit", "burst", "256kb", "latency", "50ms"))


class Ended(NamedTuple):
    """How a program of a host ended."""

    status: int
    seconds: float  # that it was waited for


class Program:
    """A program that runs on a host, and what it has printed."""

    def __init__(self, process: subprocess.Popen[bytes], log: pathlib.Path) -> None:
        self._process, self._log = process, log

    def printed(self) -> str:
        return self._log.read_text(errors="replace")

    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_for(self, pattern: str, count: int = 1, seconds: float = 300.0) -> None:
        """Wait until it has printed what a regular expression matches, `count` times.

        Raises RuntimeError where it ends before, or takes longer.
        """
        end = time.monotonic() + seconds
        while len(re.findall(pattern, self.printed())) < count:
            if not self.is_running() or time.monotonic() > end:
                raise RuntimeError(f"no {pattern!r}:\n{self.printed()[-4000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End it by closing its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def wait(self, seconds: float = 600.0) -> Ended:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        start = time.monotonic()
        return Ended(self._process.wait(seconds), time.monotonic() - start)


class Host:
    """One host; it can lose its power, and start again."""

    def __init__(self, name: str, folder: pathlib.Path) -> None:
        self.name, self.address, self._folder = name, ADDRESSES[name], folder
        self._programs = 0
        self.start()

    def start(self) -> None:
        """Start it, without a network. Raises InputError where this machine does not allow it."""
        for part in ("upper", "work"):
            (self._folder / self.name / part).mkdir(parents=True, exist_ok=True)
        script = START.format(name=self.name, folder=self._folder, shared=SHARED, root=REPOSITORY)
        command = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._outer = subprocess.Popen(
            [*command, "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._outer.stdout is not None and self._outer.stderr is not None
        if not self._outer.stdout.readline().startswith("started"):
            raise InputError(f"two hosts cannot be made here: {self._outer.stderr.read().strip()[-200:]}")
        (inner,) = psutil.Process(self._outer.pid).children()
        self.pid = inner.pid

    def cut_power(self) -> None:
        """End all that runs there at once."""
        if self._outer.poll() is None:
            os.kill(self.pid, signal.SIGKILL)  # process 1 of its namespace: the kernel ends all others
            self._outer.wait()

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs another one there."""
        entered = ["nsenter", "-t", str(self.pid), "-n", "-u", "-i", "-m", "-p", f"--wdns={REPOSITORY}"]
        return [*entered, *arguments]

    def run(self, *arguments: str) -> None:
        """Run a short command there. Raises CalledProcessError."""
        subprocess.run(self.command(*arguments), check=True, capture_output=True)

    def begin(self, arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Program:
        """Begin a Python program there."""
        self._programs += 1
        log = self._folder / f"{self.name}_{self._programs}.log"
        with open(log, "w") as file:
            command = self.command(sys.executable, *arguments)
            process = subprocess.Popen(
                command, env=dict(environment), stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT
            )
        return Program(process, log)


class Switch:
    """Joins the hosts, each by a wire of its own: what happens to one leaves the others' as it is."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        script = "ip link add switch type bridge && ip link set switch up && echo started && exec sleep infinity"
        self._process = subprocess.Popen(["unshare", "--net", "sh", "-c", script], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise InputError("two hosts cannot be made here: the kernel has no bridges")
        self._hosts = hosts
        for host in hosts:
            self.connect(host)

    def connect(self, host: Host) -> None:
        """Lay a host's wire, after its start."""
        with contextlib.suppress(subprocess.CalledProcessError):  # the kernel may still be about to end what was there
            self._run("ip", "link", "del", host.name)
        ends = ["ip", "link", "add", host.name, "netns", str(self._process.pid), "type", "veth"]
        subprocess.run([*ends, "peer", "name", "wire", "netns", str(host.pid)], check=True, capture_output=True)
        self._run("ip", "link", "set", host.name, "master", "switch", "up")
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", "wire")
        for name in ("lo", "wire"):
            host.run("ip", "link", "set", name, "up")
        self.shape = self._shaped(host)

    def _shaped(self, host: Host) -> str:
        for shape in SHAPES:
            with contextlib.suppress(subprocess.CalledProcessError):
                host.run("tc", "qdisc", "add", "dev", "wire", "root", *shape)
                return " ".join(shape)
        return "not shaped"

    @contextlib.contextmanager
    def without(self, host: Host) -> Iterator[None]:
        """Cut a host's wire until the body ends."""
        self._run("ip", "link", "set", host.name, "down")
        try:
            yield
        finally:
            self._run("ip", "link", "set", host.name, "up")

    def _run(self, *arguments: str) -> None:
        command = ["nsenter", "-t", str(self._process.pid), "-n", *arguments]
        subprocess.run(command, check=True, capture_output=True)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host, Switch, pathlib.Path]]:
    """Yield two hosts, what joins them, and the folder here that both have as SHARED.

    Raises InputError where this machine does not allow it.
    """
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        raise InputError(f"two hosts cannot be made here: there is no {missing[0]}")
    if os.geteuid():
        raise InputError("two hosts cannot be made here: that takes root")
    if sys.prefix.startswith("/tmp/") or str(REPOSITORY).startswith("/tmp/"):
        raise InputError(
            "two hosts cannot be made here: each has a /tmp of its own, so neither Python nor clone lie there"
        )
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name, contextlib.ExitStack() as ending:
        folder = pathlib.Path(name)
        (folder / "shared").mkdir()
        lines = [f"{address} {host}" for host, address in ADDRESSES.items()]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        hosts = []
        for host_name in ADDRESSES:
            hosts.append(Host(host_name, folder))
            ending.callback(hosts[-1].cut_power)
        switch = Switch(hosts)
        ending.callback(switch.close)
        yield hosts[0], hosts[1], switch, folder / "shared"
