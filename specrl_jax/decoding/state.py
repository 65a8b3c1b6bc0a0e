"""The engine's shapes and its state on the device.

The engine is generic in `Params` (weights of target and drafter) and `Cache` (their caches): it only passes them on.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar, cast

import flax.struct
import jax
import jax.numpy as jnp

from kernels_pallas.attention.types import Paging, Table
from kernels_pallas.verify.types import RowSampling
from specrl_jax.decoding.lookup_cache import LookupCache
from specrl_jax.decoding.pages import PagePool, PageTable, tables

Params = TypeVar("Params")
Cache = TypeVar("Cache")
Kind = TypeVar("Kind")  # of feature


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Static sizes of an engine.

    What is optional is a feature, with two exceptions: `budget` is the shape of every verification, and the lookup
    cache is an input of drafters that is by group, where a feature's state is by row.
    """

    num_slots: int  # B, sequences decoded at once
    max_prompt_tokens: int
    max_response_tokens: int
    chunk: int  # most iterations per call of the decode loop
    sizes: tuple[int, ...] = ()  # smaller batch sizes to compact to, descending
    prefill_rows: int = 1  # prompts per forward of a prefill, a multiple of the shards
    new_prompts: int = 0  # most prompts that one refill can start; 0: num_slots
    free_slots: int = 0  # free slots that trigger a refill; 0: a quarter of num_slots
    width: int = 0  # least positions per forward of an iteration (rollout.parity)
    budget: int = 0  # drafts of a shard that an iteration verifies at most; 0: all (draft.budget)
    groups: int = 0  # groups in the lookup cache; 0: no lookup cache
    sequences: int = 0  # sequences per group, of this call and of earlier epochs
    page_tokens: int = 16  # T, positions of a page, a power of two
    pages: int = 0  # pages of a shard; 0: as many as its slots can ever hold
    shards: int = 1  # D, data shards that split the slots
    prefill_tokens: int = 256  # most tokens of a prompt per forward of a prefill
    copies: tuple[str, ...] = ()  # mesh axes whose devices have copies of the weights and rows of their own
    features: tuple[Any, ...] = ()  # those that are on (features/base.py), one of a kind

    def feature(self, kind: type[Kind]) -> Kind | None:
        """Return the feature of a kind; None: it is off."""
        return next((feature for feature in self.features if isinstance(feature, kind)), None)

    def without(self, *kinds: type) -> Self:
        """Return the config with features of some kinds off."""
        left = tuple(feature for feature in self.features if not isinstance(feature, kinds))
        return dataclasses.replace(self, features=left)

    @property
    def cache_length(self) -> int:
        """Return S, the tokens of a sequence's cache."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def prompts(self) -> int:
        """Return P, the most prompts that one refill starts, a multiple of prefill_rows."""
        return -(-(self.new_prompts or self.num_slots) // self.prefill_rows) * self.prefill_rows

    @property
    def columns(self) -> int:
        """Return P, the most pages of a sequence."""
        return -(-self.cache_length // self.page_tokens)

    @property
    def fewest_pages(self) -> int:
        """Return the pages with which a shard lets any one sequence go on: its own, a carried prompt's, one copied."""
        return self.columns + -(-self.max_prompt_tokens // self.page_tokens) + 1

    @property
    def shard_pages(self) -> int:
        """Return C, pages of a shard: by default those of full slots, one more each, and a prompt carried over."""
        # A refill prefills no more prompts than it starts rows, which keep their pages; the one more is what a row
        # may take next, for which a refill leaves room. Where a sequence is a page or two, a refill of all slots, with
        # its prompts beside two pages a row, takes more.
        rows, prompt = self.num_slots // self.shards, -(-self.max_prompt_tokens // self.page_tokens)
        refilled = self.prompts // self.shards * prompt + 2 * rows
        return self.pages or max(rows * (self.columns + 1) + prompt, refilled)

    @property
    def refill_rows(self) -> int:
        """Free slots that trigger a refill."""
        return self.free_slots or max(1, self.num_slots // 4)


@flax.struct.dataclass
class Slots(Generic[Cache]):
    """State of B sequences being decoded."""

    tokens: jax.Array  # [B, S] int32, prompt and response by absolute position
    logprobs: jax.Array  # [B, S] float32, nats, of response tokens by absolute position; 0 elsewhere
    # [B, S] int8, by absolute position: i where draft i of a verification was accepted, 1 the first; -i where a lookup
    # had replaced a draft with probabilities; 0 where the target drew the token, and elsewhere
    draft_positions: jax.Array
    prompt_length: jax.Array  # [B] int32, tokens
    length: jax.Array  # [B] int32, committed tokens, prompt included
    limit: jax.Array  # [B] int32, most committed tokens
    done: jax.Array  # [B] bool
    rollout_id: jax.Array  # [B] uint32
    verifications: jax.Array  # [B] int32, target forwards of this row
    drafted: jax.Array  # [B, longest draft] int32, verifications that drafted at least i + 1 tokens
    accepted: jax.Array  # [B, longest draft] int32, verifications that accepted draft i and all before it
    group: jax.Array  # [B] int32, the prompt's group in the lookup cache; the number of groups: none
    sequence: jax.Array  # [B] int32, index of the row among its group's sequences
    lookup_cache: LookupCache | None  # texts for lookup drafters
    cache: Cache  # pages of the target's and the drafter's caches; axis 0 of every array is the page
    pool: PagePool  # who holds them
    held: PageTable  # those of each row
    sampling: RowSampling  # of each row
    features: dict[str, Any] = dataclasses.field(default_factory=dict)  # by name of each its state, arrays by row
    # What layers without keys and values remember, arrays by row (models/delta_rows.py); None: the target has none.
    remembered: Any = None

    @property
    def table(self) -> Table:
        """Return the pages that a forward of all rows reads and writes."""
        return tables(self.held, self.pool.free.shape[1])

    def by_row(self) -> "Slots[Cache]":
        """Return what the slots have by row: axis 0 of every array is the row."""
        return cast("Slots[Cache]", self.replace(lookup_cache=None, cache=None, pool=None))  # type: ignore[attr-defined]

    def not_by_row(self) -> "Slots[Cache]":
        """Return what `by_row` leaves out."""
        none = {field.name: None for field in dataclasses.fields(self)}
        shared = {"lookup_cache": self.lookup_cache, "cache": self.cache, "pool": self.pool}
        return cast("Slots[Cache]", self.replace(**none | shared))  # type: ignore[attr-defined]

    def with_features(self, features: Sequence[Any], state_of: Callable[[Any, Any], Any]) -> "Slots[Cache]":
        """Return the slots with what `state_of` makes of each feature and its state."""
        states = {one.name: state_of(one, self.features.get(one.name)) for one in features}
        return cast("Slots[Cache]", self.replace(features=states))  # type: ignore[attr-defined]

    def place(self, positions: jax.Array) -> Paging:
        """Return where tokens at `positions` [B, Q] of the running rows stand."""
        return Paging(self.table, jnp.where(self.done[:, None], -1, positions))


class CacheWithRows(NamedTuple):
    """The cache argument of a target with layers that have no keys and values."""

    pages: Any
    rows: Any  # `Slots.remembered` of the rows of the forward


class Prompts(NamedTuple):
    """Prefilled prompts, n of each shard, whose pages the rollouts of a group share."""

    tokens: jax.Array  # [D n, T] int32
    length: jax.Array  # [D n] int32
    held: PageTable
    remembered: Any = None  # as `Slots.remembered`


class PrefillBatch(NamedTuple):
    """Input of one refill: n = P / D prompts of each shard to prefill, and the slots that start a rollout.

    A slot's source is 0 for the prompt carried over from its shard's last refill, 1 + i for the shard's i-th new one.
    """

    tokens: jax.Array  # [P, T] int32
    length: jax.Array  # [P] int32; 0: no prompt
    carried_source: jax.Array  # [D] int32, source to carry over to the next refill; -1: none
    fresh: jax.Array  # [B] bool, slots that start a rollout
    source: jax.Array  # [B] int32
    rollout_id: jax.Array  # [B] uint32
    response: jax.Array  # [B] int32, most response tokens
    group: jax.Array  # [B] int32
    sequence: jax.Array  # [B] int32
    sampling: RowSampling  # of the slots that start
    new_group: jax.Array  # [P] int32, group of each new prompt in the lookup cache; the number of groups: none
    features: dict[str, Any]  # by name, the part of each; None: it has none
    texts: jax.Array | None = None  # [P, M, S] int32, rollouts of earlier epochs
    text_length: jax.Array | None = None  # [P, M] int32


class ChunkStatistics(NamedTuple):
    """Counts of one decode chunk, small enough to fetch after every chunk."""

    done: jax.Array  # [B] bool
    length: jax.Array  # [B] int32, committed tokens, prompt included
    iterations: jax.Array  # [] int32
    verifications: jax.Array  # [] int32, by running rows
    drafted: jax.Array  # [longest draft] int32
    accepted: jax.Array  # [longest draft] int32
    free: jax.Array  # [D] int32, free pages
    short: jax.Array  # [] bool, the next iteration would need more
    replayed: jax.Array | None = (
        None  # [1 + k] int32, result of `replay` after plain decoding with a replayable drafter
    )
