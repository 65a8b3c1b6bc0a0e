"""The parts in their order, on the first device of this machine."""

import functools
import gc
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable, Collection
from typing import Any

import jax

from experiments.accelerator import cells, engines, gaps, kernels, learner, page, rollouts
from experiments.accelerator.cells import Cell, Key
from experiments.accelerator.parts import PARTS, Budget, Part, Results, Row, run_parts
from experiments.accelerator.sizes import FULL, SMALL, LongTail, Sizes
from experiments.kernels import run as ceilings
from specrl_jax.decoding.decode import chunk_inputs
from specrl_jax.decoding.programs import Program
from specrl_jax.drafts.weights import Weights
from specrl_jax.planning.cache_size import device_memory

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "numpy")
PROFILED = (4, 12)  # iterations of the two profiles
DECODE = 0.6  # share of the minutes after which decode cells begin nothing more: the other parts have the rest


def measure(output: str, minutes: float, small: bool, flags: dict[str, str], chosen: Collection[str]) -> int:
    """Run what the minutes allow of the chosen parts; return the exit status.

    Everything is written into the folder `output`; what it has of parts that are not chosen is kept. `device`, whose
    limits others need, always runs.
    """
    sizes, results = SMALL if small else FULL, Results(os.path.join(output, "results.json"))
    results.keep_others({"device", *chosen})
    budget, device = Budget(60 * minutes), jax.devices()[0]
    m = Measurement(sizes, small, device, budget, results, flags)
    names = [name for name in PARTS if name == "device" or name in chosen]
    parts = [Part(name, sizes.seconds.get(name, 0.0), getattr(m, f"run_{name}")) for name in names]
    run_parts(parts, budget, results, lambda: page.write(results, output))
    for line in page.gaps_in(results):
        if line:
            print(line, flush=True)
    print(f"written in {budget.spent:.0f} s: {output}/results.json, README.md, figure.png")
    return 1 if results.errors else 0


