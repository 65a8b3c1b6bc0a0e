"""Draft by copying what followed the last tokens where they stood before.

`ngram` copies from a sequence's own text, `suffix` also from other rollouts of its prompt. Either has no weights and no
state. Its drafts have no probabilities (one-hot) and depend on committed tokens alone, so every verification rule stays
exact.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kernels_pallas.verify.op import Draft
from specrl_jax.decoding.drafters import NO_DRAFTER, Drafter
from specrl_jax.decoding.state import Slots
from specrl_jax.drafts.base import DrafterConfig, DraftMethod, DraftOptions
from specrl_jax.drafts.lookup.search import look_up
from specrl_jax.models.decoder import DecoderConfig


def make_none(options: DraftOptions, target: DecoderConfig) -> DraftMethod:
    """Return plain decoding."""
    return DraftMethod(lambda config: NO_DRAFTER)


def make_ngram(options: DraftOptions, target: DecoderConfig) -> DraftMethod:
    """Return prompt lookup in each sequence's own text."""
    return DraftMethod(lambda config: lookup_drafter(config.length, options.match_min, options.match_max))


def make_suffix(options: DraftOptions, target: DecoderConfig) -> DraftMethod:
    """Return lookup in a sequence's own text and those of its prompt's other rollouts."""
    return dataclasses.replace(make_ngram(options, target), uses_lookup_cache=True)


def overridden(method: DraftMethod, options: DraftOptions) -> DraftMethod:
    """Return the method with drafts overridden by lookups of `options.cascade` tokens and more."""

    def make_drafter(config: DrafterConfig) -> Drafter:
        return lookup_override(method.make_drafter(config), options.cascade, options.match_max)

    return dataclasses.replace(method, make_drafter=make_drafter, uses_lookup_cache=True)


def lookup_drafter(length: int, min_match: int, max_match: int = 8) -> Drafter:
    """Draft `length` tokens by lookup: in the row's own text, and in the slots' lookup cache where they have one.

    Args:
      min_match, max_match: as in `search.look_up`.
    """

    def draft(params: object, slots: Slots, seed: jax.Array, k: int) -> tuple[Draft, object]:
        tokens, _ = look_up(slots, k, min_match=min_match, max_match=max_match)
        deterministic, num_drafted = jnp.ones(slots.length.shape, bool), (tokens >= 0).sum(axis=1, dtype=jnp.int32)
        return Draft(tokens, None, deterministic, num_drafted=num_drafted), slots.cache

    return Drafter(length, draft, lambda params, text, cache: cache, replayable=True)


def lookup_override(neural: Drafter, min_match: int, max_match: int = 8) -> Drafter:
    """Draft by lookup in rows with a match of at least `min_match` tokens, and by `neural` in the others.

    `neural` runs in all rows, so that its cache covers all committed tokens. Where the text that is copied ends early,
    the rest of the draft stays empty: `neural` drafted its tokens after others.
    """

    def draft(params: object, slots: Slots, seed: jax.Array, k: int) -> tuple[Draft, object]:
        drafted, cache = neural.draft(params, slots, seed, k)
        copied, matched = look_up(slots, k, min_match=min_match, max_match=max_match)
        override = matched >= min_match
        tokens = jnp.where(override[:, None], copied, drafted.tokens)
        num_drafted = (tokens >= 0).sum(axis=1, dtype=jnp.int32)
        deterministic = drafted.deterministic | override
        draft = dataclasses.replace(drafted, tokens=tokens, deterministic=deterministic, num_drafted=num_drafted)
        return draft, cache

    return dataclasses.replace(neural, draft=draft)
