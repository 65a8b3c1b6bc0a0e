"""Decode cells: an iteration of rows that hold so many tokens, timed at a few depths and extended to all layers."""

import concurrent.futures
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.accelerator.engines import Built, build
from experiments.accelerator.parts import Row, one_line
from experiments.accelerator.sizes import FRACTIONS, Model, Sizes
from experiments.hlo.iteration import IterationBytes, iteration_bytes
from experiments.hlo.text import read_text
from specrl_jax.decoding.decode import chunk_inputs
from specrl_jax.decoding.pages import PagePool, PageTable
from specrl_jax.decoding.state import EngineConfig, Slots
from specrl_jax.drafts.eagle3 import Eagle3Draft, eagle3_config
from specrl_jax.drafts.weights import Weights
from specrl_jax.models import decoder
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.flops import forward_flops
from specrl_jax.models.layers import count_params

NO_TIME = "no time was left"
WARM = 2  # iterations before those that are timed
# Of the memory that a run takes: for logits, workspaces and fragments.
WORKSPACE = 0.06


@dataclasses.dataclass(frozen=True)
class Cell:
    """What an iteration is timed with."""

    model: Model
    rows: int  # B
    live: int  # tokens of each row
    fraction: float  # of the limit, that live
    k: int

    def __str__(self) -> str:
        return f"{self.model.name} B={self.rows} live={self.live} k={self.k}"


class Key(NamedTuple):
    """A compiled decode program; cells that differ in their live tokens share it."""

    model: str
    layers: int
    rows: int
    k: int

    def __str__(self) -> str:
        return f"{self.model} layers={self.layers} B={self.rows} k={self.k}"


def list_cells(sizes: Sizes, memory: int) -> list[Cell]:
    """Return the cells, the most important first; a batch that two rules name counts once.

    `memory`: bytes of the device that a run takes.
    """
    cells = []
    for model in sizes.models:
        for fraction in FRACTIONS:
            live = round(fraction * sizes.limit)
            most = most_rows(model.config, head_of(model.config, sizes), live, sizes, memory)
            for rows in dict.fromkeys((*sizes.batches, most)):
                cells += [Cell(model, rows, live, fraction, k) for k in (0, sizes.k)]
    return cells


