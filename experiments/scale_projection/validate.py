"""Compare the performance model with our runs, with the paper's tables and with its simulated rows.

    python -m experiments.scale_projection.validate

Prints every constant with its interval, every comparison, and the targets; writes validation.csv, effects.csv,
large.csv, sensitivity.csv, constants.csv and two figures beside this file. Takes a minute on one core; nothing is timed
and no device is used.
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.scale_projection import apart, effects, figures, large, ours, paper
from experiments.scale_projection.calibrate import Calibration, errors
from specrl_jax.simulator.grid import write_rows
from specrl_jax.simulator.hardware import HARDWARE

HERE = pathlib.Path(__file__).parent
Row = dict[str, Any]
# Set -> (largest median error, largest worst error) of its held-out rows.
TARGETS = {"iteration c": (0.10, 0.25), "rollout c": (0.10, 0.25)}
LARGE_COLUMNS = ("view", "lengths", "table", "row", "use", "measured", "predicted", "low", "high", "error", "share")
STEP_TARGET, PAPER_TARGET, LARGE_TARGET = 0.10, 0.10, 0.15


def print_ours(rows: list[Row], fits: list[Calibration]) -> None:
    print("OUR OWN RUNS")
    for fit in fits:
        print("\n".join(fit.lines()))
    for name in dict.fromkeys(row["set"] for row in rows):
        for use in ("fitted", "held out"):
            kept = [r for r in rows if (r["set"], r["use"]) == (name, use)]
            if not kept:
                continue
            found = errors([r["predicted"] for r in kept], [r["measured"] for r in kept])
            line = f"  {name:<18} {use:<9} {found}"
            if use == "held out" and name in TARGETS:
                median, worst = TARGETS[name]
                reached = found.median <= median and found.worst <= worst
                line += f"; wanted {median:.0%}, {worst:.0%}: {_verdict(reached)}"
            print(line)
    steps = [r for r in rows if r["set"].startswith(("step ", "split ")) and r["use"] == "held out"]
    phases = [r for r in steps if r["set"] != "step total"]
    off = [r for r in phases if abs(r["predicted"] / r["measured"] - 1) > STEP_TARGET]
    within = len(phases) - len(off)
    print(f"  {within} of {len(phases)} held-out phases, and asynchronous steps, within {STEP_TARGET:.0%}; not:")
    for r in off:
        print(f"    {r['set']}, {r['cell']}: {r['measured']:.4f} s, predicted {r['predicted']:.4f}")


def print_paper(rows: list[Row], target: float) -> None:
    for r in rows:
        shown = f" ({r['low']:.2f} to {r['high']:.2f})" if "low" in r else ""
        verdict = "" if r["use"] in ("fitted", "solved on") else f"  {_verdict(abs(r['error']) <= target)}"
        name = f"{r['table']}: {r['row']}"
        line = f"  {name:<52} {r['use']:<15} {r['measured']:8.2f} {r['predicted']:8.2f}{shown} {r['error']:+6.0%}"
        print(line + verdict)


def _verdict(reached: bool) -> str:
    return "reached" if reached else "missed"


def with_intervals(rows: list[Row], low: np.ndarray, high: np.ndarray) -> list[Row]:
    return [r | {"low": round(float(a), 4), "high": round(float(b), 4)} for r, a, b in zip(rows, low, high)]


def effect_rows(found: Sequence[effects.Effect]) -> list[Row]:
    shared = ("effect", "constant", "value", "solved_on")
    return [dict(zip(shared, (e.name, e.constant, f"{e.value:.4g}", e.solved_on))) | r for e in found for r in e.rows]


def large_views(c: paper.Calibrated, graphs: effects.Effect) -> list[Row]:
    """Compute the 235B rows under three views of verification with the lengths of each workload."""
    views = {
        "free verification": (large.assumed(c), True),
        "this project's loop": (large.fused(c), False),
        "as measured in vLLM at 8B": (large.vllm(c, graphs), False),
    }
    out = []
    for view, (calibrated, free) in views.items():
        for workload in paper.WORKLOADS:
            found = large.large_rows(calibrated, workload, free)
            out += [{"view": view, "lengths": workload} | r for r in found]
    return out


def print_large(rows: list[Row]) -> None:
    for view, lengths in dict.fromkeys((r["view"], r["lengths"]) for r in rows):
        print(f"\n235B, {view}, lengths of {lengths}")
        kept = [r for r in rows if (r["view"], r["lengths"]) == (view, lengths)]
        if view == "free verification":
            print_paper(kept, LARGE_TARGET)
            continue
        for r in kept:
            interval = f" ({r['low']:.2f} to {r['high']:.2f})" if "low" in r else ""
            print(f"  {r['table']}: {r['row']:<36} {r['predicted']:.2f}{interval}; its simulator {r['measured']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=60, help="draws of the assumptions for the paper's rows")
    draws = parser.parse_args().draws

    machine, pace, fits = ours.calibrated()
    rows = ours.check_iterations(machine) + ours.check_rollouts(machine) + ours.check_steps(machine, pace)
    ahead = apart.measured()
    contention = apart.solve_contention(ahead)
    rows += apart.check(ahead, contention)
    print_ours(rows, fits)
    print(f"  contention of the fake devices {contention:.2f}, solved on one run with lag 1")

    print("\nTHE PAPER'S TABLES (arXiv 2604.26779)")
    gb200 = HARDWARE["gb200"]
    c = paper.calibrate(gb200)
    print("\n".join(c.fit.lines()))
    fitted = paper.fitted_rows(c)
    predicted = with_intervals(paper.predicted_rows(c), *paper.intervals(gb200, draws))
    print_paper(fitted + predicted, PAPER_TARGET)
    near = sum(abs(r["error"]) <= PAPER_TARGET for r in predicted)
    print(f"  {len(c.fit.values)} fitted constants, {len(predicted)} rows predicted, {near} within {PAPER_TARGET:.0%}")
    inside = sum(r["low"] <= r["measured"] <= r["high"] for r in predicted)
    print(f"  {inside} of {len(predicted)} measured rows inside the 90 % interval, which leaves out missing effects")

    print("\nEFFECTS THAT WERE LEFT OUT, ADDED ONE BY ONE")
    added = [effects.captured_graphs(c), *effects.lookups(c), *effects.learner_floor(c)]
    for e in added:
        print(f"{e.name}: {e.constant} = {e.value:.3g}, solved on {e.solved_on}")
        print_paper(e.rows, PAPER_TARGET)

    big = large_views(c, added[0])
    print_large(big)

    changed = large.sensitivity()
    print("\nONE ASSUMPTION CHANGED, free verification: " + "; ".join(list(changed[0])[1:]))
    for r in changed:
        print(f"  {r['changed']:<40}" + "".join(f"{value:8.2f}" for value in list(r.values())[1:]))

    write_rows(str(HERE / "validation.csv"), [_as_csv(r) for r in rows] + [_as_csv(r) for r in fitted + predicted])
    write_rows(str(HERE / "effects.csv"), effect_rows(added))
    write_rows(str(HERE / "large.csv"), [dict.fromkeys(LARGE_COLUMNS, "") | r for r in big])
    write_rows(str(HERE / "sensitivity.csv"), changed)
    solved = {
        "fitted_to": "apart",
        "points": 1,
        "constant": "contention",
        "value": f"{contention:.5g}",
        "factor_90": "",
    }
    write_rows(str(HERE / "constants.csv"), [*constant_rows([*fits, c.fit]), solved])
    figures.plot_ours(str(HERE / "ours.png"), rows)
    figures.plot_paper(str(HERE / "paper.png"), predicted, added, big)


def _as_csv(r: Row) -> Row:
    """Convert either kind of row to the columns of validation.csv."""
    name, cell = (r["set"], r["cell"]) if "set" in r else (r["table"], r["row"])
    error = round(r["predicted"] / r["measured"] - 1, 4)
    numbers = {"measured": f"{r['measured']:.6g}", "predicted": f"{r['predicted']:.6g}"}
    interval = {"low": r.get("low", ""), "high": r.get("high", "")}
    return {"set": name, "cell": cell, "use": r["use"]} | numbers | interval | {"error": error}


def constant_rows(fits: Sequence[Calibration]) -> list[Row]:
    names = ("iterations", "rollouts", "steps", "paper")
    return [
        {"fitted_to": name, "points": fit.points, "constant": key, "value": f"{fit.values[key]:.5g}"}
        | {"factor_90": f"{fit.factors[key]:.3f}"}
        for name, fit in zip(names, fits)
        for key in fit.values
    ]


if __name__ == "__main__":
    main()
