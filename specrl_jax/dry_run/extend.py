"""From programs of few layers to the whole model's.

Programs that unroll their layers (the rollout's, and prepare) take a compiler minutes for a hundred layers. These
are alike, so what two depths n and n + 1 differ by is one layer, and the whole is the first plus that difference times
the layers left out. Measured for GB200 and Qwen3-8B, from 8 and 10 layers to 36: arguments, results, FLOPs and bytes
of every collective come out equal to the last byte; temporaries, which the compiler lets share memory as it can,
within 256 bytes for a chunk, 10% below for prepare and 7% above for a refill (Qwen3-235B-A22B on 512, from 8 and 9
layers to 94: 3 to 6% above for a chunk, 53% above for prepare, 11% above for a refill). Temporaries are therefore an
estimate.
"""

import collections
import dataclasses
from typing import Any

from specrl_jax.core import InputError
from specrl_jax.dry_run.count import Count, Loop
from specrl_jax.dry_run.measure import Measured, Memory


def extend(few: Measured, more: Measured, times: int, resident: dict[str, int]) -> Measured:
    """`few` plus `times` what `more` has beyond it.

    Args:
      more: the same phase with one layer more.
      resident: of the whole model, from its shapes.
    """
    if few.memory is None or more.memory is None:
        return few if few.memory is None else more
    memory = Memory(
        arguments=_numbers(few.memory.arguments, more.memory.arguments, times),
        padding=_number(few.memory.padding, more.memory.padding, times),
        results=_number(few.memory.results, more.memory.results, times),
        temporaries=_number(few.memory.temporaries, more.memory.temporaries, times),
        resident=resident,
    )
    return dataclasses.replace(
        few,
        memory=memory,
        count=_count(few.count, more.count, times),
        extended=True,
    )


def _count(few: Count, more: Count, times: int) -> Count:
    if [loop.name for loop in few.loops] != [loop.name for loop in more.loops]:
        raise InputError("dry_run.layers: programs of so few layers differ in their loops; 0 compiles all layers")
    loops = zip(few.loops, more.loops, strict=True)
    return Count(
        _number(few.flops, more.flops, times),
        collections.Counter(_numbers(few.collectives, more.collectives, times)),
        collections.Counter(_numbers(few.custom_calls, more.custom_calls, times)),
        tuple(Loop(a.name, _number(a.entered, b.entered, times), _count(a.turn, b.turn, times)) for a, b in loops),
    )


def _number(few: int | None, more: int | None, times: int) -> Any:
    return None if few is None else few + times * (more - few)


def _numbers(few: dict[str, int], more: dict[str, int], times: int) -> dict[str, int]:
    return {key: _number(few.get(key, 0), more.get(key, 0), times) for key in few.keys() | more.keys()}
