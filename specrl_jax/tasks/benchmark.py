"""task=benchmark: speed of generation at every draft length and under the controller, beside plain decoding."""

import contextlib
import dataclasses
import threading
from collections.abc import Mapping, Sequence

import numpy as np
import rich.table

from specrl_jax.config import Config
from specrl_jax.decoding.draft_lengths import DraftLengthPolicy, FixedLength
from specrl_jax.decoding.engine import Engine
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.io.metrics import MetricsWriter
from specrl_jax.io.progress import Display
from specrl_jax.io.report import table_console
from specrl_jax.io.signals import stop_on_signal, stopped_as
from specrl_jax.io.workdir import open_workdir
from specrl_jax.learner.build import Learner
from specrl_jax.planning.plan import draft_lengths
from specrl_jax.planning.problems import Problems
from specrl_jax.rollout.build import RolloutEngines
from specrl_jax.training.initial import initial_weights
from specrl_jax.training.inputs import open_inputs
from specrl_jax.training.speedup import step_workload, timed

PLAIN, ADAPTIVE = "plain", "adaptive"
# Name -> (engine, chooser of its draft lengths)
Sides = dict[str, tuple[Engine, DraftLengthPolicy | None]]
# Rounds before those that count; after the first only the controller still learns.
WARMUP = 3


def run(config: Config, workdir: str) -> None:
    """Compare generation with the draft and without, and print the result."""
    with open_inputs(config, workdir, rewards=False) as inputs:
        learner, rollout = inputs.build(compiled_lengths(inputs.config))
        open_workdir(workdir, dataclasses.asdict(inputs.config))
        print_benchmark(benchmark(learner, rollout, inputs.problems, workdir=workdir, stop=stop_on_signal()))


def compared_lengths(config: Config) -> tuple[int, ...]:
    """Return the fixed draft lengths that are compared."""
    return tuple(config.benchmark.lengths) or draft_lengths(config.draft.length, adaptive=True)


def compiled_lengths(config: Config) -> tuple[int, ...]:
    """Return those and the controller's, ascending."""
    return tuple(sorted({*compared_lengths(config), *draft_lengths(config.draft.length, config.draft.adaptive)}))


def benchmark(
    learner: Learner, rollout: RolloutEngines, problems: Problems, *, workdir: str, stop: threading.Event
) -> list[dict[str, float]]:
    """Time every side on the same training prompts, in random order, for benchmark.rounds rounds of a step's rollouts.

    Nothing is trained. `rollout` has programs of `compiled_lengths`.

    Returns a row per round, also written to metrics.jsonl. Of each side (`plain`: draft.kind=none; `k_3`: that draft
    length; `adaptive`): benchmark/SIDE, tokens per second; benchmark/SIDE_over_plain; benchmark/SIDE_acceptance_length,
    tokens per verification. `k_0` of a lookup draft includes the replay that the controller's plain chunks make
    (decoding/replay.py); `plain` is the cost of plain decoding.
    """
    config = learner.plan.config
    weights, order = initial_weights(learner, rollout), np.random.default_rng(config.seed)
    stream, rows = problems.stream(config.grpo.prompts_per_step), []
    with (
        stopped_as("a benchmark keeps nothing that could be resumed; the same command starts anew"),
        Display(config.benchmark.rounds, 0, stop) as display,
        contextlib.closing(MetricsWriter(workdir)) as writer,
    ):
        sides = make_sides(rollout)
        for engine in {id(engine): engine for engine, _ in sides.values()}.values():
            engine.compile_all(weights, display.say_compiled)
        for i in range(1 - WARMUP, config.benchmark.rounds + 1):
            work = step_workload(rollout, next(stream))
            found = {}
            # After the first round of the warm-up only the controller still learns.
            timed_sides = [name for name in sides if i > 0 or i == 1 - WARMUP or name == ADAPTIVE]
            for name in order.permutation(timed_sides):
                engine, lengths = sides[name]
                seeded = work._replace(seed=work.seed + i + WARMUP)
                found[name] = timed(engine, weights, seeded, lengths=lengths, on_progress=display.update_phase)
            if i > 0:
                rows.append({"step": i} | round_metrics({name: found[name] for name in sides}))
                writer.write(rows[-1])
                display.finish_step(i, "  ".join(f"{name} {rows[-1][f'benchmark/{name}']:.0f}" for name in sides))
    return rows


def make_sides(rollout: RolloutEngines) -> Sides:
    """Return every engine that is compared, with its draft lengths."""
    config, engine = rollout.plan.config, rollout.engine
    sides: Sides = {PLAIN: (rollout.plain_engine, None)}
    sides |= {f"k_{k}": (engine, FixedLength(k)) for k in compared_lengths(config)}
    if config.draft.adaptive:
        lengths = draft_lengths(config.draft.length, adaptive=True)
        sides[ADAPTIVE] = engine, engine.controller(lengths)
    return sides


def round_metrics(found: Mapping[str, tuple[Rollouts, float]]) -> dict[str, float]:
    """Return benchmark/* of one round: (rollouts, seconds) by side."""
    row = {}
    tokens = {name: int(rollouts.response_length.sum()) for name, (rollouts, _) in found.items()}
    speed = {name: tokens[name] / seconds for name, (_, seconds) in found.items()}
    for name, (rollouts, _) in found.items():
        row[f"benchmark/{name}"] = speed[name]
        if name != PLAIN:
            row[f"benchmark/{name}_over_plain"] = speed[name] / speed[PLAIN]
            row[f"benchmark/{name}_acceptance_length"] = tokens[name] / int(rollouts.verifications.sum())
    return row


def print_benchmark(rows: Sequence[Mapping[str, float]]) -> None:
    """Print medians over the rounds, with quartiles."""
    table = rich.table.Table(title=f"generation, {len(rows)} rounds", title_justify="left")
    for column in ("", "tokens per second", "over plain", "tokens per verification"):
        table.add_column(column, justify="left" if not column else "right")

    def shown(name: str, digits: int) -> str:
        if name not in rows[0]:
            return ""
        low, median, high = np.quantile([row[name] for row in rows], (0.25, 0.5, 0.75))
        return f"{median:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"

    for name in rows[0]:
        side = name.removeprefix("benchmark/")
        if name != "step" and not side.endswith(("_over_plain", "_acceptance_length")):
            table.add_row(side, shown(name, 0), shown(f"{name}_over_plain", 2), shown(f"{name}_acceptance_length", 2))
    table_console().print(table)
