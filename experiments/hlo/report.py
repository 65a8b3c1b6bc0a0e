"""The tables of `python -m experiments.hlo`."""

from collections.abc import Sequence

from experiments.hlo.count import Count
from experiments.hlo.programs import ProgramCounts
from specrl_jax.dry_run.fit import PageCounts, shown


def program_rows(found: ProgramCounts) -> list[str]:
    """Return the rows of a program."""
    return [f"{found.name:<36}  {found.reason}"] if found.count is None else count_rows(found.name, found.count)


def count_rows(name: str, count: Count, number: str = "") -> list[str]:
    """Return a row for a program, and one for an iteration of each of its open loops."""
    kinds = ", ".join(f"{kind} {shown(n)}" for kind, n in sorted(count.collectives.items()))
    waits = f"; exposed {shown(count.exposed)}" if count.exposed else ""
    rows = [f"{name:<36}{count.flops:>17.3g}  {kinds or '-'}{waits}"]
    for index, loop in enumerate(count.loops, 1):
        times = f", entered {loop.entered} times" if loop.entered > 1 else ""
        rows += count_rows(f"  a turn of loop {number}{index}{times}", loop.turn, f"{number}{index}.")
    return rows


def iteration_rows(found: Sequence[ProgramCounts], pages: PageCounts, shards: int) -> list[str]:
    """Return what an iteration of as many sequences as run at once moves and launches, by what each holds.

    Args:
      shards: of the pages.
    """
    known = [(f.name.removeprefix("generate: "), f.iteration) for f in found if f.iteration and not f.iteration.blocks]
    if not known:
        return []

    def row(name: str, cells: list[str]) -> str:
        return f"{name:<36}" + "".join(f"{cell:>13}" for cell in cells)

    rows = [row("live tokens of a sequence", [f"{n:,}" for n in pages.live])]
    rows.append(row("sequences at once, by pages and slots", [f"{n:,}" for n in pages.at_once]))
    held = [-(-n // pages.tokens) * b // shards for n, b in zip(pages.live, pages.at_once, strict=True)]
    rows += [row(f"an iteration moves: {name}", [shown(each.of(n)) for n in held]) for name, each in known]
    return [*rows, *(row(f"kernels of an iteration: {name}", [f"{each.kernels:,}"]) for name, each in known)]
