"""Generation by the training of the head and by draft length (Tables 3 and 5 of arXiv 2604.26779, which have k = 3).

Commands: experiments/claims.py.
"""

import pathlib

import matplotlib.pyplot as plt
import numpy as np

from experiments.claims import (
    STYLES,
    Claim,
    Interval,
    Row,
    benchmark_keys,
    by_seed,
    interval,
    judge_ratio,
    line,
    main,
    markdown,
    save,
)
from experiments.draft_init.sweep import HEADS, LENGTHS, get_sweep, paths

SIDES = [*[f"k_{k}" for k in LENGTHS], "adaptive"]
KEYS = benchmark_keys(SIDES)
# RL-Zero at k = 3: (acceptance length, generation speedup).
PAPER = {
    "generic, offline": (2.88, 1.51),
    "generic, online": (3.04, 1.63),
    "in-domain, offline": (3.32, 1.77),
    "in-domain, online": (3.29, 1.78),
}


def values(rows: list[Row], head: str, side: str, what: str) -> np.ndarray:
    """Return [seeds] of one head. The folder identifies an offline head, since its runs set no policy path."""
    return by_seed(rows, f"benchmark/{side}_{what}", **paths(head))


def table(rows: list[Row]) -> str:
    header, lines = ["head"], []
    for side in SIDES:
        header += [f"{side.replace('_', ' = ')}: tokens per verification", "over plain"]
    for head in HEADS:
        cells = [head]
        for side in SIDES:
            for i, what in enumerate(("acceptance_length", "over_plain")):
                paper = f" ({PAPER[head][i]})" if side == "k_3" else ""
                cells.append(f"{interval(values(rows, head, side, what))}{paper}")
        lines.append(cells)
    return markdown(header, lines)


def ratio(rows: list[Row], head: str, other: str) -> Interval:
    """Return the ratio of two heads' generation speed at k = 3, paired by seed."""
    return interval(values(rows, head, "k_3", "over_plain") / values(rows, other, "k_3", "over_plain"))


def claims(rows: list[Row]) -> list[Claim]:
    made = []
    for head, other, place in (
        ("generic, offline", "in-domain, offline", "Table 3"),
        ("generic, online", "generic, offline", "Table 5"),
        ("in-domain, online", "in-domain, offline", "Table 5"),
    ):
        paper = round(PAPER[head][1] / PAPER[other][1], 2)
        text = f"Zero: generation at k = 3, head {head}, over that with {other}"
        made.append(judge_ratio(text, paper, place, ratio(rows, head, other)))
    return made


def draw(rows: list[Row], path: pathlib.Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for i, head in enumerate(HEADS):
        for axis, what in zip(axes, ("acceptance_length", "over_plain")):
            found = [interval(values(rows, head, f"k_{k}", what)) for k in LENGTHS]
            line(axis, LENGTHS, found, STYLES[i], str(0.2 * i), head)
    for i, axis in enumerate(axes):
        for j, head in enumerate(HEADS):
            # The paper's k = 3, drawn a little to the right so that it does not cover ours.
            axis.plot(3.35, PAPER[head][i], STYLES[j][0], color=str(0.2 * j), mfc="none", ms=8)
        axis.set(xlabel="draft length k, tokens", xticks=LENGTHS, title="hollow: the paper, Qwen3-8B, k = 3")
        axis.title.set_fontsize(9)
        axis.legend(fontsize=8)
    axes[0].set(ylabel="tokens per verification")
    axes[1].set(ylabel="generation speed over plain decoding")
    axes[1].axhline(1, color="k", lw=0.8)
    save(figure, path)


if __name__ == "__main__":
    main(__file__, __doc__, get_sweep(), KEYS, table, draw)
