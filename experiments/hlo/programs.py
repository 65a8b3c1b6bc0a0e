"""Count the programs of a training step for a target that need not be here."""

import dataclasses
import re
from collections.abc import Iterator

from experiments.hlo.count import Count, count
from experiments.hlo.extend import extend_count, extend_iteration
from experiments.hlo.iteration import IterationBytes, iteration_bytes
from experiments.hlo.text import read_text
from specrl_jax.dry_run.measure import quiet_stderr, try_compile
from specrl_jax.dry_run.phases import Phase, find_phases
from specrl_jax.dry_run.run import shallow_plans
from specrl_jax.planning.plan import Plan

DECODING = re.compile("generate: (plain|speculative) chunk")


@dataclasses.dataclass(frozen=True)
class ProgramCounts:
    """What one program does on one device."""

    name: str
    count: Count | None  # None: unknown
    iteration: IterationBytes | None = None  # of the decode loop; None: there is none, or it is unknown
    reason: str = ""  # why something is unknown


def count_all(plan: Plan, exact: bool) -> Iterator[ProgramCounts]:
    """Compile and count every program; those that unroll their layers are extrapolated from few layers.

    Args:
      exact: they are compiled for the target itself, whose decode loops are counted.
    """
    shallow = shallow_plans(plan)
    for index, phase in enumerate(find_phases(plan)):
        pages = decode_pages(plan, phase.name) if exact else 0
        if shallow and phase.unrolled:
            few, more = (count_program(find_phases(s)[index], pages) for s in shallow)
            yield extend(few, more, plan.model.layers - shallow[0].model.layers)
        else:
            yield count_program(phase, pages)


def decode_pages(plan: Plan, name: str) -> int:
    """Return the pages of a shard, C, where a program is a decode loop; 0 for the others."""
    return plan.limits.shard_pages if DECODING.match(name) else 0


def count_program(phase: Phase, pages: int) -> ProgramCounts:
    """Compile a program and count it, and with `pages` an iteration of its decode loop."""
    with quiet_stderr():
        compiled, refused = try_compile(phase.lower())
    text, unknown = read_text(compiled) if compiled else ("", f"refused: {refused}")
    if not text:
        return ProgramCounts(phase.name, None, reason=unknown)
    return ProgramCounts(phase.name, count(text), iteration_bytes(text, pages) if pages else None)


def extend(few: ProgramCounts, more: ProgramCounts, times: int) -> ProgramCounts:
    """Return `few` plus `times` the difference between `more`, of one more layer, and `few`."""
    if few.count is None or more.count is None:
        return few if few.count is None else more
    found = dataclasses.replace(few, count=extend_count(few.count, more.count, times))
    if few.iteration is None or more.iteration is None:
        return found
    return dataclasses.replace(found, iteration=extend_iteration(few.iteration, more.iteration, times))
