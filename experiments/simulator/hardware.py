"""Hardware figures: the vendors' peak numbers, and the share of them that programs attain.

An assumed number has its source or reason beside it and a range in `SPREAD`; experiments/scale_projection fits others.
Rates are per device; a GB is 1e9 bytes.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from experiments.simulator.programs import ASSUMED, Programs, compiled
from specrl_jax.models.flops import Array


class Peak(NamedTuple):
    """FLOP/s of dense matmuls by operand dtype; a dtype without hardware support has the rate of the next wider one."""

    float32: float
    bfloat16: float
    float8: float


class Link(NamedTuple):
    """Link of a device: bytes/s in each direction, and the latency of a message in seconds."""

    bandwidth: float
    latency: float


@dataclasses.dataclass(frozen=True)
class Attained:
    """Attained shares of the peaks, and overheads. Assumed, with a range in SPREAD, unless fitted."""

    # Share of the peak in large matmuls. cuBLAS and XLA reach 0.65 to 0.75 of the dense bfloat16 peak on H100.
    matmul: Array = 0.7
    # Share of the memory's bandwidth in reading weights and caches; copies reach 0.9, decode kernels less.
    memory: Array = 0.8
    # Share of a link's bandwidth in collectives of large messages; about that of NCCL's all-reduce in a node.
    link: Array = 0.75
    # Share of the shorter of an operation's two times, arithmetic and memory, that overlaps with the longer one: 1 is
    # the roofline (max), 0 their sum. 0 is what batch sweeps of vLLM and SGLang on H100 attain (their cost grows with
    # the rows long before arithmetic alone would bind); experiments/scale_projection/public.py.
    overlap: Array = 0.0
    # Rate of a dense learner over a whole phase, relative to large matmuls: collectives, small kernels and idle stages
    # reduce it. Llama 3 at 8B to 70B trains at 1,620 to 1,940 of GB200's 5,000 TFLOP/s in FP8 (Megatron
    # Bridge 25.11, performance summary), 0.46 to 0.55 x 0.7.
    learner: Array = 0.5
    # Rate of a mixture's learner relative to a dense one: Qwen3-235B-A22B 806, Llama 3 70B 1,623 TFLOP/s a
    # GPU (Megatron Bridge 26.02, GB200, MXFP8).
    mixture: Array = 0.5
    # Cost of a backward FLOP relative to a forward FLOP.
    backward: Array = 1.0
    # Rate of draft training relative to policy training: its matmuls are smaller.
    draft_learner: Array = 1.0
    # Overhead of a kernel launched from a CUDA graph, seconds: 2 to 3 us of prologue and drain.
    kernel_seconds: Array = 2.5e-6
    # Seconds of every engine iteration in which the device waits for the host: schedule, sample, detokenise. As fitted
    # to public sweeps of vLLM and SGLang, beside the kernels' own overhead; 4 ms in vLLM before it overlapped them with
    # the device (its RFC 6854).
    host_seconds: Array = 4e-4
    # Host seconds for every drafted token, beyond the head's own kernels: one graph launch, one sampled token.
    draft_seconds: Array = 1e-4
    # Host seconds for every layer of an iteration with more rows than the largest CUDA graph, whose kernels the host
    # launches one by one; see DecoderCost.captured_rows.
    uncaptured_seconds: Array = 0.0
    # Seconds of an iteration for every sequence, and for every decoded or verified position: noise, scatters into
    # caches, masks. On an accelerator these are among the kernels.
    sequence_seconds: Array = 0.0
    row_seconds: Array = 0.0
    # Reads of a weight by a matmul of more than one row, in units of one read. A CPU library first copies the weight
    # into tiles; a matrix-vector product does not.
    packing: Array = 1.0
    # Seconds of one host synchronisation between chunks (see rollout.EngineSchedule), without the prefill it starts.
    chunk_seconds: Array = 0.0
    # Seconds of the two phases that are mostly not arithmetic: prompts are prefetched; the engine resumes, and its
    # weights are checksummed and stamped.
    data_seconds: Array = 0.2
    prepare_seconds: Array = 1.0
    # Share of the shorter of generation and learning that is added to the longer one when both run at once: 0 for
    # devices that share nothing, near 1 for fake devices of one CPU.
    contention: Array = 0.0


# Uncertainty of the assumptions: log-normal, 90 % between value / factor and value x factor. The others are fixed.
SPREAD = {
    "matmul": 1.15,
    "memory": 1.15,
    "link": 1.3,
    "learner": 1.3,
    "mixture": 1.4,
    "kernel_seconds": 2.0,
    "host_seconds": 3.4,
    "draft_seconds": 3.0,
    "prepare_seconds": 2.0,
}
SHARES = ("matmul", "memory", "link", "learner", "mixture")  # at most 1


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One device of a machine and its links."""

    name: str
    device_kind: str  # how jax.Device.device_kind begins
    peak: Peak
    memory_bytes: float
    memory_bandwidth: float  # bytes/s
    domain: int  # devices joined by `near`: an NVLink domain, a TPU pod
    near: Link  # inside a domain
    far: Link  # between domains
    # A cache that can hold weights between iterations: bytes and bytes/s. 0: none large enough.
    cache_bytes: float = 0.0
    cache_bandwidth: float = 1.0
    attained: Attained = Attained()
    programs: Programs = ASSUMED  # of the rollout engine

    def flops(self, dtype: str) -> Array:
        """FLOP/s attained by large matmuls."""
        return getattr(self.peak, dtype) * self.attained.matmul

    def bandwidth(self, resident: Array) -> Array:
        """Bytes/s at which `resident` bytes are read in every iteration."""
        cached = np.asarray(resident) <= self.cache_bytes
        return np.where(cached, self.cache_bandwidth, self.memory_bandwidth) * self.attained.memory

    def link(self, devices: Array) -> tuple[Array, Array]:
        """Return (bytes/s, seconds a message) between `devices` devices: the far link if they exceed a domain."""
        inside = np.asarray(devices) <= self.domain
        bandwidth = np.where(inside, self.near.bandwidth, self.far.bandwidth) * self.attained.link
        return bandwidth, np.where(inside, self.near.latency, self.far.latency)

    def with_attained(self, **values: Array) -> "Hardware":
        return dataclasses.replace(self, attained=dataclasses.replace(self.attained, **values))

    def with_engine(self, e: "Engine") -> "Hardware":
        """Return the machine with a rollout engine's host overheads and programs; `captured_rows` is DecoderCost's."""
        machine = self.with_attained(
            host_seconds=e.host_seconds, draft_seconds=e.draft_seconds, uncaptured_seconds=e.uncaptured_seconds
        )
        return dataclasses.replace(machine, programs=compiled() if e.compiled else ASSUMED)

    def sampled(self, count: int, seed: int = 0) -> "Hardware":
        """Sample [count, 1] values of every uncertain number, with the factors of SPREAD."""
        rng = np.random.default_rng(seed)
        values = {}
        for name, factor in SPREAD.items():
            noise = np.exp(np.log(factor) / 1.645 * rng.standard_normal((count, 1)))
            value = getattr(self.attained, name) * noise
            values[name] = np.minimum(value, 1.0) if name in SHARES else value
        return self.with_attained(**values)


