"""Weights from the learner's devices to a worker's, by jax's transfer server: from device to device, not through files.

A transfer has the distinct parts of every array, each from one of the learner's devices that hold it. The worker takes
a part once and copies it among its own devices. Both split a copy alike (mesh.tensor, mesh.expert).
"""

import secrets
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import NamedSharding, SingleDeviceSharding

from specrl_jax.drafts.weights import Weights
from specrl_jax.workers.messages import Offer

Index = tuple[tuple[int, int], ...]  # start and stop along every axis


def start_server(host: str) -> transfer.TransferServer:
    """Start this process's transfer server, at a free port of `host`."""
    return transfer.start_transfer_server(jax.devices()[0].client, f"{host}:0", [f"{host}:0"])


def offer(server: transfer.TransferServer, weights: Weights) -> Offer:
    """Let one worker fetch the weights; nothing is copied before it does."""
    leaves = jax.tree.leaves(weights)
    # Who knows the number can fetch: it is a secret, too.
    number = secrets.randbits(62)
    server.await_pull(number, [part for leaf in leaves for part in _distinct_parts(leaf)])
    return Offer(number, [list(leaf.shape) for leaf in leaves], [leaf.dtype.name for leaf in leaves])


def fetch(connection: transfer.TransferConnection, offered: Offer, shardings: Weights) -> Weights:
    """Return the offered weights on this process's devices.

    Args:
      shardings: of every leaf, a NamedSharding over these devices.
    """
    kinds, structure = jax.tree.flatten(shardings)
    wanted, counts = [], []
    for shape, dtype, sharding in zip(offered.shapes, offered.dtypes, kinds, strict=True):
        holders = _holders(sharding, tuple(shape))
        counts.append(len(holders))
        for index, devices in holders.items():
            part = tuple(stop - start for start, stop in index)
            wanted.append(jax.ShapeDtypeStruct(part, np.dtype(dtype), sharding=SingleDeviceSharding(devices[0])))
    parts = iter(connection.pull(offered.number, wanted))
    leaves = [
        _spread(tuple(shape), sharding, [next(parts) for _ in range(count)])
        for shape, sharding, count in zip(offered.shapes, kinds, counts, strict=True)
    ]
    return jax.block_until_ready(jax.tree.unflatten(structure, leaves))


def _spread(shape: tuple[int, ...], sharding: NamedSharding, parts: Sequence[jax.Array]) -> jax.Array:
    """Return the array whose distinct parts these are, copied to every device that holds one."""
    copies = [
        jax.device_put(part, device)
        for part, devices in zip(parts, _holders(sharding, shape).values(), strict=True)
        for device in devices
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, copies)


def _distinct_parts(x: jax.Array) -> list[jax.Array]:
    """Return each part of an array once, in the order of its place."""
    found = {_bounds(shard.index, x.shape): shard.data for shard in x.addressable_shards}
    return [found[index] for index in sorted(found)]


def _holders(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Index, list[jax.Device]]:
    """Return the devices that hold each part of an array, in the order of its place."""
    found: dict[Index, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        found.setdefault(_bounds(index, shape), []).append(device)
    return dict(sorted(found.items(), key=lambda item: item[0]))


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
