"""The closing table of a run."""

import math

import numpy as np
import rich.console
import rich.table

from specrl_jax.core import PHASES
from specrl_jax.io.metrics import StepMetrics, plain_seconds
from specrl_jax.io.progress import compiles

WIDTH = 100  # columns of a file, for which rich assumes 80


def table_console() -> rich.console.Console:
    """Return a console for tables: as wide as the terminal, 100 columns in a file."""
    console = rich.console.Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    return console


def print_report(rows: list[StepMetrics], draft_length: int, figure: str) -> None:
    """Print accuracy before and after, speed and acceptance of the rollouts, share of each phase, path of the plot.

    Args:
      draft_length: k.
      figure: path of the plot.
    """
    console = table_console()
    steps = [row for row in rows if "time/total" in row]
    if not steps:
        console.print("no steps were run")
        return
    table = rich.table.Table.grid(padding=(0, 2, 0, 0))
    for label, text in _lines(rows, steps, draft_length):
        table.add_row(label, text)
    console.print(f"{len(steps)} RL steps")
    console.print(table)
    console.print(f"plot: {figure}", soft_wrap=True)


def _lines(rows: list[StepMetrics], steps: list[StepMetrics], draft_length: int) -> list[tuple[str, str]]:
    """Return (label, text) of each line."""
    first, last, lines = steps[0], steps[-1], []
    for label, name in (("accuracy, sampled", "eval/accuracy"), ("accuracy, greedy", "eval/accuracy_greedy")):
        # Not there if the run was resumed with `steps` already done: that row has no evaluation.
        if name in last:
            lines.append((label, _change(rows[0].get(name), last[name])))
    lines.append(("mean reward", f"{_change(first.get('reward/mean'), last.get('reward/mean'))}, first and last step"))
    # Medians over the steps that compiled nothing, if there are any: never the first.
    clean = [row for row in steps[1:] if not compiles(row)]
    timed = clean or steps
    lines.append(("rollouts", _speed(timed, last)))
    if "spec/acceptance_length" in last:
        tokens = [f"{_shown(row.get('spec/acceptance_length'), '.1f')} of {draft_length + 1}" for row in (first, last)]
        lines.append(("accepted tokens", f"{tokens[0]} a verification in the first step, {tokens[1]} in the last"))
    shares = ", ".join(f"{part} {share}%" for part, share in _shares(timed).items())
    note = "" if clean else ", compiling"
    lines.append(("time of a step", f"{shares} of {_median(timed, 'time/total'):.3g} s{note}"))
    if plain := [seconds for row in timed if (seconds := plain_seconds(row, last)) is not None]:
        ratio = float(np.median(plain)) / _median(timed, "time/total")
        lines.append(("a plain step", f"{np.median(plain):.3g} s: with drafts a step is {ratio:.2f} times as fast"))
    return lines


def _shares(timed: list[StepMetrics]) -> dict[str, int]:
    """Return per cent of the learner's time by phase, and of what is none of them; their sum is 100. None is 0."""
    parts = {phase: sum(row[f"time/{phase}"] for row in timed) for phase in PHASES}
    waited = sum(row.get("time/exposed_generation", row["time/generate"]) for row in timed)
    if waited < 0.98 * parts["generate"]:  # beside the learner, as the data was drawn
        names = {"data": "", "generate": "waiting for rollouts"}
        parts = {names.get(phase, phase): seconds for phase, seconds in (parts | {"generate": waited}).items()}
        parts.pop("")
    total = max(sum(row["time/total"] for row in timed), sum(parts.values()))
    parts["other"] = total - sum(parts.values())
    exact = {part: 100 * seconds / total for part, seconds in parts.items()}
    whole = {part: int(share) for part, share in exact.items()}
    # What rounding down has left goes to the largest remainders.
    for part in sorted(exact, key=lambda part: whole[part] - exact[part])[: 100 - sum(whole.values())]:
        whole[part] += 1
    return {part: share for part, share in whole.items() if share}


def _speed(timed: list[StepMetrics], last: StepMetrics) -> str:
    text = f"{_median(timed, 'rollout/tokens_per_second'):,.0f} tokens/s"
    if "spec/speedup" not in last:
        return text
    low, mean, high = (_shown(last.get(f"spec/speedup{end}"), ".2f") for end in ("_low", "", "_high"))
    return f"{text}; {mean} times plain decoding (95 %: {low} to {high})"


def _median(rows: list[StepMetrics], name: str) -> float:
    return float(np.median([row[name] for row in rows]))


def _change(before: float | None, after: float | None) -> str:
    change = None if before is None or after is None else after - before
    return f"{_shown(before)} -> {_shown(after)} ({_shown(change, '+.3f')})"


def _shown(value: float | None, form: str = ".3f") -> str:
    """Return a metric as text; "-" for one that is not there or not finite (None where it was read back)."""
    return "-" if value is None or not math.isfinite(value) else format(value, form)
