"""Compile what the measurement would run, for devices that are not here, and list what each program takes.

Programs that unroll their layers are compiled at two small depths and extended to all layers: layers are alike, so
arguments, bytes and kernels are linear in their number. Temporaries need not be: theirs are estimates.
"""

import csv
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from experiments.accelerator import cells, rollouts
from experiments.accelerator.cells import Key, extrapolate
from experiments.accelerator.engines import Built
from experiments.accelerator.learner import learner_config, training_config
from experiments.accelerator.parts import Row, one_line
from experiments.accelerator.sizes import FULL, SMALL, LongTail, Sizes
from experiments.hlo.iteration import iteration_bytes
from experiments.hlo.programs import decode_pages
from experiments.hlo.text import read_text
from experiments.hlo.traffic import Pool, Traffic, traffic
from specrl_jax.accelerator_flags import flags_for
from specrl_jax.config import Config
from specrl_jax.decoding.programs import Program
from specrl_jax.dry_run.phases import find_phases
from specrl_jax.dry_run.run import with_layers
from specrl_jax.dry_run.targets import TARGETS, HardwareTarget, installed
from specrl_jax.errors import fail
from specrl_jax.planning.plan import make_plan
from specrl_jax.sharding import make_mesh

FIELDS = (
    *("target", "part", "program", "layers", "extended_from", "live_tokens", "bytes", "kernels"),
    *("temporaries", "arguments", "results", "fits", "seconds", "error"),
)
# The smallest number that a target comes in, of which one is used.
SMALLEST = {"v5p": 4}


class Task(NamedTuple):
    """A program of the measurement."""

    part: str
    name: str
    layers: int  # of the model
    unrolled: bool  # else layers are scanned, and all of them are compiled
    lower: Callable[[int], jax.stages.Lowered]  # with so many layers
    pages: int = 0  # C of a decode loop, whose iteration is counted; 0: the whole program is
    live: tuple[int, ...] = ()  # pages that rows hold; a row of the list each


class Found(NamedTuple):
    """What the compiler says of a program, in bytes but for `kernels`.

    None: it does not show its program, or attention runs in blocks, a loop whose turns no program says.
    """

    fixed: float | None  # moved with no live page
    most: float | None  # with every page live
    kernels: float | None
    temporaries: float
    arguments: float
    results: float  # that share no memory with an argument


