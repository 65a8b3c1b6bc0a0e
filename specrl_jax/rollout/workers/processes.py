"""The processes of a learner with rollout workers: the first one has the pool; all make each call of an engine alike.

In a call the others offer their parts of the weights, for one worker after the other as the first process asks, and get
the rollouts. That it goes on, or has ended, they hear through the engine's `Agreement`.
"""

import contextlib
import dataclasses
import enum
import functools
import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeVar

import jax

from specrl_jax import coordinator, distributed
from specrl_jax.config import Config
from specrl_jax.decoding.broadcast import Broadcast
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.drafts.weights import Weights
from specrl_jax.errors import InputError, WorkersFailed
from specrl_jax.io.agreement import worker_facts
from specrl_jax.rollout.workers import transfer
from specrl_jax.rollout.workers.messages import (
    Address,
    Offer,
    RolloutWorkerHello,
    open_connection,
    own_address,
    receive,
    send,
)
from specrl_jax.rollout.workers.pool import OnProgress, Others, WorkerPool

T = TypeVar("T")
# What the first process does in a call: (pool, called while it waits, what the others offer) -> result
Work = Callable[[WorkerPool, OnProgress, Others], T]


class Now(enum.IntEnum):
    """Status of a call in the first process."""

    GOES_ON = 0
    IS_DONE = 1
    HAS_FAILED = 2


class Request(NamedTuple):
    """A message of the first process to another one."""

    call: int  # of an engine; all processes count alike
    rollouts: Rollouts | None  # what came of it; None: its weights are wanted, for one worker


class OfferReply(NamedTuple):
    """Weights for one worker."""

    offer: Offer | None  # None: the call has ended here


class First:
    """The first process, or the only one.

    Args:
      connections: to the others, in their order.
    """

    def __init__(self, pool: WorkerPool, connections: Sequence[Connection] = ()) -> None:
        self._pool, self._connections, self._call = pool, connections, 0
        self._lock = threading.Lock()  # a request and its replies

    def metrics(self) -> dict[str, int | float]:
        """Return metrics of the workers."""
        return self._pool.metrics()

    def together(self, weights: Weights, work: Work[T], agree: Broadcast, *, on_progress: OnProgress) -> T:
        """Return what comes of `work`; the other processes wait for it, as `on_progress` does in all."""
        self._call += 1

        def on_wait(done: int, total: int) -> None:
            agree(int(Now.GOES_ON), done, total)
            on_progress(done, total)

        try:
            found = work(self._pool, on_wait, functools.partial(self._offers, self._call))
        except WorkersFailed:
            agree(int(Now.HAS_FAILED), 0, 0)
            raise
        agree(int(Now.IS_DONE), 0, 0)
        return found

    def rollouts(
        self, weights: Weights, work: Work[Rollouts], agree: Broadcast, *, on_progress: OnProgress
    ) -> Rollouts:
        """Return the rollouts that come of `work`, in every process."""
        found = self.together(weights, work, agree, on_progress=on_progress)
        try:
            with self._lock:
                for connection in self._connections:
                    send(connection, Request(self._call, found))
        except OSError as error:
            raise coordinator.has_left(error) from None
        return found

    def _offers(self, call: int) -> list[Offer] | None:
        """Return what the others offer one worker of the weights of a call; None: it has ended there."""
        with self._lock:
            try:
                for connection in self._connections:
                    send(connection, Request(call, None))
                offers = [receive(connection, OfferReply).offer for connection in self._connections]
            except (EOFError, OSError):
                raise WorkersFailed("another process of the learner left") from None
        found = [offer for offer in offers if offer is not None]
        return found if len(found) == len(offers) else None


class Other:
    """Another process of the learner.

    Args:
      connection: to the first one.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection, self._server = connection, transfer.LateServer(own_address(connection))
        self._rollouts = queue.SimpleQueue[Rollouts | None]()  # None: the first process has left, or this one does
        self._changed = threading.Condition()  # guards what follows
        self._call = 0
        self._weights: Weights | None = None
        threading.Thread(target=self._serve, name="weights for workers", daemon=True).start()

    def metrics(self) -> dict[str, int | float]:
        """Return nothing: the first process knows the workers."""
        return {}

    def together(self, weights: Weights, work: Work[T], agree: Broadcast, *, on_progress: OnProgress) -> None:
        """Wait until the first process has done its `work`, and offer these weights until then."""
        self._set(self._call + 1, weights)
        try:
            while True:
                now, done, total = agree(0, 0, 0)
                if now == Now.IS_DONE:
                    return
                if now == Now.HAS_FAILED:
                    raise WorkersFailed("the first process says why")
                on_progress(done, total)
        finally:
            self._set(self._call, None)

    def rollouts(
        self, weights: Weights, work: Work[Rollouts], agree: Broadcast, *, on_progress: OnProgress
    ) -> Rollouts:
        """Return the rollouts that the first process sends."""
        self.together(weights, work, agree, on_progress=on_progress)
        if (found := self._rollouts.get()) is None:
            raise coordinator.has_left(ConnectionError("no rollouts came from the first process"))
        return found

    def _set(self, call: int, weights: Weights | None) -> None:
        with self._changed:
            self._call, self._weights = call, weights
            self._changed.notify_all()

    def _serve(self) -> None:
        """Answer the first process until it leaves."""
        try:
            while True:
                request = receive(self._connection, Request)
                if request.rollouts is None:
                    send(self._connection, OfferReply(self._offer(request.call)))
                else:
                    self._rollouts.put(request.rollouts)
        except (EOFError, OSError):  # the first process says why
            pass
        finally:
            self._rollouts.put(None)

    def _offer(self, call: int) -> Offer | None:
        with self._changed:
            self._changed.wait_for(lambda: self._call >= call)
            weights = self._weights if self._call == call else None
        return None if weights is None else transfer.offer(self._server.started(), weights)


@contextlib.contextmanager
def open_workers(config: Config, workdir: str) -> Iterator[First | Other]:
    """Connect the processes of the learner, and listen for workers in the first one until the body ends.

    Raises InputError in all processes.
    """
    host, wanted = config.pipeline.host, config.pipeline.workers
    pool: WorkerPool | None = None
    with contextlib.ExitStack() as ending:
        with coordinator.refused_together():
            if distributed.is_first_process():
                facts = worker_facts(dataclasses.asdict(config), workdir)
                pool = ending.enter_context(WorkerPool(facts, host, workdir, wanted=wanted))
        address = Address(*json.loads(coordinator.exchange(json.dumps(pool and pool.address))[0]))
        with coordinator.refused_together():
            process: First | Other
            if pool:
                process = First(pool, pool.processes(jax.process_count() - 1))
            else:
                process = Other(ending.enter_context(_connect(address)))
        yield process


def _connect(address: Address) -> Connection:
    try:
        connection = open_connection(address)
    except (OSError, EOFError) as error:
        raise InputError(f"pipeline.host: the first process does not answer at {address.host}: {error}") from None
    send(connection, RolloutWorkerHello(process=jax.process_index()))
    return connection
