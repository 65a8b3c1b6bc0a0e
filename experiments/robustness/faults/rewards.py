"""Rewards that hang, die, lie, fork or do not fit: one answer fails, or the run ends in one line; nothing runs on.

Most cases score three answers in a process of their own, as a user would with `Scorer`: the middle one is bad, so its
neighbours must earn their reward. Some run main.py.
"""

import contextlib
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterator, Mapping

import psutil

from experiments.robustness.faults.catalogue import Ended, Finding, finish, is_refused, main_py, start

TIMEOUT = 2.0  # seconds for one answer
# The module of a user. `hostile` does what the answer names, in the second response only.
MODULE = """
import ctypes, itertools, os, signal, subprocess, sys, time

SLEEP = [sys.executable, "-c", f"import time; time.sleep(600)  # {__file__}"]

def fork(do=lambda: time.sleep(600)):
    if os.fork() == 0:
        do()
        os._exit(0)

def daemon():
    os.setsid()
    fork()

def recurse():
    return recurse()

def every_socket(data):
    for descriptor in range(3, 64):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                os.write(descriptor, data)
        except OSError:
            pass
    time.sleep(600)

def hostile(response, answer):
    if response != "bad":
        return 1.0
    value = eval(answer)
    return 1.0 if value is None and "return" not in answer else value

def returns(value):
    return value

def numbers(response, answer):
    if response != answer and ord(response[:1] or "0") % 2:
        return float("nan") if len(response) % 2 else float("inf")
    return 1.0

def words(response, answer):
    if response != answer:
        raise ValueError(f"cannot read {response[:5]!r}")
    return 1.0

calls = itertools.count(1)

def later(response, answer):
    if next(calls) > 18:  # two rows at the start, and two evaluations of eight
        raise ValueError("the judge is gone")
    return 1.0

def graded(response, answer):
    return {"reward": 0.5, "format": 1.0}

def three(response, answer, gold):
    return 1.0

def column(response, answer, row):
    return float(row["level"])

def no_number(response, answer):
    return "1.0"

def leaves(response, answer):
    os._exit(0)

def starts(response, answer):
    fork()
    fork(daemon)
    subprocess.Popen(SLEEP, start_new_session=True, env={})
    return 1.0
"""
# What a bad answer does -> how it must fail; "": it is scored all the same.
HOSTILE = {
    "fork()": "",
    "fork(daemon)": "",
    "subprocess.Popen(SLEEP, start_new_session=True, env={}) and None": "",
    "[fork(), fork(daemon), os._exit(3)]": "died",
    "[fork(daemon), time.sleep(600)]": "timeout",
    "[os.kill(os.getpid(), signal.SIGSTOP), time.sleep(600)]": "timeout",
    "[os.kill(os.getppid(), signal.SIGSTOP), time.sleep(600)]": "timeout",
    "os.kill(os.getpid(), signal.SIGKILL)": "died",
    "[os.kill(os.getppid(), signal.SIGKILL), time.sleep(600)]": "died",
    "os._exit(0)": "died",
    "sys.exit(0)": "error",
    "ctypes.string_at(0)": "died",
    "os.closerange(3, 64)": "died",
    "bytearray(2**30)": "memory",
    "recurse()": "error",
    "fork(lambda: None) or os.fork() and None": "",
    "print('x' * 10_000_000, flush=True)": "",
    "input()": "error",
    "returns('x' * 50_000_000)": "error",
    "returns({'reward': 1.0} | {f'p{i}': 1.0 for i in range(100_000)})": "error",
    "returns(float('nan'))": "error",
    "returns(-float('inf'))": "error",
    "returns(10 ** 400)": "error",
    "returns([1.0])": "error",
    "returns('1.0')": "error",
    "returns((1.0, 'yes'))": "error",
    "every_socket(b'\\x7f' * 100)": "died",
    "every_socket(bytes(8) * 100)": "died",
    "every_socket((2 ** 62).to_bytes(8, 'big') + b'[')": "died",
}
PROGRAM = f"""
import json, sys
from specrl_jax.rewards.scorer import Scorer
from specrl_jax.rewards.worker_group import WorkerOptions
if __name__ == "__main__":
    with Scorer(("users_module:hostile",), workers=WorkerOptions(1, timeout={TIMEOUT}, memory=0.5)) as scorer:
        scores = scorer(["fine", "bad", "fine"], ["", sys.argv[1], ""])
    print(json.dumps([scores.total.tolist(), scores.failures, scores.first_failure]))
"""
IDLE = f"""
import json, psutil, time
from specrl_jax.rewards.scorer import Scorer
from specrl_jax.rewards.worker_group import WorkerOptions
with Scorer(("users_module:starts",), workers=WorkerOptions(2, timeout={TIMEOUT})) as scorer:
    scorer(["a"] * 8, [""] * 8)
    for process in psutil.Process().children(recursive=True):
        process.{{act}}()
    begun = time.monotonic()
    scores = scorer(["a"] * 8, [""] * 8)
    seconds = time.monotonic() - begun
assert seconds < {TIMEOUT} + 20, seconds
print(json.dumps([scores.total.tolist(), scores.failures, ""]))
"""
KILLED = """
import psutil, threading, time
from specrl_jax.errors import RunFailed
from specrl_jax.rewards.scorer import Scorer
from specrl_jax.rewards.worker_group import WorkerOptions
with Scorer(("exact",), workers=WorkerOptions(2)) as scorer:
    def kill():
        while True:
            for process in psutil.Process().children(recursive=True):
                try:
                    process.kill()
                except psutil.Error:
                    pass
            time.sleep(0.05)
    threading.Thread(target=kill, daemon=True).start()
    try:
        scorer(["#1"] * 8, ["1"] * 8)
    except RunFailed as error:
        raise SystemExit(f"error: {error}")
"""
SMALL = {
    "policy.preset": "nano",
    "draft.kind": "none",
    "steps": 1,
    "eval.problems": 8,
    "eval.samples": 1,
    "reward.workers": 1,
    "rollout.max_response_tokens": 4,
}


