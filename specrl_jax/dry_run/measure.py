"""Compile a phase and read its memory by kind, and XLA's warnings."""

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

import jax

from specrl_jax.dry_run.phases import KINDS, OPTIMIZER, PARAMETERS, Phase, bytes_by_kind, shard_bytes

# XLA's log lines about arrays that are gathered whole or recomputed for lack of a better plan.
WARNING = re.compile(r".*\b(rematerializ|remateriali[sz]ation)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class PhaseMemory:
    """Bytes on one device while a phase runs."""

    arguments: dict[str, int]  # by kind: exact, from shapes and shardings
    padding: int  # added by the compiler's layouts of the arguments
    results: int  # not aliased with a donated argument
    temporaries: int | None  # buffer assignment, including activations; None: unknown for this target
    resident: dict[str, int]  # by kind: arrays on the device that are not arguments

    def by_kind(self) -> dict[str, int]:
        """Return arguments plus resident arrays by kind."""
        return {kind: self.arguments[kind] + self.resident[kind] for kind in KINDS}

    @property
    def total(self) -> int:
        """Return the peak bytes of the phase; without temporaries if they are unknown."""
        known = sum(self.by_kind().values()) + self.padding + self.results
        return known + (self.temporaries or 0)


@dataclasses.dataclass(frozen=True)
class CompiledPhase:
    """Figures of one compiled phase."""

    name: str
    seconds: float  # tracing and compiling
    memory: PhaseMemory | None  # None: the compiler refused the program
    warnings: tuple[str, ...]
    refused: str = ""  # the compiler's message
    extended: bool = False  # extrapolated from fewer layers: temporaries are an estimate


def measure(phase: Phase, exact: bool) -> CompiledPhase:
    """Compile a phase; `exact` if it is compiled for the target itself, so that temporaries are known."""
    return measure_together([phase], exact)[0]


def measure_together(phases: list[Phase], exact: bool) -> list[CompiledPhase]:
    """Compile the same phase of several models in parallel; each reports all warnings and the total seconds."""
    start = time.perf_counter()
    with captured_stderr() as log, concurrent.futures.ThreadPoolExecutor(len(phases)) as pool:
        lowered = [phase.lower() for phase in phases]
        compiled = list(pool.map(try_compile, lowered))
    seconds, warnings = time.perf_counter() - start, warnings_in(log.getvalue())
    measured = []
    for phase, before, (after, refused) in zip(phases, lowered, compiled, strict=True):
        memory = read_memory(phase, before, after, exact=exact) if after else None
        measured.append(CompiledPhase(phase.name, seconds, memory, warnings=warnings, refused=refused))
    return measured


def try_compile(
    lowered: jax.stages.Lowered, options: dict[str, str | bool] | None = None
) -> tuple[jax.stages.Compiled | None, str]:
    """Return (program, ''), or (None, the compiler's message) if it refuses: for want of memory, or for a kernel."""
    try:
        return lowered.compile(options), ""
    except jax.errors.JaxRuntimeError as error:
        message = " ".join(str(error).split())[:400]
    # Without a device products are not tuned, and Triton's are taken, which not every shape has; cuBLAS has them all.
    if "output tile sizes" in message and not options:
        return try_compile(lowered, {"xla_gpu_enable_triton_gemm": False})
    return None, message


def read_memory(
    phase: Phase, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, *, exact: bool
) -> PhaseMemory:
    arguments = argument_bytes(phase, lowered, compiled)
    found = compiled.memory_analysis()
    assert found is not None, "every backend that compiles ahead of time analyses memory"
    return PhaseMemory(
        arguments=arguments,
        padding=found.argument_size_in_bytes - sum(arguments.values()),
        results=found.output_size_in_bytes - found.alias_size_in_bytes,
        temporaries=found.temp_size_in_bytes if exact else None,
        resident=bytes_by_kind(phase.resident),
    )


def argument_bytes(phase: Phase, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> dict[str, int]:
    """Return the bytes by kind, on one device, of the arguments that the program reads."""
    found = dict.fromkeys(KINDS, 0)
    leaves, structure = jax.tree.flatten_with_path(lowered.args_info[0])
    placed = structure.flatten_up_to(compiled.input_shardings[0])  # type: ignore[attr-defined]
    for (path, info), sharding in zip(leaves, placed, strict=True):
        if sharding is not None:  # XLA drops unused arguments
            kind = phase.arguments[path[0].idx]
            found[_refine_kind(kind, path)] += shard_bytes(info.shape, info.dtype, sharding)
    return found


def _refine_kind(kind: str, path: tuple[object, ...]) -> str:
    """Count everything in a TrainState but its parameters as the optimizer's."""
    field = getattr(path[1], "name", "") if len(path) > 1 else ""
    return OPTIMIZER if kind == PARAMETERS and field in ("opt_state", "step") else kind


def warnings_in(log: str) -> tuple[str, ...]:
    """Return the distinct rematerialization warnings, without the log's prefix."""
    lines = (re.sub(r"^[EWI]\d{4} \S+ +\d+ \S+\] ", "", line) for line in log.splitlines() if WARNING.match(line))
    return tuple(dict.fromkeys(lines))


@contextlib.contextmanager
def captured_stderr() -> Iterator[io.StringIO]:
    """Capture file descriptor 2, where XLA logs; the buffer is filled on exit."""
    sys.stderr.flush()
    saved, log = os.dup(2), io.StringIO()
    with tempfile.TemporaryFile(mode="w+", errors="replace") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield log
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            log.write(file.read())
