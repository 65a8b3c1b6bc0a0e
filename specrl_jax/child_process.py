"""Child processes that may hang, die or say anything. Imports no jax: a child starts in a second."""

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

_BOOT = "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; import {0}; {0}.main(given)"


class ChildProcess:
    """A process that runs `main(settings)` of a module of this project; messages go through `channel` (frames.py).

    Args:
      settings: JSON; "socket", the number of the child's end of the channel as an open file, is added.
      options: of `subprocess.Popen`.
    """

    def __init__(self, module: str, settings: Mapping[str, object], **options: Any) -> None:
        self.channel, theirs = socket.socketpair()
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

    def hang_up(self) -> None:
        """Close the channel; a thread that waits for the child wakes."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        self.channel.close()
