"""task=benchmark: what a draft makes of generation here, at every draft length and under the controller, beside plain
decoding. Nothing learns.
"""

import contextlib
import dataclasses
import threading
from typing import Any

import numpy as np
import rich.console
import rich.table

from specrl_jax.config import Config
from specrl_jax.core import Stopped
from specrl_jax.decoding.controller import Controller
from specrl_jax.decoding.engine import Engine, FixedLength, Lengths
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.io.metrics import MetricsWriter
from specrl_jax.io.progress import Display
from specrl_jax.io.signals import stop_on_signal
from specrl_jax.io.workdir import open_workdir
from specrl_jax.training.build import Setup, build
from specrl_jax.training.plan import draft_lengths, open_mesh
from specrl_jax.training.speedup import timed

PLAIN, ADAPTIVE = "plain", "adaptive"
# Name -> (engine, what chooses its draft lengths)
Sides = dict[str, tuple[Engine, Lengths | None]]


def run(config: Config, workdir: str) -> None:
    """task=benchmark: compare generation with the draft and without, and print the result."""
    setup = build(config, open_mesh(config))
    setup.check_problems()
    open_workdir(workdir, dataclasses.asdict(config))
    print_benchmark(benchmark(setup, workdir, stop_on_signal()))


def benchmark(setup: Setup, workdir: str, stop: threading.Event) -> list[dict[str, Any]]:
    """Every side answers the same training prompts once a round, in random order; what a round has is one RL step's.

    Returns a row a round, which metrics.jsonl has too. Of each side (`plain`: draft.kind=none; `k_3`: that draft
    length; `adaptive`): benchmark/SIDE, tokens per second; benchmark/SIDE_over_plain; benchmark/SIDE_acceptance_length,
    tokens a verification. `k_0` of a draft that copies goes over its text again, as the controller's plain chunks do
    (decoding/replay.py): `plain` is what plain decoding costs.
    """
    s = setup.settings
    weights, order = setup.initial_weights(), np.random.default_rng(s.seed)
    stream, rows = setup.problems.stream(s.grpo.prompts_per_step), []
    with Display(s.benchmark.rounds, 0) as display, contextlib.closing(MetricsWriter(workdir, -1)) as writer:
        sides = make_sides(setup)
        for engine in {id(engine): engine for engine, _ in sides.values()}.values():
            engine.programs.compile_all(weights, lambda program, t: display.say(f"engine program {program}: {t:.1f} s"))
        for i in range(1 - s.benchmark.warmup, s.benchmark.rounds + 1):
            prompts = [setup.tokenizer.encode(problem.prompt) for problem in next(stream)]
            found = {}
            for name in order.permutation(in_round(i, s.benchmark.warmup, sides)):
                if stop.is_set():
                    raise Stopped("a benchmark keeps nothing that could be resumed; the same command starts anew")
                engine, lengths = sides[name]
                seed = s.rollout.seed + i + s.benchmark.warmup
                found[name] = timed(engine, weights, prompts, s.grpo.group_size, seed, lengths)
            if i > 0:
                rows.append({"step": i} | round_metrics({name: found[name] for name in sides}))
                writer.write(rows[-1])
                display.finish_step(i, "  ".join(f"{name} {rows[-1][f'benchmark/{name}']:.0f}" for name in sides))
    return rows


def in_round(i: int, warmup: int, sides: Sides) -> list[str]:
    """Those that answer in round i of 1 - warmup to rounds: all but for the warm-up after its first round, which only
    a controller learns from.
    """
    return [name for name in sides if i > 0 or i == 1 - warmup or name == ADAPTIVE]


def make_sides(setup: Setup) -> Sides:
    draft, wanted = setup.settings.draft, setup.settings.benchmark.lengths
    lengths = tuple(wanted) or draft_lengths(draft.length, adaptive=True)
    chosen = draft_lengths(draft.length, draft.adaptive)
    engine = setup.engine_of(tuple(sorted({*lengths, *chosen})))
    sides: Sides = {PLAIN: (setup.plain_engine, None)}
    sides |= {f"k_{k}": (engine, FixedLength(k)) for k in lengths}
    if draft.adaptive:
        sides[ADAPTIVE] = engine, Controller(chosen, engine.programs.sizes)
    return sides


def round_metrics(found: dict[str, tuple[Rollouts, float]]) -> dict[str, float]:
    """benchmark/* of one round: (rollouts, seconds) by side."""
    row = {}
    tokens = {name: int(rollouts.response_length.sum()) for name, (rollouts, _) in found.items()}
    speed = {name: tokens[name] / seconds for name, (_, seconds) in found.items()}
    for name, (rollouts, _) in found.items():
        row[f"benchmark/{name}"] = speed[name]
        if name != PLAIN:
            row[f"benchmark/{name}_over_plain"] = speed[name] / speed[PLAIN]
            row[f"benchmark/{name}_acceptance_length"] = tokens[name] / int(rollouts.verifications.sum())
    return row


def print_benchmark(rows: list[dict[str, Any]]) -> None:
    """Medians over the rounds, with quartiles."""
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
    # In a file rich takes 80 columns, which would break every cell.
    rich.console.Console(width=max(rich.console.Console().width, 100)).print(table)
