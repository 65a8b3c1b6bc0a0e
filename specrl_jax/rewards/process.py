"""One reward worker as the training process sees it: a process that may hang, die or say anything."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence

from specrl_jax.child_process import ChildProcess
from specrl_jax.rewards import guard
from specrl_jax.rewards.code.reward import CodeOptions
from specrl_jax.rewards.function import ASKABLE
from specrl_jax.rewards.messages import (
    FULL,
    MAX_DETAIL,
    MAX_REPLY,
    MORE,
    Outcome,
    RewardInput,
    parse_outcome,
)
from specrl_jax.rewards.worker import RewardWorkerHello

START_SECONDS = 120.0  # limit for a worker to start and import
CHUNK_SECONDS = 1.0  # a worker begins no further answer of a chunk after them
END_SECONDS = 5.0  # limit for a worker and its children to be gone

NONSENSE, GONE = "sent nonsense", "is gone"


class Lost(Exception):
    """A worker ended or no longer answers; the message says how, as what follows "the worker"."""


class WorkerProcess(ChildProcess):
    """A worker behind its guard (guard.py), which is the child. Starting does not wait: `hello` does.

    Args:
      names: the rewards.
      memory: bytes that the worker may take beyond its imports.
      code: options of the reward `code`, where it is among them.
    """

    def __init__(self, names: Sequence[str], memory: int, code: CodeOptions | None = None) -> None:
        super().__init__(
            guard.__name__,
            {"names": names, "memory": memory, "code": code, "parent": os.getpid()},
            env={**os.environ, "JAX_PLATFORMS": "cpu"},  # a reward may import jax; the accelerator is the parent's
            process_group=0,  # Ctrl-C is for the parent alone
        )
        self._count = len(names)
        self._hello: RewardWorkerHello | None = None
        self._number = 0  # of the last message

    def hello(self) -> RewardWorkerHello:
        """Return what the worker said first; wait for it. Raises Lost."""
        if self._hello is None:
            try:
                self._hello = _parse_hello(self._receive(START_SECONDS))
            except TimeoutError:
                raise Lost(f"takes more than {START_SECONDS:g} s to start") from None
        return self._hello

    def check(self, seconds: float) -> None:
        """Raise Lost unless the worker has started and, if it had before, answers within `seconds`."""
        if self._hello is None:
            self.hello()
            return
        try:
            self._send((), seconds)
            if self._receive_reply(seconds):
                raise Lost(NONSENSE)
        except TimeoutError:
            raise Lost(f"does not answer for {seconds:g} s") from None

    def score(self, rows: Sequence[RewardInput], seconds: float) -> Iterator[tuple[Outcome, bool]]:
        """Yield (outcome, whether the worker must be replaced) of the first rows, at least one.

        Raises Lost, or TimeoutError where one row takes more than `seconds`.
        """
        hello = self.hello()
        if hello.problem:
            yield from [(Outcome((), failure="error", detail=hello.problem), False)] * len(rows)
            return
        asked = [{name: getattr(row.context, name) for name in hello.asks} for row in rows]
        message = [CHUNK_SECONDS, [(row.response, row.answer, context) for row, context in zip(rows, asked)]]
        self._send(message, seconds)
        for _ in rows:
            try:
                outcome, state = self._receive_reply(seconds)
                parsed = parse_outcome(outcome, self._count)
            except ValueError:
                raise Lost(NONSENSE) from None
            yield parsed, state == FULL
            if state != MORE:
                return

    def end(self) -> str:
        """End the worker and all that it started; return how it had ended, if it had."""
        self.hang_up()
        with contextlib.suppress(ProcessLookupError):
            for number in (signal.SIGCONT, signal.SIGTERM):
                self.process.send_signal(number)
        try:
            status = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # something below it cannot be killed, as on a lost network disk
            self.process.kill()
            status = self.process.wait()
        ended_by = -status if status < 0 else status - 128
        is_signal = ended_by in set(signal.Signals)
        return f"was ended by {signal.Signals(ended_by).name}" if is_signal else f"ended with status {status}"

    def _send(self, message: Sequence[object], seconds: float) -> None:
        self._number += 1
        try:
            self.send([self._number, *message], seconds)
        except TimeoutError:
            raise
        except OSError:
            raise Lost(GONE) from None

    def _receive_reply(self, seconds: float) -> list[object]:
        """Return a reply to the last message, without its number."""
        reply = self._receive(seconds)
        # A fork of a reward may answer a second time.
        if not isinstance(reply, list) or reply[:1] != [self._number]:
            raise Lost(NONSENSE)
        return reply[1:]

    def _receive(self, seconds: float) -> object:
        try:
            return self.receive(seconds, MAX_REPLY)
        except TimeoutError:
            raise
        except (EOFError, OSError):
            raise Lost(GONE) from None
        except ValueError:
            raise Lost(NONSENSE) from None


def _parse_hello(message: object) -> RewardWorkerHello:
    match message:
        case [str(problem), list(asks)] if len(problem) <= MAX_DETAIL and all(name in ASKABLE for name in asks):
            return RewardWorkerHello(problem, asks)
    raise Lost(NONSENSE)
