"""The learner's side: who works, what is to be generated, and who generates it.

Not the pool of rewards/pool.py: workers come and go by themselves, over the network, and get one job at a time, with
the weights that they lack.
"""

import contextlib
import dataclasses
import json
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Self

from specrl_jax.coordinator import first_difference
from specrl_jax.drafts.weights import Weights
from specrl_jax.errors import InputError, WorkersFailed, printable
from specrl_jax.logs import say
from specrl_jax.rollout.workers import transfer
from specrl_jax.rollout.workers.messages import (
    ENDED,
    HANDSHAKE_BYTES,
    Address,
    Ask,
    Offer,
    RolloutWorkerHello,
    WorkerAnswer,
    accept,
    check_key,
    deadline,
    hang_up,
    listen,
    receive,
    remove_address,
    send,
    write_address,
)
from specrl_jax.rollout.workers.remote_worker import Durations, RemoteWorker, WorkerLost

# All processes of the learner have connected after so long: they have met at the coordinator just before.
CONNECT_SECONDS = 60.0
# A step waits so long for a first worker, or for another one once the last has left.
PATIENCE = 600.0
# How often a waiting step looks whether the run was asked to stop.
LOOK_SECONDS = 0.5
# So many workers that leave with the same rollouts end the run: an error that ends one would end them all.
MOST_LOST = 3
# So many may be about to prove that they have the key; one more costs the oldest of them its connection.
MOST_STRANGERS = 64
# Characters of a worker's name that are shown.
NAME_LENGTH = 80

OnProgress = Callable[[int, int], None]
# What other processes of the learner offer one worker, of the weights of a call; None: it has ended there.
Others = Callable[[], list[Offer] | None]


@dataclasses.dataclass
class _Call:
    """One caller's request and the answers to it."""

    weights: Weights
    checksum: int
    others: Others
    until: Callable[[], bool]
    answers: dict[int, WorkerAnswer] = dataclasses.field(default_factory=dict)
    done: int = 0
    ended: bool = False  # nobody waits for it any more


@dataclasses.dataclass
class _Job:
    """A part of a call, for one worker."""

    call: _Call
    part: int
    ask: Ask
    lost: int = 0  # workers that left with it