def findings(folder: pathlib.Path) -> Iterator[Finding]:
    (folder / "users_module.py").write_text(MODULE)
    for act, cause in HOSTILE.items():
        tried = f"a reward that does {act}"
        yield _judge(
            tried, _python(PROGRAM, folder, act), [1.0, 0.0 if cause else 1.0, 1.0], {cause: 1} if cause else {}
        )
    for act in ("suspend", "kill"):
        tried = f"idle workers with forks: {act} all of them"
        yield _judge(tried, _python(IDLE.format(act=act), folder), [1.0] * 8, {})
    yield is_refused(
        "kill -9 of every worker, again and again", _python(KILLED, folder), "reward workers die: 10 times"
    )
    yield from _commands(folder)


def _commands(folder: pathlib.Path) -> Iterator[Finding]:
    """Try rewards in the command."""
    for name, said in {
        "three": "does not take (response, answer)",
        "column": "KeyError: 'level'",
        "no_number": "a reward must be a number, not str",
        "leaves": "died: the worker ended with status 0",
        "missing": "AttributeError",
    }.items():
        yield is_refused(f"main.py with the reward {name}", _main(folder, name), said)
    said = "the reward failed for all 8 responses; the first: error: ValueError: cannot read"
    yield is_refused("main.py with a reward that fails for every answer", _main(folder, "words"), said)
    said = (
        "step 1: the reward failed for all 16 responses; the first: error: ValueError: the judge is gone; no checkpoint"
    )
    yield is_refused("main.py with a reward that fails from the first step on", _main(folder, "later"), said)
    trained: dict[str, dict[str, float | None]] = {
        "graded": {"reward/mean": 0.5, "reward/accuracy": 0.0, "reward/part/format": 1.0, "reward/unscored": 0},
        "numbers": {"reward/unscored": None},
    }
    for name, checks in trained.items():
        yield _trained(f"main.py with the reward {name}", _main(folder, name), folder / name, checks)
    yield _killed(folder)


def _python(program: str, folder: pathlib.Path, *arguments: str) -> Ended:
    """Run a program, and add what it has left running to its errors."""
    process = start([sys.executable, "-c", program, *arguments], _environment(folder))
    return _with_leftovers(finish(process), folder)


def _main(folder: pathlib.Path, name: str) -> Ended:
    command = main_py("configs/rlzero_tiny.py:smoke", folder / name, SMALL | {"reward.name": f"users_module:{name}"})
    return _with_leftovers(finish(start(command, _environment(folder))), folder)


def _environment(folder: pathlib.Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{folder}{os.pathsep}."}


def _with_leftovers(ended: Ended, folder: pathlib.Path) -> Ended:
    """Make an ending whose processes live on a hang. They are known by what they were started with."""
    end = time.monotonic() + 5
    while (left := _leftovers(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return ended._replace(status=99, stderr=f"{len(left)} processes were left: {left[0]}") if left else ended


def _leftovers(folder: pathlib.Path) -> list[psutil.Process]:
    """Return the processes that a case of this folder has started: by environment, or as sleepers of its module."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folder) in process.environ().get("PYTHONPATH", "") + " ".join(process.cmdline()):
                found.append(process)
    return found


def _judge(tried: str, ended: Ended, total: list[float], failures: Mapping[str, int]) -> Finding:
    """Judge scores that a program printed as [total, failures, what the first said]."""
    try:
        found_total, found_failures, said = json.loads(ended.stdout)
    except ValueError:
        return Finding(tried, "failed", f"exit status {ended.status}: {(ended.stderr or ended.stdout)[-300:]}")
    right = found_total == total and found_failures == failures and not ended.stderr and not ended.status
    what = f"{said} {ended.stderr}".strip() if right else f"{found_total} {found_failures} {said} {ended.stderr[-300:]}"
    return Finding(tried, "survived" if right else "failed", what)


def _trained(tried: str, ended: Ended, workdir: pathlib.Path, checks: Mapping[str, float | None]) -> Finding:
    """Judge a run of one step by its metrics; None: any number above zero, and no value that is not finite."""
    if ended.status or ended.traceback:
        return Finding(tried, "failed", f"exit status {ended.status}: {ended.stderr[-300:]}")
    row = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])
    wrong = {k: row.get(k) for k, v in checks.items() if (row.get(k) != v if v is not None else not row.get(k))}
    wrong |= {k: v for k, v in row.items() if v is None}
    return Finding(tried, "failed" if wrong else "survived", json.dumps(wrong or {k: row[k] for k in checks}))


def _killed(folder: pathlib.Path) -> Finding:
    """Kill a run whose reward has started processes."""
    tried = "kill -9 of a run whose reward has forked"
    command = main_py("configs/rlzero_tiny.py:smoke", folder / "killed", SMALL | {"reward.name": "users_module:starts"})
    process = start(command, _environment(folder))
    end = time.monotonic() + 120
    while process.poll() is None and len(_leftovers(folder)) < 6 and time.monotonic() < end:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    ended = _with_leftovers(finish(process), folder)
    return Finding(tried, "survived" if ended.status == -signal.SIGKILL else "failed", ended.stderr[-200:])