def compile_for(targets: list[str], output: str, small: bool, depths: tuple[int, int], parts: Sequence[str]) -> int:
    """Write programs.csv into the folder `output`, a row as soon as it is known; return the exit status.

    Args:
      depths: layers of programs that are extended.
    """
    if status := open_compilers(targets):
        return status
    os.makedirs(output, exist_ok=True)
    failed = 0
    with open(os.path.join(output, "programs.csv"), "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for name in targets:
            for row in target_rows(TARGETS[name], small, depths, parts):
                writer.writerow({"target": name} | row)
                file.flush()
                failed += bool(row.get("error"))
                print(name, row, flush=True)
    return 1 if failed else 0


def open_compilers(targets: Sequence[str]) -> int:
    """Set the environment that compiling for the targets needs; return an exit status, 0 where compilers are here."""
    missing = [name for name in targets if not installed(TARGETS[name])]
    if missing:
        return fail(f"{' '.join(missing)}: pip install -r requirements-aot.txt has the compilers")
    # No driver is here and none is needed; a TPU's compiler need not ask whose machine it is on.
    os.environ |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TPU_SKIP_MDS_QUERY": "1"}
    for name in targets:
        os.environ.update(flags_for(TARGETS[name].accelerator, os.environ).variables)
    jax.config.update("jax_platforms", "cpu")
    return 0


def target_rows(target: HardwareTarget, small: bool, depths: tuple[int, int], parts: Sequence[str]) -> Iterator[Row]:
    """Yield rows of every program, in the order in which the measurement needs them."""
    device, memory = target.devices(SMALLEST.get(target.name, 1))[0], int(target.share * target.memory)
    sizes = SMALL if small else FULL
    found: dict[str, Callable[[], Iterator[Task]]] = {
        "decode": lambda: decode_tasks(sizes, memory, device),
        "prefill": lambda: prefill_tasks(sizes, device),
        "rollouts": lambda: rollout_tasks("rollouts", sizes, sizes.rollouts, (sizes.k,), device),
        "memory": lambda: rollout_tasks("memory", sizes, sizes.shrinking, (0, sizes.k), device),
        "learner": lambda: phase_tasks("learner", learner_config(sizes), ("logprob", "train"), memory, device),
        "training": lambda: phase_tasks("training", training_config(sizes, small), ("",), memory, device),
    }
    for part, tasks in found.items():
        if part in parts:
            for task in tasks():
                yield from task_rows(task, memory, sizes.page, depths)


# ---- the programs


def decode_tasks(sizes: Sizes, memory: int, device: jax.Device) -> Iterator[Task]:
    listed = cells.list_cells(sizes, memory)
    for model in sizes.models:
        own = [c for c in listed if c.model == model]
        for rows, k in dict.fromkeys((c.rows, c.k) for c in own):
            key = Key(model.name, model.config.layers, rows, k)
            live = tuple(rows * -(-c.live // sizes.page) for c in own if (c.rows, c.k) == (rows, k))
            pages = cells.engine_of(key, own, sizes, device).engine.config.shard_pages

            def lower_cell(n: int, key: Key = key, own: list[cells.Cell] = own) -> jax.stages.Lowered:
                built = cells.engine_of(key._replace(layers=n), own, sizes, device)
                return lower(built, Program("decode", key.rows, key.k))

            yield Task("decode", f"{model.name} B={rows} k={k}", key.layers, True, lower_cell, pages, live)


def prefill_tasks(sizes: Sizes, device: jax.Device) -> Iterator[Task]:
    model, program = sizes.models[0], Program("refill", sizes.prefilled)
    name = f"{model.name}: {sizes.prefilled} prompts of {sizes.prompt}"
    yield Task(
        "prefill", name, model.config.layers, True, lambda n: lower(rollouts.prefill_engine(sizes, n, device), program)
    )


def rollout_tasks(
    part: str, sizes: Sizes, tail: LongTail, lengths: tuple[int, ...], device: jax.Device
) -> Iterator[Task]:
    model = tail.model

    def sides_of(n: int) -> rollouts.Sides:
        shallow = model._replace(config=dataclasses.replace(model.config, layers=n))
        return rollouts.make_sides(sizes, tail._replace(model=shallow), lengths, device)

    for name, (built, program) in rollouts.programs(sides_of(1)).items():

        def lower_side(n: int, name: str = name) -> jax.stages.Lowered:
            sides = sides_of(n)
            built, program = rollouts.programs(sides)[name]
            weights = built.abstract()
            if built is sides.drafting:
                weights = rollouts.with_rate(weights, 0.5)
            return built.engine.compiled.lower(program, weights)

        pages = built.engine.config.shard_pages if program.kind == "decode" else 0
        whole = f"{model.name}, {name}"
        yield Task(part, whole, model.config.layers, True, lower_side, pages, (pages,) if pages else ())


def phase_tasks(part: str, config: Config, wanted: tuple[str, ...], memory: int, device: jax.Device) -> Iterator[Task]:
    """Yield the programs of a training step; `wanted`: beginnings of their names."""
    plan = make_plan(config, make_mesh(dataclasses.asdict(config.mesh), [device]), memory=memory)
    for i, phase in enumerate(find_phases(plan)):
        if not phase.name.startswith(wanted):
            continue

        def lower_phase(n: int, i: int = i) -> jax.stages.Lowered:
            return find_phases(with_layers(plan, n))[i].lower()

        name, pages = f"{config.policy.preset}, {phase.name}", decode_pages(plan, phase.name)
        yield Task(part, name, plan.model.layers, phase.unrolled, lower_phase, pages, (pages,) if pages else ())


def lower(built: Built, program: Program) -> jax.stages.Lowered:
    return built.engine.compiled.lower(program, built.abstract())


# ---- what they take


def task_rows(task: Task, memory: int, page: int, depths: tuple[int, int]) -> Iterator[Row]:
    """Compile a program; yield a row for each number of live pages, or one with the error."""
    start = time.perf_counter()
    compiled = depths if task.unrolled and depths[1] < task.layers else (task.layers,)
    row: Row = {"part": task.part, "program": task.name, "layers": task.layers}
    row["extended_from"] = " ".join(map(str, compiled)) if len(compiled) > 1 else ""
    try:
        found = extended([read(task.lower(n).compile(), task.pages) for n in compiled], compiled, task.layers)
    except Exception as raised:
        row["error"] = one_line(raised)
        yield row | {"seconds": round(time.perf_counter() - start, 1)}
        return
    row["seconds"] = round(time.perf_counter() - start, 1)
    for live in task.live or (None,):
        tokens = live * page if live else None
        yield row | {"live_tokens": tokens} | columns(found, live, task.pages, memory)


def read(compiled: jax.stages.Compiled, pages: int) -> Found:
    """Read what a program says; of a decode loop, for a pool of `pages`, one iteration."""
    memory, (text, _) = compiled.memory_analysis(), read_text(compiled)
    assert memory is not None
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    memories = memory.temp_size_in_bytes, memory.argument_size_in_bytes, max(0, results)
    if not text:
        return Found(None, None, None, *memories)
    if pages:
        iteration = iteration_bytes(text, pages)
        if iteration.blocks:
            return Found(None, None, None, *memories)
        return Found(iteration.fixed, iteration.most, iteration.kernels, *memories)
    moved, kernels = once(traffic(text, Pool(1, 1)))
    return Found(moved, moved, kernels, *memories)


def once(found: Traffic) -> tuple[int, int]:
    """Return bytes and kernels where every loop of unknown turns, also one inside another, runs once."""
    inner = [once(loop.turn) for loop in found.loops]
    return found.bytes + sum(x for x, _ in inner), found.kernels + sum(n for _, n in inner)


def extended(found: list[Found], depths: tuple[int, ...], layers: int) -> Found:
    """Return figures of all layers."""
    pairs = dict(zip(Found._fields, zip(*found, strict=True), strict=True))
    whole: Any = {name: None if None in pair else extrapolate(depths, pair, layers) for name, pair in pairs.items()}
    return Found(**whole)


def columns(found: Found, live: int | None, pages: int, memory: int) -> Row:
    moved = found.fixed
    if moved is not None and found.most is not None and live:
        moved += (found.most - moved) * live / pages
    values = {"bytes": moved, **{name: getattr(found, name) for name in Found._fields[2:]}}
    fits = found.temporaries + found.arguments + found.results <= memory
    return {name: None if x is None else round(x) for name, x in values.items()} | {"fits": fits}
