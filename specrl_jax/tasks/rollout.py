"""task=rollout: a worker that generates for the learner of a workdir, until that has ended."""

import dataclasses
import json
import os
import platform
import sys
import threading
import time
import traceback
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from typing import NamedTuple

import jax
from jax.experimental.transfer import TransferConnection

from specrl_jax.config import Config
from specrl_jax.config.automatic import left_open
from specrl_jax.decoding.continuation import Continuation
from specrl_jax.decoding.engine import DraftLengthPolicy, Engine, FixedLength
from specrl_jax.drafts.weights import Weights
from specrl_jax.errors import InputError, RunFailed, Stopped
from specrl_jax.io.agreement import facts
from specrl_jax.io.signals import raise_once_set, stop_on_signal
from specrl_jax.sharding import make_mesh
from specrl_jax.training.build import Rollout, make_rollout
from specrl_jax.training.choices import recorded_values, resumed
from specrl_jax.training.plan import make_plan
from specrl_jax.training.rollouts import weights_shardings
from specrl_jax.workers import transfer
from specrl_jax.workers.messages import (
    CHOOSES,
    Address,
    Answer,
    Ask,
    Hello,
    Welcome,
    keep_alive,
    read_address,
    receive,
    send,
)

# A worker waits so long for a learner: to be started, or to come back.
PATIENCE = 600.0
LOOK_SECONDS = 1.0


def run(config: Config, workdir: str) -> None:
    """Work until the learner has ended. Raises RunFailed where none comes, InputError where it refuses this worker."""
    stop, known = stop_on_signal(), None
    worker: Worker | None = None
    while True:
        known, connection = connect(workdir, known, stop)
        with connection:
            keep_alive(connection)
            try:
                welcome = introduce(connection, config, workdir)
                worker = worker or Worker(make_worker_rollout(config, workdir))
                if worker.work(connection, welcome.transfer, stop):
                    print("the learner has ended")
                    return
            except (EOFError, OSError):
                print("the learner left; waiting for it to come back", flush=True)


def connect(workdir: str, known: Address | None, stop: threading.Event) -> tuple[Address, Connection]:
    """Wait for a learner at another address than `known`. Raise RunFailed where none comes, Stopped at a signal."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if stop.wait(LOOK_SECONDS):
            raise Stopped("a rollout worker keeps nothing")
        address = read_address(workdir)
        if address is None or address == known:
            continue
        try:
            return address, Client((address.host, address.port), authkey=bytes.fromhex(address.key))
        except (OSError, EOFError, AuthenticationError, ValueError):  # of a learner that has ended
            continue
    raise RunFailed(f"--workdir {workdir}: no learner with pipeline.workers for {PATIENCE:g} s")


def worker_facts(config: Config, workdir: str) -> dict[str, object]:
    """Return what a worker and its learner must have in common: all that processes of a run must, but the task."""
    return facts(dataclasses.asdict(dataclasses.replace(config, task="train")), workdir)


def introduce(connection: Connection, config: Config, workdir: str) -> Welcome:
    """Say who this is. Raise InputError where the learner refuses."""
    name = f"{platform.node()}:{os.getpid()}"
    send(connection, Hello(json.dumps(worker_facts(config, workdir)), name, jax.local_device_count()))
    welcome = receive(connection, Welcome)
    if welcome.refused:
        raise InputError(f"the learner of {workdir} refuses this worker: {welcome.refused}")
    return welcome


def make_worker_rollout(config: Config, workdir: str) -> Rollout:
    """Build the engines on all devices of this process, in the sizes that the learner has chosen."""
    config = resumed(dataclasses.replace(config, task="train"), recorded_values(workdir))
    if left_open(config):
        raise InputError(f"{workdir}: the learner has not written what it chose")
    mesh = config.mesh
    return make_rollout(make_plan(config, make_mesh({"data": -1, "expert": mesh.expert, "tensor": mesh.tensor})))


class _Engine(NamedTuple):
    """An engine, and its controller where the config wants one."""

    engine: Engine
    lengths: DraftLengthPolicy


class Worker:
    """Holds weights, engines and their controllers over all connections."""

    def __init__(self, rollout: Rollout) -> None:
        plan, quantize = rollout.plan, rollout.config.quantize
        partition, derived = plan.rollout_partition, plan.draft_method.derived
        self._rollout = rollout
        self._shardings = weights_shardings(plan.model, plan.draft, derived, quantize, partition)
        self._server = transfer.start_server("localhost")
        self._weights: Weights | None = None
        self._engines: dict[str, _Engine] = {}

    def work(self, connection: Connection, address: str, stop: threading.Event) -> bool:
        """Answer until the learner says that it has ended; return True then.

        Raises EOFError or OSError where it has left, Stopped at a signal.
        """
        source = self._server.connect(address)
        while True:
            while not connection.poll(LOOK_SECONDS):
                raise_once_set(stop)(0, 0)
            ask = receive(connection, Ask)
            if not ask.engine:
                return True
            send(connection, self._answer(ask, source, stop))

    def _answer(self, ask: Ask, source: TransferConnection, stop: threading.Event) -> Answer:
        start = time.perf_counter()
        try:
            if ask.weights is not None:
                self._weights = None  # there is memory for one copy
                self._weights = transfer.fetch(source, ask.weights, self._shardings)
            seconds = time.perf_counter() - start
            return self._generated(ask, stop)._replace(weights_seconds=seconds)
        except Stopped:
            raise
        except Exception as error:  # the learner's run ends with it
            traceback.print_exc(file=sys.stderr)
            return Answer(None, 0.0, f"{type(error).__name__}: {error}"[:500])

    def _generated(self, ask: Ask, stop: threading.Event) -> Answer:
        assert self._weights is not None  # the first ask has some
        engine, lengths = self._engine(ask.engine)
        if not ask.prompts:
            engine.compile_all(self._weights, lambda program, seconds: raise_once_set(stop)(0, 0))
            return Answer(None, 0.0, "")
        rollouts = engine.generate(
            self._weights,
            ask.prompts,
            ask.samples,
            ask.seed,
            ask.ids if len(ask.ids) > 1 else int(ask.ids[0]),
            raise_once_set(stop),
            lengths if ask.drafts == CHOOSES else FixedLength(ask.drafts),
            responses=ask.responses or None,
            continuation=Continuation(ask.version),
        )
        return Answer(rollouts, 0.0, "")

    def _engine(self, name: str) -> _Engine:
        if name not in self._engines:
            engine = getattr(self._rollout, name)
            self._engines[name] = _Engine(engine, engine.controller())
        return self._engines[name]
