"""Machines that a dry run can compile for without having them, and the memory of their devices.

An NVIDIA GPU is described to XLA by the figures of its device query, a TPU by the name of its topology. Both need the
compiler of that platform (requirements-aot.txt), neither a driver or a device.
"""

import dataclasses
import importlib.util
import math

import jax
from jax.experimental import topologies

from specrl_jax.accelerator_flags import GPU_MEMORY
from specrl_jax.errors import InputError

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardwareTarget:
    """A kind of device; the subclasses make devices for ahead-of-time compilation."""

    name: str
    memory: int = 0  # bytes of one device; 0: no limit
    source: str = ""  # of that number
    share: float = 1.0  # of the memory that a run takes by itself (XLA_CLIENT_MEM_FRACTION on a GPU)
    wheels: tuple[str, ...] = ()  # modules that its compiler needs; '|' between those of which one is enough
    accelerator: str = ""  # of accelerator_flags; '': none

    def devices(self, count: int) -> list[jax.Device]:
        """Return `count` devices to compile for. Raises InputError for a number that the target does not come in."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu(HardwareTarget):
    """The figures of an NVIDIA GPU's device query that XLA needs (as in openxla/xla,
    xla/backends/gpu/target_config/specs).
    """

    source: str = "device query, as in openxla/xla's target_config/specs"
    share: float = GPU_MEMORY
    wheels: tuple[str, ...] = ("jax_plugins.xla_cuda12|jax_plugins.xla_cuda13", "nvidia.cudnn")
    accelerator: str = "cuda"
    node: int  # GPUs of one host
    capability: int  # compute capability, major
    cores: int
    clock: float  # GHz
    bandwidth: int  # bytes a second
    l2: int  # bytes

    def description(self) -> str:
        """Return a GpuTargetConfigProto as text, with the figures that Hopper and Blackwell share."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tpu(HardwareTarget):
    source: str = "cloud.google.com/tpu/docs, HBM capacity per chip"
    wheels: tuple[str, ...] = ("libtpu",)
    accelerator: str = "tpu"
    slices: tuple[str, ...]  # available topologies, by number of chips

    def devices(self, count: int) -> list[jax.Device]:
        sizes = {chips(name): name for name in self.slices}
        if count not in sizes:
            raise InputError(f"dry_run.devices={count}: slices of {self.name} have {', '.join(map(str, sizes))} chips")
        return list(topologies.get_topology_desc(f"{self.name}:{sizes[count]}", "tpu").devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cpu(HardwareTarget):
    def devices(self, count: int) -> list[jax.Device]:
        """Return fake devices, at most --xla_force_host_platform_device_count of XLA_FLAGS."""
        found = jax.devices("cpu")
        if len(found) < count:
            raise InputError(f"dry_run.devices={count}: this process has {len(found)} fake CPU devices")
        return found[:count]


_H100 = Gpu(
    name="h100",
    memory=84_942_979_072,
    bandwidth=3_352_320_000_000,
    capability=9,
    cores=132,
    clock=1.98,
    l2=52_428_800,
    node=8,
)
_H200 = dataclasses.replace(_H100, name="h200", memory=151_397_597_184, bandwidth=4_800_000_000_000)
_GB200 = Gpu(
    name="gb200",
    memory=197_897_748_480,
    bandwidth=7_928_064_000_000,
    capability=10,
    cores=152,
    clock=2.062,
    l2=135_528_448,
    node=4,
)
_V5P = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16"
_V6E = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_TPUS = (
    Tpu(name="v5p", memory=95 * GIB, slices=tuple(_V5P.split())),
    Tpu(name="v6e", memory=32 * GIB, slices=tuple(_V6E.split())),
)

TARGETS = {target.name: target for target in (_H100, _H200, _GB200, *_TPUS, Cpu(name="cpu"))}


def compiler_of(target: HardwareTarget) -> HardwareTarget:
    """Return the target, or fake CPU devices if its compiler is not installed."""
    return target if installed(target) else TARGETS["cpu"]


def installed(target: HardwareTarget) -> bool:
    return all(any(map(_found, wheel.split("|"))) for wheel in target.wheels)


def _found(module: str) -> bool:
    return bool(importlib.util.find_spec(module.partition(".")[0]) and importlib.util.find_spec(module))


def chips(topology: str) -> int:
    """Return the number of chips: 2x4x4 -> 32."""
    return math.prod(int(size) for size in topology.split("x"))
