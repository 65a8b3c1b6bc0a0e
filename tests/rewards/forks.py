"""Rewards that start processes or write to their worker's channel; imported by reward workers."""

import json
import os
import signal
import struct
import subprocess
import sys
import time

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
FORMS = {
    "fork": lambda: fork(lambda: time.sleep(600)),
    "child": lambda: subprocess.Popen(SLEEP).pid,
    "setsid": lambda: subprocess.Popen(SLEEP, start_new_session=True, env={}).pid,
    "daemon": lambda: fork(daemon),
    "chain": lambda: fork(chain),
}


def fork(do):
    child = os.fork()
    if child == 0:
        do()
        os._exit(0)
    return child


def daemon():
    os.setsid()
    fork(lambda: time.sleep(600))


def chain():
    """Children of children, each in its own session, none of which has a living parent."""
    for _ in range(5):
        os.setsid()
        if os.fork():
            os._exit(0)
    time.sleep(600)


def start(response: str, answer: str) -> float:
    """Start what `response` lists, then do what `answer` says."""
    for word in response.split():
        FORMS[word]()
    time.sleep(0.3)
    if answer == "hang":
        time.sleep(600)
    if answer == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def forget_the_fork(response: str, answer: str) -> float:
    """Return twice: in the worker and in its fork."""
    return 1.0 if os.fork() else 0.0


def stop_later(response: str, answer: str) -> float:
    """Stop the worker half a second after the answer, when it is idle."""
    if response == "stop":
        worker = os.getpid()
        if os.fork() == 0:
            time.sleep(0.5)
            os.kill(worker, signal.SIGSTOP)
            os._exit(0)
    return 1.0


def forge(response: str, answer: str) -> float:
    """Write `answer` into every open socket: the worker's channel is one of them."""
    if response == "forge":
        data = {
            "garbage": b"\x00" * 64,
            "huge": struct.pack("!Q", 2**62) + b"[",
            "nan": frame([1, [[float("nan")], None, {}, None, "", ""], "more"]),
            "text": frame([1, [["1.0"], None, {}, None, "", ""], "more"]),
            "true": frame([1, [[True], None, {}, None, "", ""], "more"]),
            "two": frame([1, [[1.0, 1.0], None, {}, None, "", ""], "more"]),
            "deep": frame_of(b"[" * 10_000),
        }[answer]
        for descriptor in range(3, 64):
            try:
                if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                    os.write(descriptor, data)
            except OSError:
                continue
        time.sleep(600)
    return 1.0


def frame(message) -> bytes:
    return frame_of(json.dumps(message).encode())


def frame_of(data: bytes) -> bytes:
    return struct.pack("!Q", len(data)) + data
