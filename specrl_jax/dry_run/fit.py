"""Decide whether the phases fit into a device, suggest what to change if not, and count what runs at once if so."""

import dataclasses
import math

from specrl_jax.config import Config
from specrl_jax.dry_run.measure import CompiledPhase, PhaseMemory
from specrl_jax.dry_run.phases import BATCH, CACHE, OPTIMIZER, PARAMETERS
from specrl_jax.dry_run.targets import HardwareTarget
from specrl_jax.planning.plan import Plan

# Usable share of a device's memory; the rest goes to the driver, collectives and fragmentation.
LARGEST_SHARE = 0.95
LIVE = (256, 1024, 4096)  # tokens of a sequence, beside the longest


@dataclasses.dataclass(frozen=True)
class MemoryVerdict:
    """Verdict on the phase that needs most memory."""

    phase: str
    fits: bool
    needed: int  # bytes on one device
    memory: int  # bytes of the device
    arithmetic: str
    suggestion: str  # '' without one


def parts(memory: PhaseMemory) -> dict[str, int]:
    """Return the terms of `memory.total`, bytes."""
    found = memory.by_kind() | {"padding": memory.padding, "results": memory.results}
    return found | ({} if memory.temporaries is None else {"temporaries": memory.temporaries})


def judge_memory(
    measured: list[CompiledPhase], target: HardwareTarget, config: Config, *, num_shards: int
) -> MemoryVerdict:
    """Judge all phases; the learner's rows have `num_shards` shards."""
    compiled = [(m.name, m.memory) for m in measured if m.memory]
    for m in measured:
        if m.memory is None:
            advice = "a mesh with more devices for each array (mesh.tensor, mesh.fsdp), or smaller batches"
            advice = advice if "RESOURCE_EXHAUSTED" in m.refused else ""
            return MemoryVerdict(
                m.name,
                False,
                0,
                memory=target.memory,
                arithmetic=f"the compiler refuses it: {m.refused}",
                suggestion=advice,
            )
    phase, memory = max(compiled, key=lambda found: found[1].total)
    share = memory.total / target.memory
    sums = " + ".join(f"{kind} {shown(n)}" for kind, n in parts(memory).items() if n)
    arithmetic = f"{sums} = {shown(memory.total)} of {shown(target.memory)}, {share:.0%}"
    fits = share <= LARGEST_SHARE
    suggestion = suggest(memory, target, config, num_shards=num_shards) if not fits else ""
    if fits and share > target.share:
        suggestion = f"XLA_CLIENT_MEM_FRACTION={LARGEST_SHARE}: a run takes {target.share:.0%} by itself"
    return MemoryVerdict(phase, fits, memory.total, memory=target.memory, arithmetic=arithmetic, suggestion=suggestion)


def suggest(memory: PhaseMemory, target: HardwareTarget, config: Config, *, num_shards: int) -> str:
    """Suggest how to shrink the largest term."""
    sizes = parts(memory)
    largest = max(sizes, key=lambda kind: sizes[kind])
    if largest == CACHE:
        return _fewer_pages(memory, target, config)
    if largest in (PARAMETERS, OPTIMIZER):
        return "more devices for each weight: a larger mesh.fsdp or mesh.tensor (mesh.expert for experts)"
    if largest in (BATCH, "results"):
        return f"fewer rows in an update: grpo.minibatches above {config.grpo.minibatches}"
    return _fewer_temporaries(config, num_shards)


def _fewer_pages(memory: PhaseMemory, target: HardwareTarget, config: Config) -> str:
    """Suggest the most pages that fit beside everything else."""
    cache = memory.by_kind()[CACHE]
    free = int(LARGEST_SHARE * target.memory) - (memory.total - cache)
    narrower = ", or rollout.dtype=bfloat16" if config.rollout.dtype == "float32" else ""
    if free <= 0:
        return f"a larger mesh.tensor, which splits the cache by heads{narrower}"
    return f"rollout.cache_gb={math.floor(free / 1e7) / 100:g} instead of {cache / 1e9:.2f} GB{narrower}"


def _fewer_temporaries(config: Config, num_shards: int) -> str:
    tokens = config.grpo.microbatch_tokens
    least = num_shards * (config.rollout.max_prompt_tokens + config.rollout.max_response_tokens)
    if config.policy.remat != "full":
        return "policy.remat=full"
    if not tokens or tokens > least:
        return f"grpo.microbatch_tokens={least}: one row for each of the {num_shards} parts of a batch"
    return f"shorter rows (rollout.max_response_tokens={config.rollout.max_response_tokens}) or a larger mesh.tensor"


@dataclasses.dataclass(frozen=True)
class PageCounts:
    """Figures by the live tokens of each sequence."""

    count: int  # pages of a device
    tokens: int  # of a page
    page_bytes: int  # of one page on one device
    live: list[int]  # tokens of a sequence
    at_once: list[int]  # sequences, at most the slots
    fitting: list[int] | None  # the same with all the memory that is free; None: the device has no limit


def count_pages(measured: list[CompiledPhase], target: HardwareTarget, plan: Plan) -> PageCounts:
    """Count by what the programs of generation leave free."""
    limits, shards = plan.limits, plan.rollout_partition.num_shards("batch")
    T, slots = limits.page_tokens, limits.num_slots
    live = [*(n for n in LIVE if n < limits.cache_length), limits.cache_length]
    count = limits.shard_pages

    def at_once(pages: int) -> list[int]:
        return [min(slots, shards * (pages // -(-n // T))) for n in live]

    totals = [m.memory.total for m in measured if m.memory and m.name.startswith("generate")]
    fitting = None
    if target.memory and totals:
        free = int(LARGEST_SHARE * target.memory) - max(totals)
        fitting = at_once(max(0, count + free // plan.page_bytes))
    return PageCounts(count, T, plan.page_bytes, live=live, at_once=at_once(count), fitting=fitting)


def shown(n: int) -> str:
    """Format bytes: 1_234_567 -> "1.23 MB"."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(n) >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n} B"
