"""JSON in frames over a socket to a process that may hang, end or say anything.

What it says is bounded in size and in time, and is never unpickled; who reads it checks it field by field. Processes
that trust each other, and send arrays, use multiprocessing.connection (rollout/workers/messages.py), which knows their
key but no deadline within a message. Python 3.9 or later, without any package: programs of a sandbox use it, too.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct("!Q")


def send(channel: socket.socket, message: object, seconds: float | None = None) -> None:
    """Send a message. Raises TimeoutError after `seconds`, OSError where the other end is closed, TypeError for what is
    not JSON.
    """
    channel.settimeout(seconds)
    data = json.dumps(message).encode()
    channel.sendall(_LENGTH.pack(len(data)) + data)


def receive(channel: socket.socket, seconds: float | None = None, longest: float = math.inf) -> Any:
    """Return the next message.

    Raises TimeoutError after `seconds`, EOFError where the other end is closed, ValueError for what is not JSON of at
    most `longest` bytes.
    """
    end = math.inf if seconds is None else time.monotonic() + seconds
    (length,) = _LENGTH.unpack(_read(channel, _LENGTH.size, end))
    if length > longest:
        raise ValueError(f"a message of {length} bytes")
    try:
        return json.loads(_read(channel, length, end))
    except RecursionError:
        raise ValueError("a message that is too deep") from None


def _read(channel: socket.socket, count: int, end: float) -> bytes:
    """Return `count` bytes, read before `end` on the monotonic clock."""
    data = bytearray()
    while len(data) < count:
        remaining = end - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        channel.settimeout(None if remaining == math.inf else remaining)
        piece = channel.recv(min(count - len(data), 2**16))
        if not piece:
            raise EOFError("the other end is closed")
        data += piece
    return bytes(data)
