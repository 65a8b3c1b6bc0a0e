"""Run the parts of the measurement in order, within minutes, and keep what was found after each."""

import contextlib
import dataclasses
import json
import os
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

Row = dict[str, Any]
# Heading -> key, or key and what the value is multiplied by.
Columns = Mapping[str, str | tuple[str, float]]
PARTS = ("device", "kernels", "decode", "profile", "prefill", "rollouts", "memory", "learner", "training")  # in order


def one_line(error: BaseException, most: int = 200) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:most]


@dataclasses.dataclass
class Budget:
    """Seconds that are left; `clock` tells them."""

    seconds: float
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._start = self.clock()

    @property
    def spent(self) -> float:
        return self.clock() - self._start

    @property
    def left(self) -> float:
        return self.seconds - self.spent


@dataclasses.dataclass
class Results:
    """What was found so far, written to `path` whenever something is added."""

    path: str
    found: dict[str, Any] = dataclasses.field(default_factory=dict)  # by part
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # by part
    left_out: list[str] = dataclasses.field(default_factory=list)
    errors: dict[str, str] = dataclasses.field(default_factory=dict)  # by part: one line

    def keep(self, part: str, **values: Any) -> None:
        """Add values to a part and write the file."""
        self.found.setdefault(part, {}).update(values)
        self.write()

    def keep_others(self, parts: Collection[str]) -> None:
        """Take what an earlier measurement found of all but these parts from the file."""
        if not os.path.exists(self.path):
            return
        with open(self.path, encoding="utf-8") as file:
            earlier = json.load(file)
        for name in ("found", "seconds", "errors"):
            # An error's name begins with its part.
            kept = {part: value for part, value in earlier[name].items() if part.split()[0] not in parts}
            setattr(self, name, kept)
        self.left_out = [line for line in earlier["left_out"] if line.split()[0].strip(",:") not in parts]

    @contextlib.contextmanager
    def error_kept(self, name: str) -> Iterator[None]:
        """Keep an error as one line under `name`, print it in full, and go on."""
        try:
            yield
        except Exception as error:
            self.errors[name] = one_line(error, 300)
            traceback.print_exc()
            print(f"{name} failed: {self.errors[name]}", flush=True)

    def write(self) -> None:
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        content = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "path"}
        partial = f"{self.path}.partial"
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
        os.replace(partial, self.path)


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    needs: float  # seconds below which it is not begun: an estimate
    run: Callable[[], None]


def run_parts(parts: list[Part], budget: Budget, results: Results, after: Callable[[], None]) -> None:
    """Run each part that the time allows; a part that fails is one line in `errors`. Calls `after` behind each."""
    for part in parts:
        if (left := budget.left) < max(part.needs, 1.0):
            results.left_out.append(f"{part.name}: {max(left, 0):.0f} s were left, {part.needs:.0f} are needed")
            results.write()
            continue
        with timed(results, part.name), results.error_kept(part.name):
            part.run()
        results.write()
        after()
    after()


@contextlib.contextmanager
def timed(results: Results, name: str) -> Iterator[None]:
    """Record the seconds of a part."""
    start = time.perf_counter()
    print(f"== {name}", flush=True)
    try:
        yield
    finally:
        results.seconds[name] = round(time.perf_counter() - start, 2)


# ---- tables


def table(rows: list[Row], columns: Columns) -> list[str]:
    """Return a Markdown table, without columns that no row has."""
    used = {heading: spec for heading, spec in columns.items() if any(value(row, spec) is not None for row in rows)}
    if not used:
        return ["Nothing was found.", ""]
    found = [f"| {' | '.join(used)} |", "|" + "---|" * len(used)]
    return [*found, *(f"| {' | '.join(shown(value(row, spec)) for spec in used.values())} |" for row in rows), ""]


def value(row: Row, spec: str | tuple[str, float]) -> Any:
    key, times = spec if isinstance(spec, tuple) else (spec, None)
    found = row.get(key)
    return found if found is None or times is None else times * found


def shown(x: Any) -> str:
    """Return a value as text, of numbers that are not whole four digits."""
    if x is None:
        return "-"
    if isinstance(x, bool):
        return "yes" if x else "no"
    if isinstance(x, int) or (isinstance(x, float) and x.is_integer() and abs(x) < 1e15):
        return f"{int(x):,}"
    if isinstance(x, float):
        return f"{x:,.0f}" if abs(x) >= 1e4 else f"{x:.4g}"
    return str(x)
