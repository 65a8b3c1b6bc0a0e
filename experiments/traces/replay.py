"""Seconds of a rollout phase from recorded traces and a clock, the seconds of an iteration of B sequences at length k.

Acceptance comes from real rollouts, costs from any machine. The schedule is the simulator's (`simulator.rollout`), with
a response's length in iterations instead of tokens: slots are refilled at once, the batch thins out at the end.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.simulator.rollout import EngineSchedule, profile
from experiments.traces.counts import Trace
from experiments.verdicts import Interval

# (B, k, context tokens) -> seconds of an iteration, arrays of one shape
Clock = Callable[[Any, Any, Any], Any]


def seconds(
    traces: Sequence[Trace], slots: int, clock: Clock, prompt: float, stretch: np.ndarray | float = 1.0
) -> float:
    """Return the seconds to generate the rollouts of `traces`, all of one k, started in this order in `slots` slots.

    Args:
      prompt: tokens of each prompt.
      stretch: factor on the lengths, or [R] factors; acceptance along a longer response repeats the recorded one.
    """
    iterations = np.maximum(stretch * np.array([t.iterations for t in traces]), 1.0)
    each = response_tokens(traces, stretch) / iterations.sum()
    p = profile(iterations, slots, prompt / each, schedule=EngineSchedule(), tokens=1.0)
    return float((p.tokens * clock(p.batch, traces[0].k, each * p.context)).sum())


def response_tokens(traces: Sequence[Trace], stretch: np.ndarray | float) -> float:
    return float((stretch * np.array([t.tokens for t in traces])).sum())


def tokens_per_second(
    traces: Sequence[Trace], slots: int, clock: Clock, prompt: float, stretch: np.ndarray | float = 1.0
) -> float:
    """Return the response tokens a second of `seconds`."""
    return response_tokens(traces, stretch) / seconds(traces, slots, clock, prompt, stretch)


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """Iterations measured at some batch sizes, seconds; between them interpolated in the logarithm of both."""

    batches: np.ndarray  # [n], ascending
    seconds: dict[int, np.ndarray]  # k -> [n]

    def __call__(self, batch: np.ndarray, k: int, context: np.ndarray) -> np.ndarray:
        """Return seconds; a batch outside the measured ones costs as the nearest."""
        return np.exp(np.interp(np.log(np.maximum(batch, 1.0)), np.log(self.batches), np.log(self.seconds[k])))


def heavy_tail(count: int, spread: float, rng: np.random.Generator) -> np.ndarray:
    """Return [count] log-normal factors of mean 1, whose logarithm has standard deviation `spread`."""
    factors = np.exp(spread * rng.standard_normal(count))
    return factors / factors.mean()


def resampled(
    by_k: dict[int, list[Trace]],
    slots: int,
    clock: Clock,
    prompt: float,
    draws: int,
    seed: int = 0,
    stretch: float = 1.0,
    spread: float = 0.0,
) -> dict[int, np.ndarray]:
    """Return k -> [draws] tokens a second, each draw a resample of the rollouts, independent for each k.

    Each response is `stretch` times as long; with `spread` above 0 also by a factor of its own, of `heavy_tail`.
    """
    rng = np.random.default_rng(seed)

    def speed(traces: list[Trace]) -> float:
        chosen = [traces[i] for i in rng.integers(len(traces), size=len(traces))]
        factors = stretch * heavy_tail(len(traces), spread, rng)
        return tokens_per_second(chosen, slots, clock, prompt, factors)

    return {k: np.array([speed(traces) for _ in range(draws)]) for k, traces in by_k.items()}


def ratio(over: np.ndarray, under: np.ndarray) -> Interval:
    """Return the median ratio of two bootstrapped speeds, [draws] each, and its 95 % percentile interval."""
    low, middle, high = np.quantile(over / under, (0.025, 0.5, 0.975))
    return Interval(float(middle), float(low), float(high))
