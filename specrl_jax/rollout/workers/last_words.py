"""Says what may have happened where a process with a transfer server ends without a word: in C++, nobody else can."""

import atexit
import os
import subprocess
import sys

ENDED = "ended"
# Reads until the process that started it has ended, in whatever way.
PROGRAM = """
import sys
said = sys.stdin.read().split()
if said[-1] != "ENDED":
    sys.stderr.write(f"process {said[0]} ended at once. If nothing above says why: its transfer port {said[1]} was "
        "open, and a message there that is not a worker's aborts it (docs/scaling.md, rollout workers)\\n")
""".replace("ENDED", ENDED)

_watchers: list[subprocess.Popen[str]] = []


def say_if_aborted(address: str) -> None:
    """Let another process say a line on stderr if this one is aborted or killed while its port `address` is open."""
    if _watchers:  # one says enough
        return
    # In a session of its own: what ends a terminal's programs shall not end it first.
    watcher = subprocess.Popen(
        [sys.executable, "-IS", "-c", PROGRAM], stdin=subprocess.PIPE, text=True, start_new_session=True
    )
    _watchers.append(watcher)
    _say(watcher, f"{os.getpid()} {address}\n")
    atexit.register(_end, watcher)


def _end(watcher: subprocess.Popen[str]) -> None:
    _say(watcher, ENDED)
    assert watcher.stdin is not None
    watcher.stdin.close()


def _say(watcher: subprocess.Popen[str], text: str) -> None:
    assert watcher.stdin is not None
    watcher.stdin.write(text)
    watcher.stdin.flush()
