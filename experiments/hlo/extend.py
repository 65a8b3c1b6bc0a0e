"""Extrapolate the counts of programs of few layers to the whole model, as specrl_jax/dry_run/measure.py does bytes.

Measured for GB200 and Qwen3-8B, from 8 and 10 layers to 36: FLOPs and bytes of every collective are exact.
"""

import collections
import dataclasses

from experiments.hlo.count import Count, Loop
from experiments.hlo.iteration import IterationBytes
from specrl_jax.errors import InputError


def extend_count(few: Count, more: Count, times: int) -> Count:
    """Return `few` plus `times` the difference between `more`, of one more layer, and `few`."""
    if [loop.name for loop in few.loops] != [loop.name for loop in more.loops]:
        raise InputError("programs of so few layers differ in their loops")
    loops = zip(few.loops, more.loops, strict=True)
    return Count(
        _number(few.flops, more.flops, times),
        _numbers(few.collectives, more.collectives, times),
        _numbers(few.custom_calls, more.custom_calls, times),
        exposed=_number(few.exposed, more.exposed, times),
        loops=tuple(
            Loop(a.name, _number(a.entered, b.entered, times), extend_count(a.turn, b.turn, times)) for a, b in loops
        ),
    )


def extend_iteration(few: IterationBytes, more: IterationBytes, times: int) -> IterationBytes:
    """Return the iteration of `few` plus `times` the difference between that of `more` and `few`."""
    return dataclasses.replace(
        few,
        fixed=_number(few.fixed, more.fixed, times),
        most=_number(few.most, more.most, times),
        kernels=_number(few.kernels, more.kernels, times),
    )


def _number(few: int, more: int, times: int) -> int:
    return few + times * (more - few)


def _numbers(few: collections.Counter[str], more: collections.Counter[str], times: int) -> collections.Counter[str]:
    return collections.Counter({key: _number(few[key], more[key], times) for key in few.keys() | more.keys()})
