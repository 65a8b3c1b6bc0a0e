"""Run hostile programs in every sandbox of this machine, and measure how many trivial ones it runs a second.

    python -m experiments.robustness.sandbox --output experiments/robustness/sandbox.json

Exits with status 0 only if each program of hostile_programs.txt stayed inside, earned nothing, was over at most a
second after its limit and left nothing behind, in each mechanism that works here, and one does. This process plays the
trainer: it has a secret in its environment and in files, and listens for connections and signals.
"""

import contextlib
import datetime
import json
import os
import pathlib
import re
import secrets
import signal
import socket
import string
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from experiments import commands
from specrl_jax.errors import InputError
from specrl_jax.rewards.code.reward import CodeOptions, CodeReward
from specrl_jax.rewards.pool import WorkerOptions
from specrl_jax.rewards.sandbox.choose import Chosen, choose
from specrl_jax.rewards.sandbox.limits import MIB, Limits, Ran, Run, SandboxError
from specrl_jax.rewards.sandbox.mechanisms import own_uid
from specrl_jax.rewards.sandbox.process import Sandbox
from specrl_jax.rewards.scorer import Scorer

LIMITS = Limits(seconds=2.0, memory=256 * MIB, output=MIB, processes=16, disk=8 * MIB)
GRACE = 1.0  # seconds after its limit by which a program is over
ENVIRONMENT = "SPECRL_HOSTILE_SECRET"
# What a hostile program would leave, if it could. Names have the run's own mark.
LEFT: tuple[str, ...] = (
    "/dev/shm/left$mark",
    "/tmp/l$mark",
    "/tmp/h$mark",
    "/tmp/fill$mark",
    "/tmp/${mark}0",
    "/tmp/d$mark",
    "/tmp/py$mark",
    "/tmp/.$mark",
)
LEFT += ("/usr/left$mark", "/bin/left$mark", "/left$mark", "/etc/left$mark")
LEFT += ("/var/tmp/left$mark", "/root/left$mark", "/run/left$mark")
CHECK = """
def check(candidate):
    assert candidate(2) == 4
    assert [candidate(x) for x in (1, 3)] == [1, 9]
"""
UNIT = """
import unittest
from solution import f

class Squares(unittest.TestCase):
    def test_two(self):
        self.assertEqual(f(2), 4)

    def test_close(self):
        assert abs(f(3) - 9) < 1e-6 and len([f(1)]) == 1 and all([f(1) == 1])

def test_all():
    assert all(map(lambda x: f(x) == x * x, [2, 3]))
"""
ROWS = {
    "print": json.dumps({"inputs": ["2 2\n"], "outputs": ["4\n"]}),
    "call": json.dumps({"inputs": [[2]], "outputs": [4], "fn_name": "f"}),
    "assertion": json.dumps(["assert f(2) == 4"]),
    "check": json.dumps({"test": CHECK, "entry_point": "f"}),
    "unit": UNIT,
}
HONEST = {
    "print": "a, b = map(int, input().split())\nprint(a + b)  # siblinganswer",
    **dict.fromkeys(("call", "assertion", "check", "unit"), "def f(x):\n    return x * x  # siblinganswer"),
}


class Hostile(NamedTuple):
    name: str
    form: str  # of its row's tests
    program: str  # with $names of `Trainer.values`


def hostile_programs() -> list[Hostile]:
    """Return the programs of hostile_programs.txt."""
    text = pathlib.Path(__file__).with_name("hostile_programs.txt").read_text()
    _, start, *blocks = re.split(r"^### ", text, flags=re.MULTILINE)
    before = start.removeprefix("start\n")
    found = []
    for block in blocks:
        head, _, program = block.partition("\n")
        name, _, form = head.partition(" | ")
        found.append(Hostile(name, form, before + program))
    return found


