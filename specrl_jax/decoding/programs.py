"""The programs of an engine: which there are, and with what shapes each is lowered.

    empty    slots of the largest batch size, every row finished
    refill   prefills each new prompt once and starts rollouts in free slots
    decode   a `lax.while_loop` of fused iterations, one program per (batch size, draft length)
    compact  moves the running rows into the next smaller batch size
    read_row, read_pages, drop_row, restore_row, write_pages
             copy a row to the host and back (preemption.py); compiled when pages first run out, drop_row when a rollout
             first ends whose pages are kept

and those of the features. Each has fixed shapes, so a call that does not fit raises instead of compiling another.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from specrl_jax.decoding.decode import chunk_inputs, decode_chunk
from specrl_jax.decoding.functions import EngineFunctions
from specrl_jax.decoding.preemption import drop_row, read_pages, read_row, restore_row, write_pages
from specrl_jax.decoding.refill import compact, empty_slots, refill
from specrl_jax.decoding.requests import Requests
from specrl_jax.decoding.scheduler import Scheduler
from specrl_jax.decoding.state import Cache, EngineConfig, Params, PrefillBatch, Prompts, Slots

PREEMPTION = {function.__name__: function for function in (read_row, read_pages, drop_row, restore_row, write_pages)}


class Program(NamedTuple):
    """Names a compiled function: its kind, the batch size of its result, and for `decode` the draft length."""

    kind: str
    size: int
    k: int = 0

    def __str__(self) -> str:
        return f"{self.kind} B={self.size}" + (f" k={self.k}" if self.kind == "decode" else "")


@dataclasses.dataclass(eq=False)
class EnginePrograms(Generic[Params, Cache]):
    """All programs of one engine.

    Attributes:
      sizes: of the batch, the largest first.
      uncommitted: positions beyond the last committed token that an iteration writes at most.
    """

    functions: EngineFunctions[Params, Cache]
    config: EngineConfig
    lengths: tuple[int, ...]  # of drafts, that have a program
    shardings: Slots  # of the slots, for every batch size
    prompt_shardings: Prompts  # of the prompt that is carried over between refills

    def __post_init__(self) -> None:
        config = self.config
        self.sizes = (config.num_slots, *config.sizes)
        features = (feature.at_once(config) for feature in config.features)
        self.uncommitted = max(*self.lengths, self.functions.drafter.uncommitted, *features)
        self.whole = _whole(self.shardings)

    def all(self) -> list[Program]:
        """Return every program of this engine."""
        decodes = [Program("decode", size, k) for size in self.sizes for k in self.lengths]
        compacts = [Program("compact", size) for size in self.sizes[1:]]
        once = ["empty", "refill", *(kind for feature in self.config.features for kind in feature.once)]
        others = [
            Program(kind, size) for feature in self.config.features for kind in feature.by_size for size in self.sizes
        ]
        return [*(Program(kind, self.sizes[0]) for kind in once), *decodes, *others, *compacts]

    def needed(self, rollouts: int, lengths: Collection[int]) -> list[Program]:
        """Return what a call of so many rollouts runs with these draft lengths, where pages do not run short."""
        # The batch is as small as the rows that run allow.
        sizes = [size for size, smaller in zip(self.sizes, (*self.sizes[1:], 0), strict=True) if smaller < rollouts]

        def runs(program: Program) -> bool:
            if program.kind == "decode":
                return program.size in sizes and program.k in lengths
            return program.size in sizes or all(program.kind not in one.by_size for one in self.config.features)

        return [program for program in self.all() if runs(program)]

    def first(self, rollouts: int, k: int) -> list[Program]:
        """Return what the first chunk of such a call runs, with drafts of k tokens."""
        if k not in self.lengths:
            raise self._missing(Program("decode", self.sizes[0], k))
        needed = self.needed(rollouts, (k,))
        size = max(program.size for program in needed if program.kind == "decode")
        kinds = {"decode": (size,), "compact": [n for n in self.sizes if n >= size]}
        return [p for p in needed if p.kind in ("empty", "refill") or p.size in kinds.get(p.kind, ())]

    def lower(self, program: Program, params: Params) -> jax.stages.Lowered:
        """Lower one program; ShapeDtypeStructs with shardings are enough as `params`."""
        function, arguments = self.describe(program, params)
        return function.lower(*arguments)

    def _missing(self, program: Program) -> ValueError:
        return ValueError(f"this engine has no program '{program}'; its draft lengths are {self.lengths}")

    def describe(self, program: Program, params: Params) -> tuple[jax.stages.Wrapped, tuple[object, ...]]:
        """Return the jitted function and the arguments to lower it with."""
        engine_functions, config = self.functions, self.config
        both = (self.shardings, self.prompt_shardings)
        if program.kind == "empty":
            return jax.jit(functools.partial(empty_slots, engine_functions, config), out_shardings=both), ()
        if program.kind == "refill":
            fn = functools.partial(refill, functions=engine_functions, config=config)
            return jax.jit(fn, donate_argnums=(1, 2), out_shardings=both), (
                params,
                *self.abstract(program.size),
                abstract_prefill_batch(self.config),
            )
        if program.kind == "compact":
            larger = self.sizes[self.sizes.index(program.size) - 1]
            rows = jax.ShapeDtypeStruct((config.shards, program.size // config.shards), jnp.int32)
            slots = self.abstract(larger)[0]
            jitted = jax.jit(compact, donate_argnums=1, out_shardings=self.shardings)
            return jitted, (slots.by_row(), slots.not_by_row(), rows)
        if program.kind in PREEMPTION:
            return self._describe_preemption(program)
        if program.kind == "decode":
            return self.describe_chunk(functools.partial(decode_chunk, k=program.k), program.size, params)
        (feature,) = (one for one in config.features if program.kind in one.once + one.by_size)
        return feature.describe(self, program, params)

    def describe_chunk(
        self, chunk: Callable, size: int, params: Params
    ) -> tuple[jax.stages.Wrapped, tuple[object, ...]]:
        """Return as `describe` a function that runs iterations and returns slots and statistics."""
        config = self.config
        chunk = functools.partial(chunk, functions=self.functions, config=config, shardings=self.shardings)
        jitted = jax.jit(chunk, donate_argnums=1, out_shardings=(self.shardings, self.whole))
        inputs = jax.eval_shape(lambda: chunk_inputs(0, 0, config.shards))
        return jitted, (params, self.abstract(size)[0], inputs)

    def _describe_preemption(self, program: Program) -> tuple[jax.stages.Wrapped, tuple[object, ...]]:
        slots, number = self.abstract(program.size)[0], jax.ShapeDtypeStruct((), jnp.int32)
        others = {
            "restore_row": lambda: (jax.eval_shape(read_row, slots, number),),
            "read_pages": lambda: (number,),
            "write_pages": lambda: (number, jax.eval_shape(read_pages, slots, number, number)),
        }.get(program.kind, tuple)()
        function = PREEMPTION[program.kind]
        if function in (read_row, read_pages):
            return jax.jit(function), (slots, number, *others)
        return jax.jit(function, donate_argnums=0, out_shardings=self.shardings), (slots, number, *others)

    def abstract(self, size: int) -> tuple[Slots, Prompts]:
        """Return ShapeDtypeStructs of the slots of one batch size, and of the prompt carried over."""
        slots, prompts = jax.eval_shape(functools.partial(empty_slots, self.functions, self.config))
        D = self.config.shards
        rows = jax.ShapeDtypeStruct((D, size // D), jnp.int32)
        slots = jax.eval_shape(compact, slots.by_row(), slots, rows)

        def place(sharding: jax.sharding.Sharding, tree: object) -> object:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

        # Shardings may be a prefix of the tree.
        return jax.tree.map(place, self.shardings, slots), jax.tree.map(place, self.prompt_shardings, prompts)


def _whole(shardings: Slots) -> NamedSharding | None:
    """Return the sharding of arrays that each device has whole; None where there is no mesh."""
    sharding: object = jax.tree.leaves(shardings)[0]
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None


def abstract_prefill_batch(config: EngineConfig) -> PrefillBatch:
    """Return the ShapeDtypeStructs of a refill's input."""
    scheduler = Scheduler(config, 0, Requests([[0]], 1))
    batch = scheduler.schedule(np.full(config.shards, config.shard_pages))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
