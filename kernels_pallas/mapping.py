"""Run a function on each device's own parts: kernels, which XLA cannot split."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh


def on_each_device(fn: Callable, mesh: Mesh | None, in_specs: object, *, out_specs: object) -> Callable:
    """Map `fn` over the devices of a mesh by `jax.shard_map`; over one, and over None, `fn` itself.

    Inside another `shard_map` of this mesh the arrays are a device's own along the axes of that one already: only the
    other axes are mapped. The specs must not name the former.
    """
    if mesh is None:
        return fn
    context = jax.sharding.get_abstract_mesh()
    taken = set(context.manual_axes)
    left = {name for name in mesh.axis_names if name not in taken}
    if not left or (not taken and mesh.size == 1):
        return fn
    if taken:
        # Over axes of one device, too: a TPU's kernels want every axis mapped.
        return jax.shard_map(fn, mesh=context, in_specs=in_specs, out_specs=out_specs, axis_names=left, check_vma=False)
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