class Recorded:
    """A sandbox that remembers what came out of it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox, self.ran = sandbox, list[Ran]()

    def run(self, task: Run, seconds: float) -> Ran:
        self.ran.append(self.sandbox.run(task, seconds))
        return self.ran[-1]

    def close(self) -> int:
        return self.sandbox.close()


class Trainer(NamedTuple):
    """What programs may attack."""

    secret: str
    folder: str
    listener: socket.socket
    abstract: list[socket.socket]
    signals: list[int]
    absent: list[str]  # paths of LEFT where nothing is before the programs run

    def values(self) -> dict[str, object]:
        """Return what the programs' texts name."""
        return {
            "pid": os.getpid(),
            "file": f"{self.folder}/open",
            "private": f"{self.folder}/private",
            "folder": self.folder,
            "home": os.path.expanduser("~"),
            "environment": ENVIRONMENT,
            "port": self.listener.getsockname()[1],
            "mark": self.secret[:8],
        }

    def damage(self) -> str:
        """Return what a program has done out here; "" for nothing."""
        if self.signals:
            return f"signals came: {self.signals}"
        for one in (self.listener, *self.abstract):
            with contextlib.suppress(BlockingIOError):
                one.accept() if one.type == socket.SOCK_STREAM else one.recv(1)
                return "a connection came"
        if sorted(os.listdir(self.folder)) != ["open", "private"]:
            return "a file in the trainer's folder"
        path = pathlib.Path(self.folder, "open")
        if self.secret not in path.read_text() or path.stat().st_mode & 0o777 != 0o666:
            return "the trainer's file has changed"
        if left := [path for path in self.absent if os.path.lexists(path)]:
            return f"left {left[0]}"
        tables = (pathlib.Path("/proc/sysvipc", name) for name in ("shm", "msg", "sem"))
        if any(line.split()[:1] == ["4242"] for table in tables for line in table.read_text().splitlines()):
            return "left a System V object"
        return ""


@contextlib.contextmanager
def trainer() -> Iterator[Trainer]:
    """Play the process that programs would like to reach."""
    secret = secrets.token_hex(16)
    signals: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda n, _: signals.append(n))
    os.environ[ENVIRONMENT] = secret
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ending:
        os.chmod(folder, 0o777)
        for name, mode in (("open", 0o666), ("private", 0o600)):
            pathlib.Path(folder, name).write_text(f"ESCAPED {secret}")
            os.chmod(os.path.join(folder, name), mode)
        listener = ending.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = []
        for kind, name in ((socket.SOCK_STREAM, ""), (socket.SOCK_DGRAM, "datagrams")):
            one = ending.enter_context(socket.socket(socket.AF_UNIX, kind))
            one.bind(f"\0{secret[:8]}{name}")
            if kind == socket.SOCK_STREAM:
                one.listen()
            abstract.append(one)
        for one in (listener, *abstract):
            one.setblocking(False)
        paths = [string.Template(path).substitute(mark=secret[:8]) for path in LEFT]
        absent = [path for path in paths if not os.path.lexists(path)]
        yield Trainer(secret, folder, listener, abstract, signals, absent)


def fault(reward: CodeReward, sandbox: Recorded, one: Hostile, attacked: Trainer, most: int) -> tuple[str, float, str]:
    """Run a hostile program; return what it got away with, "" for nothing, its seconds, and how it ended."""
    sandbox.ran.clear()
    program = string.Template(one.program).substitute(attacked.values())
    start, ended = time.monotonic(), ""
    try:
        paid = reward(f"```python\n{program}```\n", ROWS[one.form], row={})["reward"]
    except SandboxError as error:
        paid, ended = 0.0, f"sandbox: {error}"
    seconds = time.monotonic() - start
    for ran in sandbox.ran:
        ended = ran.cause or f"status {ran.status}"
        if "ESCAPED" in ran.stdout + ran.stderr + str(ran.result) or attacked.secret in ran.stdout + ran.stderr:
            return f"escaped: {(ran.stdout + ran.stderr)[-200:]!r}", seconds, ended
    if paid:
        return f"earned {paid}", seconds, ended
    if seconds > len(sandbox.ran) * LIMITS.seconds + GRACE:
        return f"took {seconds:.1f} s", seconds, ended
    if damage := attacked.damage() or strangers(most):
        return damage, seconds, ended
    if reward(f"```python\n{HONEST[one.form]}\n```", ROWS[one.form], row={})["reward"] != 1:
        return "the next program failed", seconds, ended
    return "", seconds, ended


