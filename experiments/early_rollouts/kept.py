"""Measure how much of what earlier weights drew the newest weights draw too, by learning rate and versions between.

    python -m experiments.early_rollouts.kept

For two versions of the policy of one RL run: 128 rollouts of the older, verified under the newer. Kept is the share of
tokens before the first disagreement; rho the longest rest that has to be drawn again, over the longest answer;
break-even the disagreement per token 1 / (mean length of an answer), above which most of a rollout is lost. The same
weights (0 versions between) show what rounding does. Beside the measured disagreements stands what is expected of the
two distributions under shared Gumbel noise, and its bound by their total variation (bound.py). Writes kept.csv and its
table.
"""

import itertools
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments import commands
from experiments.claims import markdown, show_table, write_rows
from experiments.early_rollouts.bound import disagreement
from experiments.early_rollouts.runs import FOLDER, RATES, STEPS, Versions, open_versions
from experiments.engine import bench
from experiments.rooms import bases
from specrl_jax.decoding.continuation import Continuation
from specrl_jax.decoding.requests import CallOptions
from specrl_jax.decoding.rollouts import Rollouts

OUTPUT = pathlib.Path(__file__).parent / "kept.csv"
BETWEEN = (0, 1, 4)


def pair(versions: Versions, older: int, newer: int) -> dict[str, float]:
    """Return what of the older version's rollouts of a step's problems the newer one keeps."""
    engine, work = versions.rollout.engine, versions.workloads[0]
    drawn = [versions.weights(step) for step in (older, newer)]
    seed = 100 * older
    before = engine.generate(drawn[0], work.prompts, work.samples, seed=seed)
    after = engine.generate(
        drawn[1],
        work.prompts,
        work.samples,
        seed=seed,
        options=CallOptions(continuation=Continuation(earlier=responses(before))),
    )
    lengths, kept = before.response_length, after.features["reverified"].values
    rest = after.response_length - kept
    tokens, disagreements = int(kept.sum()), int((kept < lengths).sum())
    learner = versions.learner
    policies = versions.policy(older), versions.policy(newer)
    chances = disagreement(*policies, learner.plan.model, learner.plan.learner_partition, before, kept)
    return {
        "tokens": int(lengths.sum()),
        "kept": tokens,
        "disagreements": disagreements,
        "longest": int(after.response_length.max()),
        "longest_rest": int(rest.max()),
        "mean_length": float(lengths.mean()),
    } | chances._asdict()


def responses(rollouts: Rollouts) -> dict[int, np.ndarray]:
    """Return each rollout's response by its id."""
    return {int(number): rollouts.tokens[i, rollouts.response_part(i)] for i, number in enumerate(rollouts.rollout_id)}


def measure(rate: float, seed: int, dtype: str, folder: str) -> Iterator[dict[str, Any]]:
    versions = open_versions(rate, seed, dtype, folder)
    for between in BETWEEN:
        for older in range(1, STEPS + 1 - between, 2):
            found = pair(versions, older, older + between)
            yield {"learning_rate": rate, "seed": seed, "dtype": dtype, "between": between, "older": older} | found


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for rate, dtype, between in bench.distinct(rows, "learning_rate", "dtype", "between"):
        found = bench.matching(rows, learning_rate=rate, dtype=dtype, between=between)
        kept = [row["kept"] / row["tokens"] for row in found]
        # One disagreement ends what can be seen of a rollout.
        a_token = sum(row["disagreements"] for row in found) / sum(row["kept"] + row["disagreements"] for row in found)
        rho = [row["longest_rest"] / row["longest"] for row in found]
        tested = np.array([row["kept"] + row["disagreements"] for row in found])
        chances = [
            f"{np.average([row[name] for row in found], weights=tested):.1e}"
            for name in ("variation", "expected", "bound")
        ]
        entropy = np.average([row["entropy"] for row in found], weights=tested)
        even = np.mean([1 / row["mean_length"] for row in found])
        shown = f"{np.mean(kept):.3f} ({min(kept):.3f} to {max(kept):.3f})"
        last = f"{even:.1e}", f"{np.mean(rho):.2f}", f"{entropy:.2f}"
        lines.append([f"{rate:g}", dtype, between, len(found), shown, f"{a_token:.1e}", *chances, *last])
    head = ["learning rate", "rollout weights", "versions between", "pairs", "tokens kept", "disagreements per token"]
    head += ["total variation", "expected", "bound"]
    return markdown([*head, "break-even", "rho", "entropy, nats"], lines)


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(seeds=(bases.SEEDS, [0]), dtypes=(["float32", "bfloat16"], ["float32"]))
    parser.add_argument("--rates", type=float, nargs="+", choices=RATES, default=RATES, small=[1e-4])
    parser.add_argument("--folder", default=FOLDER, help="of the runs")
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    a = parser.parse_args()
    runs = itertools.product(a.rates, a.seeds, a.dtypes)
    rows = [row for rate, seed, dtype in runs for row in measure(rate, seed, dtype, a.folder)]
    write_rows(a.output, rows)
    show_table(a.output.parent, OUTPUT.parent, table(rows), "kept")


if __name__ == "__main__":
    sys.exit(commands.run(main))
