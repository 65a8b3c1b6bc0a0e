"""What every group of the catalogue of faults uses: run a command under a limit and say how it ended.

A group is a module of this package with a function `findings(folder)`. It gets an empty folder, makes what its cases
share, tries one fault after the other as a user would meet it, and yields a Finding for each. It must not raise for a
fault that is survived badly: that is a Finding whose outcome is "failed".
"""

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

ROOT = pathlib.Path(__file__).parents[3]
LIMIT = 120  # seconds until a command counts as hanging


class Finding(NamedTuple):
    """What happened to one fault."""

    tried: str  # a few words: "one bit flipped in state/.../d/0"
    outcome: Literal["survived", "refused", "failed"]  # refused: exit status 1 and one line
    said: str  # the line that the user reads, or what went wrong
    bit_equal: bool | None = None  # None: not promised


class Ended(NamedTuple):
    """A command that has ended."""

    status: int | None  # None: it ran into the limit and was killed
    stdout: str
    stderr: str
    seconds: float

    @property
    def traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.stdout + self.stderr

    @property
    def error(self) -> str:
        """Return the error line; "" where there is not exactly one."""
        lines = [line for line in self.stderr.splitlines() if line.startswith("error: ")]
        return lines[0].removeprefix("error: ") if len(lines) == 1 else ""


Findings = Callable[[pathlib.Path], Iterator[Finding]]


def start(command: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a command in the repository's root, in a process group of its own."""
    return subprocess.Popen(
        list(command),
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], limit: float = LIMIT) -> Ended:
    """Wait for a command of `start`; kill its process group at the limit."""
    begun = time.monotonic()
    try:
        stdout, stderr = process.communicate(timeout=limit)
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        status = None
    return Ended(status, stdout, stderr, time.monotonic() - begun)


def main_py(config: str, workdir: pathlib.Path | str, overrides: Mapping[str, object]) -> list[str]:
    """Return the command `python main.py` with its overrides."""
    command = [sys.executable, "main.py", "--config", config, "--workdir", str(workdir)]
    return command + [f"--config.{key}={value}" for key, value in overrides.items()]


def ends_well(tried: str, ended: Ended) -> Finding:
    """Judge a command that should go on: exit status 0, no traceback."""
    if ended.status == 0 and not ended.traceback:
        return Finding(tried, "survived", "")
    return Finding(tried, "failed", _what_went_wrong(ended))


def is_refused(tried: str, ended: Ended, named: str = "") -> Finding:
    """Judge a command that should refuse its input: status 1, one error line that contains `named`, no traceback."""
    if ended.status == 1 and ended.error and not ended.traceback and named in ended.error:
        return Finding(tried, "refused", ended.error)
    return Finding(tried, "failed", _what_went_wrong(ended))


def _what_went_wrong(ended: Ended) -> str:
    if ended.status is None:
        return f"did not end within {ended.seconds:.0f} s"
    last = (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1:]
    return f"exit status {ended.status}{', a traceback' if ended.traceback else ''}: {' '.join(last)[:200]}"