def strangers(most: int) -> str:
    """Return which processes are left beside `most` of the sandbox itself; "" for none."""
    own = psutil.Process().children(recursive=True)
    if len(own) > most:
        return f"left {len(own) - most} processes"
    known, accounts = {process.pid for process in own}, {own_uid(), own_uid() + 1} - {0, 1}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in known and process.uids().real in accounts:
                return f"left process {process.pid}"
    return ""


def try_all(chosen: Chosen, programs: list[Hostile], console: Console) -> list[dict[str, Any]]:
    """Run hostile programs in one sandbox; print and return what became of each."""
    reward = CodeReward(CodeOptions(chosen, True, 60.0))
    sandbox = reward.sandbox = Recorded(reward.sandbox)
    table = Table("program", "tests", "seconds", "ended by", "got away with", title=chosen.line())
    most = 2 if chosen.mechanism == "bubblewrap" else 1  # bwrap and the fork server
    rows = []
    with trainer() as attacked, contextlib.closing(sandbox):
        for form, program in HONEST.items():
            if reward(f"```\n{program}\n```", ROWS[form], row={})["reward"] != 1:
                raise SystemExit(f"{chosen.mechanism}: an honest program earned nothing ({form}): {sandbox.ran[-1]}")
        for one in twice(programs):
            what, seconds, ended = fault(reward, sandbox, one, attacked, most)
            table.add_row(one.name, one.form, f"{seconds:.2f}", ended, what or "nothing")
            rows.append(
                {"name": one.name, "tests": one.form, "seconds": round(seconds, 3), "ended": ended, "fault": what}
            )
    if left := strangers(0):
        rows.append({"name": "the end", "tests": "", "seconds": 0.0, "ended": "", "fault": left})
    console.print(table)
    return rows


def twice(programs: Iterable[Hostile]) -> Iterator[Hostile]:
    """Yield programs, those that look for what they have left twice in a row."""
    for one in programs:
        yield from [one] * (2 if one.name.startswith("remembers") else 1)


def throughput(chosen: Chosen, count: int, workers: int) -> dict[str, float]:
    """Return trivial answers scored a second, each in the process that it has to itself, by form of tests."""
    found = {}
    with Scorer(("code",), workers=WorkerOptions(workers), code=CodeOptions(chosen, False, 10.0)) as scorer:
        for form, program in HONEST.items():
            answers = [f"```python\n{program}\n```"] * count, [ROWS[form]] * count
            scorer(*answers)  # starts the sandboxes
            start = time.perf_counter()
            scores = scorer(*answers)
            assert scores.total.sum() == count, scores.first_failure
            found[form] = round(count / (time.perf_counter() - start), 1)
    return found


def main() -> int:
    parser = commands.Parser(__doc__)
    parser.sizes(
        only=([""], ["forges"], "names of programs, or their beginnings, as forges"),
        programs=(200, 4, "of the throughput measurement; 0 leaves it out"),
    )
    parser.add_argument("--mechanisms", nargs="+", default=["bubblewrap", "landlock"])
    parser.add_argument("--workers", type=int, default=2, help="reward processes of it")
    parser.add_argument("--output", help="JSON file for what each program did")
    a = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    result: dict[str, Any] = {"date": datetime.date.today().isoformat(), "cpus": os.cpu_count()}
    programs = [one for one in hostile_programs() if one.name.startswith(tuple(a.only))]
    held = []
    for name in a.mechanisms:
        try:
            chosen = choose(name, "", limits=LIMITS)
        except InputError as error:
            console.print(f"not tried: {error}")
            continue
        rows = try_all(chosen, programs, console)
        bad = [row for row in rows if row["fault"]]
        held.append(not bad)
        speed = throughput(chosen, a.programs, a.workers) if a.programs else {}
        console.print(f"{name}: {len(rows) - len(bad)} of {len(rows)} programs got nothing. Answers a second: {speed}")
        result[name] = {"programs": rows, "answers_per_second": speed, "workers": a.workers}
    if a.output:
        pathlib.Path(a.output).write_text(json.dumps(result, indent=1) + "\n")
    return 0 if held and all(held) else 1


if __name__ == "__main__":
    sys.exit(commands.run(main))