# Half of what the vendors call bidirectional. Latencies are of small collectives, as nccl-tests show them: about 10 us
# over an NVSwitch and twice that over InfiniBand; a hop of a TPU's links takes about 1 us, a slice some ten.
_NVLINK4, _NVLINK5 = Link(450e9, 8e-6), Link(900e9, 8e-6)
_INFINIBAND = Link(50e9, 20e-6)  # one 400 Gb/s adapter a device
_LOCAL = Link(1e9, 1e-3)  # never used: there is one device
_V5P, _V6E = Peak(459e12 / 6, 459e12, 459e12), Peak(918e12 / 6, 918e12, 918e12)
_HOPPER = Peak(67e12, 989e12, 1979e12)

# Name -> kind, peak rates, (bytes, bytes/s) of memory, devices of a domain, links inside and between domains.
_MACHINES: dict[str, tuple[str, Peak, tuple[float, float], int, Link, Link]] = {
    # NVIDIA GB200 NVL72 data sheet, per GPU and without sparsity: 2.5, 5 PFLOP/s, 186 GB, 8 TB/s, NVLink 1.8 TB/s,
    # 72 GPUs in a domain; one ConnectX-7 400 Gb/s each. float32: 80 TFLOP/s.
    "gb200": ("NVIDIA GB200", Peak(80e12, 2500e12, 5000e12), (186e9, 8e12), 72, _NVLINK5, _INFINIBAND),
    # NVIDIA HGX/DGX B200 data sheet: 2.25, 4.5 PFLOP/s, 180 GB, 8 TB/s (64 TB/s for 8), 8 GPUs on an NVSwitch.
    "b200": ("NVIDIA B200", Peak(75e12, 2250e12, 4500e12), (180e9, 8e12), 8, _NVLINK5, _INFINIBAND),
    # NVIDIA H200 data sheet (SXM): H100's rates, 141 GB, 4.8 TB/s, NVLink 900 GB/s, 8 GPUs.
    "h200": ("NVIDIA H200", _HOPPER, (141e9, 4.8e12), 8, _NVLINK4, _INFINIBAND),
    # NVIDIA H100 data sheet (SXM): 989, 1979 TFLOP/s, 80 GB, 3.35 TB/s.
    "h100": ("NVIDIA H100", _HOPPER, (80e9, 3.35e12), 8, _NVLINK4, _INFINIBAND),
    # Google Cloud documentation, "TPU v5p": 459 TFLOP/s, also in FP8; 95 GiB, 2765 GB/s, links of 1200 GB/s both ways,
    # a pod of 8,960, data-center network 50 Gb/s a chip. A TPU multiplies float32 in three or six bfloat16 passes.
    "tpu_v5p": ("TPU v5p", _V5P, (95 * 2**30, 2765e9), 8960, Link(600e9, 10e-6), Link(6.25e9, 50e-6)),
    # Google Cloud documentation, "TPU v6e": 918 TFLOP/s (1836 TOP/s int8, no FP8), 32 GB, 1638 GB/s, links of 800 GB/s
    # both ways, a pod of 256. Network: 4 x 200 Gb/s a host of 8 chips.
    "tpu_v6e": ("TPU v6 lite", _V6E, (32e9, 1638e9), 256, Link(400e9, 10e-6), Link(12.5e9, 50e-6)),
    # Two cores of an AMD EPYC 9004 (AVX-512) with 24 GiB, shared. Matmuls on two threads measured: 205 GFLOP/s in
    # float32, 430 in bfloat16; 37 GB/s from memory. One domain of one device.
    "this_machine": ("cpu", Peak(205e9, 430e9, 430e9), (24 * 2**30, 37e9), 1, _LOCAL, _LOCAL),
}
HARDWARE = {
    name: Hardware(name, kind, peak, memory_bytes=size, memory_bandwidth=rate, domain=domain, near=near, far=far)
    for name, (kind, peak, (size, rate), domain, near, far) in _MACHINES.items()
}
# About 100 GB/s from its 32 MiB of L3.
HARDWARE["this_machine"] = dataclasses.replace(HARDWARE["this_machine"], cache_bytes=32 * 2**20, cache_bandwidth=100e9)


class Engine(NamedTuple):
    """Host overheads of a rollout engine, the rows of its largest CUDA graph, and its programs."""

    host_seconds: float
    draft_seconds: float
    uncaptured_seconds: float
    captured_rows: float
    compiled: bool  # its programs are those of compiled.json, else as assumed


ENGINES = {
    # This project's: drafting, verification and commit are one program for any number of rows. The host does nothing
    # for a drafted token, and all kernels are in compiled.json. It synchronises after 64 iterations (the chunk of
    # accelerators), for 4.1 ms as fitted to our CPU runs (chunk_seconds).
    "fused": Engine(4.1e-3 / 64, 0.0, 0.0, captured_rows=np.inf, compiled=True),
    # As fitted to public sweeps of vLLM and SGLang by experiments/scale_projection/public.py; launches above its
    # largest captured graph, of 512 rows, as in a trace cited there.
    "vllm": Engine(float(Attained.host_seconds), 9.3e-4, 2.3e-4, captured_rows=512.0, compiled=False),
}
