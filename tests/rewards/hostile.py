"""A reward that does what its answer says; imported by reward workers, so it must not import jax."""

import collections
import ctypes
import itertools
import os
import signal
import sys
import time

MIB = 2**20
kept = []


def obey(response: str, answer: str) -> float:
    """1 for every answer that names nothing bad."""
    word, _, number = response.partition(" ")
    return ACTS.get(word, lambda _: 1.0)(float(number or 0))


def leave_jax_out(response: str, answer: str) -> float:
    return float("jax" not in sys.modules and "specrl_jax.rewards.worker" in sys.modules)


def pid(response: str, answer: str) -> float:
    time.sleep(0.05)
    return float(os.getpid())


def length(response: str, answer: str) -> float:
    return float(len(response))


def one_argument(response: str) -> float:
    return 1.0


def keep(mib: float) -> float:
    kept.append(bytearray(int(mib * MIB)))
    return 1.0


def borrow(mib: float) -> float:
    return float(len(bytearray(int(mib * MIB))) > 0)


def spin(_: float) -> float:
    while True:
        pass


def compute(_: float) -> float:
    collections.deque(itertools.repeat(0), maxlen=0)  # in C, with the interpreter's lock: it hears no signal
    return 1.0


def fail(_: float) -> float:
    raise ValueError("bad\nnews")


def noise(_: float) -> float:
    print("noise on stdout", flush=True)
    os.write(2, b"noise on stderr\n")
    return 1.0


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return 1.0


ACTS = {
    "spin": spin,
    "compute": compute,
    "fail": fail,
    "noise": noise,
    "sleep": sleep,
    "keep": keep,
    "borrow": borrow,
    "exit": lambda status: os._exit(int(status)),
    "quit": lambda _: sys.exit(0),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda _: ctypes.string_at(0),
    "return": lambda value: value,
    "text": lambda _: "1.0",
    "nothing": lambda _: None,
    "complex": lambda _: 1j,
    "huge": lambda _: 10**400,
}
