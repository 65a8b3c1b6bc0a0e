"""Extrapolate programs of few layers to the whole model.

Programs that unroll their layers (the rollout's, and prepare) take minutes to compile with a hundred layers. Layers are
equal, so programs of n and n + 1 layers differ by one layer, and the whole is the first plus that difference times the
remaining layers. Measured for GB200 and Qwen3-8B, from 8 and 10 layers to 36: arguments, results, FLOPs and bytes of
every collective are exact; temporaries, which share memory as the compiler finds it, are off by 256 bytes for a chunk,
-10 % for prepare and +7 % for a refill (Qwen3-235B-A22B on 512, from 8 and 9 layers to 94: +3 to +6 % for a chunk,
+53 % for prepare, +11 % for a refill). Temporaries are therefore an estimate.
"""

import collections
import dataclasses

from specrl_jax.dry_run.count import Count, Loop
from specrl_jax.dry_run.measure import CompiledPhase, PhaseMemory
from specrl_jax.errors import InputError


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
    count, iteration = _count(few.count, more.count, times), few.iteration
    if few.iteration and more.iteration:
        fixed = _number(few.iteration.fixed, more.iteration.fixed, times)
        most = _number(few.iteration.most, more.iteration.most, times)
        kernels = _number(few.iteration.kernels, more.iteration.kernels, times)
        iteration = dataclasses.replace(few.iteration, fixed=fixed, most=most, kernels=kernels)
    return dataclasses.replace(few, memory=memory, count=count, iteration=iteration, extended=True)


def _count(few: Count, more: Count, times: int) -> Count:
    if [loop.name for loop in few.loops] != [loop.name for loop in more.loops]:
        raise InputError("dry_run.layers: programs of so few layers differ in their loops; 0 compiles all layers")
    loops = zip(few.loops, more.loops, strict=True)
    return Count(
        _number(few.flops, more.flops, times),
        collections.Counter(_numbers(few.collectives, more.collectives, times)),
        collections.Counter(_numbers(few.custom_calls, more.custom_calls, times)),
        exposed=_number(few.exposed, more.exposed, times),
        loops=tuple(
            Loop(a.name, _number(a.entered, b.entered, times), _count(a.turn, b.turn, times)) for a, b in loops
        ),
    )


def _number(few: int, more: int, times: int) -> int:
    return few + times * (more - few)


def _numbers(few: dict[str, int], more: dict[str, int], times: int) -> dict[str, int]:
    return {key: _number(few.get(key, 0), more.get(key, 0), times) for key in few.keys() | more.keys()}
