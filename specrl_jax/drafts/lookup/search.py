"""Prompt lookup: find where a row's last tokens stood before, and read what followed them.

Prompt lookup (Saxena, github.com/apoorvumang/prompt-lookup-decoding) reads a sequence's own text. SuffixDecoding
(Oliaro et al., arXiv 2411.04975) also reads the other rollouts of its prompt, running, finished and of earlier epochs.
Where they keep a suffix tree, this searches token buffers: it runs inside the loop on the device, where a text that
grows in every iteration costs one scatter.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specrl_jax.decoding.state import Slots

# Distinct sentinels for positions before the first token: they never match a token or each other.
_BEFORE_TEXT, _BEFORE_RECENT = -1, -2
BLOCK = 256  # positions compared at a time; at least the longest match


class Match(NamedTuple):
    """Earlier occurrence of the last tokens of each row; with length 0 the other fields are meaningless."""

    text: jax.Array  # [B] int32
    position: jax.Array  # [B] int32, of the token after the match
    length: jax.Array  # [B] int32, tokens that match


def recent_tokens(tokens: jax.Array, length: jax.Array, n: int) -> jax.Array:
    """Return [B, n] int32: the last n of the first `length` [B] tokens of rows [B, S], last first; negative beyond."""
    positions = length[:, None] - 1 - jnp.arange(n)[None]
    recent = jnp.take_along_axis(tokens, jnp.maximum(positions, 0), axis=1)
    return jnp.where(positions >= 0, recent, _BEFORE_RECENT)


def longest_match(recent: jax.Array, texts: jax.Array, length: jax.Array, group: jax.Array | None = None) -> Match:
    """Find the longest match of each row's recent tokens that a text of its group continues after.

    Ties: lowest text index, then latest position. The match before position j of a text has the length of the longest
    run i = 0, 1, ... with text[j - 1 - i] == recent[i]. Computed as n comparisons of shifted texts, fused into one pass
    over a block of positions; blocks beyond the longest of the texts are not read.

    Memory: 16 * B * M * BLOCK bytes, two blocks; 256 rows with 24 texts take 25 MB.

    Args:
      recent: [B, n] int32, the last token first.
      texts: [C, M, S] int32, M texts of each group.
      length: [B, M] int32, valid tokens of the texts of each row's group; 0 = no text.
      group: [B] int32, index into `texts`, clipped to it; None: row b reads texts[b].
    """
    S, n = texts.shape[-1], recent.shape[1]
    whole = S < 2 * BLOCK  # one block: the usual case where texts are short, and no loop

    def read(start: jax.Array | int, size: int) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(texts, start, size, axis=2)
        return part if group is None else part.at[group].get(mode="clip")

    def best_of(start: jax.Array | int, block: jax.Array) -> jax.Array:
        """Return [B, M] the best of positions `start` on as length * S + position; `block` has n tokens before them."""
        width = block.shape[-1] - n
        position = start + jnp.arange(width)[None, None]
        matching = position < length[:, :, None]
        matched = jnp.zeros(matching.shape, jnp.int32)
        for i in range(n):
            matching &= block[:, :, n - 1 - i : n - 1 - i + width] == recent[:, i, None, None]
            matched += matching
        return jnp.max(matched * S + position, axis=-1)

    def turn(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        best, block = carry
        start, following = (jnp.minimum(j * BLOCK, S - BLOCK) for j in (i, i + 1))
        return jnp.maximum(best, best_of(start, block)), read(following - n, n + BLOCK)

    first = jnp.pad(read(0, S if whole else BLOCK), ((0, 0), (0, 0), (n, 0)), constant_values=_BEFORE_TEXT)
    if whole:
        best = best_of(0, first)
    else:
        # Each block is carried from the turn that reads it to the next: XLA for CPUs would fuse a read at a dynamic
        # position into each of the n comparisons, which takes six times as long.
        start = jnp.full(length.shape, S - 1, jnp.int32), first
        best, _ = jax.lax.fori_loop(0, (length.max() + BLOCK - 1) // BLOCK, turn, start)
    text = jnp.argmax(best // S, axis=1).astype(jnp.int32)
    best = jnp.take_along_axis(best, text[:, None], axis=1)[:, 0]
    return Match(text, best % S, best // S)


def look_up(slots: Slots, k: int, *, min_match: int, max_match: int) -> tuple[jax.Array, jax.Array]:
    """Return the k tokens after the longest match of each row's last tokens, and the length of that match.

    The row's own text is searched first; another text of its group in the lookup cache is used where its match is
    longer.

    Args:
      min_match: tokens, at least 1; nothing is copied after a shorter match.
      max_match: tokens compared.
    Returns:
      [B, k] int32, -1 where there is nothing to copy; copies from a row's own text wrap around at its end, so they are
      never short. Length [B] int32 of the match, at most max_match tokens.
    """
    tokens, length, group, lookup_cache = slots.tokens, slots.length, slots.group, slots.lookup_cache
    recent = recent_tokens(tokens, length, max_match)
    match = longest_match(recent, tokens[:, None], length[:, None])
    copied = _continue(tokens, match.position, length, k)
    matched = match.length
    if lookup_cache is not None:
        lengths = lookup_cache.length.at[group].get(mode="fill", fill_value=0)
        lengths = jnp.where(jnp.arange(lengths.shape[1])[None] == slots.sequence[:, None], 0, lengths)
        match = longest_match(recent, lookup_cache.tokens, lengths, group)
        text_length = jnp.take_along_axis(lengths, match.text[:, None], axis=1)
        positions = match.position[:, None] + jnp.arange(k)[None]
        following = lookup_cache.tokens.at[group[:, None], match.text[:, None], positions].get(mode="clip")
        longer = match.length > matched
        copied = jnp.where(longer[:, None], jnp.where(positions < text_length, following, -1), copied)
        matched = jnp.where(longer, match.length, matched)
    return jnp.where(matched[:, None] >= min_match, copied, -1), matched


def _continue(tokens: jax.Array, position: jax.Array, length: jax.Array, k: int) -> jax.Array:
    """Return [B, k] int32: tokens of rows [B, S] from `position` [B] on, wrapping around at `length` [B]."""
    period = jnp.maximum(length - position, 1)
    return jnp.take_along_axis(tokens, position[:, None] + jnp.arange(k)[None] % period[:, None], axis=1)
