"""Compare the performance model with our runs, with the paper's tables and with its simulated rows.

    python -m experiments.scale_projection.validate

Prints every constant with its interval, every comparison, and the targets; writes validation.csv, scores.csv,
tables_out.csv, asynchronous.csv, large.csv, sensitivity.csv, constants.csv, public.csv and two figures beside this
file. Takes some minutes on one core; nothing is timed and no device is used.
"""

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import commands
from experiments.claims import markdown
from experiments.engine.bench import distinct, matching
from experiments.scale_projection import apart, figures, large, ours, paper, public, score
from experiments.scale_projection.calibrate import Calibration, errors
from experiments.simulator.grid import write_rows

HERE = pathlib.Path(__file__).parent
Row = dict[str, Any]
# Set -> (largest median error, largest worst error) of its held-out rows.
TARGETS = {"iteration c": (0.10, 0.25), "rollout c": (0.10, 0.25)}
LARGE_COLUMNS = ("view", "lengths", "table", "row", "use", "measured", "predicted", "low", "high", "error", "share")
STEP_TARGET, PAPER_TARGET = 0.10, 0.10


def print_ours(rows: list[Row], fits: list[Calibration]) -> None:
    """Print the constants, the errors of every set, and the held-out phases that are further off than STEP_TARGET."""
    print("\n".join(["", "OUR OWN RUNS", *(line for fit in fits for line in fit.lines())]))
    sets = []
    for name, use in distinct(rows, "set", "use"):
        kept = matching(rows, set=name, use=use)
        found = errors(*(np.array([r[column] for r in kept]) for column in ("predicted", "measured")))
        median, worst = TARGETS.get(name, (np.inf, np.inf)) if use == "held out" else (np.inf, np.inf)
        reached = _verdict(found.median <= median and found.worst <= worst) if np.isfinite(median) else ""
        sets.append({"set": name, "use": use} | found._asdict() | {"wanted": reached})
    show("errors by set", sets)
    steps = [r for r in rows if r["set"].startswith(("step ", "split ")) and r["use"] == "held out"]
    phases = [r for r in steps if r["set"] != "step total"]
    off = [r for r in phases if abs(r["predicted"] / r["measured"] - 1) > STEP_TARGET]
    show(f"{len(phases) - len(off)} of {len(phases)} held-out phases and asynchronous steps are near; not:", off)


def _verdict(reached: bool) -> str:
    return "reached" if reached else "missed"


def show(title: str, rows: Sequence[Row], columns: Sequence[str] = ()) -> None:
    """Print a table of these columns, or of all."""
    names = list(columns or dict.fromkeys(name for r in rows for name in r))
    cells = [[f"{r[n]:.4g}" if isinstance(r[n], float) else r[n] for n in names] for r in rows]
    print(f"\n{title}\n\n{markdown(names, cells)}")


def middle(sampled: Sequence[Sequence[Row]], noise: float) -> list[Row]:
    """Return the rows with the median over worlds as prediction, and 90 % intervals that include such `noise`."""
    rows = []
    for world in zip(*sampled):
        first = world[0]
        values = {"predicted": float(np.median([r["predicted"] for r in world]))}
        if "share" in first:
            values["share"] = float(np.median([r["share"] for r in world]))
        rows.append(first | {n: round(x, 4) for n, x in values.items()})
    rows = [r | {"error": round(r["predicted"] / r["measured"] - 1, 4)} for r in rows]
    return paper.with_intervals(rows, sampled, noise)


def large_views(kept: Sequence[paper.Calibrated]) -> list[Row]:
    """Compute the 235B rows under three views of verification with the lengths of each workload."""
    return [
        {"view": view.name, "lengths": workload} | r
        for view in large.VIEWS
        for workload in paper.WORKLOADS
        # What the paper simulated has no noise.
        for r in middle([large.view_rows(c, view, workload) for c in kept], noise=0.0)
    ]


