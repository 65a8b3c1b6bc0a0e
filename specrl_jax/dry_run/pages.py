"""Sequences that run at once in the pages of a device."""

import dataclasses

from specrl_jax.dry_run.fit import LARGEST_SHARE
from specrl_jax.dry_run.measure import CompiledPhase
from specrl_jax.dry_run.targets import HardwareTarget
from specrl_jax.training.plan import Plan

LIVE = (256, 1024, 4096)  # tokens of a sequence, beside the longest


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
