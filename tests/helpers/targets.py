"""Real targets to compile for without having them: an H200 through the CUDA plugin, a TPU v5p through libtpu."""

import importlib.util
import os

import jax
from jax.experimental import topologies

# What the compiler has to know of an H200 (NVIDIA's data sheet and CUDA's device query).
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
platform_name: "CUDA"
"""
WHEELS = {"cuda": "jax_cuda12_plugin", "tpu": "libtpu"}


def installed(platform):
    """Whether requirements-aot.txt is."""
    return importlib.util.find_spec(WHEELS[platform]) is not None


def devices(platform):
    if platform == "cuda":
        # There is no driver here, and none is needed.
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        return topologies.get_topology_desc("h200", "cuda", target_config=H200, topology="1x1x1").devices
    return topologies.get_topology_desc("v5p:2x2x1", "tpu").devices


def compiled(platform, fn, *shapes):
    """`fn` of ShapeDtypeStructs, compiled for one device of the platform."""
    place = jax.sharding.SingleDeviceSharding(devices(platform)[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)
    return jax.jit(fn).trace(*shapes).lower(lowering_platforms=(platform,)).compile()
