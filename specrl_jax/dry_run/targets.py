"""The machines that a dry run compiles for without having them, and how much memory their devices have.

An NVIDIA GPU is described to XLA by the figures of its device query, a TPU by the name of its topology; both need the
compiler of that platform (requirements-aot.txt), neither needs a driver or a device.
"""

import dataclasses
import importlib.util

import jax
from jax.experimental import topologies

from specrl_jax.core import InputError

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device."""

    name: str
    memory: int  # bytes of one device; 0: not a device to fit into
    source: str  # of that number
    share: float  # of the memory that JAX takes as it comes (XLA_PYTHON_CLIENT_MEM_FRACTION on a GPU)
    wheels: tuple[str, ...]  # modules that compiling for it takes; none: every jax can
    platform: str  # of that compiler, in jax


@dataclasses.dataclass(frozen=True)
class Gpu(Target):
    """What XLA has to know of an NVIDIA GPU, as its device query says; openxla/xla keeps such figures, too
    (xla/backends/gpu/target_config/specs).
    """

    node: int  # GPUs of one host
    capability: int  # compute capability, major
    cores: int
    clock: float  # GHz
    bandwidth: int  # bytes a second
    l2: int  # bytes

    def description(self) -> str:
        """A GpuTargetConfigProto as text. What Hopper and Blackwell have in common is written out."""
        return f"""
            gpu_device_info {{
              cuda_compute_capability {{ major: {self.capability} }}
              core_count: {self.cores}
              clock_rate_ghz: {self.clock}
              device_memory_size: {self.memory}
              memory_bandwidth: {self.bandwidth}
              l2_cache_size: {self.l2}
              fpus_per_core: 128
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
            }}
            platform_name: "CUDA"
        """

    def devices(self, count: int) -> list[jax.Device]:
        per_host = min(self.node, count)
        if count % per_host:
            raise InputError(f"dry_run.devices={count}: {self.name} has {self.node} a node")
        shape = f"1x{count // per_host}x{per_host}"
        config = self.description()
        return list(topologies.get_topology_desc(self.name, "cuda", target_config=config, topology=shape).devices)


@dataclasses.dataclass(frozen=True)
class Tpu(Target):
    slices: tuple[str, ...]  # topologies that there are, by number of chips

    def devices(self, count: int) -> list[jax.Device]:
        sizes = {chips(name): name for name in self.slices}
        if count not in sizes:
            raise InputError(f"dry_run.devices={count}: slices of {self.name} have {', '.join(map(str, sizes))} chips")
        return list(topologies.get_topology_desc(f"{self.name}:{sizes[count]}", "tpu").devices)


@dataclasses.dataclass(frozen=True)
class Cpu(Target):
    def devices(self, count: int) -> list[jax.Device]:
        """Fake ones, as many as XLA_FLAGS=--xla_force_host_platform_device_count says."""
        found = jax.devices("cpu")
        if len(found) < count:
            raise InputError(f"dry_run.devices={count}: this process has {len(found)} fake CPU devices")
        return found[:count]


_QUERY = "device query, as in openxla/xla's target_config/specs"
_GOOGLE = "cloud.google.com/tpu/docs, HBM capacity per chip"
_CUDA = {"source": _QUERY, "share": 0.75, "wheels": ("jax_plugins.xla_cuda12", "nvidia.cudnn"), "platform": "cuda"}
_TPU = {"source": _GOOGLE, "share": 1.0, "wheels": ("libtpu",), "platform": "tpu"}
_HOPPER = {"capability": 9, "cores": 132, "clock": 1.98, "l2": 52_428_800, "node": 8}
_V5P = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16"
_V6E = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"

TARGETS = {
    target.name: target
    for target in (
        Gpu("h100", 84_942_979_072, bandwidth=3_352_320_000_000, **_CUDA, **_HOPPER),
        Gpu("h200", 151_397_597_184, bandwidth=4_800_000_000_000, **_CUDA, **_HOPPER),
        Gpu(
            "gb200",
            197_897_748_480,
            bandwidth=7_928_064_000_000,
            capability=10,
            cores=152,
            clock=2.062,
            l2=135_528_448,
            node=4,
            **_CUDA,
        ),
        Tpu("v5p", 95 * GIB, slices=tuple(_V5P.split()), **_TPU),
        Tpu("v6e", 32 * GIB, slices=tuple(_V6E.split()), **_TPU),
        Cpu("cpu", 0, "", 1.0, (), "cpu"),
    )
}


def find_target(name: str) -> Target:
    if name not in TARGETS:
        raise InputError(f"dry_run.target: no target '{name}'; there are {', '.join(TARGETS)}")
    return TARGETS[name]


def compiler_of(target: Target) -> Target:
    """What is compiled for: the target, or fake CPU devices where its compiler is not installed."""
    return target if installed(target) else TARGETS["cpu"]


def installed(target: Target) -> bool:
    return all(
        importlib.util.find_spec(wheel.partition(".")[0]) and importlib.util.find_spec(wheel) for wheel in target.wheels
    )


def chips(topology: str) -> int:
    """2x4x4 -> 32."""
    product = 1
    for size in topology.split("x"):
        product *= int(size)
    return product
