"""What every drafter is to the engine, and how one drafted token is drawn."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import noise as counter
from kernels_pallas.verify.op import Noise
from kernels_pallas.verify.sampling import draw
from specrl_jax.core import at_least_float32
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.step import Draft, Slots, no_draft

# (params, slots, seed, k) -> (k drafted tokens a row, cache)
DraftFn = Callable[[Any, Slots, jax.Array, int], tuple[Draft, Any]]
# (params, tokens [B, S], length [B], cache) -> cache
SyncCacheFn = Callable[[Any, jax.Array, jax.Array, Any], Any]


@dataclasses.dataclass(frozen=True)
class Drafter:
    """How an engine drafts. A drafter's own state lives in the slots' cache, beside the target's.

    Attributes:
      length: the longest draft, and the one used unless the engine is told another; 0 drafts nothing.
      draft: may assume that its state is that of at most k + 1 committed tokens ago.
      sync_cache: brings that state level with any number of committed tokens; called after a prefill, and before a
        draft whose k + 1 tokens do not reach back to it.
      copies: its drafts are one-hot functions of committed tokens alone, so that they can be made afterwards too.
    """

    length: int
    draft: DraftFn
    sync_cache: SyncCacheFn
    copies: bool = False


NO_DRAFTER = Drafter(
    length=0,
    draft=lambda params, slots, seed, k: no_draft(slots, seed),
    sync_cache=lambda params, tokens, length, cache: cache,
)


def sample_draft(
    noise: Noise, logits: jax.Array, offset: int, vocab_map: jax.Array | None, sampling: Sampling
) -> jax.Array:
    """Token number `offset` of a draft: sampled from softmax(logits / temperature), the best one at temperature 0.

    Sampled, not the best: acceptance is then 1 - TV(p, q), and the rule needs to know the law of what it verifies.
    Under `coupled` by the Gumbel noise that the target's token of that position will be drawn with.

    Args:
      logits: [B, Vd] float32 (float64).
      vocab_map: [Vd] int32, or None where Vd = V.
    Returns:
      [B] int32 target-vocabulary ids.
    """
    if sampling.temperature == 0:
        index = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    elif sampling.rule == "coupled":
        logits = at_least_float32(logits) / sampling.temperature
        g = _coupled_noise(noise, offset, vocab_map, logits.shape[-1])
        index = jnp.argmax(logits + g.astype(logits.dtype), axis=-1).astype(jnp.int32)
    else:
        uniforms = counter.uniforms(noise.seed, noise.rollout_id, noise.position, offset, counter.DRAFT)
        index = draw(jax.nn.softmax(logits / sampling.temperature, axis=-1), uniforms)
    return index if vocab_map is None else vocab_map[index]


def _coupled_noise(noise: Noise, offset: int, vocab_map: jax.Array | None, Vd: int) -> jax.Array:
    """[B, Vd] float32: the target's noise of the ids in the draft's vocabulary."""
    position = noise.position + offset
    if vocab_map is None:
        return counter.gumbel_rows(noise.seed, noise.rollout_id, position, Vd)
    return counter.gumbel(noise.seed, noise.rollout_id[:, None], position[:, None], vocab_map[None])