def most_rows(model: DecoderConfig, head: Eagle3Draft, live: int, sizes: Sizes, memory: int) -> int:
    """Return how many rows of `live` tokens fit beside the weights of all layers: a multiple of 8, at most sizes.most.

    At least the largest of sizes.batches, which may not fit.
    """
    width = jnp.dtype(sizes.dtype).itemsize
    weights = width * (count_params(decoder.inference_specs(model)) + count_params(head.inference_specs))
    token = width * 2 * model.kv_heads * model.head_dim * (model.layers + 1) + width * model.embed
    row = sizes.page * pages_of(live, sizes) * token + 4 * model.vocab * (sizes.k + 1)
    fitting = int((1 - WORKSPACE) * memory - weights) // row
    step = 8 if sizes.most >= 8 else 1
    return max(*sizes.batches, min(sizes.most, fitting // step * step))


def reserve(sizes: Sizes) -> int:
    """Return the most tokens that a row commits in the timed chunks of a cell."""
    return (WARM + sizes.rounds * sizes.iterations) * (sizes.k + 1)


def head_of(model: DecoderConfig, sizes: Sizes) -> Eagle3Draft:
    return Eagle3Draft(eagle3_config(model, min(sizes.draft_vocab, model.vocab)))


def engine_of(key: Key, cells: Sequence[Cell], sizes: Sizes, device: jax.Device) -> Built:
    """Return the engine of a program, with pages for the most that its cells hold."""
    own = [c for c in cells if (c.model.name, c.rows, c.k) == (key.model, key.rows, key.k)]
    model = dataclasses.replace(own[0].model.config, layers=key.layers)
    limits = EngineConfig(
        num_slots=key.rows,
        max_prompt_tokens=sizes.prompt,
        # Rows that hold the limit already commit more while they are timed.
        max_response_tokens=sizes.limit - sizes.prompt + reserve(sizes),
        chunk=sizes.rounds * sizes.iterations,
        page_tokens=sizes.page,
        prefill_tokens=min(512, sizes.prompt),
    )
    pages = key.rows * pages_of(max(c.live for c in own), sizes)
    limits = dataclasses.replace(limits, pages=max(pages, limits.fewest_pages))
    draft, lengths = (head_of(model, sizes), (key.k,)) if key.k else (None, (0,))
    return build(model, limits, sizes.dtype, device, draft, lengths)


def pages_of(live: int, sizes: Sizes) -> int:
    """Return the pages that a row of `live` tokens takes while it is timed."""
    return math.ceil((live + reserve(sizes)) / sizes.page)


def keys_of(cells: Sequence[Cell]) -> list[Key]:
    """Return the programs of cells, those of one cell's depths behind each other."""
    return list(dict.fromkeys(Key(c.model.name, n, c.rows, c.k) for c in cells for n in c.model.depths))


def compile_together(
    tasks: dict[str, Callable[[], Callable[[], object]]],
    seconds: dict[str, float],
    keep: Callable[[], None],
    left: Callable[[], float],
) -> dict[str, str]:
    """Trace programs one after the other, and compile each meanwhile in one of as many threads as there are processors.

    Tracing is Python, which threads would do in turns: sixteen at once took longer than one on an H200's host.

    Args:
      tasks: each traces a program and returns what compiles it.
      seconds: gets those of each that succeeds, from its tracing on.
      keep: called in this thread after each is compiled.
      left: seconds that are left; none is begun without any.
    Returns:
      why others did not succeed, one line each.
    """
    missing: dict[str, str] = {}
    compiling: dict[concurrent.futures.Future[object], tuple[str, float]] = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for name, trace in tasks.items():
            start = time.perf_counter()
            if left() <= 0:
                missing[name] = NO_TIME
                continue
            try:
                compiling[pool.submit(trace())] = name, start
            except Exception as raised:
                missing[name] = one_line(raised)
        for future in concurrent.futures.as_completed(compiling):
            name, start = compiling[future]
            if error := future.exception():
                missing[name] = one_line(error)
            else:
                seconds[name] = round(time.perf_counter() - start, 2)
            keep()
    return missing


# ---- what a program says


@dataclasses.dataclass(frozen=True)
class Figures:
    """What the text of a compiled decode program says of an iteration."""

    iteration: IterationBytes | None  # None: the compiler does not show its program
    temporaries: int  # bytes
    arguments: int  # bytes

    @property
    def kernels(self) -> int | None:
        return self.iteration.kernels if self.iteration else None


def figures(compiled: jax.stages.Compiled, pages: int) -> Figures:
    """Read the figures of a decode program whose pool has so many pages."""
    text, _ = read_text(compiled)
    memory = compiled.memory_analysis()
    assert memory is not None
    found = iteration_bytes(text, pages) if text else None
    return Figures(found, memory.temp_size_in_bytes, memory.argument_size_in_bytes)


# ---- time


@functools.partial(jax.jit, static_argnames=("live", "pages"), donate_argnums=0)
def fill(slots: Slots, live: int, pages: int) -> Slots:
    """Give every row `live` random tokens, random keys and values, and its own `pages` pages; every row runs."""
    B, S = slots.tokens.shape
    C = slots.pool.free.shape[1]
    columns = jnp.arange(slots.held.table.shape[1])[None]
    own = jnp.where(columns < pages, jnp.arange(B)[:, None] * pages + columns, C).astype(jnp.int32)
    zeros = jnp.zeros((B,), jnp.int32)
    taken = jnp.arange(C)[None] < B * pages
    pool = PagePool(taken.astype(jnp.int32), slots.pool.free, jnp.full((1,), C - B * pages, jnp.int32))

    def drawn(x: jax.Array) -> jax.Array:
        # Zeros would take less power. A CPU keeps bfloat16 as integers.
        page = jax.random.normal(jax.random.key(0), (1, *x.shape[1:])) if jnp.issubdtype(x.dtype, jnp.floating) else 0
        return (jnp.zeros_like(x) + page).astype(x.dtype)

    return dataclasses.replace(
        slots,
        tokens=jax.random.randint(jax.random.key(1), (B, S), 0, 90),
        prompt_length=zeros + 1,
        length=zeros + live,
        limit=zeros + S,
        done=jnp.zeros((B,), bool),
        rollout_id=jnp.arange(B, dtype=jnp.uint32),
        cache=jax.tree.map(drawn, slots.cache),
        pool=pool,
        held=PageTable(own, zeros + pages, zeros),
    )


def time_iterations(built: Built, weights: Weights, cell: Cell, sizes: Sizes) -> list[float]:
    """Return the seconds of an iteration in each round. Raises RuntimeError where rows end."""
    engine = built.engine
    slots = fill(engine.compiled.empty(weights)[0], cell.live, pages_of(cell.live, sizes))
    seconds = []
    for i in range(sizes.rounds + 1):
        count = sizes.iterations if i else WARM
        jax.block_until_ready(slots)
        start = time.perf_counter()
        slots, statistics = engine.compiled.decode(
            weights, slots, cell.k, inputs=chunk_inputs(i, count, engine.config.shards)
        )
        statistics = jax.device_get(statistics)
        seconds.append((time.perf_counter() - start) / count)
        if statistics.iterations != count or statistics.done.any():
            raise RuntimeError(f"{cell}: rows ended after {statistics.iterations} of {count} iterations")
    return seconds[1:]


# ---- all layers


def extrapolate(depths: Sequence[int], values: Sequence[float], layers: int) -> float:
    """Extend a value of programs of one or two depths to `layers`: layers are alike, so it is linear in them.

    Raises ValueError for one depth that is not `layers`.
    """
    if len(depths) == 1 and depths[0] == layers:
        return values[0]
    if len(depths) != 2:
        raise ValueError(f"depths {tuple(depths)}: two are extrapolated to {layers} layers")
    (a, b), (x, y) = depths, values
    return x + (y - x) * (layers - a) / (b - a)


def ideal(cell: Cell) -> float:
    """Return the FLOPs of an iteration: of the policy, one forward of k + 1 tokens a row."""
    tokens = cell.rows * (cell.k + 1)
    return float(forward_flops(cell.model.config, tokens, tokens * cell.live))


def moved(cell: Cell, found: Sequence[Figures], sizes: Sizes) -> float | None:
    """Return the bytes of an iteration with all layers; None where the programs do not say them.

    Where attention runs without a kernel its reads are not in the program's text: they are added by arithmetic.
    """
    each = [f.iteration for f in found if f.iteration]
    if len(each) < len(found):
        return None
    live = cell.rows * math.ceil(cell.live / sizes.page)
    known = extrapolate(cell.model.depths, [x.of(live) for x in each], cell.model.config.layers)
    if not any(x.blocks for x in each):
        return known
    m = cell.model.config
    return known + jnp.dtype(sizes.dtype).itemsize * 2 * m.kv_heads * m.head_dim * m.layers * cell.rows * cell.live


def cell_row(
    cell: Cell, seconds: Sequence[Sequence[float]], found: Sequence[Figures], sizes: Sizes, limits: dict[str, float]
) -> Row:
    """Return what a cell's iteration takes, with all layers.

    Args:
      seconds: of each depth, by round.
      found: of each depth.
      limits: experiments.kernels.run.ceilings.
    """
    layers, depths = cell.model.config.layers, cell.model.depths
    each = [extrapolate(depths, pair, layers) for pair in zip(*seconds, strict=True)]
    by_depth = [float(np.median(s)) for s in seconds]
    took, bytes_moved = extrapolate(depths, by_depth, layers), moved(cell, found, sizes)
    arithmetic = ideal(cell) / limits["bfloat16_operations_per_second"]
    reading = bytes_moved / limits["copy_bytes_per_second"] if bytes_moved else None
    kernels = [f.kernels for f in found if f.kernels is not None]
    least = max(arithmetic, reading or 0.0)
    return {
        "model": cell.model.name,
        "rows": cell.rows,
        "live": cell.live,
        "k": cell.k,
        "ms": 1e3 * took,
        "ms_low": 1e3 * min(each),
        "ms_high": 1e3 * max(each),
        "ms_by_depth": [1e3 * s for s in by_depth],
        "bytes": bytes_moved,
        "share_of_copy": reading / took if reading else None,
        "roofline_ms": 1e3 * least,
        "kernels": extrapolate(depths, kernels, layers) if len(kernels) == len(depths) else None,
        "tokens_per_second_at_most": cell.rows * (cell.k + 1) / took,
    }
