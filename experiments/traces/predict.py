"""Predict which draft length is faster with refills and long tails, and then measure it.

    python -m experiments.traces.predict costs      # the seconds of an iteration at a fixed number of sequences
    python -m experiments.traces.predict predict    # predictions.csv, from those and traces.csv alone
    python -m experiments.traces.predict measure    # measured.csv: the engine itself, its slots refilled
    python -m experiments.traces.predict judge      # the table in README.md

A prediction is contradicted where the measured interval excludes it and the two differ by more than 5 %.
"""

import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from experiments import commands
from experiments.claims import markdown, show_table, write_rows
from experiments.engine import bench
from experiments.parts import prepared
from experiments.rooms.bases import WORKLOADS, config_of
from experiments.traces.clocks import HERE, PROMPT, measured
from experiments.traces.costs import measure_costs
from experiments.traces.counts import read_traces
from experiments.traces.replay import ratio, resampled
from experiments.verdicts import Interval, ratio_interval
from specrl_jax.decoding.draft_lengths import FixedLength
from specrl_jax.models.decoder import PRESETS
from specrl_jax.training.speedup import timed

COSTS = HERE / "predict_costs.csv"
MODEL = "shallow"  # of both
SLOTS = (1, 8, 64)
LENGTHS, REFERENCE = (3, 5, 7), 3
DRAWS, DIFFERENT = 500, 0.05
SEED = 0  # of the measured base


def predictions() -> Iterator[bench.Row]:
    """Yield the predicted ratio to k = 3 for each workload, number of slots and k, with intervals over rollouts."""
    clock = measured(COSTS)
    traces = read_traces(HERE / "traces.csv")
    for workload in WORKLOADS:
        mine = {k: [t for t in traces if (t.workload, t.seed, t.k) == (workload, SEED, k)] for k in LENGTHS}
        for slots in SLOTS:
            found = resampled(mine, slots, clock, PROMPT, DRAWS)
            for k in LENGTHS[1:]:
                predicted = ratio(found[k], found[REFERENCE])
                names = ("predicted", "predicted_low", "predicted_high")
                yield {"workload": workload, "slots": slots, "k": k} | dict(zip(names, predicted, strict=True))


def measure(
    path: pathlib.Path, workloads: Sequence[str], slot_numbers: Sequence[int], prompts: int, rounds: int
) -> None:
    """Time the engine with refills: every length answers the same prompts once a round, in random order."""
    with bench.csv_writer(str(path), ("workload", "slots", "k", "round", "tokens", "seconds")) as write:
        for workload in workloads:
            for slots in slot_numbers:
                for row in measured_rounds(workload, slots, prompts, rounds):
                    write({"workload": workload, "slots": slots} | row)


def measured_rounds(workload: str, slots: int, prompts: int, rounds: int) -> Iterator[dict[str, Any]]:
    config = config_of(workload, SEED)
    config.draft.length, config.rollout.num_slots, config.grpo.prompts_per_step = max(LENGTHS), slots, prompts
    _, rollout, _, weights, work = prepared(config, LENGTHS)
    for k in LENGTHS:
        timed(rollout.engine, weights, work, lengths=FixedLength(k))
    for i, k in bench.in_turn(LENGTHS, rounds):
        found, seconds = timed(rollout.engine, weights, work._replace(seed=i), lengths=FixedLength(k))
        yield {"k": k, "round": i, "tokens": int(found.response_length.sum()), "seconds": seconds}


def judge() -> str:
    """Return the Markdown table of predictions beside measurements."""
    rows, lines = bench.read_rows(str(HERE / "measured.csv")), []
    for p in bench.read_rows(str(HERE / "predictions.csv")):
        cell = {"workload": p["workload"], "slots": p["slots"]}
        speed = {
            k: bench.by_round(rows, "tokens", k=k, **cell) / bench.by_round(rows, "seconds", k=k, **cell)
            for k in (p["k"], REFERENCE)
        }
        found = ratio_interval(speed[p["k"]] / speed[REFERENCE])
        predicted = Interval(p["predicted"], p["predicted_low"], p["predicted_high"])
        lines.append([p["workload"], p["slots"], p["k"], predicted, found, verdict(predicted.mean, found)])
    return markdown(["workload", "at once", "k over 3", "predicted", "measured", "verdict"], lines)


def verdict(predicted: float, found: Interval) -> str:
    """Return whether a measured ratio contradicts the predicted one, and whether both are on one side of 1."""
    excluded = not found.low <= predicted <= found.high
    contradicted = excluded and abs(found.mean / predicted - 1) > DIFFERENT
    side = "one side of 1" if (predicted > 1) == (found.mean > 1) else "other sides of 1"
    return f"{'contradicted' if contradicted else 'holds'}; {side}"


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(
        slots=(SLOTS, [1], "of costs and measure"),
        prompts=(24, 1, "of a measured round; each has grpo.group_size answers"),
        rounds=(7, 1),
    )
    parser.add_argument("part", choices=("costs", "predict", "measure", "judge"))
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="of measure", small=["rooms"]
    )
    parser.add_argument("--output", type=pathlib.Path, default=HERE, help="folder of rows and page")
    a = parser.parse_args()
    if a.part == "costs":
        model = PRESETS[MODEL]
        measure_costs(a.output / COSTS.name, model, model.vocab, a.slots, LENGTHS, a.rounds)
    elif a.part == "predict":
        write_rows(a.output / "predictions.csv", list(predictions()))
    elif a.part == "measure":
        measure(a.output / "measured.csv", a.workloads, a.slots, a.prompts, a.rounds)
    else:
        show_table(a.output, HERE, judge(), "predictions")


if __name__ == "__main__":
    sys.exit(commands.run(main))
