"""One worker as the learner sees it: what it holds, how long it may take, and whether its answer is one."""

import dataclasses
import math
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.rollout.workers.messages import ENOUGH, Ask, WorkerAnswer, deadline, receive, send

# A worker that takes so many times as long as the slowest has for such a job is given up, after a minute at least.
SLOW, LEAST_SECONDS = 10, 60.0
# The same for a job that nobody has done before: programs are compiled.
FIRST_SECONDS = 1800.0
# How often the learner looks whether what a worker has begun is enough.
ENOUGH_SECONDS = 0.02


class WorkerLost(Exception):
    """A worker is not there any more, or of no use; the text says why."""


class JobKind(NamedTuple):
    """Identifies jobs that take about as long as each other."""

    engine: str
    generates: bool  # else begins, or compiles
    first: bool  # of this engine in this worker


class Durations:
    """Keeps the seconds of the slowest job of each kind, of all workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slowest: dict[JobKind, float] = {}

    def limit(self, kind: JobKind) -> float:
        """Return the seconds after which a worker is given up."""
        with self._lock:
            return max(LEAST_SECONDS, SLOW * self._slowest[kind]) if kind in self._slowest else FIRST_SECONDS

    def note(self, kind: JobKind, seconds: float) -> None:
        with self._lock:
            self._slowest[kind] = max(self._slowest.get(kind, 0.0), seconds)


class RemoteWorker:
    """Asks one worker, in the thread that serves it."""

    def __init__(self, connection: Connection, name: str, durations: Durations) -> None:
        self.name = name
        self.held: int | None = None  # checksum of its weights
        self._connection, self._durations = connection, durations
        self._engines = set[str]()  # that it has used

    def answer(self, ask: Ask, until: Callable[[], bool]) -> WorkerAnswer:
        """Return its answer; it is told once `until` says that what it has begun is enough.

        Raises WorkerLost: it leaves, its answer is none, or does not come in time; what it begins takes until it is
        told, and is not counted.
        """
        kind = JobKind(ask.engine, bool(ask.prompts), ask.engine not in self._engines)
        seconds, start = self._durations.limit(kind), time.monotonic()
        try:
            with deadline(self._connection, seconds):
                send(self._connection, ask)
            start = self._wait(ask, until, seconds, start)
            with deadline(self._connection, seconds):
                found = receive(self._connection, WorkerAnswer)
            if wrong := wrong_answer(ask, found):
                raise ValueError(wrong)
        except TimeoutError:
            raise WorkerLost(f"has not answered within {seconds:.0f} s") from None
        except (EOFError, OSError):
            raise WorkerLost("left") from None
        except ValueError as error:
            raise WorkerLost(f"gave a wrong answer ({error})") from None
        self._engines.add(ask.engine)
        self._durations.note(kind, time.monotonic() - start)
        return found

    def _wait(self, ask: Ask, until: Callable[[], bool], seconds: float, start: float) -> float:
        """Wait for an answer, or for a part of one; return when what it did for the learner alone began."""
        begins = not ask.prompts and bool(ask.later.prompts)
        told, end = False, math.inf if begins else start + seconds
        while not self._connection.poll(ENOUGH_SECONDS):
            if time.monotonic() > end:
                raise TimeoutError
            if not told and (told := until()):
                start = time.monotonic()
                end = min(end, start + seconds)
                with deadline(self._connection, seconds):
                    send(self._connection, Ask(ENOUGH))
        return start


def wrong_answer(ask: Ask, answer: WorkerAnswer) -> str:
    """Return in a few words what an answer lacks of what was asked for; "": nothing."""
    if answer.failed or not ask.prompts:
        return ""
    if answer.rollouts is None:
        return "no rollouts"
    return wrong_shape(answer.rollouts, len(ask.ids)) or wrong_rollouts(answer.rollouts, ask)


def wrong_shape(found: Rollouts, count: int) -> str:
    """Return which array is not one of `count` rollouts; "": all are."""
    columns = found.tokens.shape[1] if found.tokens.ndim == 2 else -1
    longest = found.drafted.shape[1] if found.drafted.ndim == 2 else -1
    second = dict.fromkeys(("tokens", "logprobs", "draft_positions", "environment"), columns)
    second |= {"drafted": longest, "accepted": longest}
    for field in dataclasses.fields(found):
        if field.type is not np.ndarray:
            continue
        array = getattr(found, field.name)
        shape = (count, second[field.name]) if field.name in second else (count,)
        kind = "f" if field.name == "logprobs" else "biu"
        if array.shape != shape or array.dtype.kind not in kind:
            return f"{field.name}, {array.dtype} of shape {list(array.shape)}, for {count} rollouts"
    return ""


def wrong_rollouts(found: Rollouts, ask: Ask) -> str:
    """Return what shows that rollouts of the right shape are not those that were asked for; "": nothing does."""
    if not np.array_equal(found.rollout_id, ask.ids):
        return "rollouts of other ids"
    each = len(ask.ids) // len(ask.prompts)
    for row, place in enumerate(np.repeat(np.arange(len(ask.prompts)), each)):
        prompt = ask.prompts[place]
        if found.tokens[row, : found.prompt_length[row]].tolist() != prompt:
            return f"rollout {ask.ids[row]} of another prompt"
        if not len(prompt) <= found.length[row] <= found.tokens.shape[1]:
            return f"rollout {ask.ids[row]} of {found.length[row]} tokens"
    return ""
