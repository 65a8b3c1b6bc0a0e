"""What an engine is made of: a target and its drafter, as functions."""

import dataclasses
from collections.abc import Callable
from typing import Generic

import jax

from specrl_jax.decoding.drafters import Drafter
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import Cache, Params
from specrl_jax.decoding.step import VerifyFn

# (rows, length) -> an empty cache
InitCacheFn = Callable[[int, int], Cache]
# (params, tokens [P, T], positions [P, T], cache) -> cache with those positions filled
PrefillFn = Callable[[Params, jax.Array, jax.Array, Cache], Cache]
# (params, tokens [B, Q], positions [B, Q], cache) -> (logits [B, Q, V] float32, cache)
DecodeFn = Callable[[Params, jax.Array, jax.Array, Cache], tuple[jax.Array, Cache]]


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
