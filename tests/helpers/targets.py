"""Real targets to compile for without having them: an H200 through the CUDA plugin, a TPU v5p through libtpu."""

import os

import jax

from specrl_jax.dry_run import targets

# The smallest that there is of each: one GPU, a slice of four chips.
TARGETS = {"cuda": (targets.find_target("h200"), 1), "tpu": (targets.find_target("v5p"), 4)}


def installed(platform):
    """Whether requirements-aot.txt is."""
    return targets.installed(TARGETS[platform][0])


def devices(platform):
    # There is no driver here, and none is needed.
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    target, count = TARGETS[platform]
    return target.devices(count)


def compiled(platform, fn, *shapes):
    """`fn` of ShapeDtypeStructs, compiled for one device of the platform."""
    place = jax.sharding.SingleDeviceSharding(devices(platform)[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)
    return jax.jit(fn).trace(*shapes).lower(lowering_platforms=(platform,)).compile()
