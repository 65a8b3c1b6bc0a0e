"""Simulate rollouts that outlive a step: 8B on 32 GPUs, 235B on 2,048.

    python -m experiments.scale_projection.updates

Every way to let rollouts and updates follow each other (experiments/simulator/updates.py), by the chance that new
weights draw another token with the same noise. Scenarios, draws and loop are those of `grid.py`; a way with devices for
rollouts alone has their best number by the formula. Writes updates.csv and its table: medians of the draws that Table 1
allows and whose synchronous step by turns fits in memory, and 90 % of them. Some ten minutes on one core.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Collection, Sequence

import numpy as np

from experiments import commands
from experiments.claims import markdown, show_table
from experiments.engine.bench import distinct, matching, read_rows
from experiments.scale_projection import grid, large, paper, public
from experiments.scale_projection.ours import Row
from experiments.simulator.grid import write_rows
from experiments.simulator.lengths import LogNormalLengths
from experiments.simulator.modes import DISAGREEMENTS, MODES, Update, break_even, divided, formula, simulate_update
from experiments.simulator.scenario import Points, Scenario, best_split, points, predict
from experiments.verdicts import Interval

HERE = pathlib.Path(__file__).parent
DEVICES = {"8B": 32, "235B": 2048}
LAGS = (1, 2)
SHOWN = DISAGREEMENTS[:-1]  # of the table
AT = 1e-5  # disagreement at which the table shows what is kept
# Lengths that no limit cuts: a quarter of it on average, with the longest tail of the priors.
LONG_TAIL = 0.25, max(paper.PRIORS["spread"])


def long_tailed(s: Scenario) -> Scenario:
    """Return the scenario with long-tailed lengths, which Table 1 does not allow."""
    share, spread = LONG_TAIL
    lengths = LogNormalLengths(share * s.workload.lengths.limit, s.workload.lengths.limit, spread)
    return dataclasses.replace(s, workload=dataclasses.replace(s.workload, lengths=lengths))


def world_rows(s: Scenario, p: Points) -> list[Row]:
    """Return the rows of one scenario: a way, a disagreement, and what follows."""
    base = simulate_update(s, p, MODES["synchronous"]).seconds
    rows: list[Row] = []
    for lag in LAGS:
        q = p._replace(lag=np.array([lag]))
        q = q._replace(rollout_devices=best_split(s, q))
        faster = float(predict(s, p).step.total[0] / predict(s, q).step.total[0])
        rows.append(
            {"way": f"lag {lag}", "disagreement": 0.0, "seconds": base / faster, "faster": faster, "stale": 1.0}
        )
    for name, update in MODES.items():
        rows += _way(s, p, name, update, base)
    return rows


def _way(s: Scenario, p: Points, name: str, update: Update, base: float) -> list[Row]:
    """Return the rows of one way; the first says from which disagreement on it gains nothing, by turns and split."""
    rows = []
    for d in DISAGREEMENTS if update.exact else (0.0,):
        q = divided(s, p, update, disagreement=d)
        found = simulate_update(s, q, update, disagreement=d)
        row = {"way": name, "disagreement": d, "faster": base / found.seconds} | found._asdict()
        row["rollout_devices"] = int(q.rollout_devices[0])
        if update.beside:
            row["formula_over_events"] = float(formula(s, q, update, disagreement=d)[0]) / found.seconds
        rows.append(row)
    if update.exact:
        rows[0]["break_even"] = break_even(np.array(DISAGREEMENTS), np.array([r["seconds"] for r in rows]), base)
        q = divided(s, p, update)
        apart = simulate_update(s, q, MODES["synchronous"]).seconds
        same = np.array([simulate_update(s, q, update, disagreement=d).seconds for d in DISAGREEMENTS])
        rows[0]["break_even_same_split"] = break_even(np.array(DISAGREEMENTS), same, apart)
        rows[0]["faster_same_split"] = apart / same[0]
    return rows


def quantiles(worlds: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the rows with medians over the worlds, and `_low` and `_high` where there are several."""
    out = []
    for same in zip(*worlds, strict=True):
        row = {name: same[0][name] for name in ("way", "disagreement")}
        for name in (name for name in same[0] if name not in row):
            values = np.array([r[name] for r in same], float)
            found = np.quantile(values, (0.5, 0.05, 0.95), method="inverted_cdf")
            ends = ("", "_low", "_high") if len(worlds) > 1 else ("",)
            row |= {name + end: f"{x:.4g}" for end, x in zip(ends, found)}
        out.append(row)
    return out


