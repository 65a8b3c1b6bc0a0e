"""One run of several processes: the same program in each, and one learner mesh over the devices of all.

Every process draws the same problems, generates and scores its share of them on its own devices, with its own copy of
the rollout weights, and then gets the rollouts of all: `gathered`, by the thread that learns, since programs of several
processes must come in one order everywhere. What follows is one program on the global mesh, and
host code that does the same everywhere. Checkpoints are written by all; other files, and the terminal, are the first
one's. With a single process every function here is the identity.
"""

import os
import pickle
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from specrl_jax.core import InputError

# A process that is not heard of for so long is given up, and the others end.
HEARTBEAT_SECONDS = 30
# Mesh axes that split rollout weights, so that a process must have all of them.
WHOLE = ("expert", "tensor")
# Of localhost, or where no cluster manager tells: jax reads the first by itself.
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def join(distributed: bool) -> None:
    """Joins the other processes of this run, before anything else of jax: those that the environment names (VARIABLES),
    that Slurm started beside this one, or, where `distributed`, that jax finds (TPU pods, Kubernetes, MPI).

    Raises InputError where they cannot be found or reached.
    """
    given = [os.environ.get(name, "") for name in VARIABLES]
    several = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    if not (any(given[1:]) or several or distributed):
        return
    try:
        known: dict[str, Any] = {}
        if any(given[1:]):
            known = {"coordinator_address": given[0], "num_processes": int(given[1]), "process_id": int(given[2])}
        jax.distributed.initialize(**known, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    except (ValueError, RuntimeError, TypeError) as error:
        names = ", ".join(VARIABLES)
        raise InputError(f"several processes ({names}, Slurm, --distributed): {' '.join(str(error).split())}") from None


def is_first() -> bool:
    return jax.process_index() == 0


def share(count: int) -> slice:
    """This process' part of `count` things, in their order."""
    i, n = jax.process_index(), jax.process_count()
    return slice(count * i // n, count * (i + 1) // n)


def gathered(value: Any) -> list[Any]:
    """The `value` of every process, in their order. All must call it, and together."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([len(data)]))[:, 0]
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes)]


def any_of(flag: bool) -> bool:
    """Whether it is set in any process: what all must then do, all do."""
    return any(gathered(flag))


def to_host(x: Any) -> np.ndarray:
    """The whole of an array whose parts may lie with other processes."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def placed(tree: Any, sharding: NamedSharding) -> Any:
    """Host arrays, the same in every process, as arrays of the global mesh; jit takes those of a single one itself."""
    if jax.process_count() == 1:
        return tree
    place = lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])  # noqa: E731
    return jax.tree.map(lambda x: place(np.asarray(x)), tree)


def own_mesh(mesh: Mesh, whole: tuple[str, ...]) -> Mesh:
    """The part of a global mesh that this process has, with all of the axes `whole`.

    Raises InputError where its devices are no such part: those axes would need more than one process has.
    """
    if jax.process_count() == 1:
        return mesh
    mine = np.vectorize(lambda device: device.process_index)(mesh.devices) == jax.process_index()
    places = [np.flatnonzero(mine.any(axis=tuple(np.delete(np.arange(mine.ndim), i)))) for i in range(mine.ndim)]
    devices = mesh.devices[np.ix_(*places)]
    for axis in whole:
        i = mesh.axis_names.index(axis)
        if devices.shape[i] != mesh.devices.shape[i] or devices.size != mine.sum():
            raise InputError(
                f"mesh.{axis}={mesh.shape[axis]}: rollouts read it within a process, which has "
                f"{jax.local_device_count()} devices"
            )
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def own_copy(tree: Any, shardings: Any) -> Any:
    """Arrays that every process has whole on its own devices, seen as arrays of those alone; nothing is moved."""

    def local(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        parts = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

    return jax.tree.map(local, tree, shardings)
