"""Ask the process that renders chat templates, under limits: a template may loop or fill the memory for any row."""

import atexit
import functools
import json
import os
import select
import subprocess
import sys
import threading
import time
from typing import Any

from specrl_jax.errors import InputError

SECONDS = 30.0  # of a conversation, on a busy machine; Qwen3's takes a thousandth of one
START = 60.0  # of the process


class OverLimit(InputError):
    """A template that takes too long or too much, for these messages."""


class Renderer:
    """A process of `specrl_jax.data.templates`, which starts when it is needed, and anew after it had to be ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # conversations ask from several threads
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, source: str) -> None:
        """Compile a template. Raises InputError where it cannot be, OverLimit where that takes too much."""
        self._ask({"source": source})

    def render(self, source: str, messages: list[dict[str, Any]], **variables: object) -> str:
        """Return `specrl_jax.data.templates.render`. Raises InputError where the template fails, and OverLimit."""
        return self._ask({"source": source, "values": {"messages": messages, **variables}})

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _ask(self, request: dict[str, object]) -> str:
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                    self._exchange({}, START)
                reply = self._exchange(request, SECONDS)
            except BaseException:
                self._end()
                raise
            if "limit" in reply:
                self._end()  # what filled its memory may still be there
                raise OverLimit(f"data.tokenizer: the chat template {reply['limit']}")
        if "fault" in reply:
            raise InputError(f"data.tokenizer: the chat template {reply['fault']}")
        return reply["text"]

    def _exchange(self, request: dict[str, object], seconds: float) -> dict[str, str]:
        process, end, parts = self._process, time.monotonic() + seconds, [b""]
        assert process is not None and process.stdin is not None and process.stdout is not None
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            parts = []
        while parts and not parts[-1].endswith(b"\n"):
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                raise OverLimit(f"data.tokenizer: the chat template did not end within {seconds:g} s")
            if more := os.read(process.stdout.fileno(), 2**20):
                parts.append(more)
            else:
                parts.clear()
        if not parts:
            status = process.wait()
            raise OverLimit(f"data.tokenizer: the chat template ends the process that renders it (status {status})")
        return json.loads(b"".join(parts))

    def _start(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "specrl_jax.data.templates"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


@functools.cache
def renderer() -> Renderer:
    """Return the process of this one, shared by all templates: each start takes half a second."""
    process = Renderer()
    atexit.register(process.close)
    return process
