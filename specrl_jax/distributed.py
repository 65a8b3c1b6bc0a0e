"""Several processes in one run: each runs the same program, and one learner mesh spans the devices of all.

Every process draws the same problems. Each, or each group of processes that hold one copy of the rollout weights
(process_groups.py), generates its share of them; each scores its own. `all_gather_objects` gives all rollouts to every
process. What follows is one program on the global mesh, and host code that does the same everywhere. Programs of
several processes must start in the same order everywhere, so only the thread that learns may call these functions. All
processes write checkpoints; the first one writes the other files and the terminal. With one process every function here
is the identity.

Before there are devices, processes compare small texts through the coordinator (`exchange`).
"""

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import clusters
from jax._src.distributed import global_state
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specrl_jax.core import Tree
from specrl_jax.errors import InputError, RunFailed, Stopped, fail
from specrl_jax.serialize import Packed, pack, unpack

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

# Bytes of each process that are gathered at once: through one device, which holds those of all.
PIECE = 1 << 28

T = TypeVar("T")


class ProcessLost(RunFailed):
    """Another process has left; nothing more can be saved."""


# Exchanges of texts so far; every process makes the same ones.
_exchanges = itertools.count()


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
            fail(_not_joined(f"{late}; where its name is a loopback address there, set {BIND}"))
            sys.stderr.flush()
            os._exit(1)

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
    except (ValueError, RuntimeError, TypeError) as error:
        raise InputError(_not_joined(" ".join(str(error).split()))) from None


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
    return ProcessLost(f"{who} left: {why}; the same command goes on from the last checkpoint")


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
        fail(str(error))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


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


def is_first_process() -> bool:
    return jax.process_index() == 0


def all_gather_objects(kind: type[T], value: T) -> list[T]:
    """Return the `value` of every process, in their order. All must call it together.

    A value of type `kind` is whatever `serialize.pack` takes, such as a NamedTuple of arrays; it arrives bit for bit.
    """
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(to_bytes(value), np.uint8)
    sizes = _all_gather(np.array(divmod(len(data), PIECE), np.int32)) @ [PIECE, 1]
    pieces = list[np.ndarray]()  # [processes, bytes]
    for start in range(0, sizes.max(), PIECE):
        padded = np.zeros(min(PIECE, sizes.max() - start), np.uint8)
        own = data[start : start + PIECE]
        padded[: len(own)] = own
        pieces.append(_all_gather(padded))
    return [from_bytes(kind, row[:size].tobytes()) for row, size in zip(np.concatenate(pieces, axis=1), sizes)]


def to_bytes(value: object) -> bytes:
    """Return a value as npz without pickle: its arrays, and the rest as JSON under the name "json"."""
    packed, file = pack(value, "value"), io.BytesIO()
    text = np.frombuffer(json.dumps(packed.values).encode(), np.uint8)
    np.savez(file, allow_pickle=False, json=text, **packed.arrays)
    return file.getvalue()


def from_bytes(kind: type[T], data: bytes) -> T:
    """Return what `to_bytes` wrote; nothing in `data` chooses what is built."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return unpack(kind, Packed(json.loads(arrays.pop("json").tobytes()), arrays))


def any_process(flag: bool) -> bool:
    """Return whether `flag` is set in any process. All must call it together."""
    if jax.process_count() == 1:
        return flag
    return bool(_all_gather(np.array([flag])).any())


def _all_gather(x: np.ndarray) -> np.ndarray:
    """Return the `x` of every process, of one shape, in their order; through the first device of each, which learns.

    Those that only generate may be running programs of several processes, in another order.
    """
    devices = np.array([jax.local_devices(process_index=i)[0] for i in range(jax.process_count())])
    mesh = Mesh(devices, ("process",))
    by_process, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("process",), ()))
    own = jax.device_put(x[None], jax.local_devices()[0])
    rows = jax.make_array_from_single_device_arrays((len(devices), *x.shape), by_process, [own])
    return np.asarray(jax.jit(_identity, out_shardings=whole)(rows))


def _identity(x: jax.Array) -> jax.Array:
    return x


def together(work: Callable[[], T]) -> T:
    """Return `work()`; raise Stopped in every process where it does in one. All must call it together."""
    result: list[T] = []
    with contextlib.suppress(Stopped):
        result = [work()]
    if any_process(not result):
        raise Stopped
    return result[0]


def to_host(x: jax.Array | np.ndarray) -> np.ndarray:
    """Return the whole array on the host, also where its shards are in several processes."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def global_arrays(tree: Tree, sharding: NamedSharding) -> Tree:
    """Turn host arrays, equal in every process, into arrays of the global mesh.

    With one process the tree is returned as it is: jit takes host arrays itself.
    """
    if jax.process_count() == 1:
        return tree

    def place(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(lambda x: place(np.asarray(x)), tree)
