"""Table and figure of the runs of sweep.py: acceptance by RL step, compared with the paper's two workloads.

    python -m experiments.launch --config configs/rlzero_tiny.py --sweep experiments/online_adaptation/sweep.py
    python -m experiments.online_adaptation.report --workdir runs/sweeps/rlzero_tiny_online_adaptation

Writes results.csv (one row per step and run) and acceptance.png beside this file; without --workdir the figure alone,
from results.csv.
"""

import pathlib
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from experiments.claims import COLOURS, STYLES, save
from experiments.online_adaptation.sweep import DRAFTS, get_sweep
from experiments.sweep_report import run_report
from experiments.verdicts import Claim, judge_ratio, judge_share

HERE = pathlib.Path(__file__).parent
LENGTH = "spec/acceptance_length"
POSITIONS = [f"spec/acceptance_rate_pos_{i}" for i in (1, 2, 3)]
FIELDS = ["draft", "seed", "step", LENGTH, *POSITIONS]
FIELDS += ["spec/acceptance_predicted", "draft/loss", "draft/target_entropy", "draft/kl", "draft/seconds", "time/train"]
FIELDS += ["spec/draft_length_mean", "time/generate", "reward/mean"]
# Tables 3 and 5 of arXiv 2604.26779, acceptance length at k = 3: Zero, Think.
PAPER = {
    "in-domain, offline": (3.32, 2.77),
    "in-domain, online": (3.29, 2.74),
    "generic, offline": (2.88, 2.40),
    "generic, online": (3.04, 2.55),
}
WINDOW = 5  # steps averaged
ON = 0.5  # drafted tokens per verification; the probes of a controller that does not draft stay below it
CLOSED_AT = 30  # RL step at which the gap of the generic head is measured


