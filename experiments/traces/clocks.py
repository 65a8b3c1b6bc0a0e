"""Replay the recorded traces under four clocks, and find the best draft length by concurrency and host time.

    python -m experiments.traces.clocks

Reads traces.csv and costs.csv of this folder, and writes speed.csv, best.csv and best.png.
"""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from experiments.claims import Interval, markdown, put_table, write_rows
from experiments.engine import bench
from experiments.scale_projection.paper import DRAFT_VOCAB
from experiments.traces.counts import Trace, read_traces
from experiments.traces.replay import Clock, Measured, heavy_tail, ratio, resampled, tokens_per_second
from specrl_jax.models.qwen3 import PRESETS
from specrl_jax.simulator.cost import DecoderCost, head_config
from specrl_jax.simulator.hardware import ENGINES, HARDWARE

Row = dict[str, Any]
HERE = pathlib.Path(__file__).parent
SLOTS = (1, 8, 16, 32, 64)
HOST_MICROSECONDS = (0, 30, 100, 300, 1000, 3000)  # of a drafted token
PROMPT = 10.0  # tokens, of the recorded workload
DRAWS, SPREAD = 200, 1.0  # of the bootstrap; of ln(length) with a heavy tail
# Recorded responses have some tens of tokens: repeated so often they have thousands, as the paper's 8B runs.
GPU_STRETCH = 100.0
COMPARED = (1, 5, 7)  # against k = 3


def measured() -> Measured:
    """Return the clock of this engine, from the medians of costs.csv."""
    rows = bench.read_rows(str(HERE / "costs.csv"))
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
    return DecoderCost(model, head_config(model, DRAFT_VOCAB), hardware, captured_rows=e.captured_rows).speculative


# Name -> (clock, factor on all lengths)
def clocks() -> dict[str, tuple[Clock, float]]:
    return {
        "measured, 107 M, two CPU cores": (measured(), 1.0),
        "8B on a GB200, this project's loop, roofline": (gb200("fused"), GPU_STRETCH),
        "the same with the host time of a draft in public sweeps": (
            gb200("fused", ENGINES["vllm"].draft_seconds),
            GPU_STRETCH,
        ),
        "8B on a GB200, vLLM by public sweeps": (gb200("vllm"), GPU_STRETCH),
    }


def speed_rows(by_k: dict[int, list[Trace]]) -> Iterator[Row]:
    """Yield each clock's speed of every k relative to plain decoding and to k = 3, with intervals over rollouts."""
    for name, (clock, stretch) in clocks().items():
        for slots in SLOTS:
            found = resampled(by_k, slots, clock, PROMPT, DRAWS, stretch=stretch)
            for k in by_k:
                over, against = ratio(found[k], found[0]), ratio(found[k], found[3])
                row = {"clock": name, "slots": slots, "k": k, "over_plain": over.mean, "low": over.low}
                row |= {"high": over.high, "over_3": against.mean, "over_3_low": against.low}
                yield row | {"over_3_high": against.high}


def best_rows(by_k: dict[int, list[Trace]]) -> Iterator[Row]:
    """Yield the best k on the GB200 roofline by slots and host time, for recorded lengths and for a heavy tail."""
    for tail, spread in (("recorded", 0.0), ("heavy", SPREAD)):
        factors = {k: GPU_STRETCH * heavy_tail(len(ts), spread, seed=0) for k, ts in by_k.items()}
        for slots in SLOTS:
            for host in HOST_MICROSECONDS:
                clock = gb200("fused", host * 1e-6)
                speed = {k: tokens_per_second(ts, slots, clock, PROMPT, factors[k]) for k, ts in by_k.items()}
                best = max(speed, key=lambda k: speed[k])
                yield {"lengths": tail, "slots": slots, "host_us": host, "best_k": best} | {
                    f"k_{k}": speed[k] / speed[0] for k in speed
                }


def table(rows: Sequence[Row]) -> str:
    """Return the Markdown table of the speeds relative to plain decoding and of k = 5 and 7 relative to 3."""
    lines = []
    for name in dict.fromkeys(row["clock"] for row in rows):
        for slots in SLOTS:
            cells = {row["k"]: row for row in rows if row["clock"] == name and row["slots"] == slots}
            relative = [Interval(*(cells[k][f"over_3{end}"] for end in ("", "_low", "_high"))) for k in COMPARED]
            lines.append([name, slots, f"{cells[3]['over_plain']:.2f}", *relative])
    return markdown(["clock", "at once", "k = 3 over plain", *(f"k = {k} over 3" for k in COMPARED)], lines)


def draw(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Draw the best k by slots and host time, its gain over plain decoding below it."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for axis, tail in zip(axes, ("recorded", "heavy")):
        kept = {(row["slots"], row["host_us"]): row for row in rows if row["lengths"] == tail}
        grid = np.array([[kept[s, h]["best_k"] for h in HOST_MICROSECONDS] for s in SLOTS], float)
        axis.imshow(grid, cmap="Greys", vmin=-2, vmax=14, aspect="auto", origin="lower")
        for i, slots in enumerate(SLOTS):
            for j, host in enumerate(HOST_MICROSECONDS):
                row = kept[slots, host]
                best = row["best_k"]
                text = f"k = {best}\n{row[f'k_{best}']:.2f}"
                axis.text(j, i, text, ha="center", va="center", fontsize=8)
        axis.set_xticks(range(len(HOST_MICROSECONDS)), [str(h) for h in HOST_MICROSECONDS])
        axis.set_yticks(range(len(SLOTS)), [str(s) for s in SLOTS])
        axis.set_xlabel("host time of a draft, microseconds")
        title = "recorded lengths" if tail == "recorded" else f"log-normal lengths, spread {SPREAD:g}"
        axis.set_title(f"best k and its speed over plain, {title}", fontsize=9)
    axes[0].set_ylabel("sequences at once")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    traces = read_traces(HERE / "traces.csv")
    by_k = {k: [t for t in traces if t.k == k] for k in sorted({t.k for t in traces})}
    speeds, best = list(speed_rows(by_k)), list(best_rows(by_k))
    write_rows(HERE / "speed.csv", speeds)
    write_rows(HERE / "best.csv", best)
    put_table(HERE / "README.md", table(speeds))
    draw(best, HERE / "best.png")


if __name__ == "__main__":
    main()
