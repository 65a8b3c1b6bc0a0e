"""Agreement of a run's processes through the coordinator that each is connected to, a store of keys and values.

This is for texts of a few hundred bytes, and for numbers; what is large goes through the devices (distributed.py). The
coordinator is there before there are devices, needs no order among programs of several threads, and a process that
waits holds no device. A message took 0.2 ms on this project's test machine, where a collective of a few bytes took 4.

With `exchange` all processes hear from all others. With `Agreement` those that run an engine in lock-step hear from
their first one, which does not wait for them.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
from jax._src import clusters
from jax._src.distributed import global_state

from specrl_jax import last_words
from specrl_jax.errors import InputError, RunFailed, fail

# All processes must have joined after so long: nodes of one job may start minutes apart.
JOIN_SECONDS = 300
# One may read files for longer than another; one that is gone is seen by its heartbeat.
EXCHANGE_SECONDS = 3600
# A process that sends no heartbeat for so long is given up, and the others end.
HEARTBEAT_SECONDS = 30
# A process that ends alone, by an error of its own, waits so long for the others; then they end too.
LEAVE_SECONDS = 120
# Processes that have lost another one wait so long for each other's names.
ANSWER_SECONDS = 5.0
# How often a process looks whether another one was asked to stop.
LOOK_SECONDS = 1.0
# For processes on one machine, or where no cluster manager tells.
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# The interface on which the first process listens, where it is not that of the coordinator's address.
BIND = "JAX_COORDINATOR_BIND_ADDRESS"
# One waits for the first of a group as long as it takes; where a process is gone, its heartbeat ends all.
WAIT_SECONDS = 7 * 24 * 3600
GOES_ON = "the same command goes on from the last checkpoint"
# So many messages of a group are kept by the coordinator until all have read them.
KEPT = 256
# How a number is sent.
_CODES = {bool: "?", int: "i"}
# Exchanges of texts, and agreements, so far; every process makes the same ones.
_exchanges, _agreements = itertools.count(), itertools.count()


class ProcessLost(RunFailed):
    """Another process has left; nothing more can be saved."""


def initialize(distributed: bool) -> None:
    """Connect to the other processes of this run; call it before anything else of jax.

    The processes are those that the environment names (VARIABLES), that Slurm started beside this one, or, where
    `distributed`, that jax finds (TPU pods, Kubernetes, MPI). The first one listens on the coordinator's address alone.
    Raises InputError where they cannot be found; ends the process with one line where some do not join.
    """
    given = [os.environ.get(name, "") for name in VARIABLES]
    several = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    if not (any(given[1:]) or several or distributed):
        return
    try:
        processes, process = (int(given[1]), int(given[2])) if any(given[1:]) else (None, None)
        # jax looks for these itself, but then listens on every interface.
        address, count, index, devices = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            given[0] or None, processes, process, None, None, JOIN_SECONDS
        )

        def leave() -> None:  # jax would abort with a stack trace
            late = f"not all of {count} processes joined at {address} within {JOIN_SECONDS:g} s"
            _end(_not_joined(f"{late}; where its name is a loopback address there, set {BIND}"))

        with unless_within(JOIN_SECONDS, leave):
            jax.distributed.initialize(
                coordinator_address=address,
                num_processes=count,
                process_id=index,
                local_device_ids=None if os.environ.get("JAX_LOCAL_DEVICE_IDS") else devices,
                cluster_detection_method="deactivate",
                initialization_timeout=JOIN_SECONDS + 60,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=LEAVE_SECONDS,
                coordinator_bind_address=os.environ.get(BIND) or address,
            )
        # Where no end of its connections is heard of a process, jax notices it by its heartbeats, and aborts.
        last_words.if_aborted(f"another process of this run has left, or cannot be reached; {GOES_ON}")
    except (ValueError, RuntimeError, TypeError) as error:
        raise InputError(_not_joined(" ".join(str(error).split()))) from None


def _end(line: str) -> NoReturn:
    """End the process with one line, whatever its other threads are at."""
    fail(line)
    last_words.has_ended()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


@contextlib.contextmanager
def unless_within(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """Call `act`, in a thread, if the body takes longer than `seconds`."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _not_joined(problem: str) -> str:
    return f"several processes ({', '.join(VARIABLES)}, Slurm, --distributed): {problem}"


def is_joined() -> bool:
    """Return whether this process is one of several; unlike the other functions it touches no device."""
    return global_state.client is not None and global_state.num_processes > 1


def exchange(value: str) -> list[str]:
    """Return the `value` of every process, in their order, through the coordinator. All must call it together.

    For a few hundred bytes. Raises RunFailed where a process does not come.
    """
    client: Any = global_state.client
    if not is_joined():
        return [value]
    folder = f"specrl_jax/{next(_exchanges)}"
    try:
        client.key_value_set(f"{folder}/{global_state.process_id}", value)
        client.wait_at_barrier(folder, 1000 * EXCHANGE_SECONDS)
        values = {int(name.rpartition("/")[2]): value for name, value in client.key_value_dir_get(folder)}
    except RuntimeError as error:
        raise has_left(error) from None
    return [values[i] for i in range(global_state.num_processes)]


