"""Processes that hold one copy of the rollout weights together and run its engine in lock-step.

Where `mesh.tensor` or `mesh.expert` goes beyond a process, a copy of the weights does too. Its processes then start the
same programs in the same order. What the host does between two programs follows from what it fetches, which is whole
in every process. What follows from a clock, a signal or another thread (draft lengths, the end of a call, whose turn it
is) the group's first process decides, and sends to the others (`Agreement` of coordinator.py). Groups do not wait for
each other.
"""

import dataclasses
import itertools
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from specrl_jax.core import Tree
from specrl_jax.errors import InputError

# Mesh axes that split rollout weights: a copy has all of such an axis.
COPY_AXES = ("expert", "tensor")


class Share(NamedTuple):
    """A process's share of things that all processes cover once."""

    group: slice  # of its group
    own: slice  # its own part

    @property
    def within(self) -> slice:
        """Return this process's part, counted from the group's first."""
        return slice(self.own.start - self.group.start, self.own.stop - self.group.start)


@dataclasses.dataclass(frozen=True)
class ProcessGroups:
    """All groups, each by its processes in ascending order; every process is in one."""

    groups: tuple[tuple[int, ...], ...] = ((0,),)

    @property
    def order(self) -> tuple[int, ...]:
        """Return the processes, group by group: the order of what they cover."""
        return tuple(itertools.chain(*self.groups))

    @property
    def own(self) -> tuple[int, ...]:
        """Return the group of this process."""
        return next(group for group in self.groups if jax.process_index() in group)

    def share(self, count: int) -> Share:
        """Return this process's share of `count` things."""
        order, own = self.order, self.own
        bounds = [count * i // len(order) for i in range(len(order) + 1)]
        i, first = order.index(jax.process_index()), order.index(own[0])
        return Share(slice(bounds[first], bounds[first + len(own)]), slice(bounds[i], bounds[i + 1]))


ALONE = ProcessGroups()


def find_groups(mesh: Mesh) -> ProcessGroups:
    """Return the smallest groups whose devices hold whole copies of the rollout weights.

    Raises InputError where no groups of whole processes hold such copies.
    """
    if jax.process_count() == 1:
        return ALONE
    found = {i: _members(mesh, i) for i in range(jax.process_count())}
    if any(found[other] != members for members in found.values() for other in members):
        shown = ", ".join(f"mesh.{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
        raise InputError(f"{shown}: no groups of processes hold whole copies of the rollout weights")
    return ProcessGroups(tuple(sorted(set(found.values()))))


def group_mesh(mesh: Mesh) -> Mesh:
    """Return the part of a mesh on the devices of this process's group."""
    if jax.process_count() == 1:
        return mesh
    devices = _devices_of(mesh, _members(mesh, jax.process_index()))
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def spans_processes(mesh: Mesh) -> bool:
    """Return whether a mesh has devices of several processes."""
    return len(set(_owners(mesh.devices).flat)) > 1


def _members(mesh: Mesh, process: int) -> tuple[int, ...]:
    """Return the processes whose devices make a part of the mesh, with all of each of COPY_AXES and with `process`."""
    members: tuple[int, ...] = (process,)
    while (more := tuple(np.unique(_owners(_devices_of(mesh, members))).tolist())) != members:
        members = more
    return members


def _devices_of(mesh: Mesh, members: tuple[int, ...]) -> np.ndarray:
    """Return the smallest part of a mesh that has the devices of some processes, and all of each of COPY_AXES."""
    theirs = np.isin(_owners(mesh.devices), members)
    places = [
        np.arange(size) if name in COPY_AXES else np.unique(axis)
        for name, size, axis in zip(mesh.axis_names, theirs.shape, np.nonzero(theirs), strict=True)
    ]
    return mesh.devices[np.ix_(*places)]


def _owners(devices: np.ndarray) -> np.ndarray:
    return np.vectorize(lambda device: device.process_index)(devices)


def group_copy(tree: Tree, shardings: object) -> Tree:
    """View arrays of which every group holds a copy as arrays of this group's devices alone; nothing is moved."""

    def view(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        parts = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

    return jax.tree.map(view, tree, shardings)


def staging_mesh(learner: Mesh, rollout: Mesh) -> Mesh:
    """Return the learner's devices as a mesh of copies split like those of `rollout`, devices that only generate.

    Groups are of consecutive processes. Of each process the first devices hold the parts of its rollout devices, in
    their order; further ones hold them again.
    """
    axes = learner.axis_names
    each = int((_owners(rollout.devices) == jax.process_index()).sum())
    found = [[d for d in learner.devices.flat if d.process_index == i] for i in range(jax.process_count())]
    devices = np.array([sorted(own, key=lambda d: d.id) for own in found]).reshape(len(found), -1, each)
    parts = [rollout.shape[axis] if axis in COPY_AXES else 1 for axis in axes]
    parts[0] = -1
    return Mesh(devices.swapaxes(0, 1).reshape(parts), axes, axis_types=learner.axis_types)


def move_parts(tree: Tree, shardings: object) -> Tree:
    """Move arrays of a `staging_mesh` to the devices that only generate, within each process."""

    def move(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        devices = [d for d in sharding.mesh.devices.flat if d.process_index == jax.process_index()]
        parts = sorted(x.addressable_shards, key=lambda shard: shard.device.id)[: len(devices)]
        moved = jax.device_put([part.data for part in parts], devices)
        return jax.make_array_from_single_device_arrays(x.shape, sharding, moved)

    return jax.tree.map(move, tree, shardings)
