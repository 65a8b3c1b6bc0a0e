"""Compile what the measurement would run, for devices that are not here, and list what each program takes."""

import csv
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator

import jax

from experiments.accelerator import cells, rollouts
from experiments.accelerator.cells import Cell, Key
from experiments.accelerator.engines import Built
from experiments.accelerator.learner import training_config
from experiments.accelerator.parts import Row
from experiments.accelerator.sizes import FULL, SMALL, Sizes
from specrl_jax.accelerator_flags import flags_for
from specrl_jax.decoding.compiled import Program
from specrl_jax.dry_run.measure import read_text
from specrl_jax.dry_run.phases import find_phases
from specrl_jax.dry_run.targets import TARGETS, HardwareTarget, installed
from specrl_jax.errors import fail
from specrl_jax.sharding import make_mesh
from specrl_jax.training.plan import make_plan

FIELDS = (
    *("target", "part", "program", "layers", "iteration_bytes", "live_tokens", "kernels", "temporaries", "arguments"),
    *("fits", "seconds", "error"),
)
# The smallest number that a target comes in, of which one is used.
SMALLEST = {"v5p": 4}


def compile_for(targets: list[str], output: str, small: bool) -> int:
    """Write programs.csv into the folder `output`, a row as soon as its program is compiled; return the exit status.

    Programs of fewer layers than the model's are extended to all of them in a row of their own.
    """
    missing = [name for name in targets if not installed(TARGETS[name])]
    if missing:
        return fail(f"--compile {' '.join(missing)}: pip install -r requirements-aot.txt has the compilers")
    # No driver is here and none is needed; a TPU's compiler need not ask whose machine it is on.
    os.environ |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TPU_SKIP_MDS_QUERY": "1"}
    for name in targets:
        os.environ.update(flags_for(TARGETS[name].accelerator, os.environ))
    jax.config.update("jax_platforms", "cpu")
    os.makedirs(output, exist_ok=True)
    failed = 0
    with open(os.path.join(output, "programs.csv"), "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for name in targets:
            for row in compiled_rows(TARGETS[name], SMALL if small else FULL, small):
                writer.writerow({"target": name} | row)
                file.flush()
                failed += bool(row.get("error"))
                print(name, row, flush=True)
    return 1 if failed else 0


def compiled_rows(target: HardwareTarget, sizes: Sizes, small: bool) -> Iterator[Row]:
    """Yield a row for every program, in the order in which the measurement needs them."""
    device, memory = target.devices(SMALLEST.get(target.name, 1))[0], int(target.share * target.memory)
    listed = cells.list_cells(sizes, memory)
    for model in sizes.models:
        own = [c for c in listed if c.model == model]
        found: dict[Key, cells.Figures] = {}
        for key in cells.keys_of(own):
            built = cells.engine_of(key, own, sizes, device)
            row, compiled = attempt(functools.partial(lower, built, Program("decode", key.rows, key.k)))
            if compiled is not None:
                found[key] = cells.figures(compiled, built.engine.config.shard_pages)
            same = [c for c in own if (c.rows, c.k) == (key.rows, key.k)]
            live = max(c.live for c in same)
            yield row | decode_columns(f"{key.model} B={key.rows} k={key.k}", key, found.get(key), live, sizes, memory)
            if key.layers == model.depths[-1]:
                yield from (row for c in same if (row := extended(c, found, sizes, memory)))
    yield from others(sizes, small, device, memory)


def lower(built: Built, program: Program) -> jax.stages.Lowered:
    return built.engine.compiled.lower(program, built.abstract())


def attempt(lower_it: Callable[[], jax.stages.Lowered]) -> tuple[Row, jax.stages.Compiled | None]:
    """Compile; return seconds and the error, and the program or None."""
    start = time.perf_counter()
    try:
        compiled, error = lower_it().compile(), ""
    except Exception as raised:
        compiled, error = None, " ".join(f"{type(raised).__name__}: {raised}".split())[:200]
    return {"seconds": round(time.perf_counter() - start, 1), "error": error}, compiled


def decode_columns(name: str, key: Key, figures: cells.Figures | None, live: int, sizes: Sizes, memory: int) -> Row:
    row: Row = {"part": "decode", "program": name, "layers": key.layers, "live_tokens": live}
    if figures is None:
        return row
    pages = key.rows * -(-live // sizes.page)
    return row | {
        "iteration_bytes": figures.bytes.of(pages) if figures.bytes else None,
        "kernels": figures.kernels,
        "temporaries": figures.temporaries,
        "arguments": figures.arguments,
        "fits": figures.temporaries + figures.arguments <= memory,
    }


def extended(cell: Cell, found: dict[Key, cells.Figures], sizes: Sizes, memory: int) -> Row | None:
    """Return a cell's row with all layers, from programs of two depths; None where one of them is missing."""
    depths, layers = cell.model.depths, cell.model.config.layers
    keys = [Key(cell.model.name, n, cell.rows, cell.k) for n in depths]
    if len(depths) == 1 or any(key not in found for key in keys):
        return None
    each = [found[key] for key in keys]

    def whole(values: list[float]) -> int:
        return round(cells.extrapolate(depths, values, layers))

    arguments, temporaries = whole([f.arguments for f in each]), whole([f.temporaries for f in each])
    bytes_moved, kernels = cells.moved(cell, each, sizes), [f.kernels for f in each if f.kernels is not None]
    return {
        "part": "decode, extended",
        "program": f"{cell.model.name} B={cell.rows} k={cell.k}",
        "layers": layers,
        "live_tokens": cell.live,
        "iteration_bytes": round(bytes_moved) if bytes_moved else None,
        "kernels": whole(kernels) if len(kernels) == len(each) else None,
        "temporaries": temporaries,
        "arguments": arguments,
        "fits": arguments + temporaries <= memory,
    }


def others(sizes: Sizes, small: bool, device: jax.Device, memory: int) -> Iterator[Row]:
    """Yield rows of prefill, of the long-tailed rollouts, and of a training step."""
    for layers in sizes.models[0].depths:
        built = rollouts.prefill_engine(sizes, layers, device)
        program = Program("refill", sizes.prefilled)
        row, compiled = attempt(functools.partial(lower, built, program))
        yield row | plain_columns("prefill", str(program), layers, compiled, memory)
    sides = rollouts.make_sides(sizes, device)
    for name, (built, program) in rollouts.programs(sides).items():
        weights = built.abstract()
        if built is sides.drafting:
            weights = rollouts.with_rate(weights, 0.5)
        row, compiled = attempt(functools.partial(built.engine.compiled.lower, program, weights))
        yield row | plain_columns("rollouts", name, sizes.rollouts.layers, compiled, memory)
    config = training_config(sizes, small)
    plan = make_plan(config, make_mesh(dataclasses.asdict(config.mesh), [device]), memory=memory)
    for phase in find_phases(plan):
        row, compiled = attempt(phase.lower)
        yield row | plain_columns("training", phase.name, plan.model.layers, compiled, memory)


def plain_columns(part: str, name: str, layers: int, compiled: jax.stages.Compiled | None, memory: int) -> Row:
    row: Row = {"part": part, "program": name, "layers": layers}
    if compiled is None:
        return row
    text, _ = read_text(compiled)
    found = compiled.memory_analysis()
    assert found is not None
    total = found.temp_size_in_bytes + found.argument_size_in_bytes
    return row | {
        "kernels": cells.count_kernels(text) or None if text else None,
        "temporaries": found.temp_size_in_bytes,
        "arguments": found.argument_size_in_bytes,
        "fits": total <= memory,
    }
