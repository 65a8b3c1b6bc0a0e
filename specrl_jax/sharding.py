"""Shardings: the table from logical axes to mesh axes, the mesh, and `Partitioner`, which reads both.

Only this file names mesh axes. Arrays declare *logical* axes ("embed", "heads", ...). The table has two versions,
`LEARNER` and `ROLLOUT`: training splits weights so that the optimizer state fits, decoding so that each token reads
them once. The mesh has Auto axes on purpose: XLA propagates shardings between the constraints, and a gather from a
vocabulary-sharded embedding is legal (it is not under Explicit axes in jax 0.10).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specrl_jax.core import Tree
from specrl_jax.errors import InputError

MESH_AXES = ("data", "fsdp", "expert", "tensor", "sequence")

# Logical axis -> mesh axes. An axis that is absent is a bug in the caller and raises KeyError.
LEARNER = {
    "batch": ("data", "fsdp", "expert"),
    # Long rows: each device holds a part of their tokens, and gathers the keys and values of all, layer by layer.
    "sequence": ("sequence",),
    # Rows of logits with the whole vocabulary on one device, for sampling: one all-to-all instead of an all-gather.
    "sampled_rows": ("data", "fsdp", "expert", "tensor", "sequence"),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    # The embedding's rows too, which costs one of a decode step's 2 L + 1 all-reduces: whole on each device, the table
    # of the 8B would take 1.24 GB in place of 0.62 or 0.31 with two or four GPUs a copy.
    "vocab": ("tensor",),
    "experts": ("expert",),
    "layers": (),
}
# Decoding reads every weight once per iteration, so weights are split only where the matmul stays local (tensor) and
# are whole along `embed`: an all-gather per layer and token would cost more than the memory it saves. Its rows are one
# or a few tokens long, so the devices of the sequence axis take rows too.
ROLLOUT = LEARNER | {"embed": (), "sequence": (), "batch": ("data", "fsdp", "sequence", "expert")}
# Between the two, on a mesh whose `data` axis counts copies: split like the rollouts' weights, and besides along
# `embed`. From LEARNER to ROLLOUT at once XLA gathers whole weights where the two differ.
HALFWAY = ROLLOUT | {"embed": ("data",)}


class Spec(Protocol):
    """A leaf that describes an array."""

    @property
    def axes(self) -> tuple[str | None, ...]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclasses.dataclass(frozen=True)
class Partitioner:
    """Turn logical axes into shardings, by a mesh and one version of the table. Hashable: static under jit."""

    mesh: Mesh
    rules: tuple[tuple[str, tuple[str, ...]], ...]

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """Return the PartitionSpec of an array with these logical axes (None: replicated).

        Raises InputError where two dimensions of one array would use the same mesh axis.
        """
        entries = [self.axes(axis) if axis else () for axis in axes]
        used = [name for entry in entries for name in entry if self.mesh.shape[name] > 1]
        for name in set(used):
            if used.count(name) > 1:
                raise InputError(f"mesh.{name}: an array with axes {axes} would be split over it twice")
        return PartitionSpec(*[entry if entry else None for entry in entries])

    def sharding(self, axes: tuple[str | None, ...], shape: tuple[int, ...] | None = None) -> NamedSharding:
        """Return the NamedSharding for these logical axes.

        Raises InputError where `shape` is given and does not divide evenly.
        """
        for axis, size in zip(axes, shape or ()):
            if axis and size % self.num_shards(axis):
                names = " x ".join(f"mesh.{name}={self.mesh.shape[name]}" for name in dict(self.rules)[axis])
                raise InputError(
                    f"{names}: cannot split the {axis} axis of size {size} into {self.num_shards(axis)} equal parts"
                )
        return NamedSharding(self.mesh, self.spec(axes))

    def axes(self, axis: str) -> tuple[str, ...]:
        """Return the mesh axes that a logical axis is split over, for collectives inside `shard_map`.

        In a `shard_map` over a part of the mesh axes only the others: its arrays are a device's own along that part.
        """
        return tuple(name for name in dict(self.rules)[axis] if name not in self._taken())

    def _taken(self) -> tuple[str, ...]:
        """Return the mesh axes of a `shard_map` over a part of them that is being traced, as by a copy's loop."""
        taken = jax.sharding.get_abstract_mesh().manual_axes
        return () if set(self.mesh.axis_names) <= set(taken) else taken

    def num_shards(self, axis: str) -> int:
        """Return the number of shards of a logical axis."""
        return math.prod(self.mesh.shape[name] for name in self.axes(axis))

    def shardings(self, specs: Mapping[str, Spec]) -> Mapping[str, NamedSharding]:
        """Return the shardings of a tree of specs (`models.layers.ParamSpec`)."""
        return jax.tree.map(lambda leaf: self.sharding(leaf.axes, leaf.shape), specs)

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Pin an activation inside jit to the sharding of its logical axes."""
        mesh = jax.sharding.get_abstract_mesh() if self._taken() else self.mesh
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, self.spec(axes)))

    @property
    def copies(self) -> tuple[str, ...]:
        """Return the mesh axes whose devices have rows of their own and equal weights."""
        rules = dict(self.rules)
        rows = ("batch", "sampled_rows", "sequence")
        split = {name for axis, names in rules.items() if axis not in rows for name in names}
        return tuple(name for name in rules["batch"] if name not in split)

    def sums(self, dtype: jnp.dtype) -> jnp.dtype | None:
        """Return the dtype in which devices of `heads` and `mlp` add their parts of activations of `dtype`: that dtype.

        bfloat16 is half the bytes of float32. n parts, each rounded and then added with roundings, are off by at most
        n / 256 of the sum of their sizes; added in float32, by 1 / 256 of the sum. None on a CPU, which multiplies
        slowly where the result is bfloat16: float32.
        """
        return None if self.platform == "cpu" else dtype

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


def partitioner(mesh: Mesh, rules: Mapping[str, tuple[str, ...]]) -> Partitioner:
    """Return the Partitioner of a mesh and LEARNER or ROLLOUT."""
    return Partitioner(mesh, tuple(sorted(rules.items())))


def learner_devices(rollout_devices: int) -> list[jax.Device]:
    """Return all devices but the last `rollout_devices` of each process, which only generate.

    Raises InputError where that leaves a process without one.
    """
    if not rollout_devices:
        return jax.devices()
    kept = []
    for i in range(jax.process_count()):
        devices = jax.local_devices(process_index=i)
        if rollout_devices >= len(devices):
            raise InputError(
                f"pipeline.rollout_devices={rollout_devices}: of the {len(devices)} devices present one must learn"
            )
        kept += devices[: len(devices) - rollout_devices]
    return kept


def make_mesh(sizes: dict[str, int], devices: list[jax.Device] | None = None) -> Mesh:
    """Return a mesh over `devices` (default: all). One size may be -1: the rest; an axis without a size has 1.

    Raises InputError where the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = [sizes.get(axis, 1) for axis in MESH_AXES]
    shown = ", ".join(f"mesh.{axis}={size}" for axis, size in zip(MESH_AXES, shape))
    if any(size < 1 and size != -1 for size in shape) or shape.count(-1) > 1:
        raise InputError(f"{shown}: sizes are positive, and at most one is -1 (the rest)")
    product = math.prod(size for size in shape if size != -1)
    if -1 in shape:
        shape[shape.index(-1)] = len(devices) // product
    if math.prod(shape) != len(devices):
        raise InputError(f"{shown}: does not multiply to the {len(devices)} devices present")
    return jax.make_mesh(tuple(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices)


def bytes_on_devices(tree: Tree) -> int:
    """Return the bytes of arrays on all their devices together: those of a copy count as often as there are copies."""

    def of(x: jax.Array) -> int:
        return x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) * len(x.sharding.device_set)

    return sum(map(of, jax.tree.leaves(tree)))
