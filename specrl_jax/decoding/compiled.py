"""The jitted programs of an engine, all of them: what is compiled, when, and how long it took.

    empty    slots of the largest size, every row finished
    refill   prefills prompts once each, and deals them to the slots that are free
    run      a `lax.while_loop` of fused iterations, one program per (batch size, draft length)
    shrink   keeps some rows: the batch in the next smaller size

Each is compiled ahead of time for fixed shapes, so a call that does not fit raises instead of compiling another.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.decoding.drafters import Drafter
from specrl_jax.decoding.lookup_cache import LookupCache, admit, empty_corpus, record
from specrl_jax.decoding.replay import replay
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.step import Draft, Slots, TargetFn, VerifyFn, no_draft, speculative_step

# (rows, length) -> an empty cache
InitCacheFn = Callable[[int, int], Any]
# (params, tokens [P, T], positions [P, T], cache) -> cache with those positions filled
PrefillFn = Callable[[Any, jax.Array, jax.Array, Any], Any]
# (params, tokens [B, Q], positions [B, Q], cache) -> (logits [B, Q, V] float32, cache)
DecodeFn = Callable[[Any, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Model:
    """A target and its drafter, as functions."""

    init_cache: InitCacheFn
    prefill: PrefillFn
    decode: DecodeFn
    drafter: Drafter
    verify: VerifyFn
    sampling: Sampling
    eos_ids: tuple[int, ...]
    pad_id: int


@dataclasses.dataclass(frozen=True)
class Limits:
    """Shapes of an engine."""

    num_slots: int  # B, sequences decoded at once
    max_prompt_tokens: int
    max_response_tokens: int
    chunk: int  # most iterations between two looks of the host
    sizes: tuple[int, ...] = ()  # batch sizes below num_slots that the batch shrinks to as it thins, descending
    prefill_rows: int = 1  # prompts in one forward of a prefill
    new_prompts: int = 0  # most prompts that one refill can start; 0: as many as slots
    free_slots: int = 0  # so many free ones are worth a refill; 0: a quarter of them
    width: int = 0  # every forward of an iteration is over at least this many positions (rollout.parity)
    groups: int = 0  # of the corpus that drafters copy from; 0: no corpus
    members: int = 0  # texts of a group, of this call and of earlier epochs

    @property
    def cache_length(self) -> int:
        """S, tokens."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def prompts(self) -> int:
        """P, most prompts that one refill starts."""
        return -(-(self.new_prompts or self.num_slots) // self.prefill_rows) * self.prefill_rows

    @property
    def refill_rows(self) -> int:
        return self.free_slots or max(1, self.num_slots // 4)


class Prompts(NamedTuple):
    """Prefilled prompts: what the rollouts of a group share. The cache is T long, no longer than a prompt can be."""

    tokens: jax.Array  # [P, T] int32
    length: jax.Array  # [P] int32
    cache: Any


class PrefillBatch(NamedTuple):
    """What the host deals at one refill: P prompts to prefill, at most, and the slots that get a rollout.

    A slot's source is 0 for the prompt carried over from the last refill, 1 + i for the i-th of the new ones.
    """

    count: jax.Array  # [] int32, prompts to prefill; the rest is padding
    tokens: jax.Array  # [P, T] int32
    length: jax.Array  # [P] int32, at least 1
    keep: jax.Array  # [] int32, source that is carried over to the next refill
    fresh: jax.Array  # [B] bool, slots that get a new rollout
    source: jax.Array  # [B] int32
    rollout_id: jax.Array  # [B] uint32
    group: jax.Array  # [B] int32
    member: jax.Array  # [B] int32
    new_group: jax.Array  # [P] int32, the corpus's group of each new prompt; Limits.groups: none
    texts: jax.Array | None  # [P, M, S] int32, rollouts of earlier epochs for the members this call leaves free
    text_length: jax.Array | None  # [P, M] int32


class ChunkStatistics(NamedTuple):
    """What a chunk did, beside the slots; small enough to fetch after every chunk."""

    done: jax.Array  # [B] bool
    iterations: jax.Array  # [] int32
    verifications: jax.Array  # [] int32, by running rows
    drafted: jax.Array  # [longest draft] int32
    accepted: jax.Array  # [longest draft] int32
    replayed: jax.Array | None  # [1 + k] int32, by `replay`: after plain decoding, of drafters that copy


def empty_slots(model: Model, limits: Limits) -> tuple[Slots, Prompts]:
    """Finished slots of the largest size with room for prompts and responses, and nothing carried over."""
    B, S, T = limits.num_slots, limits.cache_length, limits.max_prompt_tokens
    k = model.drafter.length

    def zeros(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    slots = Slots(
        tokens=jnp.full((B, S), model.pad_id, jnp.int32),
        logprobs=jnp.zeros((B, S), jnp.float32),
        prompt_length=zeros(B) + 1,
        length=zeros(B) + 1,
        limit=zeros(B) + S,
        done=jnp.ones((B,), bool),
        rollout_id=jnp.zeros((B,), jnp.uint32),
        verifications=zeros(B),
        drafted=zeros(B, k),
        accepted=zeros(B, k),
        group=zeros(B) + limits.groups,
        member=zeros(B),
        corpus=empty_corpus(limits.groups, limits.members, S) if limits.groups else None,
        cache=model.init_cache(B, S),
    )
    return slots, Prompts(zeros(1, T), zeros(1) + 1, model.init_cache(1, T))


def refill(
    params: Any, slots: Slots, carried: Prompts, admission: PrefillBatch, *, model: Model, limits: Limits
) -> tuple[Slots, Prompts]:
    """Prefills the new prompts and starts a rollout in every fresh slot.

    Rollouts are dealt prompt by prompt, so at most one group is dealt in part, and one prompt carried over.

    The prompt's last token is pending, so its cache entry is written again, with equal values, by the first iteration.
    Entries of padding lie at or beyond the pending position and are overwritten before anything reads them, as are
    those that a slot's former rollout left.
    """
    pool = _prefill(params, carried, admission, model, limits)
    dealt = jax.tree.map(lambda x: x[admission.source], pool)
    fresh = admission.fresh
    _B, S = slots.tokens.shape
    tokens = jnp.pad(dealt.tokens, ((0, 0), (0, S - dealt.tokens.shape[1])), constant_values=model.pad_id)

    def start(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(jnp.expand_dims(fresh, range(1, old.ndim)), new, old)

    slots = slots.replace(
        tokens=start(tokens, slots.tokens),
        logprobs=start(jnp.zeros_like(slots.logprobs), slots.logprobs),
        prompt_length=start(dealt.length, slots.prompt_length),
        length=start(dealt.length, slots.length),
        limit=start(dealt.length + limits.max_response_tokens, slots.limit),
        done=slots.done & ~fresh,
        rollout_id=start(admission.rollout_id, slots.rollout_id),
        verifications=start(jnp.zeros_like(slots.verifications), slots.verifications),
        drafted=start(jnp.zeros_like(slots.drafted), slots.drafted),
        accepted=start(jnp.zeros_like(slots.accepted), slots.accepted),
        group=start(admission.group, slots.group),
        member=start(admission.member, slots.member),
        corpus=_admit(slots.corpus, admission, dealt),
        cache=jax.tree.map(lambda new, old: _overwrite(old, new, fresh), dealt.cache, slots.cache),
    )
    return slots, jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, admission.keep, 1), pool)


def _prefill(params: Any, carried: Prompts, admission: PrefillBatch, model: Model, limits: Limits) -> Prompts:
    """The prompt carried over and the new ones, [1 + P]. A few prompts at a time, and only as many as there are."""
    r, T = limits.prefill_rows, limits.max_prompt_tokens
    positions = jnp.broadcast_to(jnp.arange(T), (r, T))

    def prefill_some(i: jax.Array, pool: Any) -> Any:
        tokens, length = (jax.lax.dynamic_slice_in_dim(x, i * r, r) for x in (admission.tokens, admission.length))
        # Always true here, and another value each turn: a prefill that is the same in all of them (r = P) XLA would
        # lift out of the loop, where it runs at every refill, also of none.
        tokens = jnp.where(i * r < admission.count, tokens, 0)
        cache = model.prefill(params, tokens, positions, model.init_cache(r, T))
        if model.drafter.length:
            cache = model.drafter.sync_cache(params, tokens, length, cache)
        return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, 1 + i * r, 0), pool, cache)

    def join(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.concatenate([old, new])

    pool = jax.tree.map(join, carried.cache, model.init_cache(limits.prompts, T))
    pool = jax.lax.fori_loop(0, (admission.count + r - 1) // r, prefill_some, pool)
    return Prompts(join(carried.tokens, admission.tokens), join(carried.length, admission.length), pool)


def _admit(corpus: LookupCache | None, admission: PrefillBatch, dealt: Prompts) -> LookupCache | None:
    """The corpus with the new groups' earlier rollouts and the fresh rows' prompts."""
    if corpus is None:
        return None
    corpus = admit(corpus, admission.new_group, admission.texts, admission.text_length)
    group = jnp.where(admission.fresh, admission.group, corpus.tokens.shape[0])
    positions = jnp.broadcast_to(jnp.arange(dealt.tokens.shape[1]), dealt.tokens.shape)
    return record(corpus, group, admission.member, positions, dealt.tokens, dealt.length)


def _overwrite(buffer: jax.Array, new: jax.Array, rows: jax.Array) -> jax.Array:
    """buffer [B, ...] with the leading part of each axis that `new` [B, ...] covers replaced in `rows` [B] bool."""
    covered = tuple(slice(0, n) for n in new.shape)
    mask = jnp.expand_dims(rows, range(1, new.ndim))
    return buffer.at[covered].set(jnp.where(mask, new, buffer[covered]))


def run(
    params: Any,
    slots: Slots,
    seed: jax.Array,
    iterations: jax.Array,
    floor: jax.Array,
    stale: jax.Array,
    *,
    k: int,
    model: Model,
    limits: Limits,
    shardings: Slots,
) -> tuple[Slots, ChunkStatistics]:
    """Fused iterations of k drafted tokens: `iterations` of them at most, fewer once only `floor` rows still run.

    Args:
      stale: [] bool: the drafter first goes over all committed tokens, since it missed some.
    """
    target_fn: TargetFn = lambda *args: model.decode(params, *args)  # noqa: E731
    drafter = model.drafter

    def draft_fn(slots: Slots, seed: jax.Array) -> tuple[Draft, Any]:
        return drafter.draft(params, slots, seed, k) if k else no_draft(slots, seed)

    def body(carry: tuple[jax.Array, Slots]) -> tuple[jax.Array, Slots]:
        i, slots = carry
        # Verification may split rows further than decoding does; pinned, its layout does not spread into the state.
        slots = jax.lax.with_sharding_constraint(slots, shardings)
        slots = speculative_step(
            slots, seed, draft_fn, target_fn, model.sampling, model.eos_ids, model.verify, limits.width
        )
        return i + 1, slots

    def unfinished(carry: tuple[jax.Array, Slots]) -> jax.Array:
        i, slots = carry
        return (i < iterations) & ((~slots.done).sum(dtype=jnp.int32) > floor)

    if k:
        # Over no tokens where nothing was missed: a loop of no turns, which costs no copy of the cache, as a cond does.
        length = jnp.where(stale, slots.length, 0)
        slots = slots.replace(cache=drafter.sync_cache(params, slots.tokens, length, slots.cache))
    before = slots
    count, slots = jax.lax.while_loop(unfinished, body, (jnp.int32(0), slots))
    counted = jax.tree.map(jnp.subtract, _counters(slots), _counters(before))
    replayed = None
    # Half a chunk at most, so that the other half is left to be gone over.
    looked_at = min(drafter.length, limits.chunk // 2)
    if drafter.copies and not k and looked_at:
        replayed = replay(before, slots, lambda then: drafter.draft(params, then, seed, looked_at)[0], looked_at)
    return slots, ChunkStatistics(slots.done, count, *counted, replayed)


def _counters(slots: Slots) -> tuple[jax.Array, jax.Array, jax.Array]:
    return tuple(x.sum(axis=0, dtype=jnp.int32) for x in (slots.verifications, slots.drafted, slots.accepted))


def shrink(slots: Slots, rows: jax.Array) -> Slots:
    """The slots with row i replaced by row rows[i], as many as there are in `rows` [B']."""
    taken = jax.tree.map(lambda x: x[rows], slots.replace(corpus=None))
    return taken.replace(corpus=slots.corpus)


class Program(NamedTuple):
    """Which program: its kind, the batch size it leaves, and for `run` the draft length."""

    kind: str
    size: int
    k: int = 0

    def __str__(self) -> str:
        return f"{self.kind} B={self.size}" + (f" k={self.k}" if self.kind == "run" else "")


class Programs:
    """Every program of one engine, each compiled once: by `compile_all`, or at its first use."""

    def __init__(
        self, model: Model, limits: Limits, lengths: tuple[int, ...], shardings: Slots, prompt_shardings: Any
    ) -> None:
        """
        Args:
          lengths: the draft lengths that there are programs for.
          shardings: of the slots, whatever their size.
          prompt_shardings: of the prompt that is carried from refill to refill.
        """
        self.sizes = (limits.num_slots, *limits.sizes)
        self.lengths = lengths
        self.seconds: dict[Program, float] = {}  # of tracing and compiling
        self._model, self._limits = model, limits
        self._shardings, self._prompt_shardings = shardings, prompt_shardings
        self._compiled: dict[Program, Callable[..., Any]] = {}

    def all(self) -> list[Program]:
        """Every program there can be."""
        runs = [Program("run", size, k) for size in self.sizes for k in self.lengths]
        shrinks = [Program("shrink", size) for size in self.sizes[1:]]
        return [Program("empty", self.sizes[0]), Program("refill", self.sizes[0]), *runs, *shrinks]

    def compile_all(self, params: Any, on_program: Callable[[Program, float], None] = lambda program, seconds: None):
        """Compiles what is not compiled yet; `on_program` gets each one's seconds."""
        for program in self.all():
            if program not in self._compiled:
                self._get(program, params)
                on_program(program, self.seconds[program])

    def empty(self, params: Any) -> tuple[Slots, Prompts]:
        return self._get(Program("empty", self.sizes[0]), params)()

    def refill(self, params: Any, slots: Slots, carried: Prompts, admission: PrefillBatch) -> tuple[Slots, Prompts]:
        return self._get(Program("refill", self.sizes[0]), params)(params, slots, carried, admission)

    def run(
        self, params: Any, slots: Slots, k: int, seed: int, iterations: int, floor: int, stale: bool
    ) -> tuple[Slots, ChunkStatistics]:
        program = self._get(Program("run", slots.done.shape[0], k), params)
        return program(params, slots, np.uint32(seed % 2**32), np.int32(iterations), np.int32(floor), np.bool_(stale))

    def shrink(self, params: Any, slots: Slots, rows: np.ndarray) -> Slots:
        return self._get(Program("shrink", len(rows)), params)(slots, rows)

    def lower(self, program: Program, params: Any) -> jax.stages.Lowered:
        """One program for `params`, of which ShapeDtypeStructs with shardings are enough."""
        function, arguments = self._describe(program, params)
        return function.lower(*arguments)

    def _get(self, program: Program, params: Any) -> Callable[..., Any]:
        if program not in self._compiled:
            if program not in self.all():
                raise ValueError(f"this engine has no program '{program}'; its draft lengths are {self.lengths}")
            start = time.perf_counter()
            jit = not jax.config.jax_disable_jit
            compiled = self.lower(program, params).compile() if jit else self._describe(program, params)[0]
            self._compiled[program] = compiled
            self.seconds[program] = time.perf_counter() - start
        return self._compiled[program]

    def _describe(self, program: Program, params: Any) -> tuple[Any, tuple[Any, ...]]:
        """(the jitted function, what it is lowered with)."""
        model, limits = self._model, self._limits
        both = (self._shardings, self._prompt_shardings)
        scalar = functools.partial(jax.ShapeDtypeStruct, ())
        if program.kind == "empty":
            return jax.jit(functools.partial(empty_slots, model, limits), out_shardings=both), ()
        if program.kind == "refill":
            fn = functools.partial(refill, model=model, limits=limits)
            arguments = (params, *self._abstract(program.size), abstract_admission(limits))
            return jax.jit(fn, donate_argnums=(1, 2), out_shardings=both), arguments
        if program.kind == "shrink":
            larger = self.sizes[self.sizes.index(program.size) - 1]
            rows = jax.ShapeDtypeStruct((program.size,), jnp.int32)
            return jax.jit(shrink, out_shardings=self._shardings), (self._abstract(larger)[0], rows)
        fn = functools.partial(run, k=program.k, model=model, limits=limits, shardings=self._shardings)
        numbers = (scalar(jnp.uint32), scalar(jnp.int32), scalar(jnp.int32), scalar(jnp.bool_))
        jitted = jax.jit(fn, donate_argnums=1, out_shardings=(self._shardings, None))
        return jitted, (params, self._abstract(program.size)[0], *numbers)

    def _abstract(self, size: int) -> tuple[Slots, Prompts]:
        """ShapeDtypeStructs of the slots of one batch size, and of the prompt carried over."""
        slots, prompts = jax.eval_shape(functools.partial(empty_slots, self._model, self._limits))
        slots = jax.eval_shape(shrink, slots, jax.ShapeDtypeStruct((size,), jnp.int32))

        def place(x: Any, sharding: Any) -> Any:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), x)

        # Shardings may be a prefix of the tree.
        return tuple(
            jax.tree.map(lambda s, x: place(x, s), shardings, tree)
            for shardings, tree in ((self._shardings, slots), (self._prompt_shardings, prompts))
        )


def abstract_admission(limits: Limits) -> PrefillBatch:
    """ShapeDtypeStructs."""
    B, P, S = limits.num_slots, limits.prompts, limits.cache_length

    def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    return PrefillBatch(
        count=of(jnp.int32),
        tokens=of(jnp.int32, P, limits.max_prompt_tokens),
        length=of(jnp.int32, P),
        keep=of(jnp.int32),
        fresh=of(jnp.bool_, B),
        source=of(jnp.int32, B),
        rollout_id=of(jnp.uint32, B),
        group=of(jnp.int32, B),
        member=of(jnp.int32, B),
        new_group=of(jnp.int32, P),
        texts=of(jnp.int32, P, limits.members, S) if limits.groups else None,
        text_length=of(jnp.int32, P, limits.members) if limits.groups else None,
    )
