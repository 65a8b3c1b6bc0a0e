"""task=rollout: a worker that generates for the learner of a workdir, until that has ended."""

import dataclasses
import functools
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import jax

from specrl_jax.config import Config
from specrl_jax.config.automatic import left_open
from specrl_jax.decoding.continuation import Continuation
from specrl_jax.decoding.controller import Controller
from specrl_jax.decoding.draft_lengths import DraftLengthPolicy, FixedLength
from specrl_jax.decoding.lookahead import Lookahead
from specrl_jax.decoding.requests import CallOptions
from specrl_jax.drafts.weights import Weights
from specrl_jax.errors import InputError, RunFailed, Stopped
from specrl_jax.io.agreement import worker_facts
from specrl_jax.io.signals import raise_once_set, stop_on_signal, stopped_as
from specrl_jax.planning.choices import recorded_values, resumed
from specrl_jax.planning.plan import make_plan
from specrl_jax.rollout.build import RolloutEngines, make_rollout
from specrl_jax.rollout.inference_engine import weights_shardings
from specrl_jax.rollout.speculation import Guarded
from specrl_jax.rollout.workers import transfer
from specrl_jax.rollout.workers.messages import (
    CHOOSES_ALARMED,
    ENDED,
    ENOUGH,
    Ask,
    RolloutWorkerHello,
    WorkerAnswer,
    open_connection,
    own_address,
    pack_texts,
    read_address,
    receive,
    send,
    unpack_texts,
)
from specrl_jax.sharding import make_mesh

if TYPE_CHECKING:
    from jax.experimental.transfer import TransferConnection, TransferServer

# A worker waits so long for a learner: to be started, or to come back.
PATIENCE = 600.0
LOOK_SECONDS = 1.0


def run(config: Config, workdir: str) -> None:
    """Work until the learner has ended. Raises RunFailed where none comes, InputError where it refuses this worker."""
    with stopped_as("a rollout worker keeps nothing"):
        work_for_learners(config, workdir, stop_on_signal())


def work_for_learners(config: Config, workdir: str, stop: threading.Event) -> None:
    """Work for one learner after the other, each the one before started again, until one has ended its run."""
    # Now: a source that changes later is not what this process runs.
    facts = worker_facts(dataclasses.asdict(config), workdir)
    worker: RolloutWorker | None = None
    while True:
        with connect(workdir, stop) as connection:
            try:
                introduce(connection, facts, workdir)
            except (EOFError, OSError):
                continue
            worker = worker or RolloutWorker(make_worker_rollout(config, workdir), stop)
            try:
                worker.work(connection)
            except (EOFError, OSError):
                print("the learner left; waiting for it to come back", flush=True)
            else:
                print("the learner has ended")
                return


def connect(workdir: str, stop: threading.Event) -> Connection:
    """Wait for the learner of a workdir. Raise RunFailed where none comes, Stopped at a signal."""
    end, why = time.monotonic() + PATIENCE, "no learner with pipeline.workers has begun there"
    while time.monotonic() < end:
        if stop.wait(LOOK_SECONDS):
            raise Stopped
        if (address := read_address(workdir)) is None:
            continue
        try:
            return open_connection(address)
        except (OSError, EOFError, AuthenticationError, AssertionError, ValueError) as error:
            why = f"{address.host}:{address.port}: {error or type(error).__name__}"
    raise RunFailed(f"--workdir {workdir}: no learner for {PATIENCE:g} s: {why}")


def introduce(connection: Connection, known: Mapping[str, object], workdir: str) -> None:
    """Say who this is. Raise InputError where the learner refuses."""
    name = f"{platform.node()}:{os.getpid()}:{secrets.token_hex(2)}"
    send(connection, RolloutWorkerHello(json.dumps(known), name, jax.local_device_count()))
    if refused := receive(connection, str):
        raise InputError(f"the learner of {workdir} refuses this worker: {refused}")


def make_worker_rollout(config: Config, workdir: str) -> RolloutEngines:
    """Build the engines on all devices of this process, in the sizes that the learner has chosen."""
    config = resumed(dataclasses.replace(config, task="train"), recorded_values(workdir))
    if left_open(config):
        raise InputError(f"{workdir}: the learner has not written what it chose")
    mesh = config.mesh
    return make_rollout(make_plan(config, make_mesh({"data": -1, "expert": mesh.expert, "tensor": mesh.tensor})))


