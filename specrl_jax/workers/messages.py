"""What a learner and its rollout workers say to each other, over a connection that both sides authenticate.

The learner writes where it listens, and a key, into the workdir. Messages are JSON and arrays (serialize.py), never
pickles. Nothing is encrypted.
"""

import json
import os
import pathlib
import socket
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeVar

import numpy as np

from specrl_jax.decoding.rollouts import Rollouts, WeightsVersion
from specrl_jax.distributed import from_bytes, to_bytes

ADDRESS = "workers.json"  # in the workdir
# A machine that is gone without a word is noticed after about half a minute: seconds until the first question, between
# questions, and their number.
KEEPALIVE = (15, 5, 3)

T = TypeVar("T")


class Address(NamedTuple):
    """Where a learner listens."""

    host: str
    port: int
    key: str  # hexadecimal


class Hello(NamedTuple):
    """A worker's first message."""

    facts: str  # JSON, of io/agreement.py
    name: str  # host and process
    devices: int


class Welcome(NamedTuple):
    """The learner's answer."""

    refused: str  # why the worker cannot help; "" if it can
    transfer: str  # address of the learner's transfer server


class Offer(NamedTuple):
    """Weights that a worker fetches: the parts of every leaf, in the order of `jax.tree.leaves`."""

    number: int  # of the transfer
    shapes: list[list[int]]
    dtypes: list[str]


class Ask(NamedTuple):
    """Rollouts to generate."""

    engine: str  # a field of Rollout; "": nothing more, the learner has ended
    weights: Offer | None  # None: those at hand
    version: WeightsVersion
    prompts: list[list[int]]  # none: compile only
    samples: int
    seed: int
    ids: np.ndarray  # [prompts x samples] uint32
    drafts: int  # of every verification; CHOOSES: the worker's controller says how many
    responses: list[int]  # most tokens of each; none: the engine's


CHOOSES = -1


class Answer(NamedTuple):
    """What came of an `Ask`."""

    rollouts: Rollouts | None  # None: only compiled
    weights_seconds: float  # until the weights were there
    failed: str  # what went wrong; "" if nothing did


def send(connection: Connection, message: object) -> None:
    connection.send_bytes(to_bytes(message))


def receive(connection: Connection, kind: type[T]) -> T:
    """Return the next message. Raises EOFError or OSError where the other side has left."""
    return from_bytes(kind, connection.recv_bytes())


def keep_alive(connection: Connection) -> None:
    """Let the operating system find out whether the other machine is still there."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in zip(("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), KEEPALIVE):
            if hasattr(socket, name):  # Linux
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def write_address(workdir: str, address: Address) -> None:
    """Write where the learner listens, readable by this account alone."""
    path = pathlib.Path(workdir, ADDRESS)
    new = path.with_suffix(".new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(address._asdict(), file)
    new.replace(path)


def remove_address(workdir: str) -> None:
    """Say that nobody listens any more."""
    pathlib.Path(workdir, ADDRESS).unlink(missing_ok=True)


def read_address(workdir: str) -> Address | None:
    """Return where the learner of a workdir listens; None: it has not said so yet."""
    try:
        found = json.loads(pathlib.Path(workdir, ADDRESS).read_text())
        return Address(str(found["host"]), int(found["port"]), str(found["key"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
