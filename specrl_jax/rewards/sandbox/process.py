"""A sandbox as a reward worker sees it: programs go in, what they printed or returned comes out."""

import contextlib
import fcntl
import io
import json
import os
import selectors
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Protocol

from specrl_jax.rewards.sandbox import fork_server
from specrl_jax.rewards.sandbox.bundle import bundle
from specrl_jax.rewards.sandbox.limits import Limits, Ran, Run, SandboxError
from specrl_jax.rewards.sandbox.mechanisms import ENVIRONMENT, Interpreter, account, command

START_SECONDS = 20.0  # limit for a sandbox to be ready
END_SECONDS = 5.0  # limit for what is killed to be gone
MAX_RESULT = 4 * 2**20  # bytes of a returned value
_STDERR = 2000  # characters kept of it


class Sandbox(Protocol):
    """Runs programs, one at a time."""

    def run(self, task: Run, seconds: float) -> Ran:
        """Run a program for at most so long. Raises SandboxError if the sandbox fails."""

    def close(self) -> int:
        """End it and all that it started; return its exit status."""


class LocalSandbox:
    """Programs on this machine, under bubblewrap or Landlock; what runs them starts when first needed.

    Args:
      mechanism: "bubblewrap" or "landlock".
    """

    def __init__(self, mechanism: str, python: Interpreter, limits: Limits) -> None:
        self.mechanism, self.python, self.limits = mechanism, python, limits
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def run(self, task: Run, seconds: float) -> Ran:
        control = self._start()
        with contextlib.ExitStack() as ending:
            job = json.dumps({"program": task.program, "call": task.call, "arguments": task.arguments}).encode()
            given = [ending.enter_context(_sealed(content)) for content in (task.stdin.encode(errors="replace"), job)]
            if task.tests:
                tests = json.dumps({"tests": task.tests, "check": task.check}).encode()
                given.append(ending.enter_context(_sealed(tests)))
            pipes = [tuple(map(ending.enter_context, _pipe())) for _ in range(3)]
            reader = _Reader([ours.fileno() for ours, _ in pipes], (self.limits.output,) * 2 + (MAX_RESULT,))
            try:
                socket.send_fds(control, [b"run"], [given[0], *(theirs.fileno() for _, theirs in pipes), *given[1:]])
                for _, theirs in pipes:
                    theirs.close()
                cause = reader.wait(control, seconds)
                if cause:
                    control.send(b"end")
                told = _parse(control, END_SECONDS)
                status, has_files = int(told["status"]), bool(told["left"])
            except (OSError, ValueError, KeyError, TypeError):
                ended = self.close()
                raise SandboxError(f"the sandbox ended with status {ended} while a program ran") from None
            except BaseException:
                self.close()
                raise
            reader.drain()
        if has_files:
            self.close()  # nobody else finds what this one wrote
        out, err, result = (bytes(content) for content in reader.contents)
        text = err.decode(errors="replace")[-_STDERR:]
        return Ran(status, out.decode(errors="replace"), text, result=_result(result), cause=cause)

    def close(self) -> int:
        """End the sandbox and everything in it; return the exit status. A later run starts a new one."""
        server, control, self._server, self._control = self._server, self._control, None, None
        if control is None or server is None:
            return 0
        control.close()  # the server ends its programs, then itself
        try:
            return server.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()  # under bubblewrap all of them end with it
            return server.wait()

    def _start(self) -> socket.socket:
        """Return the socket of a running fork server."""
        if self._control is not None:
            return self._control
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        how = command(self.mechanism, self.python, self.limits, server=bundle(fork_server), socket=theirs.fileno())
        with theirs, tempfile.TemporaryFile() as errors:
            try:
                self._server = subprocess.Popen(
                    how.arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=ENVIRONMENT,
                    cwd="/",
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    **account(how.uid),
                )
                theirs.close()
                _parse(self._control, START_SECONDS)
            except (OSError, ValueError) as error:
                self.close()
                errors.seek(0)
                last = errors.read()[-_STDERR:].decode(errors="replace").strip().splitlines()[-1:]
                raise SandboxError("; ".join([f"it does not start ({type(error).__name__})", *last])) from None
        return self._control


class _Reader:
    """Reads what comes out of a run, each of its files up to a limit."""

    def __init__(self, files: list[int], limits: tuple[int, ...]) -> None:
        self.files, self.limits = files, limits
        self.contents = [bytearray() for _ in files]
        for file in files:
            os.set_blocking(file, False)

    def wait(self, control: socket.socket, seconds: float) -> str:
        """Read until `control` has an answer. Return the limit that was exceeded before: "time", "output" or ""."""
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for place, file in enumerate(self.files):
                selector.register(file, selectors.EVENT_READ, place)
            selector.register(control, selectors.EVENT_READ, None)
            while (remaining := end - time.monotonic()) > 0:
                ready = [key for key, _ in selector.select(remaining)]
                for key in ready:
                    if key.data is not None and not self._read(key.data):
                        selector.unregister(key.fd)
                    elif key.data is not None and len(self.contents[key.data]) > self.limits[key.data]:
                        return "output"
                if any(key.data is None for key in ready):
                    return ""
        return "time"

    def drain(self) -> None:
        """Read what is left once all that could write has ended."""
        for place in range(len(self.files)):
            with contextlib.suppress(BlockingIOError):
                while len(self.contents[place]) <= self.limits[place] and self._read(place):
                    pass

    def _read(self, place: int) -> bool:
        """Read a piece; return whether there may be more."""
        piece = os.read(self.files[place], 2**16)
        self.contents[place] += piece
        return bool(piece)


def _parse(control: socket.socket, seconds: float) -> dict[str, Any]:
    """Return what a fork server says. Raises OSError or ValueError where it does not, or ends."""
    control.settimeout(seconds)
    return json.loads(control.recv(256))


def _result(content: bytes) -> object:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


@contextlib.contextmanager
def _sealed(content: bytes) -> Iterator[int]:
    """Yield a file in memory with `content`, which nobody can change."""
    file = os.memfd_create("given", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(file, "wb", closefd=False) as writer:
            writer.write(content)
        os.lseek(file, 0, os.SEEK_SET)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        yield file
    finally:
        os.close(file)


def _pipe() -> tuple[io.FileIO, io.FileIO]:
    """Return a pipe's ends for reading and for writing."""
    read, write = os.pipe()
    return io.FileIO(read), io.FileIO(write, "w")
