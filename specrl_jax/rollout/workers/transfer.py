"""Weights from the learner's devices to a worker's, by jax's transfer server: from device to device, not through files.

The learner offers every array in the parts in which its devices hold it, each once, by one of its processes. A worker
takes the parts that make up each of its own, and joins and copies them among its devices.
"""

import datetime
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from specrl_jax import last_words
from specrl_jax.drafts.weights import Weights
from specrl_jax.errors import InputError, RunFailed
from specrl_jax.rollout.workers.messages import Bounds, Leaf, Offer

Holders = dict[Bounds, list[jax.Device]]
# Weights arrive within so many seconds, or not at all.
FETCH_SECONDS = 600.0
# What nobody has fetched is released after so many.
OFFER_SECONDS = 900.0
LOOK_SECONDS = 0.01
# The server's buffers on the host are a few times as large.
PIECE = 64 << 20  # bytes
# jax 0.10.2 lists an array's shards when first asked, and while one thread does others see a part of the list.
_SHARDS = threading.Lock()


if TYPE_CHECKING:
    from jax.experimental.transfer import TransferConnection, TransferServer


class LateServer:
    """This process's transfer server, which listens once somebody who has the key is to fetch weights.

    Raises InputError where jax has none.
    """

    def __init__(self, address: str) -> None:
        _transfer()
        self._lock, self._address = threading.Lock(), address
        self._server: TransferServer | None = None

    def started(self) -> "TransferServer":
        """Return it, listening."""
        with self._lock:
            self._server = self._server or start_server(self._address)
            return self._server


def start_server(address: str) -> "TransferServer":
    """Start this process's transfer server, at a free port of a numeric address of this machine.

    It asks nobody for a key, and ends the process in C++ at a message that it cannot read. Raises InputError where jax
    has none.
    """
    own = f"{address}:0"
    server = _transfer().start_transfer_server(jax.devices()[0].client, own, [own], transfer_size=PIECE)
    last_words.if_aborted(
        f"its transfer port {server.address()} was open, and a message there that is not a worker's aborts it "
        "(docs/scaling.md)"
    )
    return server


def _transfer() -> Any:
    try:
        from jax.experimental import transfer
    except (ImportError, AttributeError):  # not in jaxlib's builds for every system
        raise InputError("pipeline.workers: this build of jaxlib has no transfer server") from None
    return transfer


def offer(server: "TransferServer", weights: Weights) -> Offer:
    """Let one worker fetch this process's parts of the weights; nothing is copied before it does.

    What several processes hold one of them offers, in turn.
    """
    leaves, parts, number = [], [], secrets.randbits(62)
    for i, x in enumerate(jax.tree.leaves(weights)):
        with _SHARDS:
            found = {_bounds(shard.index, x.shape): shard.data for shard in x.addressable_shards}
        places = [place for place, process in _offered_by(x, i).items() if process == jax.process_index()]
        leaves.append(Leaf(list(x.shape), x.dtype.name, places))
        parts += [found[place] for place in places]
    if parts:
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=OFFER_SECONDS)
        server.await_pull(number, parts, timeout=end)
    return Offer(server.address(), number, leaves)


def _offered_by(x: jax.Array, turn: int) -> dict[Bounds, int]:
    """Return the process that offers each part of an array."""
    holders: dict[Bounds, set[int]] = {}
    places: Mapping[Any, Any] = x.sharding.devices_indices_map(x.shape)
    for device, index in places.items():
        holders.setdefault(_bounds(index, x.shape), set()).add(_process_of(device))
    return {place: sorted(found)[(turn + i) % len(found)] for i, (place, found) in enumerate(sorted(holders.items()))}


def _process_of(device: jax.Device) -> int:
    return int(device.process_index)


