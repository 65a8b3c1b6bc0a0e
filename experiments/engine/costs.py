"""Measure the cost of an iteration by draft length and batch, and compare it with the sum of its parts.

    python -m experiments.engine.costs --output experiments/engine/costs.csv

Random weights: 12 layers, d 768, vocabulary 32,000, an EAGLE-3 head of the same widths that drafts 4,000 ids; float32
and bfloat16, cache in float32, 32 + 128 tokens. In every round each fused iteration (a chunk of the engine) and each of
its parts (in its own loop) is timed once, in random order. With T = forward over one position, compared are

    c(k) = iteration(k) / iteration(0)  and  forward(k + 1) / T + (k head + fc(k)) / T

fc is the projection of k + 1 features and the keys and values of k pairs; `rest` draws drafts, verifies and commits.
overhead = (iteration - forward - k head - fc) / iteration.
"""

import sys
from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from experiments import commands
from experiments.claims import markdown
from experiments.engine import bench
from experiments.engine.cost_parts import RESPONSE, WARM, Case, build, fc, forward, head, iteration, rest
from experiments.engine.peers import MODELS
from specrl_jax.io.plots import COLOURS
from specrl_jax.models import decoder

FIELDS = ("batch", "dtype", "part", "k", "round", "seconds")


def measure(case: Case, lengths: tuple[int, ...], rounds: int) -> Iterator[bench.Row]:
    """Measure rows (part, k, round, seconds per iteration) after one warm-up of every part."""
    count = RESPONSE // (max(lengths) + 1) - WARM
    runs = {(part.__name__, k): part(case, k, count) for part in (iteration, forward, rest) for k in lengths}
    runs |= {("fc", k): fc(case, k, count) for k in lengths if k} | {("head", 1): head(case, 1, count)}
    for run in runs.values():
        run()
    for i, (part, k) in bench.in_turn(list(runs), rounds):
        yield {"part": part, "k": k, "round": i, "seconds": runs[part, k]()}


def table(rows: list[bench.Row]) -> list[dict[str, Any]]:
    """Return one row per k from the rows of one (batch, dtype): quartiles over rounds of the quantities named above."""

    def seconds(part: str, k: int) -> np.ndarray:
        return bench.by_round(rows, "seconds", part=part, k=k)

    plain, policy, one_head = seconds("iteration", 0), seconds("forward", 0), seconds("head", 1)
    out = []
    for k in sorted(k for part, k in bench.distinct(rows, "part", "k") if part == "iteration"):
        whole, verify = seconds("iteration", k), seconds("forward", k)
        heads, features = k * one_head, seconds("fc", k) if k else 0 * plain
        total = verify + heads + features
        columns = {
            "c": whole / plain,
            "c_verify": verify / policy,
            "k_head": heads / policy,
            "fc": features / policy,
            "sum": total / policy,
            "ratio": (whole / plain) / (total / policy),
            "overhead": (whole - total) / whole,
            "rest": seconds("rest", k) / whole,
        }
        out.append({"k": k} | {name: bench.quartiles(values) for name, values in columns.items()})
    return out


def report(rows: list[bench.Row]) -> None:
    for batch, dtype in bench.distinct(rows, "batch", "dtype"):
        lines = table(bench.matching(rows, batch=batch, dtype=dtype))
        print(f"\nbatch {batch}, {dtype}\n\n{markdown(list(lines[0]), [list(line.values()) for line in lines])}")


def plot_costs(path: str, figure_path: str) -> None:
    """Plot c(k) of every batch from the CSV file: measured with quartiles, and as the sum of its parts."""
    rows = bench.read_rows(path)
    dtypes = [dtype for (dtype,) in bench.distinct(rows, "dtype")]
    figure, axes = plt.subplots(1, len(dtypes), figsize=(6 * len(dtypes), 4.5), layout="constrained", squeeze=False)
    for axis, dtype in zip(axes[0], dtypes):
        for color, (batch,) in enumerate(bench.distinct(rows, "batch")):
            lines = table(bench.matching(rows, batch=batch, dtype=dtype))
            k, c = [line["k"] for line in lines], np.array([line["c"] for line in lines])
            bars = (c[:, 1] - c[:, 0], c[:, 2] - c[:, 1])
            axis.errorbar(k, c[:, 1], bars, fmt="o-", color=COLOURS[color], capsize=3, label=f"{batch} sequences")
            axis.plot(k, [line["sum"].median for line in lines], "--", color=COLOURS[color])
        axis.set(title=f"{dtype} (dashed: sum of the parts)", xlabel="k, drafted tokens", ylabel="c, plain iterations")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(figure_path, dpi=110)
    plt.close(figure)


def main() -> None:
    models = MODELS | decoder.PRESETS
    parser = commands.Parser(__doc__)
    parser.sizes(batches=([1, 4, 8, 16], [1]), lengths=([1, 2, 3, 5, 7], [1], "k; 0 is always measured"), rounds=(9, 1))
    parser.add_argument("--model", choices=models, default="medium", help="sizes; at least 7 layers", small="nano_deep")
    parser.add_argument("--draft-vocab", type=int, default=4000, small=40)
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"], small=["float32"]
    )
    parser.add_argument("--output", default="experiments/engine/costs.csv")
    parser.add_argument("--figure", default="experiments/engine/c_k_B.png")
    a = parser.parse_args()
    lengths = tuple(sorted({0, *a.lengths}))
    with bench.csv_writer(a.output, FIELDS) as write:
        for batch in a.batches:
            for dtype in a.dtypes:
                case = build(models[a.model], a.draft_vocab, batch, dtype, lengths)
                for row in measure(case, lengths, a.rounds):
                    write({"batch": batch, "dtype": dtype} | row)
    report(bench.read_rows(a.output))
    plot_costs(a.output, a.figure)


if __name__ == "__main__":
    sys.exit(commands.run(main))
