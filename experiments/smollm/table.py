"""Write the tables of README.md and its figure from acceptance.csv and mismatch.csv.

python -m experiments.smollm.table
"""

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from experiments import commands
from experiments.claims import error, line, markdown, put_table, save
from experiments.engine import bench
from experiments.verdicts import Interval
from specrl_jax.io.plots import COLOURS

Row = dict[str, Any]
HERE = pathlib.Path(__file__).parent
# Below this disagreement a token at equal weights, verifying any engine's rollouts by the learner's pass is worth
# building: asked before it was measured.
WORTH_BUILDING = 5e-4
# (draft, drafts) -> label of the figure
DRAWN = {
    ("in_domain", "sampled"): "EAGLE-3, in-domain",
    ("in_domain", "argmax"): "the same, likeliest drafts",
    ("generic", "sampled"): "EAGLE-3, generic",
    ("suffix", "copied"): "suffix, 4 siblings",
    ("ngram", "copied"): "n-gram",
}


def tokens_of(row: Row) -> Interval:
    return Interval(row["per_verification"], row["low"], row["high"])


def cases(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    return bench.distinct(rows, "temperature", "draft", "drafts")


def tokens_table(rows: Sequence[Row]) -> str:
    """Return tokens per verification by draft and length."""
    lines, lengths = list[list[Any]](), sorted({row["k"] for row in rows})
    for temperature, draft, drafts in cases(rows):
        found = {row["k"]: row for row in bench.matching(rows, temperature=temperature, draft=draft, drafts=drafts)}
        cells = [tokens_of(found[k]).text() if k in found else "" for k in lengths]
        lines.append([draft, drafts, f"{temperature:g}", found[max(found)]["answers"], *cells])
    return markdown(["draft", "drafts", "temperature", "answers", *(f"k = {k}" for k in lengths)], lines)


def positions_table(rows: Sequence[Row]) -> str:
    """Return the share of verifications that keep draft i and all before it, of the longest drafts."""
    longest = max(row["k"] for row in rows)
    lines = []
    for temperature, draft, drafts in cases(rows):
        for row in bench.matching(rows, temperature=temperature, draft=draft, drafts=drafts, k=longest):
            rates = [f"{row[f'accepted_{i + 1}']:.2f}" for i in range(longest)]
            lines.append([draft, drafts, f"{temperature:g}", *rates])
    return markdown(["draft", "drafts", "temperature", *map(str, range(1, longest + 1))], lines)


def mismatch_table(rows: Sequence[Row]) -> str:
    """Return disagreement and KL of all tokens, and what one verification keeps."""
    lines = []
    for row in bench.matching(rows, entropy="all"):
        rate = f"{row['rate']:.2g} ({row['low']:.2g} to {row['high']:.2g})"
        kept = [f"{row[name]:.3f}" for name in ("whole_256", "tokens_256", "whole_2048", "tokens_2048")]
        lines.append([row["rollouts"], row["tokens"], row["disagree"], rate, f"{row['kl']:.2g}", *kept])
    names = ["rollouts", "tokens", "disagree", "a token (95 %)", "KL, nats a token"]
    return markdown([*names, "256 whole", "tokens kept", "2,048 whole", "tokens kept"], lines)


def entropies_table(rows: Sequence[Row]) -> str:
    """Return disagreement by the entropy of the position."""
    bins = [entropy for (entropy,) in bench.distinct(rows, "entropy") if entropy != "all"]
    lines = []
    for (name,) in bench.distinct(rows, "rollouts"):
        found = {row["entropy"]: row for row in bench.matching(rows, rollouts=name)}
        lines.append([name, *(f"{found[entropy]['rate']:.1g}" for entropy in bins)])
    first = bench.distinct(rows, "rollouts")[0][0]
    shares = {row["entropy"]: row["tokens"] for row in bench.matching(rows, rollouts=first)}
    lines.insert(0, ["share of tokens", *(f"{shares[entropy] / shares['all']:.2f}" for entropy in bins)])
    return markdown(["nats", *bins], lines)


def draw(acceptance: Sequence[Row], mismatch: Sequence[Row], path: pathlib.Path) -> None:
    """Draw tokens per verification at temperature 1, and disagreement by precision."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for i, ((draft, drafts), label) in enumerate(DRAWN.items()):
        found = bench.matching(acceptance, temperature=1, draft=draft, drafts=drafts)
        if found:
            line(left, [row["k"] for row in found], [tokens_of(row) for row in found], i, label)
    left.set(xlabel="k, drafted tokens", ylabel="tokens per verification", title="GSM8K questions, temperature 1")
    left.legend(fontsize=8, loc="center right")
    rows = bench.matching(mismatch, entropy="all")
    found_rates = [Interval(row["rate"], row["low"], row["high"]) for row in rows]
    places = range(len(rows))
    # A rate of zero has no place on a logarithmic axis: its upper bound alone is drawn.
    shown = [max(rate.mean, 1e-6) for rate in found_rates]
    right.errorbar(places, shown, error(found_rates), fmt="o", color=COLOURS[0], capsize=3)
    right.axhline(WORTH_BUILDING, ls="--", color="0.4", lw=1)
    right.set_yscale("log")
    right.set_xticks(places, [row["rollouts"] for row in rows], rotation=20)
    right.set(
        ylabel="tokens that the learner's pass draws otherwise", title="Rollouts against the learner, shared noise"
    )
    save(figure, path)


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.add_argument("--figure", type=pathlib.Path, default=HERE / "smollm.png")
    a = parser.parse_args()
    acceptance, mismatch = (bench.read_rows(str(HERE / f"{name}.csv")) for name in ("acceptance", "mismatch"))
    tables = {
        "tokens": tokens_table(acceptance),
        "positions": positions_table(acceptance),
        "mismatch": mismatch_table(mismatch),
        "entropies": entropies_table(mismatch),
    }
    for name, text in tables.items():
        print(text, end="\n\n")
        if not a.small:
            put_table(HERE / "README.md", text, name)
    draw(acceptance, mismatch, a.figure)


if __name__ == "__main__":
    sys.exit(commands.run(main))
