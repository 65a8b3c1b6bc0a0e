"""Weights and caches of an engine, target and draft side by side."""

from typing import Generic, NamedTuple, TypeVar

import jax

from specrl_jax.core import Params
from specrl_jax.models import cache as kv

Cache = TypeVar("Cache")


class Weights(NamedTuple):
    """Target and draft in the inference layout, made by one `prepare`."""

    policy: Params
    draft: Params  # empty for a draft without weights; of a twin those that the policy has in more bits
    vocab_map: jax.Array | None  # [Vd] int32, target id of each draft id; None = the same ids
    checksum: (
        jax.Array
    )  # [] uint32 (io/digests.py), of every bit of what the above were made of, in their dtype, and of `vocab_map`


class Caches(NamedTuple, Generic[Cache]):
    """The engine's cache where it is more than the target's keys and values."""

    target: kv.KVCache
    draft: Cache  # as `DraftModel.init_cache` makes it; None: the draft has none
    experts: jax.Array | None = None  # [C, T, L k], those of the target's forwards (policy.router_replay)
