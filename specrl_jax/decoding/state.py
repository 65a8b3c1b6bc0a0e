"""The engine's shapes and its state on the device.

The engine is generic in `Params` (weights of target and drafter) and `Cache` (their caches): it only passes them on.
"""

import dataclasses
from typing import Generic, NamedTuple, TypeVar

import flax.struct
import jax

from specrl_jax.decoding.lookup_cache import LookupCache

Params = TypeVar("Params")
Cache = TypeVar("Cache")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Static sizes of an engine."""

    num_slots: int  # B, sequences decoded at once
    max_prompt_tokens: int
    max_response_tokens: int
    chunk: int  # most iterations per call of the decode loop
    sizes: tuple[int, ...] = ()  # smaller batch sizes to compact to, descending
    prefill_rows: int = 1  # prompts per forward of a prefill
    new_prompts: int = 0  # most prompts that one refill can start; 0: num_slots
    free_slots: int = 0  # free slots that trigger a refill; 0: a quarter of num_slots
    width: int = 0  # least positions per forward of an iteration (rollout.parity)
    groups: int = 0  # groups in the lookup cache; 0: no lookup cache
    sequences: int = 0  # sequences per group, of this call and of earlier epochs
    most_kept: int = 0  # K, tokens that top-k and top-p keep at most, recorded of each response token; 0: not recorded

    @property
    def cache_length(self) -> int:
        """S, tokens."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def prompts(self) -> int:
        """P, most prompts that one refill starts, a multiple of prefill_rows."""
        return -(-(self.new_prompts or self.num_slots) // self.prefill_rows) * self.prefill_rows

    @property
    def refill_rows(self) -> int:
        """Free slots that trigger a refill."""
        return self.free_slots or max(1, self.num_slots // 4)


@flax.struct.dataclass
class MaskBuffer:
    """The token ids that top-k and top-p kept at each response token: of a chunk, which the host collects after it.

    A chunk ends before a row's C ids could be too few: [B, S, K] ids would be gigabytes.
    """

    count: jax.Array  # [B, S] int32, ids kept, by absolute position; 0 elsewhere
    ids: jax.Array  # [B, C] int32, of the chunk's tokens, one token after the other
    used: jax.Array  # [B] int32, entries of `ids`


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
    cache: Cache  # of the target and the drafter
    mask: MaskBuffer | None = None  # None: not recorded


class Prompts(NamedTuple):
    """Prefilled prompts, shared by the rollouts of a group. Their cache has length T, the longest prompt's."""

    tokens: jax.Array  # [P, T] int32
    length: jax.Array  # [P] int32
    cache: object


class PrefillBatch(NamedTuple):
    """Input of one refill: at most P prompts to prefill, and the slots that start a rollout.

    A slot's source is 0 for the prompt carried over from the last refill, 1 + i for the i-th new prompt.
    """

    num_prompts: jax.Array  # [] int32, prompts to prefill; the others are padding
    tokens: jax.Array  # [P, T] int32
    length: jax.Array  # [P] int32, at least 1
    carry: jax.Array  # [] int32, source to carry over to the next refill
    fresh: jax.Array  # [B] bool, slots that start a rollout
    source: jax.Array  # [B] int32
    rollout_id: jax.Array  # [B] uint32
    group: jax.Array  # [B] int32
    sequence: jax.Array  # [B] int32
    new_group: jax.Array  # [P] int32, group of each new prompt in the lookup cache; the number of groups: none
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
    replayed: jax.Array | None = (
        None  # [1 + k] int32, result of `replay` after plain decoding with a replayable drafter
    )