class WorkerPool:
    """Listens for workers, and shares what is to be generated among those that are there.

    Args:
      facts: by which workers must agree with the learner (io/agreement.py).
      host: of this machine, by which workers reach it.
      workdir: where the address is written.
      wanted: workers that a run waits for before it begins.
    Raises:
      InputError: nothing can listen there.
    """

    def __init__(self, facts: Mapping[str, object], host: str, workdir: str, *, wanted: int) -> None:
        self._facts, self._wanted = facts, wanted
        self._workdir, self._key, self._listener = workdir, secrets.token_bytes(32), listen(host)
        own, port = self._listener.getsockname()
        self.address = Address(own, port, self._key.hex())
        self._server = transfer.LateServer(own)
        self._changed = threading.Condition()  # guards what follows
        self._jobs: deque[_Job] = deque()
        self._strangers: deque[Connection] = deque()
        self._workers: list[RolloutWorkerHello] = []
        self._durations = Durations()
        self._processes: dict[int, Connection] = {}  # the learner's others
        self._failed, self._closed, self._finished = "", False, False
        self._fetched = (0, 0.0)  # checksum of the newest weights, seconds of the longest fetch
        write_address(workdir, self.address)
        threading.Thread(target=self._accept, name="rollout workers", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Tell the workers that the run has ended, or, where it was stopped or failed, leave: they wait for it."""
        with self._changed:
            self._closed, self._finished = True, kind is None
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._workers, timeout=5.0)
        with contextlib.suppress(OSError), self._listener:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        remove_address(self._workdir)
        for connection in self._processes.values():
            connection.close()

    def processes(self, count: int) -> list[Connection]:
        """Wait for the `count` other processes of the learner; return the connections to them, in their order.

        Raises InputError where one does not come.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._processes) == count, CONNECT_SECONDS):
                raise InputError(
                    f"pipeline.host: {len(self._processes)} of the learner's {count} other processes reached the first "
                    f"one within {CONNECT_SECONDS:g} s"
                )
            return [self._processes[i] for i in sorted(self._processes)]

    def compile(self, weights: Weights, on_wait: OnProgress, others: Others = list) -> None:
        """Wait for the first workers, and let them compile the training engine."""
        shown = -1

        def enough() -> bool:
            nonlocal shown
            if shown != len(self._workers) < self._wanted:
                shown = len(self._workers)
                say(f"waiting for rollout workers: {shown} of {self._wanted}")
            return len(self._workers) >= self._wanted

        self._wait(enough, on_wait, lambda: (0, 0))
        self.run(weights, [Ask("engine")] * self._wanted, 0, on_wait=on_wait, others=others)

    def run(
        self,
        weights: Weights,
        asks: Sequence[Ask],
        rollouts: int,
        *,
        on_wait: OnProgress,
        others: Others = list,
        until: Callable[[], bool] = lambda: False,
    ) -> list[WorkerAnswer]:
        """Return the answers to `asks`, in their order.

        Args:
          rollouts: of all asks together.
          on_wait: called with (rollouts that are there, all); what it raises ends the call.
          others: of a learner of several processes.
          until: says that what the workers have begun is enough; asked by several threads.
        Raises:
          WorkersFailed: what is asked cannot be generated, or no worker is left.
        """
        call = _Call(weights, int(weights.checksum), others, until=until)
        with self._changed:
            self._jobs.extend(_Job(call, i, ask) for i, ask in enumerate(asks))
            self._changed.notify_all()
        try:
            self._wait(lambda: len(call.answers) == len(asks), on_wait, lambda: (call.done, rollouts))
        finally:
            with self._changed:
                call.ended = True
                self._jobs = deque(job for job in self._jobs if job.call is not call)
        return [call.answers[i] for i in range(len(asks))]

    @property
    def count(self) -> int:
        """Return the number of workers that are there, and at least 1."""
        with self._changed:
            return max(1, len(self._workers))

    def metrics(self) -> dict[str, int | float]:
        """Return how many workers there are, with how many devices, and the seconds until they had the weights."""
        with self._changed:
            return {
                "rollout/workers": len(self._workers),
                "rollout/worker_devices": sum(worker.devices for worker in self._workers),
                "time/weights": self._fetched[1],
            }

    def _wait(self, until: Callable[[], bool], on_wait: OnProgress, progress: Callable[[], tuple[int, int]]) -> None:
        alone = time.monotonic()
        while True:
            with self._changed:
                found = self._changed.wait_for(lambda: until() or self._failed, timeout=LOOK_SECONDS)
                if self._failed:
                    raise WorkersFailed(self._failed)
                if found:
                    return
                if self._workers:
                    alone = time.monotonic()
                done = progress()
            on_wait(*done)
            if time.monotonic() - alone > PATIENCE:
                raise WorkersFailed(f"no rollout worker for {PATIENCE:g} s; start some with --config.task=rollout")

    def _accept(self) -> None:
        while True:
            try:
                connection = accept(self._listener)
            except OSError:
                if self._closed:
                    return
                time.sleep(LOOK_SECONDS)
                continue
            with self._changed:
                self._strangers.append(connection)
                if len(self._strangers) > MOST_STRANGERS:
                    hang_up(self._strangers.popleft())
            threading.Thread(target=self._serve, args=(connection,), name="rollout worker", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Give one worker its jobs until it, or the run, ends; keep the connection of a process of the learner."""
        with contextlib.ExitStack() as ending:
            ending.enter_context(connection)
            try:
                # Here, where somebody without the key keeps nobody else waiting.
                hello = self._welcome(connection)
                if hello.process:
                    ending.pop_all()
                    with self._changed:
                        self._processes[hello.process] = connection
                        self._changed.notify_all()
                    return
                refused = difference(self._facts, json.loads(hello.facts))
                with deadline(connection):
                    send(connection, refused)
            except Exception:  # of a stranger, or of a worker that has left again
                return
            if refused:
                say(f"rollout worker {hello.name} refused: {refused}")
                return
            self._employ(connection, hello)

    def _welcome(self, connection: Connection) -> RolloutWorkerHello:
        """Return who is there, with a name that can be shown. Raises what it likes for whoever has not the key."""
        try:
            with deadline(connection):
                check_key(connection, self._key)
                hello = receive(connection, RolloutWorkerHello, HANDSHAKE_BYTES)
        finally:
            with self._changed, contextlib.suppress(ValueError):  # it was the oldest of too many
                self._strangers.remove(connection)
        return hello._replace(name=printable(hello.name)[:NAME_LENGTH])

    def _employ(self, connection: Connection, hello: RolloutWorkerHello) -> None:
        """Give a worker that agrees its jobs."""
        job: _Job | None = None
        worker = RemoteWorker(connection, hello.name, self._durations)
        with self._changed:
            self._workers.append(hello)
            self._changed.notify_all()
        say(f"rollout worker {hello.name} is there")
        try:
            while True:
                job = None  # with its weights
                job = self._next()
                if job is None:
                    break
                self._work(worker, job)
            if self._finished:
                with contextlib.suppress(OSError), deadline(connection):  # it may have left
                    send(connection, Ask(ENDED))
        except WorkerLost as lost:
            say(f"rollout worker {hello.name} {lost}; others do its rollouts")
        except Exception as error:  # in every worker alike
            with self._changed:
                self._failed = f"rollout worker {hello.name}: {type(error).__name__}: {error}"
        finally:
            with self._changed:
                if job and not job.call.ended:
                    self._give_back(job)
                self._workers = [one for one in self._workers if one is not hello]
                self._changed.notify_all()

    def _give_back(self, job: _Job) -> None:
        """Let others do what a lost worker had, unless that is what ends them."""
        job.lost += 1
        if job.lost < MOST_LOST:
            self._jobs.appendleft(job)
        else:
            self._failed = self._failed or f"{job.lost} rollout workers left with the same rollouts; see what they said"

    def _next(self) -> _Job | None:
        """Wait for something to do; None: the run has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            return None if self._closed else self._jobs.popleft()

    def _work(self, worker: RemoteWorker, job: _Job) -> None:
        """Let a worker do a job. Nobody waits for a job whose call has ended."""
        call, offers = job.call, list[Offer]()
        if call.until():  # what it would have begun stays as it is
            self._note(job, WorkerAnswer(), worker.name)
            return
        if worker.held != call.checksum:
            others = call.others()
            if others is None:
                return
            offers = [transfer.offer(self._server.started(), call.weights), *others]
        answer = worker.answer(job.ask._replace(weights=tuple(offers)), call.until)
        worker.held = call.checksum
        with self._changed:
            if offers:
                earlier = self._fetched[1] if self._fetched[0] == call.checksum else 0.0
                self._fetched = call.checksum, max(earlier, answer.weights_seconds)
        self._note(job, answer, worker.name)

    def _note(self, job: _Job, answer: WorkerAnswer, name: str) -> None:
        """Let the caller have the answer to its job."""
        call = job.call
        with self._changed:
            if answer.failed:
                self._failed = self._failed if call.ended else f"rollout worker {name}: {answer.failed}"
            else:
                call.answers[job.part] = answer
                call.done += 0 if answer.rollouts is None else len(answer.rollouts.length)
            self._changed.notify_all()


def difference(ours: Mapping[str, object], theirs: Mapping[str, object]) -> str:
    """Return which fact differs first, in one line; "" if none does."""
    if not (name := first_difference([ours, theirs])):
        return ""
    mine, other = (json.dumps(facts.get(name)) for facts in (ours, theirs))
    return f"it differs in {name}: {other}, and the learner has {mine}"
