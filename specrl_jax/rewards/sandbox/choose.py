"""Probe once, at the start, which isolation works; fail if none does."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from specrl_jax.errors import InputError
from specrl_jax.rewards.sandbox.http import HttpSandbox, is_url
from specrl_jax.rewards.sandbox.limits import Limits, Run, SandboxError
from specrl_jax.rewards.sandbox.mechanisms import (
    ENVIRONMENT,
    MECHANISMS,
    SYSTEM,
    Interpreter,
    account,
    hidden,
    missing,
    own_uid,
)
from specrl_jax.rewards.sandbox.process import LocalSandbox, Sandbox

SYSTEM_PYTHON = "/usr/bin/python3"
OLDEST = (3, 9)
_ALTERNATIVE = "reward.sandbox=http://HOST:PORT runs programs on a SandboxFusion server"
_ABOUT = "import ctypes, json, sys; print(json.dumps([sys.executable, sys.version_info[:3], " + (
    "[sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]]))"
)
# Prints what it reaches of what must be out of reach.
_PROBE = """
import os, socket

def reaches(action):
    try:
        action()
    except OSError:
        return False
    return True

tried = {
    "files": lambda: open("/etc/passwd"),
    "writing": lambda: open("/usr/probe", "w"),
    "the network": lambda: socket.socket(socket.AF_INET),
    "root": lambda: os.setuid(0),
}
print("reaches", [name for name, action in tried.items() if reaches(action)])
"""


class Chosen(NamedTuple):
    """A sandbox that has been tried, as reward workers are told of it."""

    mechanism: str
    limits: Limits
    python: Interpreter | None = None
    url: str = ""

    def sandbox(self) -> Sandbox:
        """Return the sandbox; it starts when first used."""
        if self.python is None:
            return HttpSandbox(self.url, self.limits)
        return LocalSandbox(self.mechanism, self.python, self.limits)

    def line(self) -> str:
        """Return what the start of a run says of it."""
        if self.python is None:
            return f"reward.sandbox: http, programs run on {self.url}"
        return f"reward.sandbox: {self.mechanism}, programs run in {self.python.path} ({self.python.version})"


def choose(name: str, python: str, *, limits: Limits) -> Chosen:
    """Return the sandbox that reward.sandbox names, or the first that works; a program has run in it.

    Args:
      name: "auto", "bubblewrap", "landlock" or the URL of a server.
      python: interpreter of programs; "" is this process's own without its packages, or the system's where the account
        that programs get cannot read that.
    Raises:
      InputError: where there is none, with what each lacks and what would do instead.
    """
    if is_url(name):
        return _try_server(name, limits)
    faults = []
    for mechanism in MECHANISMS if name == "auto" else (name,):
        if fault := missing(mechanism):
            faults.append(f"{mechanism}: {fault}")
            continue
        chosen = Chosen(mechanism, limits, interpreter := find_python(python))
        if not (fault := hidden(mechanism, interpreter) or _fault(chosen)):
            return chosen
        faults.append(f"{mechanism}: {fault}")
    raise InputError(f"reward.sandbox={name}: none works here. {'; '.join(faults)}. {_ALTERNATIVE}")


def find_python(path: str) -> Interpreter:
    """Return the interpreter that programs run in. Raises InputError where none can be used."""
    faults = []
    for candidate in (path,) if path else (os.path.realpath(sys.executable), SYSTEM_PYTHON):
        try:
            return _about(candidate)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            faults.append(f"{candidate}: {getattr(error, 'strerror', None) or type(error).__name__}")
    needed = f"a Python of {'.'.join(map(str, OLDEST))} or later, with ctypes, that the programs' account can read"
    raise InputError(f"reward.sandbox_python={path}: {needed}, is needed; {'; '.join(faults)}")


def _about(path: str) -> Interpreter:
    told = subprocess.run(
        [path, "-I", "-c", _ABOUT],
        env=ENVIRONMENT,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=20,
        check=True,
        **account(own_uid()),
    ).stdout
    executable, version, prefixes = json.loads(told)
    if tuple(version) < OLDEST:
        raise ValueError
    return Interpreter(executable, ".".join(map(str, version)), _outside_system(sorted(set(prefixes))))


def _outside_system(folders: Sequence[str]) -> list[str]:
    return [f for f in folders if not any(f == s or f.startswith(s + "/") for s in SYSTEM)]


def _fault(chosen: Chosen) -> str:
    """Return why a sandbox does not confine a program; "" where it does."""
    sandbox = chosen.sandbox()
    try:
        ran = sandbox.run(Run(_PROBE), 20.0)
    except SandboxError as error:
        return str(error)
    finally:
        sandbox.close()
    if ran.stdout.strip() == "reaches []":
        return ""
    return f"a program in it {(ran.stdout or ran.stderr).strip()[-200:] or f'ended with status {ran.status}'}"


def _try_server(url: str, limits: Limits) -> Chosen:
    try:
        ran = HttpSandbox(url, limits).run(Run("print(int(input()) * 7)", "6\n"), 20.0)
    except SandboxError as error:
        raise InputError(f"reward.sandbox: {error}") from None
    if ran.stdout.strip() != "42":
        reply = f"{ran.stdout[:50]!r} {ran.stderr[-100:]!r}"
        raise InputError(f"reward.sandbox={url}: asked for 6 * 7, it said {reply}")
    return Chosen("http", limits, None, url=url)