class Measurement:
    """The parts; each keeps what it finds in `results`."""

    def __init__(
        self, sizes: Sizes, small: bool, on: jax.Device, budget: Budget, results: Results, flags: dict[str, str]
    ) -> None:
        self.sizes, self.small, self.on = sizes, small, on
        self.budget, self.results, self.flags = budget, results, flags
        self.shapes = ceilings.SMALL if small else ceilings.FULL
        self._built: dict[Key, engines.Built] = {}
        self._figures: dict[Key, cells.Figures] = {}
        self._weights: dict[tuple[str, int], Weights] = {}

    @property
    def limits(self) -> dict[str, float]:
        return self.results.found["device"]["limits"]

    def run_device(self) -> None:
        """Versions, device, flags, and what the device reaches in a copy and in a product."""
        self.results.keep(
            "device",
            kind=self.on.device_kind,
            platform=self.on.platform,
            count=jax.device_count(),
            memory=device_memory(),
            versions={name: version for name in PACKAGES if (version := installed(name))},
            python=platform.python_version(),
            machine=platform.platform(),
            flags=self.flags,
            date=time.strftime("%Y-%m-%d"),
            commit=find_commit(),
            small=self.small,
            limits=ceilings.ceilings(self.shapes),
        )

    def run_kernels(self) -> None:
        """Every kernel against its reference; raises where one differs."""
        verification = kernels.check_verification(self.shapes, self.sizes.rules, self.on)
        self.results.keep("kernels", verification=verification)
        _, N, K, H = self.shapes.rows
        attention = kernels.check_attention(self.sizes.dtype, (N, K, H), self.sizes.page, self.on)
        self.results.keep("kernels", attention=attention)
        rows = kernels.check_learner_attention(self.shapes._replace(rounds=self.sizes.rounds), self.limits)
        self.results.keep("kernels", learner_attention=rows)
        wrong = [row for row in (*verification, *attention, *rows) if not row["ok"]]
        if wrong:
            raise RuntimeError(f"{len(wrong)} checks differ from the reference: {wrong[0]}")

    def run_decode(self) -> None:
        """Decode cells: compile all programs of a model side by side, then time cell by cell."""
        listed = cells.list_cells(self.sizes, device_memory())
        compiled: dict[str, float] = {}
        for model in self.sizes.models:
            own = [c for c in listed if c.model == model]
            self._time_cells(own, self._compile(own, compiled))
            self._weights.clear()  # rows of the next model are counted for a device without them
            gc.collect()

    def _decode_left(self) -> float:
        """Return the seconds in which decode cells may begin something."""
        return self.budget.left - (1 - DECODE) * self.budget.seconds

    def _compile(self, own: list[Cell], seconds: dict[str, float]) -> dict[str, str]:
        """Compile the programs of cells; return by program why it is missing."""

        def task(key: Key) -> Callable[[], None]:
            built = cells.engine_of(key, own, self.sizes, self.on)
            compiled, program, weights = built.engine.compiled, Program("decode", key.rows, key.k), built.abstract()
            compile_it = compiled.begin(program, weights)

            def finish() -> None:
                compile_it()
                decode: Any = compiled.get(program, weights)
                self._figures[key] = cells.figures(decode, built.engine.config.shard_pages)
                self._built[key] = built

            return finish

        tasks: dict[str, Callable[[], Callable[[], object]]]
        tasks = {str(key): functools.partial(task, key) for key in cells.keys_of(own)}
        keep = functools.partial(self.results.keep, "decode", compile_seconds=seconds)
        return cells.compile_together(tasks, seconds, keep, self._decode_left)

    def _time_cells(self, own: list[Cell], missing: dict[str, str]) -> None:
        """Time the cells of a model; list those that are left out by reason."""
        rows = self.results.found.get("decode", {}).get("cells", [])
        left_out: dict[str, list[str]] = {}
        for cell in own:
            keys = [Key(cell.model.name, n, cell.rows, cell.k) for n in cell.model.depths]
            reasons = [missing[str(key)] for key in keys if str(key) in missing]
            if reasons or self._decode_left() <= 0:
                left_out.setdefault(reasons[0] if reasons else cells.NO_TIME, []).append(str(cell))
                continue
            with self.results.error_kept(f"decode {cell}"):
                rows.append(self._time(cell, keys))
            self.results.keep("decode", cells=rows)
        self.results.left_out += [f"decode, {reason}: {', '.join(names)}" for reason, names in left_out.items()]

    def _time(self, cell: Cell, keys: list[Key]) -> dict[str, Any]:
        seconds = [cells.time_iterations(self._built[k], self._weights_of(k, cell), cell, self.sizes) for k in keys]
        row = cells.cell_row(cell, seconds, [self._figures[k] for k in keys], self.sizes, self.limits)
        print(f"{cell}: {row['ms']:.3f} ms, roofline {row['roofline_ms']:.3f}", flush=True)
        return row

    def _weights_of(self, key: Key, cell: Cell) -> Weights:
        """Return random weights of so many layers, drawn once for all cells."""
        name = key.model, key.layers
        if name not in self._weights:
            drafting = key._replace(k=self.sizes.k)
            built = self._built.get(drafting) or cells.engine_of(
                drafting, [Cell(cell.model, key.rows, cell.live, cell.fraction, self.sizes.k)], self.sizes, self.on
            )
            self._weights[name] = built.random()
        weights = self._weights[name]
        return weights if key.k else engines.without_draft(weights)

    def run_profile(self) -> None:
        """Kernels and idle share of an iteration, of the smallest and the largest batch, without and with drafts."""
        rows = []
        model = self.sizes.models[0]
        for B in dict.fromkeys((self.sizes.batches[0], self.sizes.batches[-1])):
            for k in (0, self.sizes.k):
                key = Key(model.name, model.depths[-1], B, k)
                cell = Cell(model, B, self.sizes.limit // 10, 0.1, k)
                if key not in self._built:
                    self.results.left_out.append(f"profile of {cell}: its program was not compiled")
                    continue
                found = self._profile(cell, key)
                row: Row = {"layers": key.layers, "rows": B, "k": k, "kernels_of_text": self._figures[key].kernels}
                rows.append(row | found)
                self.results.keep("profile", iterations=rows)

    def _profile(self, cell: Cell, key: Key) -> dict[str, float | None]:
        engine, weights = self._built[key].engine, self._weights_of(key, cell)
        slots = cells.fill(engine.compiled.empty(weights)[0], cell.live, cells.pages_of(cell.live, self.sizes))
        found = []
        for count in (2, *PROFILED):  # the first is not profiled

            def chunk(count: int = count) -> None:
                nonlocal slots
                slots, statistics = engine.compiled.decode(
                    weights, slots, cell.k, inputs=chunk_inputs(0, count, engine.config.shards)
                )
                jax.block_until_ready(statistics)

            if count == 2:
                chunk()
            else:
                found.append(gaps.summarize(gaps.profiled(chunk)))
        return gaps.per_iteration(found[0], found[1], PROFILED[1] - PROFILED[0])

    def run_prefill(self) -> None:
        """Tokens a second of prefilling prompts of the longest length, the first model at two depths."""
        self._forget()
        model = self.sizes.models[0]
        seconds = []
        for layers in model.depths:
            built = rollouts.prefill_engine(self.sizes, layers, self.on)
            seconds.append(rollouts.time_prefill(built, built.random(), self.sizes, model.config.vocab))
        took = cells.extrapolate(model.depths, seconds, model.config.layers)
        tokens = self.sizes.prefilled * self.sizes.prompt
        self.results.keep(
            "prefill", model=model.name, tokens=tokens, seconds=took, by_depth=seconds, tokens_per_second=tokens / took
        )

    def run_rollouts(self) -> None:
        """Long-tailed rollouts without and with a draft of imposed acceptance."""
        sides, weights = self._open_sides("rollouts", self.sizes.rollouts, (self.sizes.k,))
        self.results.keep("rollouts", model=self.sizes.rollouts.model.name, rollouts=len(sides.work.responses))
        rows = []
        for row in rollouts.compare_sides(sides, weights, self.sizes.k):
            rows.append(row)
            self.results.keep("rollouts", sides=rows)

    def run_memory(self) -> None:
        """Memory through the calibration of draft lengths and the compaction of the batch."""
        sides, weights = self._open_sides("memory", self.sizes.shrinking, (0, self.sizes.k))
        self.results.keep("memory", **rollouts.memory_through(sides, weights, self.on))

    def _open_sides(self, part: str, tail: LongTail, lengths: tuple[int, ...]) -> tuple[rollouts.Sides, Weights]:
        """Draw weights and compile; of an earlier part nothing is kept."""
        self._forget()
        sides = rollouts.make_sides(self.sizes, tail, lengths, self.on)
        weights, seconds = rollouts.draw_weights(sides), dict[str, float]()
        keep = functools.partial(self.results.keep, part, compile_seconds=seconds)
        errors = rollouts.compile_sides(sides, weights, seconds, keep, lambda: self.budget.left)
        if errors:
            raise RuntimeError(f"{len(errors)} programs do not compile: {next(iter(errors.values()))}")
        return sides, weights

    def _forget(self) -> None:
        """Free the engines and weights of earlier parts."""
        self._built.clear()
        self._weights.clear()
        gc.collect()

    def run_learner(self) -> None:
        """Log-prob and train phases on packed long-tailed rows."""
        gc.collect()
        self.results.keep("learner", **learner.time_learner(self.sizes, self.on))

    def run_training(self) -> None:
        """Some steps of RL from random weights, and the same again."""
        learner.train_twice(self.sizes, self.small, functools.partial(self.results.keep, "training"))


def installed(package: str) -> str:
    """Return the version of a package, '' where it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def find_commit() -> str:
    """Return the commit of this tree, '' where git does not say."""
    here = os.path.dirname(__file__)
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    except OSError:
        return ""
    return found.stdout.strip()
