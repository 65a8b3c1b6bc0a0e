"""Score the predictions of the paper's tables: beside two nulls, and with constants fitted to all tables but one.

Nulls: generation is as many times faster as the acceptance length (an iteration with drafts costs a plain one); a step
is as much faster as Amdahl's law then allows with the paper's share of generation. Asynchronous: the synchronous step
on twice the devices.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.scale_projection import paper
from experiments.scale_projection.calibrate import fit
from experiments.simulator.step import amdahl

NGRAM_TABLE, DRAFT_LENGTHS = "Table 2", "Table 4"


def null(name: str) -> float:
    """Return the null prediction of a row of `predicted_rows`, by its name."""
    acceptance = {f"{w}, generation": paper.EAGLE[w] for w in paper.WORKLOADS}
    acceptance |= {f"{w}, n-gram": a for w, _, a, _ in paper.NGRAM} | {
        f"{w}, k = {k}": a for w, k, a, _ in paper.TABLE_4
    }
    acceptance |= {f"{w}, {head}": a for w, head, a, _ in paper.HEADS}
    if name in acceptance:
        return acceptance[name]
    step = {
        w: amdahl(paper.TABLE_1[w]["generate"] / paper.TABLE_1[w]["total"], paper.EAGLE[w]) for w in paper.WORKLOADS
    }
    plain = paper.TABLE_1["think"]["total"] * paper.DEVICES / paper.ASYNC_DEVICES
    others = {f"{w}, step": float(step[w]) for w in paper.WORKLOADS}
    others |= {
        "plain, step s": plain,
        "speculative, step s": plain / float(step["think"]),
        "speedup": float(step["think"]),
    }
    return others[name]


def with_nulls(rows: Sequence[paper.Row]) -> list[paper.Row]:
    """Add whether the measured value lies inside the interval, and the null with its error."""
    out = []
    for r in rows:
        n = null(r["row"])
        inside = r["low"] <= r["measured"] <= r["high"]
        out.append(r | {"inside": inside, "null": round(n, 4), "null_error": round(n / r["measured"] - 1, 4)})
    return out


def group(r: paper.Row) -> str:
    """Return the kind of a row of `predicted_rows`."""
    if r["table"] == "async":
        return "asynchronous"
    return {NGRAM_TABLE: "n-gram", DRAFT_LENGTHS: "k = 5 and 7"}.get(r["table"], "k = 3")


def median_error(rows: Sequence[paper.Row], column: str = "predicted") -> float:
    """Return the median of |ln(predicted / measured)|."""
    return float(np.median([abs(np.log(r[column] / r["measured"])) for r in rows]))


def summary(rows: Sequence[paper.Row]) -> list[paper.Row]:
    """Return, for all rows and for each group, the median absolute logarithmic error of model and null."""
    groups = {"all": list(rows)} | {g: [r for r in rows if group(r) == g] for g in dict.fromkeys(map(group, rows))}
    return [
        {"rows": name, "count": len(kept), "inside": sum(r["inside"] for r in kept)}
        | {"model": round(median_error(kept), 3), "null": round(median_error(kept, "null"), 3)}
        for name, kept in groups.items()
    ]


# ---- constants fitted to the paper's own tables


class Generation(NamedTuple):
    """A measured speedup of generation."""

    table: str
    row: str
    workload: str
    k: int
    acceptance: float
    measured: float


GENERATION = [
    *(
        Generation("Tables 1, 2", f"{w}, generation", w, 3, paper.EAGLE[w], paper.generation_speedup(w))
        for w in paper.WORKLOADS
    ),
    *(Generation(NGRAM_TABLE, f"{w}, n-gram", w, k, a, s) for w, k, a, s in paper.NGRAM),
    *(Generation(DRAFT_LENGTHS, f"{w}, k = {k}", w, k, a, s) for w, k, a, s in paper.TABLE_4),
    *(Generation("Tables 3, 5", f"{w}, {name}", w, 3, a, s) for w, name, a, s in paper.HEADS),
]


def generated(c: paper.Calibrated, values: Mapping[str, float], rows: Sequence[Generation]) -> np.ndarray:
    """Return the rows' speedups with the given constants; `ngram_seconds` is host time for each running text."""
    text = values.get("ngram_seconds", 0.0)
    with_head = c.hardware.with_attained(**{n: x for n, x in values.items() if n != "ngram_seconds"})
    plain = {w: c.generate(w, 0, 1.0) for w in paper.WORKLOADS}
    head = c._replace(hardware=with_head)
    lookup = c._replace(hardware=with_head.with_attained(sequence_seconds=text))
    return np.array(
        [
            plain[r.workload]
            / (
                lookup.generate(r.workload, r.k, r.acceptance, head=False)
                if r.table == NGRAM_TABLE
                else head.generate(r.workload, r.k, r.acceptance)
            )
            for r in rows
        ]
    )


def fitted_to(c: paper.Calibrated, tables: Sequence[str]) -> dict[str, float]:
    """Fit the constants that the given tables identify: host seconds per draft, per uncaptured layer, per n-gram text.

    The others keep their public values.
    """
    a = c.hardware.attained
    start: Any = {"draft_seconds": a.draft_seconds}
    if DRAFT_LENGTHS in tables:
        start["uncaptured_seconds"] = a.uncaptured_seconds
    if NGRAM_TABLE in tables:
        start["ngram_seconds"] = 2e-4
    rows = [r for r in GENERATION if r.table in tables]
    return fit(lambda v: generated(c, v, rows), np.array([r.measured for r in rows]), start).values


def leave_one_table_out(c: paper.Calibrated) -> list[paper.Row]:
    """Predict each table with public constants, constants fitted to all tables, and constants fitted to all others."""
    tables = list(dict.fromkeys(r.table for r in GENERATION))
    whole, out = fitted_to(c, tables), []
    for table in tables:
        own, others = [r for r in GENERATION if r.table == table], fitted_to(c, [t for t in tables if t != table])
        found = (generated(c, values, own) for values in ({}, whole, others))
        for r, public, inside, outside in zip(own, *found):
            numbers = {"public": public, "all_tables": inside, "without_it": outside}
            named = "; ".join(f"{n} {x:.3g}" for n, x in others.items())
            kept = {n: round(float(x), 4) for n, x in numbers.items()}
            out.append({"table": table, "row": r.row, "measured": round(r.measured, 4)} | kept | {"fitted": named})
    return out


ASYNC_VARIANTS = {
    "learner scores and trains; batches wait": (2, False),
    "learner scores and trains; weights change in flight": (2, True),
    "learner trains; batches wait": (0, False),
    "learner trains; weights change in flight": (0, True),
}


def asynchronous_variants(kept: Sequence[paper.Calibrated]) -> list[paper.Row]:
    """Return medians over worlds of the asynchronous rows under four readings, none with a constant of its own."""
    out = []
    for name, reading in ASYNC_VARIANTS.items():
        for world in zip(*(paper.async_rows(c, *reading) for c in kept)):
            predicted = float(np.median([r["predicted"] for r in world]))
            error = round(predicted / world[0]["measured"] - 1, 4)
            out.append({"reading": name} | world[0] | {"predicted": round(predicted, 4), "error": error})
    return out
