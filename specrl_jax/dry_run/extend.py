"""Extrapolate programs of few layers to the whole model.

Programs that unroll their layers (the rollout's, and prepare) take minutes to compile with a hundred layers. Layers are
equal, so programs of n and n + 1 layers differ by one layer, and the whole is the first plus that difference times the
remaining layers. Measured for GB200 and Qwen3-8B, from 8 and 10 layers to 36: arguments and results are exact;
temporaries, which share memory as the compiler finds it, are off by 256 bytes for a chunk,
-10 % for prepare and +7 % for a refill (Qwen3-235B-A22B on 512, from 8 and 9 layers to 94: +3 to +6 % for a chunk,
+53 % for prepare, +11 % for a refill). Temporaries are therefore an estimate.
"""

import dataclasses

from specrl_jax.dry_run.measure import CompiledPhase, PhaseMemory


def extend(few: CompiledPhase, more: CompiledPhase, times: int, *, resident: dict[str, int]) -> CompiledPhase:
    """Return `few` plus `times` the difference between `more` and `few`.

    Args:
      more: the same phase with one more layer.
      resident: bytes by kind of the whole model, from its shapes.
    """
    if few.memory is None or more.memory is None:
        return few if few.memory is None else more
    a, b = few.memory.temporaries, more.memory.temporaries
    memory = PhaseMemory(
        arguments=_numbers(few.memory.arguments, more.memory.arguments, times),
        padding=_number(few.memory.padding, more.memory.padding, times),
        results=_number(few.memory.results, more.memory.results, times),
        temporaries=None if a is None or b is None else _number(a, b, times),
        resident=resident,
    )
    return dataclasses.replace(few, memory=memory, extended=True)


def _number(few: int, more: int, times: int) -> int:
    return few + times * (more - few)


def _numbers(few: dict[str, int], more: dict[str, int], times: int) -> dict[str, int]:
    return {key: _number(few.get(key, 0), more.get(key, 0), times) for key in few.keys() | more.keys()}
