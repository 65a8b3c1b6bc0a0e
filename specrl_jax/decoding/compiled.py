"""The compiled functions of an engine: which exist, when they are compiled, and how long that took.

A call compiles what it may want before it begins, so that its seconds are its own. In a training run it compiles what
its first chunk runs: the rest, smaller batches and other draft lengths, beside the rollouts, and who wants a program
sooner waits for it.

    empty    slots of the largest batch size, every row finished
    refill   prefills each new prompt once and starts rollouts in free slots
    decode   a `lax.while_loop` of fused iterations, one program per (batch size, draft length)
    reverify verifies what earlier weights drew of fresh rows
    extend   appends what environments answered and prefills it (turns)
    compact  moves the running rows into the next smaller batch size
    read_row, read_pages, drop_row, restore_row, write_pages
             copy a row to the host and back (preemption.py); compiled when pages first run out, drop_row with turns
             when a rollout first ends
    read_records
             copies what is recorded of a finished row's tokens to the host (records.py)

Each is compiled ahead of time for fixed shapes, so a call that does not fit raises instead of compiling another.
"""

import concurrent.futures
import functools
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from specrl_jax.core import compiler_options, stand_in
from specrl_jax.decoding.decode import ChunkInputs, chunk_inputs, decode_chunk
from specrl_jax.decoding.extend import Extension, extend
from specrl_jax.decoding.functions import EngineFunctions
from specrl_jax.decoding.preemption import drop_row, read_pages, read_row, restore_row, write_pages
from specrl_jax.decoding.records import pages_at_once, read_records
from specrl_jax.decoding.refill import compact, empty_slots, refill
from specrl_jax.decoding.reverify import Reverified, at_once, reverify_chunk
from specrl_jax.decoding.scheduler import Scheduler
from specrl_jax.decoding.state import Cache, ChunkStatistics, EngineConfig, Params, PrefillBatch, Prompts, Slots

PREEMPTION = {function.__name__: function for function in (read_row, read_pages, drop_row, restore_row, write_pages)}
# Programs compiled at once: at 8B each takes about a GB of the host's memory meanwhile.
MOST_THREADS = 8
# Of the host's cores, for programs that are compiled beside rollouts.
BESIDE = 1 / 2


class Program(NamedTuple):
    """Names a compiled function: its kind, the batch size of its result, and for `decode` the draft length."""

    kind: str
    size: int
    k: int = 0

    def __str__(self) -> str:
        return f"{self.kind} B={self.size}" + (f" k={self.k}" if self.kind == "decode" else "")


