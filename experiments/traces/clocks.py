"""Replay the recorded traces under four clocks, and find the best draft length by concurrency and host time.

    python -m experiments.traces.clocks

Reads traces.csv of --folder and costs.csv of this one, and writes speed.csv, best.csv and best.png into --output. The
table goes into README.md of this folder, or is printed.
"""

import itertools
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from experiments import commands
from experiments.claims import COLOURS, markdown, show_table, write_rows
from experiments.engine import bench
from experiments.rooms.bases import NAMES
from experiments.scale_projection.paper import DRAFT_VOCAB
from experiments.simulator.cost import DecoderCost
from experiments.simulator.hardware import ENGINES, HARDWARE
from experiments.simulator.heads import head_config
from experiments.traces.counts import Trace, read_traces
from experiments.traces.replay import Clock, Measured, ratio, resampled
from experiments.verdicts import Claim, Interval, judge_simulated
from specrl_jax.models.decoder import PRESETS

Row = dict[str, Any]
HERE = pathlib.Path(__file__).parent
SLOTS = (1, 8, 16, 32, 64)
SHOWN = (1, 8, 64)  # slots in the table
HOST_MICROSECONDS = (0, 30, 100, 300, 930, 3000)  # of a drafted token
# The paper's runs: about 1,024 responses on 32 devices, and the host time of a draft in public sweeps.
PAPER_SLOTS, PAPER_HOST = 32, 930
# The clock by which the paper's Tables 1 and 4 are judged, at PAPER_SLOTS, and the speeds over plain in them by k.
JUDGED = "the same with the host time of a draft in public sweeps"
PAPER = {"rooms": {3: 1.77, 5: 1.44, 7: 1.21}, "careful": {3: 1.54, 5: 0.84, 7: 0.71}}
SAMPLE = "simulated clock, 95 % over resampled rollouts"
PROMPT = 40.0  # tokens, of the recorded workloads
SPREAD = 1.0  # of ln(length) with a heavy tail
# Recorded responses have some two hundred tokens: repeated so often they have thousands, as the paper's 8B runs.
GPU_STRETCH = 20.0
COMPARED = (1, 5, 7)  # against k = 3
TAILS = {"recorded": 0.0, "heavy": SPREAD}


def measured(path: pathlib.Path) -> Measured:
    """Return the clock of an engine, from the medians of a file of `costs.measure_costs`."""
    rows = bench.read_rows(str(path))
    batches = sorted({row["batch"] for row in rows})
    lengths = sorted({row["k"] for row in rows})
    return Measured(
        np.array(batches, float),
        {k: np.array([np.median(bench.by_round(rows, "seconds", k=k, batch=b)) for b in batches]) for k in lengths},
    )


def gb200(engine: str, host_per_draft: float = 0.0) -> Clock:
    """Return the roofline of an 8B policy on one GB200: an engine's host times, and so many seconds more a draft."""
    e, model = ENGINES[engine], PRESETS["qwen3_8b"]
    hardware = HARDWARE["gb200"].with_engine(e).with_attained(draft_seconds=e.draft_seconds + host_per_draft)
    cost = DecoderCost(model, head_config(model, DRAFT_VOCAB), hardware, captured_rows=e.captured_rows)
    return cost.speculative


def clocks() -> dict[str, tuple[Clock, float]]:
    """Return name -> (clock, factor on all lengths)."""
    return {
        "measured, 107 M, two CPU cores": (measured(HERE / "costs.csv"), 1.0),
        "8B on a GB200, this project's loop, roofline": (gb200("fused"), GPU_STRETCH),
        JUDGED: (gb200("fused", ENGINES["vllm"].draft_seconds), GPU_STRETCH),
        "8B on a GB200, vLLM by public sweeps": (gb200("vllm"), GPU_STRETCH),
    }


def speed_rows(workload: str, by_k: dict[int, list[Trace]], draws: int) -> Iterator[Row]:
    """Yield each clock's speed of every k relative to plain decoding and to k = 3, with intervals over rollouts."""
    for name, (clock, stretch) in clocks().items():
        for slots in SLOTS:
            found = resampled(by_k, slots, clock, PROMPT, draws, stretch=stretch)
            for k in by_k:
                over, against = ratio(found[k], found[0]), ratio(found[k], found[3])
                row = {
                    "workload": workload,
                    "clock": name,
                    "slots": slots,
                    "k": k,
                    "over_plain": over.mean,
                    "low": over.low,
                }
                row |= {"high": over.high, "over_3": against.mean, "over_3_low": against.low}
                yield row | {"over_3_high": against.high}


def best_rows(workload: str, by_k: dict[int, list[Trace]], draws: int) -> Iterator[Row]:
    """Yield the best k on the GB200 roofline by slots and host time, for recorded lengths and for a heavy tail.

    The ends of its interval are those k that are best in 2.5 and in 97.5 % of the resamples, of rollouts and tails.
    """
    for (tail, spread), slots, host in itertools.product(TAILS.items(), SLOTS, HOST_MICROSECONDS):
        clock = gb200("fused", host * 1e-6)
        found = resampled(by_k, slots, clock, PROMPT, draws, stretch=GPU_STRETCH, spread=spread)
        lengths = np.array(list(found))
        best = lengths[np.argmax(list(found.values()), axis=0)]
        low, middle, high = np.quantile(best, (0.025, 0.5, 0.975), method="nearest")
        row = {"workload": workload, "lengths": tail, "slots": slots, "host_us": host}
        row |= {"best_k": middle, "best_k_low": low, "best_k_high": high}
        yield row | {f"k_{k}": float(np.median(speed / found[0])) for k, speed in found.items()}


