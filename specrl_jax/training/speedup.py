"""Speedup of speculation over plain decoding, measured on the same prompts and weights."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import scipy.special

from specrl_jax import distributed
from specrl_jax.config import Config
from specrl_jax.data.problem import Problem
from specrl_jax.decoding.draft_lengths import DraftLengthPolicy
from specrl_jax.decoding.engine import Engine
from specrl_jax.decoding.requests import CallOptions
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.drafts.weights import Weights
from specrl_jax.errors import Stopped
from specrl_jax.rollout.build import RolloutEngines

OnProgress = Callable[[int, int], None]  # of Engine.generate


class Workload(NamedTuple):
    """Prompts and samples of one measurement."""

    prompts: Sequence[Sequence[int]]
    samples: int  # rollouts of each prompt
    seed: int
    responses: Sequence[int] | None = None  # most tokens of each rollout; None: the engine's


def step_workload(rollout: RolloutEngines, problems: Sequence[Problem]) -> Workload:
    """Return as many rollouts of `problems` as a training step has."""
    config = rollout.plan.config
    prompts = [rollout.tokenizer.encode_prompt(problem.prompt) for problem in problems[: config.grpo.prompts_per_step]]
    return Workload(prompts, config.grpo.group_size, config.rollout.seed)


def comparison_workload(rollout: RolloutEngines, problems: Sequence[Problem]) -> Workload:
    """Return the rollouts of a round of the closing comparison: `comparison_share` of a training step's."""
    work = step_workload(rollout, problems)
    count = round(comparison_share(rollout.plan.config) * len(work.prompts) * work.samples)
    prompts = work.prompts[: max(1, count)]
    return work._replace(prompts=prompts, samples=max(1, count // len(prompts)))


def comparison_share(config: Config) -> float:
    """Return a quarter, or more where that would be fewer than four for each sequence that is decoded at once."""
    step = config.grpo.prompts_per_step * config.grpo.group_size
    return min(1.0, max(1 / 4, 4 * config.rollout.num_slots / step))


def timed(
    engine: Engine,
    weights: Weights,
    work: Workload,
    *,
    lengths: DraftLengthPolicy | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> tuple[Rollouts, float]:
    """Generate; return (rollouts, seconds)."""
    start = time.perf_counter()
    rollouts = engine.generate(
        weights,
        work.prompts,
        work.samples,
        seed=work.seed,
        on_progress=on_progress,
        lengths=lengths,
        options=CallOptions(responses=work.responses),
    )
    return rollouts, time.perf_counter() - start


def measure_speedup(
    engine: Engine,
    plain: Engine,
    weights: Weights,
    *,
    work: Workload,
    rounds: int,
    lengths: DraftLengthPolicy | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> np.ndarray:
    """Return [rounds] ratios of generated tokens per second, `engine` over `plain`, after a warm-up of both.

    Tokens per second, since the two draw different rollouts of the same distribution, whose lengths differ a little.

    Args:
      lengths: chooses the draft lengths of `engine`.
      on_progress: of the engines; where it raises Stopped there are the ratios of the rounds before, or none.
    """

    def tokens_per_second(which: Engine, seed: int) -> float:
        chooses = None if which is plain else lengths
        seeded = work._replace(seed=seed)
        with distributed.together():
            rollouts, seconds = timed(which, weights, seeded, lengths=chooses, on_progress=on_progress)
        return rollouts.response_length.sum() / seconds

    ratios = []
    with contextlib.suppress(Stopped):
        for warm in (engine, plain):
            tokens_per_second(warm, work.seed)
        for i in range(rounds):
            # The order alternates: what the first leaves behind (heat, caches) must not favour one of them.
            pair = (engine, plain) if i % 2 else (plain, engine)
            speed = {id(e): tokens_per_second(e, work.seed + 1 + i) for e in pair}
            ratios.append(speed[id(engine)] / speed[id(plain)])
    return np.array(ratios)


def speedup_metrics(
    rollout: RolloutEngines,
    weights: Weights,
    problems: Sequence[Problem],
    *,
    lengths: DraftLengthPolicy,
    on_progress: OnProgress,
) -> dict[str, float]:
    """Return spec/speedup*, the run's own engine over draft.kind=none on validation problems.

    Nothing where `on_progress` raises Stopped before the end of the second round.
    """
    work, rounds = comparison_workload(rollout, problems), rollout.plan.config.draft.compare_rounds
    ratios = measure_speedup(
        rollout.engine,
        rollout.plain_engine,
        weights,
        work=work,
        rounds=rounds,
        lengths=lengths,
        on_progress=on_progress,
    )
    if len(ratios) < 2:
        return {}
    mean, low, high = mean_ratio(ratios)
    return {"spec/speedup": mean, "spec/speedup_low": low, "spec/speedup_high": high}


def mean_ratio(ratios: np.ndarray) -> tuple[float, float, float]:
    """Return the geometric mean of paired ratios [n >= 2], and both ends of its 95 % confidence interval.

    Student's t interval of the mean logarithm, with n - 1 degrees of freedom. A round measures both engines one after
    the other: what slows a whole round cancels in its ratio. Rounds are taken as independent.
    """
    logs = np.log(ratios)
    half = scipy.special.stdtrit(len(logs) - 1, 0.975) * logs.std(ddof=1) / np.sqrt(len(logs))
    mean, low, high = np.exp(logs.mean() + np.array([0.0, -half, half]))
    return float(mean), float(low), float(high)
