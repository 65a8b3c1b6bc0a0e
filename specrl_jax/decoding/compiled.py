"""The compiled functions of an engine: which exist, when they are compiled, and how long that took.

A call compiles its programs before it begins, so that its time excludes compilation. A training run first compiles only
those of its first chunk. Those of smaller batches and other draft lengths compile in the background; a call that needs
one sooner waits for it.
"""

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np

from specrl_jax.core import compiler_options
from specrl_jax.decoding.decode import ChunkInputs
from specrl_jax.decoding.programs import PREEMPTION, EnginePrograms, Program
from specrl_jax.decoding.state import Cache, ChunkStatistics, Params, PrefillBatch, Prompts, Slots

# Programs compiled at once: at 8B each takes about a GB of the host's memory meanwhile.
MOST_THREADS = 8
# Of the host's cores, for programs that are compiled beside rollouts.
BESIDE = 1 / 2


class CompiledFunctions(EnginePrograms[Params, Cache]):
    """All programs of one engine, each compiled once: by `compile_all`, by `begin_next`, or at its first use.

    Attributes:
      on_begin: called with the programs that a call waits for, before they are compiled.
      on_program: called with each program that a call of the engine compiled, and its seconds.
      beside: whether calls begin before all of their programs are compiled.
      stays_large: whether a batch stays as it is while the programs of a smaller one compile, where `beside`; else it
        waits for them, and its bits do not depend on the clock.
      spare: set once a first call leaves a thread of `compile_all` free.
    """

    def __post_init__(self) -> None:
        """Compile nothing."""
        super().__post_init__()
        self.seconds: dict[Program, float] = {}  # of tracing and compiling
        self.on_begin: Callable[[list[Program]], None] = lambda programs: None
        self.on_program: Callable[[Program, float], None] = lambda program, seconds: None
        self._compiled: dict[Program, Callable] = {}
        # Programs that `begin_next` has begun, the oldest first. An evaluation may run while another thread generates.
        self._compiling: dict[Program, concurrent.futures.Future[Callable]] = {}
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._lock = threading.RLock()
        self.beside, self.stays_large, self.spare = False, False, threading.Event()
        self._gather = jax.jit(lambda tree: tree, out_shardings=self.whole)

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
            compiled = (
                lowered.compile(compiler_options(jax.default_backend()))
                if lowered
                else self.describe(program, params)[0]
            )
            self.seconds[program] = traced + time.perf_counter() - start
            return compiled

        return finish

    def begin_next(self, params: Params, programs: Collection[Program]) -> None:
        """Start to compile the next of these programs in the background; report those that are done.

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
        """Wait for a program that `begin_next` has started, and report it."""
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

    def compact(self, params: Params, slots: Slots[Cache], rows: np.ndarray) -> Slots[Cache]:
        """Call `compact`."""
        return self.get(Program("compact", rows.size), params)(slots.by_row(), slots.not_by_row(), rows)

    def run(self, kind: str, params: Params, size: int, *arguments: object) -> Any:
        """Call another program for a batch of `size`; slots among the arguments are donated where it returns some."""
        once = any(kind in feature.once for feature in self.config.features)
        return self.get(Program(kind, self.sizes[0] if once else size), params)(*arguments)

    def fetch(self, tree: object) -> Any:
        """Return arrays on the host, whole in every process of the engine; all of them call it together."""
        parts = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
        if not all(x.is_fully_addressable or x.is_fully_replicated for x in parts):
            tree = self._gather(tree)
        return jax.device_get(tree)

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
