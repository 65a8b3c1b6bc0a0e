"""Generation by the training of the head and by draft length (Tables 3 and 5 of arXiv 2604.26779, which have k = 3).

Commands: experiments/claims.py.
"""

import pathlib

import matplotlib.pyplot as plt
import numpy as np

from experiments.claims import COLOURS, STYLES, Row, benchmark_keys, by_seed, line, main, markdown, numbers, save
from experiments.draft_init.sweep import HEADS, LENGTHS, get_sweep, paths
from experiments.engine.bench import distinct, matching, read_rows
from experiments.verdicts import Claim, interval, judge_level, judge_ratio, ratio_interval

OFFLINE = pathlib.Path(__file__).parent / "offline.csv"
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
                of = (interval, ratio_interval)[i]
                cells.append(f"{of(values(rows, head, side, what))}{paper}")
        lines.append(cells)
    return markdown(header, lines)


def ratios(rows: list[Row], head: str, other: str) -> np.ndarray:
    """Return [seeds]: the ratio of two heads' generation speed at k = 3."""
    return values(rows, head, "k_3", "over_plain") / values(rows, other, "k_3", "over_plain")


def claims(rows: list[Row]) -> list[Claim]:
    made = []
    for head, other, place in (
        ("generic, offline", "in-domain, offline", "Table 3"),
        ("generic, online", "generic, offline", "Table 5"),
        ("in-domain, online", "in-domain, offline", "Table 5"),
    ):
        paper = round(PAPER[head][1] / PAPER[other][1], 2)
        text = f"Zero: generation at k = 3, head {head}, over that with {other}"
        made.append(judge_ratio(text, paper, place, ratios(rows, head, other)))
    for head, (length, _) in PAPER.items():
        text = f"Zero: EAGLE-3, k = 3, tokens per verification, head {head}"
        made.append(judge_level(text, length, "Tables 3, 5", values(rows, head, "k_3", "acceptance_length")))
    return made


def draw(rows: list[Row], path: pathlib.Path) -> None:
    """Draw one column of panels a head: tokens per verification and speed by draft length, with their numbers."""
    figure, axes = plt.subplots(2, len(HEADS), figsize=(14, 6.5), layout="constrained", sharex=True, sharey="row")
    whats = {"acceptance_length": "tokens per verification", "over_plain": "generation over plain decoding"}
    for column, head in zip(axes.T, HEADS):
        for i, (axis, what) in enumerate(zip(column, whats)):
            of = (interval, ratio_interval)[i]
            found = [of(values(rows, head, f"k_{k}", what)) for k in LENGTHS]
            line(axis, LENGTHS, found, 0, "here")
            numbers(axis, LENGTHS, found)
            # The paper's k = 3, drawn a little to the right so that it does not cover ours.
            axis.plot(3.4, PAPER[head][i], "D", color="k", mfc="none", ms=7, label="the paper, Qwen3-8B")
            side = {"textcoords": "offset points", "va": "center", "fontsize": 7}
            axis.annotate(f"{PAPER[head][i]}", (3.4, PAPER[head][i]), (7, 0), **side)
        column[0].set_title(head, fontsize=10)
        column[1].set(xlabel="draft length k, tokens", xticks=LENGTHS)
        column[1].axhline(1, color="k", lw=0.8)
    for axis, text in zip(axes[:, 0], whats.values()):
        axis.set_ylabel(text)
        axis.margins(y=0.1)
    axes[0, 0].legend(fontsize=8, loc="upper left")
    save(figure, path)
    draw_positions(read_rows(str(OFFLINE)), path.with_name("offline.png"))


def draw_positions(rows: list[Row], path: pathlib.Path) -> None:
    """Draw one panel a way of training: the share of verifications that keep draft i, by position i and seed."""
    longest = max(row["k"] for row in rows)
    rows = matching(rows, k=longest)
    trained, positions = distinct(rows, "prompts", "loss", "ttt_steps"), np.arange(1, longest + 1)
    columns = 3
    lines = -(-len(trained) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(13, 3.2 * lines), layout="constrained", sharey=True)
    for axis, (prompts, loss, steps) in zip(axes.flat, trained):
        found = matching(rows, prompts=prompts, loss=loss, ttt_steps=steps)
        for i, row in enumerate(found):
            kept = [row[f"kept_{n}"] for n in positions]
            axis.plot(positions, kept, STYLES[i], color=COLOURS[i], ms=4, label=f"seed {row['seed']}")
        mean = interval([row["acceptance_length"] for row in found]).mean
        title = f"{prompts}, {loss}, {steps} unrolled step{'s' * (steps != 1)}"
        axis.set_title(f"{title}\n{mean:.2f} tokens per verification", fontsize=9)
        axis.set(ylim=(0, 1.02), xlabel="position of the draft token", xticks=positions)
        axis.legend(fontsize=8)
    for axis in axes.flat[len(trained) :]:
        axis.set_visible(False)
    figure.supylabel("share of verifications that keep it and all before it", fontsize=10)
    save(figure, path)


if __name__ == "__main__":
    main(__file__, __doc__, get_sweep(), KEYS, table, draw)