def has_left(error: Exception) -> ProcessLost:
    """Return what to raise where `error` says that another process has left; it names those that do not answer."""
    client: Any = global_state.client
    silent = [0]  # with which the coordinator has left
    with contextlib.suppress(RuntimeError):
        client.key_value_set(f"specrl_jax/lost/{global_state.process_id}", "", allow_overwrite=True)
        time.sleep(ANSWER_SECONDS)
        here = {int(name.rpartition("/")[2]) for name, _ in client.key_value_dir_get("specrl_jax/lost")}
        silent = [i for i in range(global_state.num_processes) if i not in here]
        if not global_state.process_id:  # the others may ask later
            time.sleep(ANSWER_SECONDS)
    who = f"process{'es' * (len(silent) > 1)} {', '.join(map(str, silent))}" if silent else "another process"
    why = " ".join(str(error).split())[:200]
    return ProcessLost(f"{who} left: {why}; {GOES_ON}")


@contextlib.contextmanager
def leave_with_others() -> Iterator[None]:
    """End the process with one line where the body fails as another one has left: closing a run would wait for that."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError, ProcessLost) as error:
        if not isinstance(error, ProcessLost):
            # A ValueError where the failure of a program that was under way is found only when its result is read.
            if not (is_joined() and re.search("Gloo|NCCL|by peer|heartbeat", str(error))):
                raise
            error = has_left(error)
        _end(str(error))


def share_event(event: threading.Event) -> None:
    """Set `event` in every process within seconds after it was set in one; all must call it.

    Through the coordinator, so also while a process generates alone.
    """
    folder = f"specrl_jax/{next(_exchanges)}"

    def watch() -> None:
        try:
            # Asked for anew each time: a reference kept here would delay the client's end.
            while (client := global_state.client) and not client.key_value_dir_get(folder):
                del client
                if event.wait(LOOK_SECONDS) and global_state.client:
                    global_state.client.key_value_set(f"{folder}/set", "", allow_overwrite=True)
            event.set()
        except RuntimeError:  # the coordinator has left: this run ends
            return

    if is_joined():
        threading.Thread(target=watch, name="shared event", daemon=True).start()


def agree(facts: Mapping[str, object]) -> None:
    """Raise InputError in every process unless the `facts` of all are equal; it names the first that differs.

    Args:
      facts: what JSON can hold, by name.
    """
    text = json.dumps(facts)
    digests = exchange(hashlib.blake2b(text.encode()).hexdigest())
    kinds = list(dict.fromkeys(digests))
    if len(kinds) == 1:
        return
    # Once for each kind: what hundreds of processes have in common is sent once.
    index = global_state.process_id
    sent = exchange(text if digests.index(digests[index]) == index else "")
    found = {kind: json.loads(sent[digests.index(kind)]) for kind in kinds}
    differing = first_difference([*found.values()])
    values = [json.dumps(found[digest].get(differing)) for digest in digests]
    differences = "; ".join(f"{value} in {_processes(values, value)}" for value in dict.fromkeys(values))
    raise InputError(f"the processes of this run differ in {differing}: {differences}")


def first_difference(facts: Sequence[Mapping[str, object]]) -> str:
    """Return the name of the first fact, as JSON, that is not in all alike; "" if there is none."""
    names = dict.fromkeys(name for one in facts for name in one)
    return next((name for name in names if len({json.dumps(one.get(name)) for one in facts}) > 1), "")


def _processes(values: Sequence[str], value: str) -> str:
    having = [str(i) for i, other in enumerate(values) if other == value]
    return f"process{'es' * (len(having) > 1)} {', '.join(having[:8])}{', ...' * (len(having) > 8)}"


@contextlib.contextmanager
def refused_together() -> Iterator[None]:
    """Raise the InputError that the body raises in one process in every process, whose lines then say in which;
    without, they would wait for it.
    """
    own: InputError | None = None
    try:
        yield
    except InputError as error:
        own = error
    problems = exchange(json.dumps(own.args if own else []))
    if own:
        raise own
    for i, problem in enumerate(problems):
        if lines := json.loads(problem):
            raise InputError(*(f"process {i}: {line}" for line in lines))


class Agreement:
    """Gives every process of a group the numbers of its first one; all ask for the same ones in the same order.

    A group of one process agrees with itself. Every process makes its agreements in the same order.
    """

    def __init__(self, members: tuple[int, ...]) -> None:
        self._messages = 0  # sent or received
        self._members, self._folder = members, f"specrl_jax/agreement_{next(_agreements)}/{members[0]}"

    def __call__(self, *values: int) -> tuple[int, ...]:
        """Return the first process's `values`: bools and ints of 32 bits, in every process of the same types.

        Raises RunFailed where a process has left.
        """
        if len(self._members) == 1:
            return values
        code = "<" + "".join(_CODES[type(value)] for value in values)
        try:
            return struct.unpack(code, self._exchange(struct.pack(code, *values)))
        except RuntimeError as error:
            raise has_left(error) from None

    def _exchange(self, message: bytes) -> bytes:
        client: Any = global_state.client
        number, first = self._messages, self._members[0] == global_state.process_id
        self._messages += 1
        if number % KEPT == 0 and number:
            epoch = f"{self._folder}/{number // KEPT - 1}"
            client.wait_at_barrier(epoch, 1000 * WAIT_SECONDS, list(self._members))
            if first:
                client.key_value_delete(f"{epoch}/")
        key = f"{self._folder}/{number // KEPT}/{number % KEPT}"
        if not first:
            return client.blocking_key_value_get_bytes(key, 1000 * WAIT_SECONDS)
        client.key_value_set_bytes(key, message)
        return message
