"""Machines and workloads for computation by hand."""

import dataclasses

import numpy as np

from experiments.simulator.communication import Parallelism
from experiments.simulator.hardware import HARDWARE, Attained, Hardware, Link, Peak
from experiments.simulator.heads import head_config
from experiments.simulator.learner import Workload
from experiments.simulator.lengths import LogNormalLengths
from experiments.simulator.scenario import Scenario
from specrl_jax.models.decoder import PRESETS, DecoderConfig

FREE = Link(np.inf, 0.0)
# Every peak is attained in full, and there are no overheads.
EXACT = Attained(
    matmul=1.0,
    memory=1.0,
    link=1.0,
    learner=1.0,
    mixture=1.0,
    kernel_seconds=0.0,
    host_seconds=0.0,
    draft_seconds=0.0,
    data_seconds=0.0,
    prepare_seconds=0.0,
)
NANO = PRESETS["nano"]
MIXTURE = DecoderConfig(
    128,
    64,
    7,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp=32,
    tied=False,
    max_positions=4096,
    experts=16,
    experts_per_token=2,
)


def ideal(flops: float = np.inf, bandwidth: float = np.inf, near: Link = FREE) -> Hardware:
    """Return a machine limited only by the given rates."""
    return Hardware(
        "ideal",
        "ideal",
        Peak(flops, flops, flops),
        memory_bytes=1e12,
        memory_bandwidth=bandwidth,
        domain=64,
        near=near,
        far=near,
        attained=EXACT,
    )


def scenario(hardware: Hardware | None = None, spread: float = 0.8, model: str = "qwen3_8b", **changes) -> Scenario:
    """Qwen3-8B on GB200, 256 responses of 2,000 tokens on average."""
    w = Workload(
        256,
        8,
        100.0,
        longest_prompt=400.0,
        lengths=LogNormalLengths(2000.0, 8000.0, spread),
        slots=4096,
        microbatch_tokens=16 * 8400,
        remat="none",
    )
    policy = PRESETS[model]
    split = Parallelism(4, 8) if policy.experts else Parallelism(2)
    s = Scenario(
        policy,
        head_config(policy, 32_000),
        hardware or HARDWARE["gb200"],
        workload=w,
        rollout_split=split,
        learner_split=split,
    )
    return dataclasses.replace(s, **changes)
