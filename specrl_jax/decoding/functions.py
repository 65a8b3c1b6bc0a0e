"""Functions that make up an engine: those of a target and of its drafter."""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import jax

from kernels_pallas.attention.types import Paging
from specrl_jax.decoding.drafters import Drafter
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import Cache, CacheWithRows, Params, Slots
from specrl_jax.decoding.step import TargetFn, VerifyFn

Given = TypeVar("Given", contravariant=True)
# (pages, tokens of a page) -> an empty cache, axis 0 of whose arrays is the page
InitCacheFn = Callable[[int, int], Cache]


class PrefillFn(Protocol[Given, Cache]):
    """Write tokens [B, Q] into the cache, where `paging` says."""

    def __call__(self, params: Given, tokens: jax.Array, paging: Paging, *, cache: Cache) -> Cache: ...


class DecodeFn(Protocol[Given, Cache]):
    """Do as `PrefillFn`; return logits [B, Q, V] float32 too."""

    def __call__(
        self, params: Given, tokens: jax.Array, paging: Paging, *, cache: Cache
    ) -> tuple[jax.Array, Cache]: ...


@dataclasses.dataclass(frozen=True)
class EngineFunctions(Generic[Params, Cache]):
    """The target's functions, the drafter, and the rule that verifies its drafts."""

    init_cache: InitCacheFn[Cache]
    prefill: PrefillFn[Params, Cache]
    decode: DecodeFn[Params, Cache]
    drafter: Drafter[Params, Cache]
    verify: VerifyFn
    sampling: Sampling
    eos_ids: tuple[int, ...]
    pad_id: int
    least_tokens: int = 1  # of a device's forward; with fewer, positions behind them fill up
    # Seconds in which an iteration reads a live token's keys and values, over those of all weights: by their bytes.
    token_read: float = 0.0
    # rows -> what layers without keys and values remember of sequences without tokens; None: there are no such layers.
    init_rows: Callable[[int], Any] | None = None

    def empty_rows(self, rows: int) -> Any:
        """Return `Slots.remembered` of sequences without tokens."""
        return self.init_rows(rows) if self.init_rows else None

    def target_fn(self, params: Params) -> TargetFn[Cache]:
        """Return the forward of an iteration, over tokens of all rows."""

        def forward(tokens: jax.Array, paging: Paging, slots: Slots[Cache]) -> tuple[jax.Array, Slots[Cache]]:
            cache: Any = with_rows(slots.cache, slots.remembered)
            logits, cache = self.decode(params, tokens, paging, cache=cache)
            pages, rows = without_rows(cache)
            return logits, dataclasses.replace(slots, cache=pages, remembered=rows)

        return forward


def with_rows(pages: Any, rows: Any) -> Any:
    """Return the cache argument of a target's functions; `rows`: None where all its layers have keys and values."""
    return pages if rows is None else CacheWithRows(pages, rows)


def without_rows(cache: Any) -> tuple[Any, Any]:
    """Return pages and rows of what a target's functions return."""
    return (cache.pages, cache.rows) if isinstance(cache, CacheWithRows) else (cache, None)
