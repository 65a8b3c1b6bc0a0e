"""The learner's side: who works, what is to be generated, and who generates it."""

import dataclasses
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Self

import numpy as np

from specrl_jax.decoding.rollouts import NO_VERSION
from specrl_jax.drafts.weights import Weights
from specrl_jax.errors import InputError, RunFailed
from specrl_jax.workers import transfer
from specrl_jax.workers.messages import (
    CHOOSES,
    Address,
    Answer,
    Ask,
    Hello,
    Welcome,
    keep_alive,
    receive,
    remove_address,
    send,
    write_address,
)

# A step waits so long for a first worker, or for another one once the last has left.
PATIENCE = 600.0
# How often a waiting step looks whether the run was asked to stop.
LOOK_SECONDS = 0.5
END = Ask("", None, NO_VERSION, [], 0, 0, np.zeros(0, np.uint32), CHOOSES, [])

OnProgress = Callable[[int, int], None]


@dataclasses.dataclass
class _Call:
    """What one caller waits for."""

    weights: Weights
    checksum: int
    rollouts: int
    answers: dict[int, Answer] = dataclasses.field(default_factory=dict)
    done: int = 0


@dataclasses.dataclass(frozen=True)
class _Job:
    """A part of a call, for one worker."""

    call: _Call
    part: int
    ask: Ask


