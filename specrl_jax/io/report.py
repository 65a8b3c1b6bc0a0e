"""The closing table of a run."""

import math

import numpy as np
import rich.console
import rich.table

from specrl_jax.core import PHASES
from specrl_jax.io.metrics import Row


def print_report(rows: list[Row], figure: str) -> None:
    """Print accuracy before and after, reward, speculation, the time of each phase, and the path of the plot."""
    console = rich.console.Console()
    steps = [row for row in rows if "time/total" in row]
    if not steps:
        console.print("no steps were run")
        return
    console.print(_learning_table(rows, steps))
    if "spec/acceptance_length" in steps[-1]:
        console.print(_speculation_table(steps))
    console.print(_time_table(steps))
    console.print(f"plot: {figure}", soft_wrap=True)


def _table(title: str, *columns: str) -> rich.table.Table:
    table = rich.table.Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def _learning_table(rows: list[Row], steps: list[Row]) -> rich.table.Table:
    table = _table(f"{len(steps)} RL steps", "", "before", "after", "change")
    last = rows[-1]
    for label, name in (("accuracy, sampled", "eval/accuracy"), ("accuracy, greedy", "eval/accuracy_greedy")):
        if name not in last:  # the run was resumed with `steps` already done: that row has no evaluation
            continue
        _add_change(table, label, rows[0].get(name), last[name])
    _add_change(table, "mean reward, first and last step", steps[0].get("reward/mean"), last.get("reward/mean"))
    return table


def _add_change(table: rich.table.Table, label: str, before: float | None, after: float | None) -> None:
    change = None if before is None or after is None else after - before
    table.add_row(label, _shown(before), _shown(after), _shown(change, "+.3f"))


def _shown(value: float | None, form: str = ".3f") -> str:
    """Return a metric as text; "-" for one that is not there or not finite (None where it was read back)."""
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def _speculation_table(steps: list[Row]) -> rich.table.Table:
    table = _table("speculation", "", "first step", "last step")
    labels = {"tokens per verification (1 to k + 1)": "spec/acceptance_length"}
    rates = sorted(name for name in steps[-1] if name.startswith("spec/acceptance_rate_pos_"))
    labels |= {f"draft {name.rpartition('_')[2]} accepted": name for name in rates}
    labels["draft loss"] = "draft/loss"
    for label, name in labels.items():
        if name in steps[-1]:
            table.add_row(label, *(_shown(row.get(name)) for row in (steps[0], steps[-1])))
    if "spec/speedup" in steps[-1]:
        low, median, high = (_shown(steps[-1][f"spec/speedup{end}"], ".2f") for end in ("_low", "", "_high"))
        table.add_row("generation speedup over draft.kind=none", "", f"{median} ({low} to {high})")
    return table


def _time_table(steps: list[Row]) -> rich.table.Table:
    # The first step compiles: medians over the others, if there are any.
    timed = steps[1:] or steps
    total = float(np.median([row["time/total"] for row in timed]))
    table = _table("median step", "phase", "seconds", "share")
    for phase in PHASES:
        seconds = float(np.median([row[f"time/{phase}"] for row in timed]))
        table.add_row(phase, f"{seconds:.3f}", f"{seconds / total:.1%}")
    table.add_row("total", f"{total:.3f}", "")
    speed = float(np.median([row["rollout/tokens_per_second"] for row in timed]))
    table.add_row("generated tokens per second", f"{speed:,.0f}", "")
    return table