def table(rows: Sequence[Row]) -> str:
    """Return the Markdown table of the speeds relative to plain decoding and of k = 5 and 7 relative to 3."""
    lines = []
    for name, workload, slots in itertools.product(dict.fromkeys(row["clock"] for row in rows), NAMES, SHOWN):
        cells = {row["k"]: row for row in bench.matching(rows, clock=name, workload=workload, slots=slots)}
        relative = [Interval(*(cells[k][f"over_3{end}"] for end in ("", "_low", "_high"))) for k in COMPARED]
        lines.append([name, NAMES[workload], slots, f"{cells[3]['over_plain']:.2f}", *relative])
    return markdown(["clock", "", "at once", "k = 3 over plain", *(f"k = {k} over 3" for k in COMPARED)], lines)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Judge k = 3 over plain decoding, and k = 5 and 7 over 3, by the rows of speed.csv for a GB200 with host time."""
    found = []
    for workload, paper in PAPER.items():
        kept = {row["k"]: row for row in bench.matching(rows, clock=JUDGED, workload=workload, slots=PAPER_SLOTS)}
        for k, speed in paper.items():
            column, value, place = (
                ("over_plain", speed, "Table 1") if k == 3 else ("over_3", speed / paper[3], "Table 4")
            )
            ends = ("low", "high") if k == 3 else ("over_3_low", "over_3_high")
            ours = Interval(kept[k][column], *(kept[k][end] for end in ends))
            text = f"{NAMES[workload]}, traces on a GB200 with host time: k = {k} over {'plain' if k == 3 else 'k = 3'}"
            found.append(judge_simulated(text, round(value, 2), place, ours)._replace(sample=SAMPLE))
    return found


def draw(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Draw the best k by slots and host time, with its gain over plain decoding; a frame is the paper's cell."""
    figure, axes = plt.subplots(len(NAMES), len(TAILS), figsize=(12, 8), layout="constrained", sharex=True, sharey=True)
    for (workload, tail), axis in zip(itertools.product(NAMES, TAILS), axes.ravel(), strict=True):
        kept = {(r["slots"], r["host_us"]): r for r in bench.matching(rows, workload=workload, lengths=tail)}
        grid = np.array([[kept[s, h]["best_k"] for h in HOST_MICROSECONDS] for s in SLOTS], float)
        axis.imshow(grid, cmap="Greys", vmin=-2, vmax=14, aspect="auto", origin="lower")
        for (i, slots), (j, host) in itertools.product(enumerate(SLOTS), enumerate(HOST_MICROSECONDS)):
            axis.text(j, i, cell(kept[slots, host]), ha="center", va="center", fontsize=9)
        place = HOST_MICROSECONDS.index(PAPER_HOST) - 0.5, SLOTS.index(PAPER_SLOTS) - 0.5
        axis.add_patch(plt.Rectangle(place, 1, 1, fill=False, lw=2.5, ec=COLOURS[0]))
        lengths = "recorded lengths" if tail == "recorded" else f"log-normal lengths, spread {SPREAD:g}"
        axis.set_title(f"{NAMES[workload]}: best k and its speed over plain, {lengths}", fontsize=9)
        axis.set_xticks(range(len(HOST_MICROSECONDS)), [str(h) for h in HOST_MICROSECONDS])
        axis.set_yticks(range(len(SLOTS)), [str(s) for s in SLOTS])
    for axis in axes[-1]:
        axis.set_xlabel("host time of a draft, microseconds (frame: the paper's runs, which find k = 3 best)")
    for axis in axes[:, 0]:
        axis.set_ylabel("sequences at once")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def cell(row: Row) -> str:
    """Return "k = 3 (3 to 5)" and the speed over plain decoding."""
    low, best, high = (int(row[f"best_k{end}"]) for end in ("_low", "", "_high"))
    ends = f" ({low} to {high})" if low < high else ""
    return f"k = {best}{ends}\n{row[f'k_{best}']:.2f}"


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(draws=(200, 4, "of the bootstrap of the speeds"), best_draws=(60, 2, "of that of the best k"))
    parser.add_argument("--folder", type=pathlib.Path, default=HERE, help="of traces")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the results; default: of the traces", small=HERE)
    a = parser.parse_args()
    output = a.output or a.folder
    traces = read_traces(a.folder / "traces.csv")
    speeds, best = list[Row](), list[Row]()
    for workload in NAMES:
        mine = [t for t in traces if t.workload == workload]
        by_k = {k: [t for t in mine if t.k == k] for k in sorted({t.k for t in mine})}
        speeds += speed_rows(workload, by_k, a.draws)
        best += best_rows(workload, by_k, a.best_draws)
    write_rows(output / "speed.csv", speeds)
    write_rows(output / "best.csv", best)
    draw(best, output / "best.png")
    show_table(output, HERE, table(speeds))


if __name__ == "__main__":
    sys.exit(commands.run(main))
