"""The report of a dry run: a table on the terminal, and everything as JSON."""

import dataclasses
import json
import math
import os

from specrl_jax.core import atomic_write
from specrl_jax.dry_run.fit import LARGEST_SHARE, MemoryVerdict, PageCounts, shown
from specrl_jax.dry_run.measure import CompiledPhase, PhaseMemory
from specrl_jax.dry_run.phases import KINDS
from specrl_jax.dry_run.targets import HardwareTarget
from specrl_jax.io.workdir import versions

COLUMNS = (*KINDS, "results", "temporaries", "total")


@dataclasses.dataclass(frozen=True)
class Report:
    target: HardwareTarget  # named by the config
    compiled_for: HardwareTarget  # the same, or fake CPU devices
    mesh: dict[str, int]
    measured: list[CompiledPhase]
    fit: MemoryVerdict | None  # None: the target has no memory limit
    pages: PageCounts
    exact: bool  # compiled by the target's own compiler
    seconds: float  # of everything

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    def print(self) -> None:
        sizes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items() if size > 1)
        print(f"dry run for {self.devices} {self.target.name} ({sizes or 'one device'})")
        print(self.label())
        print(f"\n{'memory of one device':<36}" + "".join(f"{name:>13}" for name in COLUMNS))
        for m in self.measured:
            print(f"{m.name:<36}" + (memory_row(m.memory, m.extended) if m.memory else f"  refused: {m.refused}"))
        if any(m.extended for m in self.measured):
            print("~ an estimate: of few layers, extended to all of them ; the rest is exact")
        print("\n" + "\n".join(page_rows(self.pages)))
        print(f"\n{self.verdict()}\n{self.seconds:.0f} s")

    def label(self) -> str:
        if self.exact:
            return "compiled by the target's own compiler, without devices: bytes are the target's"
        line = "compiled for fake CPU devices: argument bytes only"
        if self.compiled_for is not self.target:
            line += f" ({self.target.name} needs requirements-aot.txt)"
        return line

    def verdict(self) -> str:
        if self.fit is None:
            return "no device to fit into: dry_run.target=cpu"
        answer = "fits" if self.fit.fits else "does not fit"
        if self.fit.fits and not self.exact:
            answer = "fits as far as arguments and results go"
        line = f"{answer} {self.target.name}, of whose memory {LARGEST_SHARE:.0%} count ({self.target.source})\n"
        line += f"most in '{self.fit.phase}': {self.fit.arithmetic}"
        return line + (f"\nsuggestion: {self.fit.suggestion}" if self.fit.suggestion else "")

    def write(self, workdir: str, config: dict[str, object]) -> str:
        """Write dry_run.json to the workdir, which stays free for a run. Return its path."""
        path = os.path.join(workdir, "dry_run.json")
        phases = [
            dataclasses.asdict(m) | {"memory": m.memory and m.memory._asdict() | {"total": m.memory.total}}
            for m in self.measured
        ]
        content = {
            "target": self.target.name,
            "compiled_for": self.compiled_for.name,
            "exact": self.exact,
            "devices": self.devices,
            "mesh": self.mesh,
            "seconds": self.seconds,
            "fit": dataclasses.asdict(self.fit) if self.fit else None,
            "pages": dataclasses.asdict(self.pages),
            "phases": phases,
            "versions": versions(),
            "config": config,
        }
        with atomic_write(path) as file:
            json.dump(content, file, indent=2)
        return path


def memory_row(memory: PhaseMemory, extended: bool) -> str:
    results = memory.results + memory.padding
    temporaries = "-" if memory.temporaries is None else ("~" if extended else "") + shown(memory.temporaries)
    cells = [shown(n) for n in memory.by_kind().values()]
    return "".join(f"{cell:>13}" for cell in (*cells, shown(results), temporaries, shown(memory.total)))


def page_rows(pages: PageCounts) -> list[str]:
    """Return how many sequences run at once, by what each holds."""
    size = shown(pages.count * pages.page_bytes)
    rows = [f"pages of one device: {pages.count:,} of {pages.tokens} tokens, {size}"]

    def row(name: str, cells: list[str]) -> str:
        return f"{name:<36}" + "".join(f"{cell:>13}" for cell in cells)

    rows.append(row("live tokens of a sequence", [f"{n:,}" for n in pages.live]))
    rows.append(row("sequences at once, by pages and slots", [f"{n:,}" for n in pages.at_once]))
    if pages.fitting is not None:
        rows.append(row("the same if pages took what is free", [f"{n:,}" for n in pages.fitting]))
    return rows
