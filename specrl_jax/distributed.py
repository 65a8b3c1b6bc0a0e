"""Several processes in one run: each runs the same program, and one learner mesh spans the devices of all.

Every process draws the same problems. Each, or each group of processes that hold one copy of the rollout weights
(process_groups.py), generates its share of them; each scores its own. `all_gather_objects` gives all rollouts to every
process. What follows is one program on the global mesh, and host code that does the same everywhere. Programs of
several processes must start in the same order everywhere, so only the thread that learns may call these functions. All
processes write checkpoints; the first one writes the other files and the terminal. With one process every function here
is the identity.
"""

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specrl_jax.core import Tree
from specrl_jax.errors import Stopped
from specrl_jax.serialize import from_bytes, to_bytes

# Bytes of each process that are gathered at once: through one device, which holds those of all.
PIECE = 1 << 28

T = TypeVar("T")


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


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Raise Stopped in every process where the body does in one. All must enter it together."""
    stopped = False
    try:
        yield
    except Stopped:
        stopped = True
    if any_process(stopped):
        raise Stopped


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
