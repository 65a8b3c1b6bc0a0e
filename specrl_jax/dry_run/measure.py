"""Compile a phase and read its memory by kind.

Programs that unroll their layers (the rollout's, and prepare) take minutes to compile with a hundred layers. Layers are
equal, so programs of n and n + 1 layers differ by one layer, and the whole is the first plus that difference times the
remaining layers. Measured for GB200 and Qwen3-8B, from 8 and 10 layers to 36: arguments and results are exact;
temporaries, which share memory as the compiler finds it, are off by 256 bytes for a chunk,
-10 % for prepare and +7 % for a refill (Qwen3-235B-A22B on 512, from 8 and 9 layers to 94: +3 to +6 % for a chunk,
+53 % for prepare, +11 % for a refill). Temporaries are therefore an estimate.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax

from specrl_jax.dry_run.phases import KINDS, OPTIMIZER, PARAMETERS, Phase, bytes_by_kind, shard_bytes


class PhaseMemory(NamedTuple):
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
        lasting = sum(self.by_kind().values()) + self.padding + self.results
        return lasting + (self.temporaries or 0)


@dataclasses.dataclass(frozen=True)
class CompiledPhase:
    """Figures of one compiled phase."""

    name: str
    seconds: float  # tracing and compiling
    memory: PhaseMemory | None  # None: the compiler refused the program
    refused: str = ""  # the compiler's message
    extended: bool = False  # extrapolated from fewer layers: temporaries are an estimate


def measure(phases: list[Phase], exact: bool) -> list[CompiledPhase]:
    """Compile the same phase of one or several models, in parallel; each reports the seconds of all.

    `exact`: compiled for the target itself, so that temporaries are known.
    """
    start = time.perf_counter()
    with quiet_stderr(), concurrent.futures.ThreadPoolExecutor(len(phases)) as pool:
        lowered = [phase.lower() for phase in phases]
        compiled = list(pool.map(try_compile, lowered))
    seconds, measured = time.perf_counter() - start, []
    for phase, before, (after, refused) in zip(phases, lowered, compiled, strict=True):
        memory = read_memory(phase, before, after, exact=exact) if after else None
        measured.append(CompiledPhase(phase.name, seconds, memory, refused=refused))
    return measured


def extend(few: CompiledPhase, more: CompiledPhase, times: int, *, resident: dict[str, int]) -> CompiledPhase:
    """Return `few` plus `times` the difference between `more` and `few`.

    Args:
      more: the same phase with one more layer.
      resident: bytes by kind of the whole model, from its shapes.
    """
    if few.memory is None or more.memory is None:
        return few if few.memory is None else more
    memory = jax.tree.map(lambda a, b: a + times * (b - a), few.memory, more.memory)
    return dataclasses.replace(few, memory=memory._replace(resident=resident), extended=True)


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
            kind, field = phase.arguments[path[0].idx], getattr(path[1], "name", "") if len(path) > 1 else ""
            # Everything in a TrainState but its parameters is the optimizer's.
            kind = OPTIMIZER if kind == PARAMETERS and field in ("opt_state", "step") else kind
            found[kind] += shard_bytes(info.shape, info.dtype, sharding)
    return found


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Drop what XLA logs, to file descriptor 2."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
            yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
