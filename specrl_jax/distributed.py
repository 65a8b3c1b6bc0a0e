"""Several processes in one run: each runs the same program, and one learner mesh spans the devices of all.

Every process draws the same problems, then generates and scores its slice of them on its own devices, with its own copy
of the rollout weights. `all_gather_objects` gives all rollouts to every process. What follows is one program on the
global mesh, and host code that does the same everywhere. Programs of several processes must start in the same order
everywhere, so only the thread that learns may call these functions. All processes write checkpoints; the first one
writes the other files and the terminal. With one process every function here is the identity.
"""

import os
import pickle
from typing import TypedDict, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from specrl_jax.core import Tree
from specrl_jax.errors import InputError

# A process that sends no heartbeat for so long is given up, and the others end.
HEARTBEAT_SECONDS = 30
# Mesh axes that split rollout weights: each process needs all of such an axis.
LOCAL_AXES = ("expert", "tensor")
# For processes on one machine, or where no cluster manager tells; jax reads the first by itself.
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")

T = TypeVar("T")


class _Known(TypedDict, total=False):
    coordinator_address: str
    num_processes: int
    process_id: int


def initialize(distributed: bool) -> None:
    """Connect to the other processes of this run; call it before anything else of jax.

    The processes are those that the environment names (VARIABLES), that Slurm started beside this one, or, where
    `distributed`, that jax finds (TPU pods, Kubernetes, MPI). Raises InputError where they cannot be found or reached.
    """
    given = [os.environ.get(name, "") for name in VARIABLES]
    several = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    if not (any(given[1:]) or several or distributed):
        return
    try:
        known: _Known = {}
        if any(given[1:]):
            known = {"coordinator_address": given[0], "num_processes": int(given[1]), "process_id": int(given[2])}
        jax.distributed.initialize(**known, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    except (ValueError, RuntimeError, TypeError) as error:
        names = ", ".join(VARIABLES)
        raise InputError(f"several processes ({names}, Slurm, --distributed): {' '.join(str(error).split())}") from None


def is_first_process() -> bool:
    return jax.process_index() == 0


def process_slice(count: int) -> slice:
    """Return this process's slice of `count` things; the slices of all processes, in their order, cover them once."""
    i, n = jax.process_index(), jax.process_count()
    return slice(count * i // n, count * (i + 1) // n)


def all_gather_objects(value: T) -> list[T]:
    """Return the `value` of every process, in their order. All must call it together; values are pickled."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([len(data)]))[:, 0]
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes)]


def any_process(flag: bool) -> bool:
    """Return whether `flag` is set in any process. All must call it together."""
    return any(all_gather_objects(flag))


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


def local_mesh(mesh: Mesh, local_axes: tuple[str, ...]) -> Mesh:
    """Return the part of a global mesh on this process's devices, with all of each of `local_axes`.

    Raises InputError where that is no such part: those axes would need more devices than one process has.
    """
    if jax.process_count() == 1:
        return mesh
    mine = np.vectorize(lambda device: device.process_index)(mesh.devices) == jax.process_index()
    places = [np.flatnonzero(mine.any(axis=tuple(np.delete(np.arange(mine.ndim), i)))) for i in range(mine.ndim)]
    devices = mesh.devices[np.ix_(*places)]
    for axis in local_axes:
        i = mesh.axis_names.index(axis)
        if devices.shape[i] != mesh.devices.shape[i] or devices.size != mine.sum():
            raise InputError(
                f"mesh.{axis}={mesh.shape[axis]}: rollouts read it within a process, which has "
                f"{jax.local_device_count()} devices"
            )
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def local_copy(tree: Tree, shardings: object) -> Tree:
    """View arrays that every process holds whole as arrays of this process's devices alone; nothing is moved."""

    def local(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        parts = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

    return jax.tree.map(local, tree, shardings)