def allowed(found: paper.Worlds) -> list[str]:
    """Return, for each undisclosed number, how many of the kept draws have each value."""
    lines = [f"  Table 1 allows {len(found.kept)} of {found.drawn} draws:"]
    for name, values in paper.PRIORS.items():
        counts = {v: sum(getattr(c.undisclosed, name) == v for c in found.kept) for v in values}
        lines.append(f"    {name}: " + ", ".join(f"{v:g} in {n}" for v, n in counts.items()))
    return lines


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(draws=(100, 2, "draws behind every interval that Table 1 allows"))
    parser.add_argument("--output", type=pathlib.Path, default=HERE, help="folder of rows and figures")
    a = parser.parse_args()
    draws, folder = a.draws, a.output

    hosts, left = public.calibrate(), public.leave_one_sweep_out()
    print("\n".join(hosts.lines()))
    show("PUBLIC EAGLE-3 SWEEPS ON ONE H100, median errors", [x._asdict() for x in left])

    print("\nTHE PAPER'S TABLES (arXiv 2604.26779), fitted to Table 1's plain columns")
    c = paper.calibrate()
    assert c.fit is not None  # calibrated
    print("\n".join(c.fit.lines()))
    found = paper.worlds(draws, {name: hosts.factors[name] for name in hosts.values})
    print("\n".join(allowed(found)))
    # The noise of a measurement, and how far the model is off where its constants were fitted.
    noise = float(np.hypot(paper.NOISE, hosts.scatter))
    predicted = score.with_nulls(middle([paper.predicted_rows(x) for x in found.kept], noise))
    reached = [{"target": _verdict(abs(r["error"]) <= PAPER_TARGET)} for r in predicted]
    show("THE PAPER'S ROWS", [r | target for r, target in zip(predicted, reached)])
    show("MEDIANS OF |ln(predicted / measured)|", score.summary(predicted))
    tables = score.leave_one_table_out(c)
    show("ONE TABLE LEFT OUT OF A FIT TO THE PAPER'S TABLES", tables)
    readings = score.asynchronous_variants(found.kept)
    show("THE ASYNCHRONOUS RUN, FOUR READINGS", readings)
    big = large_views(found.kept)
    show("235B, beside the paper's simulator", big, LARGE_COLUMNS)
    changed = large.sensitivity()
    show("ONE ASSUMPTION CHANGED, free verification", changed)

    machine, pace, fits = ours.calibrated()
    rows = ours.check_iterations(machine) + ours.check_rollouts(machine) + ours.check_steps(machine, pace)
    ahead = apart.measured()
    contention = apart.solve_contention(ahead)
    rows += apart.check(ahead, contention)
    print_ours(rows, fits)
    print(f"  contention of the fake devices {contention:.2f}, solved on one run with lag 1")

    write_rows(str(folder / "validation.csv"), [_as_csv(r) for r in [*rows, *paper.fitted_rows(c), *predicted]])
    write_rows(str(folder / "scores.csv"), predicted)
    write_rows(str(folder / "tables_out.csv"), tables)
    write_rows(str(folder / "asynchronous.csv"), readings)
    write_rows(str(folder / "large.csv"), [{name: r[name] for name in LARGE_COLUMNS} for r in big])
    write_rows(str(folder / "sensitivity.csv"), changed)
    write_rows(str(folder / "public.csv"), public_rows(hosts))
    solved: Row = {"fitted_to": "apart", "points": 1, "constant": "contention", "value": f"{contention:.5g}"}
    share = np.median([x.means["zero"] / x.undisclosed.limit for x in found.kept])
    typical: Row = {"fitted_to": "draws", "points": draws, "constant": "mean_share", "value": f"{share:.3g}"}
    fitted = constant_rows(dict(zip(("iterations", "rollouts", "steps"), fits)) | {"public": hosts, "paper": c.fit})
    write_rows(str(folder / "constants.csv"), fitted + [r | {"factor_90": ""} for r in (solved, typical)])
    figures.plot_ours(str(folder / "ours.png"), rows)
    figures.plot_paper(str(folder / "paper.png"), predicted, big)


def public_rows(fit: Calibration) -> list[Row]:
    cells = public.cells()
    found = public.predict(fit.values, cells)
    return [
        {"sweep": x.sweep, "kind": x.kind, "layers": x.model.layers, "context": x.context, "batch": x.batch, "k": x.k}
        | {"published": f"{x.value:.5g}", "predicted": f"{y:.5g}", "error": round(float(y / x.value - 1), 4)}
        for x, y in zip(cells, found)
    ]


def _as_csv(r: Row) -> Row:
    """Convert either kind of row to the columns of validation.csv."""
    name, cell = (r["set"], r["cell"]) if "set" in r else (r["table"], r["row"])
    error = round(r["predicted"] / r["measured"] - 1, 4)
    numbers = {"measured": f"{r['measured']:.6g}", "predicted": f"{r['predicted']:.6g}"}
    interval = {"low": r.get("low", ""), "high": r.get("high", "")}
    return {"set": name, "cell": cell, "use": r["use"]} | numbers | interval | {"error": error}


def constant_rows(fits: dict[str, Calibration]) -> list[Row]:
    return [
        {"fitted_to": name, "points": fit.points, "constant": key, "value": f"{fit.values[key]:.5g}"}
        | {"factor_90": f"{fit.factors[key]:.3f}"}
        for name, fit in fits.items()
        for key in fit.values
    ]


if __name__ == "__main__":
    sys.exit(commands.run(main))
