"""How much sooner rollouts arrive with speculation than without, on the same prompts and weights."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specrl_jax.decoding.engine import Engine, Lengths
from specrl_jax.decoding.rollouts import Rollouts


def timed(
    engine: Engine, weights: Any, prompts: Sequence[Sequence[int]], samples: int, seed: int, lengths: Lengths | None
) -> tuple[Rollouts, float]:
    """(rollouts, seconds that they took)."""
    start = time.perf_counter()
    rollouts = engine.generate(weights, prompts, samples, seed, lengths=lengths)
    return rollouts, time.perf_counter() - start


def compare_with_plain(
    engine: Engine,
    plain: Engine,
    weights: Any,
    prompts: Sequence[Sequence[int]],
    samples: int,
    seed: int,
    rounds: int,
    lengths: Lengths | None = None,
    enough: Callable[[], bool] = lambda: False,
) -> np.ndarray:
    """[rounds] ratios of generated tokens per second, `engine` over `plain`, the two in turn; neither compiles in it.

    Fewer rounds, or none, where `enough` says so before one.

    Tokens per second, since the two draw different rollouts of the same law, whose lengths differ a little.
    """

    def tokens_per_second(engine: Engine, seed: int) -> float:
        chooses = None if engine is plain else lengths
        rollouts, seconds = timed(engine, weights, prompts, samples, seed, chooses)
        return rollouts.response_length.sum() / seconds

    ratios = []
    for warm in (engine, plain):
        if not enough():
            tokens_per_second(warm, seed)
    for i in range(rounds):
        if enough():
            break
        # Who goes first alternates too: what the first leaves behind (heat, caches) must not favour one of them.
        pair = (engine, plain) if i % 2 else (plain, engine)
        speed = {id(e): tokens_per_second(e, seed + 1 + i) for e in pair}
        ratios.append(speed[id(engine)] / speed[id(plain)])
    return np.array(ratios)