class CompiledFunctions(Generic[Params, Cache]):
    """All programs of one engine, each compiled once: by `compile_all`, by `begin_next`, or at its first use.

    Attributes:
      on_begin: called with the programs that a call waits for, before they are compiled.
      on_program: called with each program that a call of the engine compiled, and its seconds.
      beside: whether calls begin before all that they may want is compiled.
      stays_large: whether a batch stays as it is while the programs of a smaller one compile, where `beside`; else it
        waits for them, and its bits do not depend on the clock.
      spare: set once a first call leaves a thread of `compile_all` free.
    """

    def __init__(
        self,
        functions: EngineFunctions[Params, Cache],
        config: EngineConfig,
        lengths: tuple[int, ...],
        *,
        shardings: Slots,
        prompt_shardings: Prompts,
    ) -> None:
        """
        Args:
          lengths: draft lengths that have a program.
          shardings: of the slots, for every batch size.
          prompt_shardings: of the prompt that is carried over between refills.
        """
        self.sizes = (config.num_slots, *config.sizes)
        self.lengths = lengths
        # Positions beyond the last committed token that an iteration writes at most.
        self.uncommitted = max(*lengths, functions.drafter.uncommitted, at_once(config) if config.earlier else 0)
        self.seconds: dict[Program, float] = {}  # of tracing and compiling
        self.on_begin: Callable[[list[Program]], None] = lambda programs: None
        self.on_program: Callable[[Program, float], None] = lambda program, seconds: None
        self._functions, self._config = functions, config
        self._shardings, self._prompt_shardings = shardings, prompt_shardings
        self._compiled: dict[Program, Callable] = {}
        # Programs that `begin_next` has begun, the oldest first. An evaluation may run while another thread generates.
        self._compiling: dict[Program, concurrent.futures.Future[Callable]] = {}
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._lock = threading.RLock()
        self.beside, self.stays_large, self.spare = False, False, threading.Event()
        self._whole = _whole(shardings)
        self._gather = jax.jit(lambda tree: tree, out_shardings=self._whole)

    def all(self) -> list[Program]:
        """Return every program of this engine."""
        decodes = [Program("decode", size, k) for size in self.sizes for k in self.lengths]
        compacts = [Program("compact", size) for size in self.sizes[1:]]
        once = ["empty", "refill", *(["reverify"] if self._config.earlier else [])]
        once += ["read_records"] if self._config.records else []
        extends = [Program("extend", size) for size in self.sizes if self._config.turns]
        return [*(Program(kind, self.sizes[0]) for kind in once), *decodes, *extends, *compacts]

    def needed(self, rollouts: int, lengths: Collection[int]) -> list[Program]:
        """Return what a call of so many rollouts runs with these draft lengths, where pages do not run short."""
        # The batch is as small as the rows that run allow.
        sizes = [size for size, smaller in zip(self.sizes, (*self.sizes[1:], 0), strict=True) if smaller < rollouts]

        def runs(program: Program) -> bool:
            if program.kind in ("decode", "extend"):
                return program.size in sizes and (program.kind == "extend" or program.k in lengths)
            return True

        return [program for program in self.all() if runs(program)]

    def first(self, rollouts: int, k: int) -> list[Program]:
        """Return what the first chunk of such a call runs, with drafts of k tokens."""
        if k not in self.lengths:
            raise self._missing(Program("decode", self.sizes[0], k))
        needed = self.needed(rollouts, (k,))
        size = max(program.size for program in needed if program.kind == "decode")
        kinds = {"decode": (size,), "compact": [n for n in self.sizes if n >= size]}
        return [p for p in needed if p.kind in ("empty", "refill") or p.size in kinds.get(p.kind, ())]

    def lacks(self, programs: Collection[Program]) -> bool:
        """Return whether one of them is not compiled yet."""
        return not self._compiled.keys() >= set(programs)

    def compile_all(
        self,
        params: Params,
        on_program: Callable[[Program, float], None] = lambda program, seconds: None,
        programs: Collection[Program] | None = None,
    ) -> None:
        """Compile what is not compiled yet, side by side; call `on_program` with the seconds of each program, in order.

        What `on_program` raises ends the call once the programs under way are compiled.

        Args:
          programs: those wanted; None: all.
        """
        with self._lock:
            self._compile_all(params, on_program, self.all() if programs is None else programs)
        self.spare.set()

    def _compile_all(
        self, params: Params, on_program: Callable[[Program, float], None], programs: Collection[Program]
    ) -> None:
        if missing := [program for program in programs if program not in self._compiled]:
            self.on_begin(missing)
        running: dict[Program, concurrent.futures.Future[Callable]] = dict(self._compiling)
        self._compiling.clear()

        def finish_oldest() -> None:
            program = next(iter(running))
            self._compiled[program] = running.pop(program).result()
            on_program(program, self.seconds[program])

        with concurrent.futures.ThreadPoolExecutor(threads := min(MOST_THREADS, os.cpu_count() or 1)) as pool:
            try:
                for program in programs:
                    if program not in self._compiled and program not in running:
                        # Traced here, since a thread would not see settings that hold in this one only.
                        running[program] = pool.submit(self._finisher(program, params))
                    while len(running) > threads:
                        finish_oldest()
                while running:
                    if sum(not future.done() for future in running.values()) < threads:
                        self.spare.set()
                    finish_oldest()
            finally:
                pool.shutdown(cancel_futures=True)

    def _finisher(self, program: Program, params: Params) -> Callable[[], Callable]:
        """Trace and lower one program; return what compiles it and notes the seconds of both."""
        start = time.perf_counter()
        jit = not jax.config.jax_disable_jit  # type: ignore[attr-defined]
        lowered = self.lower(program, params) if jit else None
        traced = time.perf_counter() - start

        def finish() -> Callable:
            start = time.perf_counter()
            compiled = lowered.compile(compiler_options()) if lowered else self.describe(program, params)[0]
            self.seconds[program] = traced + time.perf_counter() - start
            return compiled

        return finish

    def begin_next(self, params: Params, programs: Collection[Program]) -> None:
        """Begin to compile, beside what goes on, the next of these programs; tell of those that are done.

        Called between chunks: it is traced here, since a thread would not see settings that hold in this one only.
        """
        if not self.beside:
            return
        with self._lock:
            for program in [program for program, future in self._compiling.items() if future.done()]:
                self._take(program)
            threads = max(1, int(BESIDE * min(MOST_THREADS, os.cpu_count() or 1)))
            # Small ones first: with them one decode program is enough for a smaller batch.
            missing = [p for p in programs if p not in self._compiled and p not in self._compiling]
            following = min(missing, key=lambda program: program.kind != "compact", default=None)
            if following is None or len(self._compiling) >= threads or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
                return
            self._pool = self._pool or concurrent.futures.ThreadPoolExecutor(threads)
            self._compiling[following] = self._pool.submit(self._finisher(following, params))

    def postponed(self, size: int) -> bool:
        """Return whether a batch is not to shrink to `size` rows yet."""
        decodes = any(program.kind == "decode" and program.size == size for program in self._compiled)
        return self.beside and self.stays_large and not (decodes and Program("compact", size) in self._compiled)

    def _take(self, program: Program) -> None:
        """Wait for a program that `begin_next` has begun, and tell of it."""
        self._compiled[program] = self._compiling.pop(program).result()
        self.on_program(program, self.seconds[program])

    def begin(self, program: Program, params: Params) -> Callable[[], None]:
        """Trace and lower one program, in this thread; return what compiles it for `get`, in any thread."""
        finish = self._finisher(program, params)
        return lambda: self._compiled.update({program: finish()})

    def empty(self, params: Params) -> tuple[Slots[Cache], Prompts]:
        """Call `empty_slots`."""
        return self.get(Program("empty", self.sizes[0]), params)()

    def refill(
        self, params: Params, slots: Slots[Cache], carried: Prompts, *, batch: PrefillBatch
    ) -> tuple[Slots[Cache], Prompts]:
        """Call `refill`; `slots` and `carried` are donated."""
        return self.get(Program("refill", self.sizes[0]), params)(params, slots, carried, batch)

    def decode(
        self, params: Params, slots: Slots[Cache], k: int, *, inputs: ChunkInputs
    ) -> tuple[Slots[Cache], ChunkStatistics]:
        """Call `decode_chunk`; `slots` are donated."""
        return self.get(Program("decode", slots.done.shape[0], k), params)(params, slots, inputs)

    def reverify(self, params: Params, slots: Slots[Cache], inputs: ChunkInputs) -> tuple[Slots[Cache], Reverified]:
        """Call `reverify_chunk`; `slots` are donated."""
        return self.get(Program("reverify", slots.done.shape[0]), params)(params, slots, inputs)

    def extend(self, params: Params, slots: Slots[Cache], new: Extension) -> Slots[Cache]:
        """Call `extend`; `slots` are donated."""
        return self.get(Program("extend", slots.done.shape[0]), params)(params, slots, new)

    def compact(self, params: Params, slots: Slots[Cache], rows: np.ndarray) -> Slots[Cache]:
        """Call `compact`."""
        return self.get(Program("compact", rows.size), params)(slots.by_row(), slots.not_by_row(), rows)

    def preempt(self, name: str, params: Params, slots: Slots[Cache], *rest: object) -> Any:
        """Call one of PREEMPTION; those that return slots are given them donated."""
        return self.get(Program(name, slots.done.shape[0]), params)(slots, *rest)

    def fetch(self, tree: object) -> Any:
        """Return arrays on the host, whole in every process of the engine; all of them call it together."""
        parts = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
        if not all(x.is_fully_addressable or x.is_fully_replicated for x in parts):
            tree = self._gather(tree)
        return jax.device_get(tree)

    def read_records(self, params: Params, slots: Slots[Cache], shard: np.ndarray, *, pages: np.ndarray) -> jax.Array:
        """Call `read_records` on the slots' pool."""
        assert self._functions.recorded is not None, "something is recorded"
        program = self.get(Program("read_records", self.sizes[0]), params)
        return program(self._functions.recorded(slots.cache), shard, pages)

    def lower(self, program: Program, params: Params) -> jax.stages.Lowered:
        """Lower one program; ShapeDtypeStructs with shardings are enough as `params`."""
        function, arguments = self.describe(program, params)
        return function.lower(*arguments)

    def get(self, program: Program, params: Params) -> Callable:
        """Return the compiled function of a program."""
        if program not in self._compiled:
            if program not in self.all() and program.kind not in PREEMPTION:
                raise self._missing(program)
            with self._lock:
                if program not in self._compiled:
                    self.on_begin([program])
                if program in self._compiling:
                    self._take(program)
                elif program not in self._compiled:
                    self.begin(program, params)()
                    self.on_program(program, self.seconds[program])
        return self._compiled[program]

    def _missing(self, program: Program) -> ValueError:
        return ValueError(f"this engine has no program '{program}'; its draft lengths are {self.lengths}")

    def describe(self, program: Program, params: Params) -> tuple[jax.stages.Wrapped, tuple[object, ...]]:
        """Return the jitted function and the arguments to lower it with."""
        engine_functions, config = self._functions, self._config
        both = (self._shardings, self._prompt_shardings)
        if program.kind == "empty":
            return jax.jit(functools.partial(empty_slots, engine_functions, config), out_shardings=both), ()
        if program.kind == "refill":
            fn = functools.partial(refill, functions=engine_functions, config=config)
            return jax.jit(fn, donate_argnums=(1, 2), out_shardings=both), (
                params,
                *self._abstract(program.size),
                abstract_prefill_batch(self._config),
            )
        if program.kind == "compact":
            larger = self.sizes[self.sizes.index(program.size) - 1]
            rows = jax.ShapeDtypeStruct((config.shards, program.size // config.shards), jnp.int32)
            slots = self._abstract(larger)[0]
            jitted = jax.jit(compact, donate_argnums=1, out_shardings=self._shardings)
            return jitted, (slots.by_row(), slots.not_by_row(), rows)
        if program.kind in PREEMPTION:
            return self._describe_preemption(program)
        if program.kind == "read_records":
            assert engine_functions.recorded is not None, "something is recorded"
            pool = engine_functions.recorded(self._abstract(program.size)[0].cache)
            pages = jax.ShapeDtypeStruct((pages_at_once(config),), jnp.int32)
            jitted = jax.jit(functools.partial(read_records, shards=config.shards), out_shardings=self._whole)
            return jitted, (pool, jax.ShapeDtypeStruct((), jnp.int32), pages)
        if program.kind == "extend":
            extending = functools.partial(extend, functions=engine_functions, config=config)
            jitted = jax.jit(extending, donate_argnums=1, out_shardings=self._shardings)
            row = stand_in(jax.ShapeDtypeStruct((program.size,), jnp.int32))
            tokens = stand_in(jax.ShapeDtypeStruct((program.size, config.cache_length), jnp.int32))
            return jitted, (params, self._abstract(program.size)[0], Extension(tokens, row, row, limit=row))
        chunk: Callable = functools.partial(decode_chunk, k=program.k) if program.kind == "decode" else reverify_chunk
        chunk = functools.partial(chunk, functions=engine_functions, config=config, shardings=self._shardings)
        jitted = jax.jit(chunk, donate_argnums=1, out_shardings=(self._shardings, self._whole))
        inputs = jax.eval_shape(lambda: chunk_inputs(0, 0, config.shards))
        return jitted, (params, self._abstract(program.size)[0], inputs)

    def _describe_preemption(self, program: Program) -> tuple[jax.stages.Wrapped, tuple[object, ...]]:
        slots, number = self._abstract(program.size)[0], jax.ShapeDtypeStruct((), jnp.int32)
        rest = {
            "restore_row": lambda: (jax.eval_shape(read_row, slots, number),),
            "read_pages": lambda: (number,),
            "write_pages": lambda: (number, jax.eval_shape(read_pages, slots, number, number)),
        }.get(program.kind, tuple)()
        function = PREEMPTION[program.kind]
        if function in (read_row, read_pages):
            return jax.jit(function), (slots, number, *rest)
        return jax.jit(function, donate_argnums=0, out_shardings=self._shardings), (slots, number, *rest)

    def _abstract(self, size: int) -> tuple[Slots, Prompts]:
        """Return ShapeDtypeStructs of the slots of one batch size, and of the prompt carried over."""
        slots, prompts = jax.eval_shape(functools.partial(empty_slots, self._functions, self._config))
        D = self._config.shards
        kept = jax.ShapeDtypeStruct((D, size // D), jnp.int32)
        slots = jax.eval_shape(compact, slots.by_row(), slots, kept)

        def place(sharding: jax.sharding.Sharding, tree: object) -> object:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

        # Shardings may be a prefix of the tree.
        return jax.tree.map(place, self._shardings, slots), jax.tree.map(place, self._prompt_shardings, prompts)


def _whole(shardings: Slots) -> NamedSharding | None:
    """Return the sharding of arrays that each device has whole; None where there is no mesh."""
    sharding: object = jax.tree.leaves(shardings)[0]
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None


def abstract_prefill_batch(config: EngineConfig) -> PrefillBatch:
    """Return the ShapeDtypeStructs of a refill's input."""
    scheduler = Scheduler(config, 0, [[0]], samples=1)
    batch = scheduler.schedule(np.full(config.shards, config.shard_pages))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