def name_run(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run's draft and seed."""
    (name,) = [name for name, overrides in DRAFTS.items() if overrides.items() <= run.items()]
    return {"draft": name, "seed": run["seed"]}


def lengths(rows: list[dict[str, Any]], draft: str, seed: int) -> np.ndarray:
    """Return [steps]: the acceptance length of one run."""
    return np.array([r[LENGTH] for r in rows if (r["draft"], r["seed"]) == (draft, seed) and LENGTH in r])


def window_mean(series: np.ndarray, step: int) -> float:
    """Compute the mean over the WINDOW steps that end with `step`, counted from 1."""
    return float(series[max(step - WINDOW, 0) : step].mean())


def switched_on(rows: list[dict[str, Any]]) -> int | None:
    """Return the step after the last one with fewer than ON drafted tokens per verification, None if there is none."""
    off = [row["step"] for row in rows if row.get("spec/draft_length_mean", ON) < ON]
    return None if off and off[-1] == rows[-1]["step"] else off[-1] + 1 if off else 1


def gap_closed(rows: list[dict[str, Any]]) -> list[float]:
    """Return, by seed, the share of the gap between generic and in-domain head that is closed at step CLOSED_AT."""
    closed = []
    for seed in sorted({row["seed"] for row in rows}):
        best, low, online = (
            lengths(rows, d, seed) for d in ("in-domain, offline", "generic, offline", "generic, online")
        )
        top, bottom, learnt = (window_mean(series, CLOSED_AT) for series in (best, low, online))
        closed.append((learnt - bottom) / (top - bottom))
    return closed


def paper_gap_closed() -> float:
    """Return the share of the gap between the two heads that online learning closes in the paper, RL-Zero."""
    best, low, online = (PAPER[name][0] for name in ("in-domain, offline", "generic, offline", "generic, online"))
    return round((online - low) / (best - low), 2)


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Judge Tables 3 and 5 of arXiv 2604.26779 (RL-Zero) by rows of results.csv, which may have empty cells."""
    rows = [{name: value for name, value in row.items() if value != ""} for row in rows]
    seeds = sorted({row["seed"] for row in rows})
    text = f"Zero: share of a generic head's gap that online learning closes in {CLOSED_AT} steps"
    made = [judge_share(text, paper_gap_closed(), "Table 5", gap_closed(rows))]
    series = {d: [lengths(rows, d, s) for s in seeds] for d in PAPER}
    for step in (CLOSED_AT, len(series["in-domain, online"][0])):
        pairs = zip(series["in-domain, online"], series["in-domain, offline"])
        ours = [window_mean(online, step) / window_mean(offline, step) for online, offline in pairs]
        text = f"Zero: tokens per verification of an in-domain head, online over offline, after {step} steps"
        paper = round(PAPER["in-domain, online"][0] / PAPER["in-domain, offline"][0], 2)
        made.append(judge_ratio(text, paper, "Table 5", ours))
    return made


def print_tables(rows: list[dict[str, Any]]) -> None:
    seeds = sorted({row["seed"] for row in rows})
    print(f"acceptance length, k = 3, mean of {WINDOW} steps: first, at step {CLOSED_AT}, last; paper Zero, Think")
    for draft in DRAFTS:
        shown = []
        for seed in seeds:
            series = lengths(rows, draft, seed)
            shown.append(" ".join(f"{window_mean(series, at):.3f}" for at in (WINDOW, CLOSED_AT, len(series))))
        print(f"  {draft:<19} {'   '.join(shown)}   {PAPER.get(draft, '')}")
    share: dict[str, list[float]] = {"offline": [], "online": []}
    on = []
    for seed in seeds:
        random = lengths(rows, "random, online", seed)
        for kind, found in share.items():
            series = lengths(rows, f"in-domain, {kind}", seed)
            found.append((window_mean(random, len(random)) - 1) / (window_mean(series, len(series)) - 1))
        on.append(switched_on([r for r in rows if (r["draft"], r["seed"]) == ("random, adaptive", seed)]))
    print(f"gap of the generic head closed at step {CLOSED_AT}: {np.round(gap_closed(rows), 3)}; the paper 0.36, 0.41")
    for kind, found in share.items():
        print(
            f"random head's accepted drafts over those of the in-domain head, {kind}, last steps: {np.round(found, 3)}"
        )
    print(f"first step from which on the controller drafts with a random head: {on}")
    for draft in DRAFTS:
        timed = [r["draft/seconds"] / r["time/train"] for r in rows if r["draft"] == draft and "draft/seconds" in r]
        if timed:
            print(f"draft learning's share of the train phase, {draft}: {np.median(timed):.3f}")


def by_position(rows: list[dict[str, Any]], draft: str, name: str) -> tuple[list[int], np.ndarray]:
    """Return (steps, [3, steps]: mean, lowest and highest seed) of a metric of one draft, at the steps that have it.

    A controller that does not draft in some step leaves its seed out there.
    """
    found: dict[int, list[float]] = {}
    for row in (row for row in rows if row["draft"] == draft and name in row):
        found.setdefault(row["step"], []).append(row[name])
    steps = sorted(found)
    return steps, np.array([[of(found[step]) for step in steps] for of in (np.mean, np.min, np.max)])


def plot(rows: list[dict[str, Any]]) -> None:
    """Draw one panel a draft: the share of verifications that keep each draft token, by RL step."""
    figure, axes = plt.subplots(2, 3, figsize=(14, 7), layout="constrained", sharex=True, sharey=True)
    for axis, draft in zip(axes.flat, DRAFTS):
        for i, name in enumerate(POSITIONS):
            steps, values = by_position(rows, draft, name)
            style = {"color": COLOURS[i], "ms": 4, "markevery": 6, "label": f"draft {i + 1}"}
            axis.plot(steps, values[0], STYLES[i], **style)
            axis.fill_between(steps, *values[1:], color=COLOURS[i], alpha=0.25, lw=0)
        series = by_position(rows, draft, LENGTH)[1][0]
        shown = ", ".join(f"{window_mean(series, at):.2f}" for at in (WINDOW, CLOSED_AT, len(series)))
        paper = f" (the paper {PAPER[draft][0]})" if draft in PAPER else ""
        axis.set_title(f"{draft}\ntokens per verification: {shown}{paper}", fontsize=9)
    axes[0, 0].set_ylim(0, 1.02)
    axes[0, 0].legend(fontsize=9, loc="lower left")
    at = f"tokens are means of {WINDOW} steps: the first, those before step {CLOSED_AT}, the last"
    figure.supxlabel(f"RL step (line: mean over seeds, band: all of them; {at})", fontsize=10)
    figure.supylabel("share of verifications that keep the draft token and all before it", fontsize=10)
    save(figure, HERE / "acceptance.png")


if __name__ == "__main__":
    run_report(__doc__, HERE, get_sweep(), FIELDS, (plot, print_tables), name_run)
