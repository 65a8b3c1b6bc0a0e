"""Runs a call or tests on a server that runs one file: what a fork server does, without its walls.

The file is what `bundle` makes; the job comes through the standard input. Python 3.9 or later.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile

from specrl_jax.rewards.sandbox.judging import check
from specrl_jax.rewards.sandbox.programs import run, serve


def main() -> int:
    """Run the job in the standard input, and print its result in a last line that begins with the job's mark."""
    job = json.load(sys.stdin)
    with tempfile.TemporaryFile() as result:
        status = _judge(job, result.fileno()) if job["tests"] else run(_file(job), os.dup(result.fileno()))
        result.seek(0)
        os.write(1, b"\n" + job["mark"].encode() + result.read() + b"\n")
    return status


def _judge(job: dict[str, str], result: int) -> int:
    """Run tests in this process, and the program in another, which is told neither them nor the mark."""
    ours, theirs = socket.socketpair()
    files = [_file({"program": job["program"]}), theirs.fileno()]
    with subprocess.Popen([sys.executable, sys.argv[0], *map(str, files)], pass_fds=files) as served:
        theirs.close()
        status = check(_file({"tests": job["tests"], "check": job["check"]}), ours.detach(), result)
        served.kill()
    return status


def _file(job: object) -> int:
    """Return an open file of no name with a job in it."""
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(job).encode())
        file.seek(0)
        return os.dup(file.fileno())


if __name__ == "__main__":
    os._exit(serve(*map(int, sys.argv[1:])) if sys.argv[1:] else main())
