"""Compiles one phase and reads off it what it needs: memory by kind, products, collectives, XLA's warnings."""

import concurrent.futures
import contextlib
import dataclasses
import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax

from specrl_jax.dry_run.count import Count, count
from specrl_jax.dry_run.phases import KINDS, OPTIMIZER, PARAMETERS, Phase, bytes_by_kind, shard_bytes

# XLA's log lines that say an array is gathered whole, or computed again, since nothing better was found.
WARNING = re.compile(r".*\b(rematerializ|remateriali[sz]ation)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device while a phase runs."""

    arguments: dict[str, int]  # by kind, of the program's arguments: exact, from their shapes and shardings
    padding: int  # what the compiler's layouts of the arguments take beyond that
    results: int  # that are not written in the place of a donated argument
    temporaries: int | None  # of the compiler's buffer assignment, activations among them; None: not of this target
    resident: dict[str, int]  # by kind, of what is no argument and yet there

    def by_kind(self) -> dict[str, int]:
        """Arguments and residents of each kind."""
        return {kind: self.arguments[kind] + self.resident[kind] for kind in KINDS}

    @property
    def total(self) -> int:
        """At the phase's peak; without temporaries where they are not known."""
        known = sum(self.by_kind().values()) + self.padding + self.results
        return known + (self.temporaries or 0)


@dataclasses.dataclass(frozen=True)
class Measured:
    """One phase."""

    name: str
    seconds: float  # of tracing and compiling
    memory: Memory | None  # None: the compiler refused the program
    count: Count
    warnings: tuple[str, ...]
    refused: str = ""  # what the compiler said
    extended: bool = False  # from programs of fewer layers: temporaries are an estimate


def measure(phase: Phase, exact: bool) -> Measured:
    """`exact`: whether it is compiled for the target itself, so that temporaries are the target's."""
    return measure_together([phase], exact)[0]


def measure_together(phases: list[Phase], exact: bool) -> list[Measured]:
    """The same phase of several models, compiled side by side: each has all their warnings, and the seconds of all."""
    start = time.perf_counter()
    with captured_stderr() as log, concurrent.futures.ThreadPoolExecutor(len(phases)) as pool:
        lowered = [phase.lower() for phase in phases]
        compiled = list(pool.map(try_compile, lowered))
    seconds, warnings = time.perf_counter() - start, warnings_in(log.getvalue())
    measured = []
    for phase, before, (after, refused) in zip(phases, lowered, compiled, strict=True):
        memory = read_memory(phase, before, after, exact) if after else None
        found = count(after.as_text()) if after else Count()
        measured.append(Measured(phase.name, seconds, memory, found, warnings, refused))
    return measured


def try_compile(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled | None, str]:
    """(the program, ''), or (None, what the compiler says) where it needs more than the device has."""
    try:
        return lowered.compile(), ""
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None, " ".join(str(error).split())[:400]


def read_memory(phase: Phase, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, exact: bool) -> Memory:
    arguments = argument_bytes(phase, lowered, compiled)
    found = compiled.memory_analysis()
    return Memory(
        arguments=arguments,
        padding=found.argument_size_in_bytes - sum(arguments.values()),
        results=found.output_size_in_bytes - found.alias_size_in_bytes,
        temporaries=found.temp_size_in_bytes if exact else None,
        resident=bytes_by_kind(phase.resident),
    )


def argument_bytes(phase: Phase, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> dict[str, int]:
    """By kind, on one device, of the arguments that the program reads."""
    found = dict.fromkeys(KINDS, 0)
    leaves, structure = jax.tree.flatten_with_path(lowered.args_info[0])
    placed = structure.flatten_up_to(compiled.input_shardings[0])
    for (path, info), sharding in zip(leaves, placed, strict=True):
        if sharding is not None:  # XLA drops what is not read
            kind = phase.arguments[path[0].idx]
            found[_told_apart(kind, path)] += shard_bytes(info.shape, info.dtype, sharding)
    return found


def _told_apart(kind: str, path: tuple[Any, ...]) -> str:
    """Of a TrainState, all but the parameters is the optimizer's."""
    field = getattr(path[1], "name", "") if len(path) > 1 else ""
    return OPTIMIZER if kind == PARAMETERS and field in ("opt_state", "step") else kind


def warnings_in(log: str) -> tuple[str, ...]:
    """Rematerialization that XLA did not want, each once, without the log's own prefix."""
    lines = (re.sub(r"^[EWI]\d{4} \S+ +\d+ \S+\] ", "", line) for line in log.splitlines() if WARNING.match(line))
    return tuple(dict.fromkeys(lines))


@contextlib.contextmanager
def captured_stderr() -> Iterator[io.StringIO]:
    """What is written to file descriptor 2 meanwhile, where XLA logs; filled at the end."""
    sys.stderr.flush()
    kept, log = os.dup(2), io.StringIO()
    with tempfile.TemporaryFile(mode="w+", errors="replace") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield log
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            log.write(file.read())
