"""Write the tables of README.md: tokens per verification and cost of an iteration apart, and what they give together.

    python -m experiments.drafters.table

Reads acceptance.csv, costs.csv and speed.csv. The costs of an H200 and a GB200 are the simulator's for Qwen3-8B,
bfloat16, 2,000 tokens of context a sequence, by the roofline of this project's loop: nothing there is measured.
"""

import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.claims import markdown, put_table
from experiments.drafters.acceptance import DRAFTERS, HEADS, OUTPUT
from experiments.drafters.costs import FREE, KINDS, options_of
from experiments.drafters.costs import OUTPUT as COSTS
from experiments.drafters.speed import LENGTHS as SPEED_LENGTHS
from experiments.drafters.speed import OUTPUT as SPEEDS
from experiments.drafters.speed import PLAIN
from experiments.engine import bench
from experiments.rooms.bases import NAMES
from experiments.scale_projection.paper import DRAFT_VOCAB
from experiments.simulator.cost import DecoderCost
from experiments.simulator.counts import Precision
from experiments.simulator.hardware import ENGINES, HARDWARE
from experiments.verdicts import Interval, interval, ratio_interval
from specrl_jax.drafts.sizes import priced_head
from specrl_jax.models.decoder import PRESETS

Row = dict[str, Any]
SHOWN, CONTEXT = (3, 5, 7), 2000.0
MACHINES, BATCHES = ("h200", "gb200"), (1, 64)
MODEL = "qwen3_8b"
EAGLE3 = "eagle3_1200"  # of the speeds
PAGE = pathlib.Path(__file__).parent / "README.md"


def tokens(rows: Sequence[Row], workload: str, drafter: str, drafts: str, k: int) -> Interval:
    """Return tokens per verification, mean and interval over bases."""
    return interval([*tokens_by_base(rows, workload, drafter, drafts, k).values()])


def tokens_by_base(rows: Sequence[Row], workload: str, drafter: str, drafts: str, k: int) -> dict[int, float]:
    found = bench.matching(rows, workload=workload, drafter=drafter, drafts=drafts, k=k)
    return {row["seed"]: row["tokens"] / row["verifications"] for row in found}


def tokens_table(rows: Sequence[Row]) -> str:
    lines = []
    for drafter, drafts in itertools.product(DRAFTERS, ("sampled", "argmax")):
        if not bench.matching(rows, drafter=drafter, drafts=drafts):
            continue
        name = f"{drafter}, {drafts}" if drafter in HEADS else drafter
        cells = [tokens(rows, workload, drafter, drafts, k).text() for workload in NAMES for k in SHOWN]
        lines.append([name, *cells])
    return markdown(["drafts", *(f"{name}, k = {k}" for name in NAMES.values() for k in SHOWN)], lines)


def ratios_table(rows: Sequence[Row]) -> str:
    """Return DSpark's sampled tokens over those of EAGLE-3 heads, paired by base, with log-t intervals over bases."""
    lines = []
    for (workload, name), other in itertools.product(NAMES.items(), ("eagle3", "eagle3_600", "eagle3_1200")):
        cells = []
        for k in SHOWN:
            ours, theirs = (tokens_by_base(rows, workload, who, "sampled", k) for who in ("dspark", other))
            both = sorted(ours.keys() & theirs.keys())
            cells.append(ratio_interval([ours[base] / theirs[base] for base in both]).text())
        lines.append([name, other, len(both), *cells])
    return markdown(["workload", "DSpark over", "bases", *(f"k = {k}" for k in SHOWN)], lines)


def decoder(drafter: str, machine: str) -> DecoderCost:
    """Return the 8B policy with a drafter of the kinds measured here."""
    model = PRESETS[MODEL]
    hardware = HARDWARE[machine].with_engine(ENGINES["fused"])
    if drafter == "self":
        return DecoderCost(model, None, hardware, precision=Precision(twin="int8"))
    kind = HEADS[drafter].kind if drafter in HEADS else ""
    new = options_of(kind or FREE, DRAFT_VOCAB)
    head = priced_head(kind, model, DRAFT_VOCAB, slots=new.slots, layers=new.layers) if kind else None
    return DecoderCost(model, head, hardware)


def iteration(drafter: str, machine: str, batch: int, k: int) -> float:
    """Return the seconds of an iteration, in plain iterations."""
    d = decoder(drafter, machine)
    return float(d.speculative(batch, k, CONTEXT) / d.plain(batch, CONTEXT))


