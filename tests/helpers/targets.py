"""Compile for accelerators that are not present: an H200 through the CUDA plugin, a TPU v5p through libtpu."""

import os

import jax

from specrl_jax.dry_run import targets

# The smallest of each: one GPU, a slice of four chips.
TARGETS = {"cuda": (targets.TARGETS["h200"], 1), "tpu": (targets.TARGETS["v5p"], 4)}


def installed(platform):
    """Return whether requirements-aot.txt is installed for the platform."""
    return targets.installed(TARGETS[platform][0])


def devices(platform, least=1):
    """Return at least so many devices of the platform that programs can be compiled for."""
    # No driver is present, and none is needed.
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    target, count = TARGETS[platform]
    return target.devices(max(count, least))


def compiled(platform, fn, *shapes, donate=()):
    """Compile `fn` of ShapeDtypeStructs for one device of the platform; `donate`: arguments that it may overwrite."""
    place = jax.sharding.SingleDeviceSharding(devices(platform)[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)
    return jax.jit(fn, donate_argnums=donate).trace(*shapes).lower(lowering_platforms=(platform,)).compile()