def cases(kept: Sequence[paper.Calibrated], names: Collection[str]) -> list[Row]:
    rows = []
    for case in (case for case in grid.CASES if case.name in names):
        for drafts, k, tokens in (("none", 0, 1.0), (f"k = {case.k}", case.k, case.acceptance)):
            p, shared = points(DEVICES[case.name], k, tokens), {"case": case.name, "drafts": drafts}
            scenarios = [case.scenario(large.fused(c)) for c in kept]
            fitting = [world_rows(s, p) for s in scenarios if predict(s, p).fits[0]]
            rows += [shared | {"lengths": "fitted", "draws": len(fitting)} | r for r in quantiles(fitting)]
            tailed = [world_rows(long_tailed(case.scenario(large.fused(paper.calibrate()))), p)]
            rows += [shared | {"lengths": "long tail", "draws": 1} | r for r in quantiles(tailed)]
    columns = dict.fromkeys(name for r in rows for name in r)
    return [{name: r.get(name, "") for name in columns} for r in rows]


def table(rows: Sequence[Row]) -> str:
    """Return the Markdown table of the rows with drafts."""
    lines, drafting = [], [r for r in rows if r["drafts"] != "none" and r["way"] != "synchronous"]
    for case, lengths, way in distinct(drafting, "case", "lengths", "way"):
        own = matching(drafting, case=case, lengths=lengths, way=way)
        cells = {r["disagreement"]: _interval(r, "faster") for r in own}
        at = next((r for r in own if r["disagreement"] == AT), None)
        kept = f"{at['kept']:.2f}, {at['rest']:.2f}" if at else ""
        lines.append(
            [
                f"{case}, {DEVICES[case]:,} GPUs, {lengths}",
                way,
                *(cells.get(d, "") for d in SHOWN),
                *(_chance(own[0][name]) for name in ("break_even", "break_even_same_split")),
                kept,
                f"{own[0]['stale']:.2f}",
            ]
        )
    head = ["", "way", *(f"d = {d:g}" for d in SHOWN), "break-even d", "on the same split"]
    return markdown([*head, f"kept, rho at {AT:g}", "stale"], lines)


def _interval(r: Row, name: str) -> Interval:
    ends = (r.get(name + end, "") for end in ("_low", "_high"))  # of one draw there are none
    low, high = (float("nan") if end == "" else end for end in ends)
    return Interval(r[name], low, high)


def _chance(value: float | str) -> str:
    """Return a break-even as text; 0 is never, inf beyond what was simulated."""
    if isinstance(value, str):
        return value
    return {0: "never", float("inf"): f"above {DISAGREEMENTS[-1]:g}"}.get(value, f"{value:.0e}")


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(draws=(12, 1, "draws behind every interval that Table 1 allows"))
    parser.add_argument("--output", type=pathlib.Path, default=HERE, help="folder of rows and page")
    names = [case.name for case in grid.CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, small=["8B"])
    a = parser.parse_args()
    hosts = public.calibrate()
    kept = paper.worlds(a.draws, {name: hosts.factors[name] for name in hosts.values}).kept
    rows = str(a.output / "updates.csv")
    write_rows(rows, cases(kept, a.cases))
    show_table(a.output, HERE, table(read_rows(rows)), "updates")


if __name__ == "__main__":
    sys.exit(commands.run(main))
