"""A line on what may have ended a process that ends without a word of its own, as where C++ aborts it.

A second process says it, once the first has gone.
"""

import atexit
import os
import subprocess
import sys

# Reads until the process that started it has ended, in whatever way: its number, then a line a cause.
PROGRAM = """
import sys
number, *causes = sys.stdin.read().splitlines()
if causes[-1:] != [""]:
    for cause in causes:
        sys.stderr.write(f"process {number} ended at once; if nothing above says why: {cause}\\n")
"""
_watchers: list[subprocess.Popen[str]] = []


def if_aborted(cause: str) -> None:
    """Let `cause`, one line, be said on stderr if this process is aborted or killed from now on."""
    if not _watchers:
        # In a session of its own: what ends a terminal's programs shall not end it first.
        command = [sys.executable, "-IS", "-c", PROGRAM]
        _watchers.append(subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True))
        _tell(str(os.getpid()))
        atexit.register(has_ended)
    _tell(cause)


def has_ended() -> None:
    """Let nothing be said: this process ends as it should, or has said why it does not."""
    if _watchers:
        _tell("")


def _tell(line: str) -> None:
    stdin = _watchers[0].stdin
    assert stdin is not None
    stdin.write(line + "\n")
    stdin.flush()