def fetch(
    connect: Callable[[str], "TransferConnection"],
    offers: Sequence[Offer],
    shardings: Weights,
    *,
    on_wait: Callable[[], None] = lambda: None,
) -> Weights:
    """Return the offered weights on this process's devices.

    Args:
      connect: to the transfer server at an address.
      offers: of all processes of the learner.
      shardings: of every leaf, a NamedSharding over these devices; its parts are whole parts of the offers, or several.
      on_wait: called while they are under way; what it raises ends the call.
    Raises:
      RunFailed: they do not arrive.
      ConnectionError: the learner has left.
    """
    kinds, structure = jax.tree.flatten(shardings)
    holders = [_holders(sharding, leaf) for leaf, sharding in zip(offers[0].leaves, kinds, strict=True)]
    pulled = [_pull(connect, offer, holders) for offer in offers]
    _wait([part for parts in pulled for part in parts], on_wait)
    found: list[dict[Bounds, jax.Array]] = [{} for _ in kinds]
    for offer, parts in zip(offers, pulled, strict=True):
        remaining = iter(parts)
        for places, leaf in zip(found, offer.leaves, strict=True):
            places |= {part: next(remaining) for part in leaf.parts}
    leaves = [
        _assemble(leaf, sharding, holding, dict(sorted(places.items())))
        for leaf, sharding, holding, places in zip(offers[0].leaves, kinds, holders, found, strict=True)
    ]
    return jax.block_until_ready(jax.tree.unflatten(structure, leaves))


def _pull(connect: Callable[[str], "TransferConnection"], offer: Offer, holders: Sequence[Holders]) -> Sequence[Any]:
    """Begin to fetch what a process offers; return its parts in the order of the offer, which a transfer keeps."""
    shapes = [
        jax.ShapeDtypeStruct(_size(part), np.dtype(leaf.dtype), sharding=SingleDeviceSharding(_first(part, holding)))
        for leaf, holding in zip(offer.leaves, holders, strict=True)
        for part in leaf.parts
    ]
    return connect(offer.address).pull(offer.number, shapes) if shapes else []


def _wait(parts: Sequence[Any], on_wait: Callable[[], None]) -> None:
    """Wait for parts that are under way."""
    end = time.monotonic() + FETCH_SECONDS
    while not all(part.is_ready() for part in parts):
        if time.monotonic() > end:
            raise RunFailed(
                f"no weights within {FETCH_SECONDS:g} s: the transfer ports, which are chosen freely, must be open "
                "between the machines"
            )
        on_wait()
        time.sleep(LOOK_SECONDS)
    try:
        jax.block_until_ready(parts)
    except jax.errors.JaxRuntimeError as error:
        raise ConnectionError(str(error)) from None


def _assemble(leaf: Leaf, sharding: NamedSharding, holders: Holders, parts: Mapping[Bounds, jax.Array]) -> jax.Array:
    """Return the array of a leaf, whose parts, in the order of their places, lie on the first devices to need them."""
    copies = []
    for index, devices in holders.items():
        inside = [(place, x) for place, x in parts.items() if _within(place, index)]
        places, found = zip(*inside, strict=True)
        whole = found[0] if len(found) == 1 else jnp.concatenate(found, _split_axis(*places[:2]))
        copies += [jax.device_put(whole, device) for device in devices]
    return jax.make_array_from_single_device_arrays(tuple(leaf.shape), sharding, copies)


def _split_axis(first: Bounds, second: Bounds) -> int:
    """Return the axis along which two neighbours lie: the learner splits an array finer along one axis (`embed`)."""
    return next(axis for axis, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)


def _holders(sharding: NamedSharding, leaf: Leaf) -> Holders:
    """Return the devices that hold each part of an array here, in the order of its place."""
    found: Holders = {}
    shape = tuple(leaf.shape)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        found.setdefault(_bounds(index, shape), []).append(device)
    return dict(sorted(found.items(), key=lambda item: item[0]))


def _first(part: Bounds, holders: Holders) -> jax.Device:
    """Return the first device that needs a part of the offer."""
    return next(devices[0] for index, devices in holders.items() if _within(part, index))


def _within(part: Bounds, whole: Bounds) -> bool:
    return all(a[0] >= b[0] and a[1] <= b[1] for a, b in zip(part, whole, strict=True))


def _size(part: Bounds) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in part)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