def is_heard(connection: Connection) -> bool:
    """Return whether the learner has said something, or has left, which whoever reads or answers finds out."""
    try:
        return connection.poll()
    except (EOFError, OSError):
        return True


class RolloutWorker:
    """Holds weights, engines and their controllers over all connections."""

    def __init__(self, rollout: RolloutEngines, stop: threading.Event) -> None:
        plan, quantize = rollout.plan, rollout.config.quantize
        partition, derived = plan.rollout_partition, plan.draft_method.derived
        self._rollout, self._stop = rollout, raise_once_set(stop)
        self._shardings = weights_shardings(plan.model, plan.draft, derived, quantize=quantize, partition=partition)
        self._servers: dict[str, TransferServer] = {}  # by address of this machine
        self._weights: Weights | None = None
        self._controllers: dict[str, Controller] = {}  # by engine

    def work(self, connection: Connection) -> None:
        """Answer until the learner says that it has ended.

        Raises:
          EOFError: the learner has left; also OSError.
          Stopped: at a signal.
          RunFailed: the learner's weights do not arrive, or this machine fails.
        """
        # Of the address that leads there: what leads to this machine alone does not lead to others.
        own = own_address(connection)
        if own not in self._servers:
            self._servers[own] = transfer.start_server(own)
        connect = functools.cache(self._servers[own].connect)
        while True:
            while not connection.poll(LOOK_SECONDS):
                self._stop(0, 0)
            ask = receive(connection, Ask)
            if ask.engine == ENDED:
                return
            if ask.engine != ENOUGH:  # all were finished before the learner knew
                send(connection, self._answer(ask, connect, lambda: is_heard(connection)))

    def _answer(
        self, ask: Ask, connect: Callable[[str], "TransferConnection"], until: Callable[[], bool]
    ) -> WorkerAnswer:
        """
        Args:
          until: says that what has begun is enough.
        """
        start = time.perf_counter()
        if ask.weights:
            self._weights = None  # there is memory for one copy
            self._weights = transfer.fetch(connect, ask.weights, self._shardings, on_wait=lambda: self._stop(0, 0))
        seconds = time.perf_counter() - start
        try:
            return self._generated(ask, until)._replace(weights_seconds=seconds)
        except InputError as error:  # to any worker it would be one
            return WorkerAnswer(failed=str(error))
        except OSError as error:  # not of the connection, which is only looked at meanwhile
            raise RunFailed(f"{error.filename or 'rollouts'}: {error.strerror or error}") from error

    def _generated(self, ask: Ask, until: Callable[[], bool]) -> WorkerAnswer:
        assert self._weights is not None  # the first ask has some
        engine, later = getattr(self._rollout, ask.engine), ask.later
        if not ask.prompts and not later.prompts:
            engine.compile_all(self._weights, lambda program, seconds: self._stop(0, 0))
            return WorkerAnswer()
        earlier = unpack_texts(ask.earlier)
        lookahead = Lookahead(later.prompts, later.ids, earlier)
        if not ask.prompts:  # begin those of a later call until the learner says that it is enough, or all are finished

            def enough() -> bool:
                self._stop(0, 0)
                return until()

            lengths = self._lengths(ask)
            finished = engine.begin(self._weights, lookahead, ask.samples, seed=ask.seed, until=enough, lengths=lengths)
            return WorkerAnswer(texts=pack_texts(lookahead.texts, later.ids), finished=finished)
        how: Continuation[Weights] = Continuation(ask.version, dict(earlier), lookahead if later.prompts else None)
        rollouts = engine.generate(
            self._weights,
            ask.prompts,
            ask.samples,
            seed=ask.seed,
            options=CallOptions(first_id=ask.ids, responses=ask.responses or None, continuation=how),
            on_progress=self._stop,
            lengths=self._lengths(ask),
        )
        return WorkerAnswer(rollouts, texts=pack_texts(lookahead.texts, later.ids))

    def _lengths(self, ask: Ask) -> DraftLengthPolicy:
        """Return the length that the learner says, or this process's controller of the engine."""
        if ask.drafts >= 0:
            return FixedLength(ask.drafts)
        if ask.engine not in self._controllers:
            self._controllers[ask.engine] = getattr(self._rollout, ask.engine).controller()
        return Guarded(self._controllers[ask.engine], ask.drafts == CHOOSES_ALARMED, threading.RLock())
