"""Draft the last token again and again."""

import jax
import jax.numpy as jnp

from kernels_pallas.verify.op import Draft
from specrl_jax.decoding.drafters import Drafter
from specrl_jax.decoding.state import Slots
from specrl_jax.drafts.base import DrafterConfig, DraftMethod, DraftOptions
from specrl_jax.models.decoder import DecoderConfig


def make(options: DraftOptions, target: DecoderConfig) -> DraftMethod:
    return DraftMethod(repeat_drafter)


def repeat_drafter(config: DrafterConfig) -> Drafter:
    def draft(params: object, slots: Slots, seed: jax.Array, k: int) -> tuple[Draft, object]:
        last = jnp.take_along_axis(slots.tokens, slots.length[:, None] - 1, axis=1)  # [B, 1]
        deterministic = jnp.ones(slots.length.shape, bool)
        return Draft(jnp.repeat(last, k, axis=1), None, deterministic), slots.cache

    return Drafter(config.length, draft, sync_cache=lambda params, text, cache: cache)