def simulated_table(rows: Sequence[Row]) -> str:
    """Return iteration costs and, with the tokens of the first workload, speeds relative to plain decoding."""
    workload, name = next(iter(NAMES.items()))
    lines = []
    for drafter, k in itertools.product(DRAFTERS, (3, 7)):
        found = tokens(rows, workload, drafter, "sampled", k).mean
        if np.isnan(found):
            continue
        costs = [iteration(drafter, machine, batch, k) for machine in MACHINES for batch in BATCHES]
        lines.append([drafter, k, f"{found:.2f}", *(f"{c:.2f}: **{found / c:.2f}**" for c in costs)])
    machines = [f"{machine}, {batch} at once" for machine in MACHINES for batch in BATCHES]
    return markdown(["drafts", "k", f"tokens, {name}", *machines], lines)


def measured_table(rows: Sequence[Row]) -> str:
    """Return measured iterations over plain ones, and the drafts' own cost relative to an EAGLE-3 head's."""
    lines = []
    for kind, k in itertools.product([kind for kind in KINDS if kind != FREE], (3, 7)):
        cells = []
        for batch in sorted({row["batch"] for row in rows}):
            plain, free = (bench.by_round(rows, "seconds", kind=FREE, k=x, batch=batch) for x in (0, k))
            whole, eagle3 = (bench.by_round(rows, "seconds", kind=x, k=k, batch=batch) for x in (kind, "eagle3"))
            share = float(np.median(whole - free) / np.median(eagle3 - free))
            cells += [ratio_interval(whole / plain).text(), "1" if kind == "eagle3" else f"{share:.2f}"]
        lines.append([kind, k, *cells])
    batches = sorted({row["batch"] for row in rows})
    head = [text for b in batches for text in (f"iteration, {b} at once", f"drafts over EAGLE-3's, {b} at once")]
    return markdown(["drafts", "k", *head], lines)


def speed_table(rows: Sequence[Row]) -> str:
    """Return measured speeds over plain decoding, and DSpark's best k over that of EAGLE-3 heads trained as long.

    The best k of the even rounds is used in the odd ones, and the other way round: one of the same rounds would be best
    partly by luck.
    """
    lines = []
    for cell in bench.distinct(rows, "workload", "seed", "slots"):
        where = dict(zip(("workload", "seed", "slots"), cell))
        speeds = {
            (drafter, k): bench.by_round(rows, "tokens", drafter=drafter, k=k, **where)
            / bench.by_round(rows, "seconds", drafter=drafter, k=k, **where)
            for drafter, k in bench.distinct(rows, "drafter", "k")
        }
        ratios = np.ones(len(speeds[PLAIN, 0]))
        for half in (0, 1):
            ours, theirs = (_best(speeds, drafter, 1 - half) for drafter in ("dspark", EAGLE3))
            ratios[half::2] = ours[half::2] / theirs[half::2]
        for drafter in (EAGLE3, "dspark"):
            over = [ratio_interval(speeds[drafter, k] / speeds[PLAIN, 0]).text() for k in SPEED_LENGTHS]
            lines.append([*cell, drafter, *over, ratio_interval(ratios).text() if drafter == "dspark" else ""])
    head = ["workload", "base", "at once", "drafts", *(f"k = {k} over plain" for k in SPEED_LENGTHS)]
    return markdown([*head, "best k over EAGLE-3's best"], lines)


def _best(speeds: dict[tuple[str, int], np.ndarray], drafter: str, half: int) -> np.ndarray:
    """Return [rounds], the speeds of the k that is best in the even (0) or the odd (1) rounds."""
    return max((speeds[drafter, k] for k in SPEED_LENGTHS), key=lambda speed: float(np.median(speed[half::2])))


def main() -> None:
    rows = bench.read_rows(str(OUTPUT))
    found = {"tokens": tokens_table(rows), "ratios": ratios_table(rows), "simulated": simulated_table(rows)}
    found["costs"] = measured_table(bench.read_rows(str(COSTS)))
    found["speed"] = speed_table(bench.read_rows(str(SPEEDS)))
    for name, text in found.items():
        print(text, end="\n\n")
        put_table(PAGE, text, name)


if __name__ == "__main__":
    main()
