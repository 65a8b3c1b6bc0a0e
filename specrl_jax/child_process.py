"""Child processes that may hang, die or say anything, and JSON in frames between them and this one.

What a child says is bounded in size and in time, and is never unpickled; who asked checks it field by field. Imports no
jax: a child is small, and starts in a second.
"""

import contextlib
import json
import math
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

_LENGTH = struct.Struct("!Q")
_BOOT = "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; import {0}; {0}.main(given)"


class ChildProcess:
    """A process that runs `main(settings)` of a module of this project.

    Args:
      settings: JSON; "socket", the number of the child's end of the channel as an open file, is added.
      options: of `subprocess.Popen`.
    """

    def __init__(self, module: str, settings: Mapping[str, object], **options: Any) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            settings = {**settings, "socket": theirs.fileno(), "path": sys.path}
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT.format(module), json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # thousands of arbitrary answers would flood the console
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                **options,
            )

    def send(self, message: object, seconds: float) -> None:
        """Send a message: `send` below."""
        send(self._channel, message, seconds)

    def receive(self, seconds: float, longest: float = math.inf) -> Any:
        """Return the next message: `receive` below."""
        return receive(self._channel, seconds, longest)

    def hang_up(self) -> None:
        """Close the channel; a thread that waits for the child wakes."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()


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
            raise EOFError
        data += piece
    return bytes(data)