class WorkerPool:
    """Listens for workers, and shares what is to be generated among those that are there.

    Args:
      facts: by which workers must agree with the learner (io/agreement.py).
      host: of this machine, by which workers reach it.
      workdir: where the address is written.
      wanted: workers that a run waits for before it begins.
      say: prints a line.
      patience: seconds without a worker after which the run ends.
    Raises:
      InputError: nothing can listen there.
    """

    def __init__(
        self,
        facts: Mapping[str, object],
        host: str,
        workdir: str,
        wanted: int,
        say: Callable[[str], None] = print,
        patience: float = PATIENCE,
    ) -> None:
        self._facts, self._wanted, self._say, self._patience = facts, wanted, say, patience
        self._workdir, self._key = workdir, secrets.token_bytes(32)
        try:
            self._listener = Listener((host, 0))
        except OSError as error:
            raise InputError(f"pipeline.host={host}: {error.strerror}; a name or address of this machine") from None
        self._server = transfer.start_server(host)
        self._changed = threading.Condition()  # guards what follows
        self._jobs: deque[_Job] = deque()
        self._workers: dict[str, int] = {}  # name -> devices
        self._failed, self._closed = "", False
        self._weights_seconds = 0.0  # the longest fetch of the newest weights
        write_address(workdir, Address(host, self._listener.address[1], self._key.hex()))
        threading.Thread(target=self._accept, name="rollout workers", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Tell all workers that the run has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._workers, timeout=5.0)
        self._listener.close()
        remove_address(self._workdir)

    def compile(self, weights: Weights, on_wait: OnProgress) -> None:
        """Wait for the first workers, and let them compile the training engine."""
        self._wait(lambda: len(self._workers) >= self._wanted, on_wait, lambda: (0, 0))
        self.run(weights, [END._replace(engine="engine")] * self._wanted, 0, on_wait)

    def run(self, weights: Weights, asks: Sequence[Ask], rollouts: int, on_wait: OnProgress) -> list[Answer]:
        """Return the answers to `asks`, in their order.

        Args:
          rollouts: of all asks together.
          on_wait: called with (rollouts that are there, all); what it raises ends the call.
        Raises:
          RunFailed: a worker failed, or none is left.
        """
        call = _Call(weights, int(weights.checksum), rollouts)
        with self._changed:
            self._jobs.extend(_Job(call, i, ask) for i, ask in enumerate(asks))
            self._changed.notify_all()
        try:
            self._wait(lambda: len(call.answers) == len(asks), on_wait, lambda: (call.done, rollouts))
        finally:
            with self._changed:
                self._jobs = deque(job for job in self._jobs if job.call is not call)
        self._weights_seconds = max(answer.weights_seconds for answer in call.answers.values())
        return [call.answers[i] for i in range(len(asks))]

    @property
    def count(self) -> int:
        """Workers that are there, and at least 1."""
        with self._changed:
            return max(1, len(self._workers))

    def metrics(self) -> dict[str, int | float]:
        """Return how many workers there are, with how many devices, and the seconds until they had the weights."""
        with self._changed:
            return {
                "rollout/workers": len(self._workers),
                "rollout/worker_devices": sum(self._workers.values()),
                "time/weights": self._weights_seconds,
            }

    def _wait(self, until: Callable[[], bool], on_wait: OnProgress, progress: Callable[[], tuple[int, int]]) -> None:
        alone = time.monotonic()
        while True:
            with self._changed:
                found = self._changed.wait_for(lambda: until() or self._failed, timeout=LOOK_SECONDS)
                if self._failed:
                    raise RunFailed(self._failed)
                if found:
                    return
                if self._workers:
                    alone = time.monotonic()
                done = progress()
            on_wait(*done)
            if time.monotonic() - alone > self._patience:
                raise RunFailed(f"no rollout worker for {self._patience:g} s; start some with --config.task=rollout")

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # closed
                return
            keep_alive(connection)
            threading.Thread(target=self._serve, args=(connection,), name="rollout worker", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Give one worker its jobs until it, or the run, ends."""
        with connection:
            try:
                # Here, where somebody without the key keeps nobody else waiting.
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                name = self._welcome(connection)
            except (AuthenticationError, EOFError, OSError, ValueError, KeyError, TypeError):
                return
            if not name:
                return
            job: _Job | None = None
            try:
                held: int | None = None
                while job := self._next():
                    held = self._work(connection, name, job, held)
                send(connection, END)
            except (EOFError, OSError):
                self._say(f"rollout worker {name} left" + ("; others do its rollouts" if job else ""))
            finally:
                with self._changed:
                    if job:
                        self._jobs.appendleft(job)
                    del self._workers[name]
                    self._changed.notify_all()

    def _welcome(self, connection: Connection) -> str:
        """Let a worker in that agrees with the learner; return its name, "" for one that does not."""
        hello = receive(connection, Hello)
        refused = difference(self._facts, json.loads(hello.facts))
        with self._changed:
            if not refused and hello.name in self._workers:
                refused = f"{hello.name} works already"
            if not refused:
                self._workers[hello.name] = hello.devices
        send(connection, Welcome(refused, self._server.address()))
        if refused:
            self._say(f"rollout worker {hello.name} refused: {refused}")
            return ""
        self._say(f"rollout worker {hello.name} is there")
        with self._changed:
            self._changed.notify_all()
        return hello.name

    def _next(self) -> _Job | None:
        """Wait for something to do; None: the run has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            return None if self._closed else self._jobs.popleft()

    def _work(self, connection: Connection, name: str, job: _Job, held: int | None) -> int:
        """Let a worker do a job; return the checksum of the weights that it then holds."""
        call = job.call
        offered = None if held == call.checksum else transfer.offer(self._server, call.weights)
        send(connection, job.ask._replace(weights=offered))
        answer = receive(connection, Answer)
        with self._changed:
            if answer.failed:
                self._failed = f"rollout worker {name}: {answer.failed}"
            else:
                call.answers[job.part] = answer
                call.done += 0 if answer.rollouts is None else len(answer.rollouts.length)
            self._changed.notify_all()
        return call.checksum


def difference(ours: Mapping[str, object], theirs: Mapping[str, object]) -> str:
    """Return which fact differs first, in one line; "" if none does."""
    for name in dict.fromkeys([*ours, *theirs]):
        mine, other = (json.dumps(facts.get(name)) for facts in (ours, theirs))
        if mine != other:
            return f"it differs in {name}: {other}, and the learner has {mine}"
    return ""
