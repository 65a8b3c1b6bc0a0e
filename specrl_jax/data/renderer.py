"""Ask the process that renders chat templates, under limits: a template may loop or fill the memory for any row."""

import atexit
import functools
import threading
from typing import Any

from specrl_jax.child_process import ChildProcess
from specrl_jax.errors import InputError

SECONDS = 30.0  # of a conversation, on a busy machine; Qwen3's takes a thousandth of one
START = 60.0  # of the process


class OverLimit(InputError):
    """A template that takes too long or too much, for these messages."""


class Renderer:
    """A process of `specrl_jax.data.templates`, which starts when it is needed, and anew after it had to be ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # conversations ask from several threads
        self._child: ChildProcess | None = None

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
                if self._child is None or self._child.process.poll() is not None:
                    self._end()
                    self._child = ChildProcess("specrl_jax.data.templates", {})
                    _exchange(self._child, {}, START)
                reply = _exchange(self._child, request, SECONDS)
            except BaseException:
                self._end()
                raise
            if "limit" in reply:
                self._end()  # what filled its memory may still be there
                raise OverLimit(f"data.tokenizer: the chat template {reply['limit']}")
        if "fault" in reply:
            raise InputError(f"data.tokenizer: the chat template {reply['fault']}")
        return reply["text"]

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.hang_up()
            child.process.kill()
            child.process.wait()


def _exchange(child: ChildProcess, request: dict[str, object], seconds: float) -> dict[str, str]:
    try:
        child.send(request, seconds)
        return child.receive(seconds)
    except TimeoutError:
        raise OverLimit(f"data.tokenizer: the chat template did not end within {seconds:g} s") from None
    except (EOFError, OSError):
        status = child.process.wait()
        ended = f"ends the process that renders it (status {status})"
        raise OverLimit(f"data.tokenizer: the chat template {ended}") from None


@functools.cache
def renderer() -> Renderer:
    """Return the process of this one, shared by all templates: each start takes half a second."""
    process = Renderer()
    atexit.register(process.close)
    return process
