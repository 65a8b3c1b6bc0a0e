"""Child processes that may hang, die or say anything (frames.py). Imports no jax: a child starts in a second."""

import contextlib
import json
import math
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from specrl_jax.frames import receive, send

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
        """Send a message as `frames.send` does."""
        send(self._channel, message, seconds)

    def receive(self, seconds: float, longest: float = math.inf) -> Any:
        """Return the next message as `frames.receive` does."""
        return receive(self._channel, seconds, longest)

    def hang_up(self) -> None:
        """Close the channel; a thread that waits for the child wakes."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()
