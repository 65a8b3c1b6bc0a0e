"""The interface of drafters to the engine, and the draw of one drafted token."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import noise as counter
from kernels_pallas.attention.types import Table
from kernels_pallas.verify.op import Draft, Noise
from kernels_pallas.verify.sampling import draw_rows
from specrl_jax.core import at_least_float32
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import Cache, Params, Slots
from specrl_jax.decoding.step import no_draft

# (params, slots, seed, k) -> (k drafted tokens per row, cache)
DraftFn = Callable[[Params, Slots[Cache], jax.Array, int], tuple[Draft, Cache]]


class CommittedTokens(NamedTuple):
    """Committed tokens of some sequences, and the pages in which they stand."""

    tokens: jax.Array  # [B, S] int32
    length: jax.Array  # [B] int32; 0: none
    table: Table


# (params, text, cache) -> cache
SyncCacheFn = Callable[[Params, CommittedTokens, Cache], Cache]


@dataclasses.dataclass(frozen=True)
class Drafter(Generic[Params, Cache]):
    """Functions of a drafter. Its cache is part of the slots' cache, beside the target's.

    Attributes:
      length: the longest draft, used unless a call chooses another; 0 drafts nothing.
      draft: may assume that its cache is at most k + 1 committed tokens behind.
      sync_cache: updates its cache from any number of committed tokens; called after a prefill, and before a draft
        whose cache is further behind.
      replayable: its drafts are deterministic functions of committed tokens, so that `replay` can make them afterwards.
      uncommitted: positions beyond the last committed token that a draft writes, however few tokens it drafts.
    """

    length: int
    draft: DraftFn[Params, Cache]
    sync_cache: SyncCacheFn[Params, Cache]
    replayable: bool = False
    uncommitted: int = 0


NO_DRAFTER: Drafter = Drafter(
    length=0,
    draft=lambda params, slots, seed, k: no_draft(slots, seed),
    sync_cache=lambda params, text, cache: cache,
)


@functools.partial(jax.jit, static_argnames="sampling")
def sample_draft(
    noise: Noise,
    logits: jax.Array,
    offset: jax.Array | int,
    *,
    vocab_map: jax.Array | None,
    sampling: Sampling,
    temperature: jax.Array | None = None,
) -> jax.Array:
    """Sample token number `offset` of a draft from softmax(logits / temperature); the argmax at temperature 0.

    Sampled drafts have acceptance 1 - TV(p, q), and the ratio rules need the distribution that a draft was drawn from.
    Under `coupled` the draw uses the Gumbel noise that the target's token of that position will be drawn with. Jitted,
    so that the draws of k steps are traced and lowered once.

    Args:
      logits: [B, Vd] float32 (float64).
      vocab_map: [Vd] int32, or None where Vd = V.
      temperature: [B] float32; None: that of `sampling`.
    Returns:
      [B] int32 target-vocabulary ids.
    """
    if temperature is None:
        temperature = jnp.full(len(logits), sampling.temperature, jnp.float32)
    greedy, logits = temperature == 0, at_least_float32(logits)
    logits = logits / jnp.where(greedy, 1, temperature).astype(logits.dtype)[:, None]
    if sampling.rule == "coupled":
        g = _coupled_noise(noise, offset, vocab_map, logits.shape[-1])
        noisy = logits + jnp.where(greedy[:, None], 0, g).astype(logits.dtype)
        index = jnp.argmax(noisy, axis=-1).astype(jnp.int32)
    else:
        uniforms = counter.uniforms(noise.seed, noise.rollout_id, noise.position, offset, counter.DRAFT)
        index = draw_rows(logits, uniforms, greedy)
    return index if vocab_map is None else vocab_map[index]


def _coupled_noise(noise: Noise, offset: jax.Array | int, vocab_map: jax.Array | None, Vd: int) -> jax.Array:
    """Return [B, Vd] float32, the target's noise of the ids in the draft's vocabulary."""
    position = noise.position + offset
    if vocab_map is None:
        return counter.gumbel_rows(noise.seed, noise.rollout_id, position, Vd)
    return counter.gumbel(noise.seed, noise.rollout_id[:, None], position[:, None], vocab_map[None])
