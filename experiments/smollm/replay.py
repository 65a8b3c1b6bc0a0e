"""Replay speculative decoding along texts: what each verification would keep, without running the engine.

A lossless verifier writes the policy's own texts, whatever is drafted. What it keeps therefore has the law of this:
take texts y that the policy wrote without drafts, and at each position the probabilities that policy and draft give to
y. Behind drafts that were kept, a draft that is sampled from q is kept with chance

    P(kept | y) = min(p(y), q(y)) / p(y) = min(1, q(y) / p(y))

since the rejection rule (arXiv 2211.17192) emits y as a kept draft with chance min(p(y), q(y)); a draft without
probabilities is kept if it is y. One pass of a head over the texts so gives every draft length.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.decoding.lookup_cache import LookupCache
from specrl_jax.drafts.lookup.search import look_up


class Texts(NamedTuple):
    """R answers, G neighbours to each prompt."""

    tokens: np.ndarray  # [R, S] int32, prompt then answer
    prompt_length: np.ndarray  # [R] int32
    length: np.ndarray  # [R] int32, end-of-text included
    logprobs: np.ndarray  # [R, S] float32, nats, of the answer's tokens
    limit: int  # most tokens of an answer

    @property
    def response_length(self) -> np.ndarray:
        return self.length - self.prompt_length

    def first(self, count: int) -> Self:
        """Return the first `count` answers."""
        return self._replace(**{name: getattr(self, name)[:count] for name in self._fields[:-1]})


class Kept(NamedTuple):
    """What R answers took with drafts of k tokens."""

    verifications: np.ndarray  # [R] int64
    drafted: np.ndarray  # [R, k] int64, verifications that drafted at least i + 1 tokens
    accepted: np.ndarray  # [R, k] int64, those of them that kept draft i and all before it


# (answer tokens committed so far [R]) -> [R, k] bool, whether each draft is kept if those before it are
Drafts = Callable[[np.ndarray], np.ndarray]


def replay(texts: Texts, drafts: Drafts, k: int) -> Kept:
    """Verify drafts of k tokens from the start of each answer to its end."""
    total, rows = texts.response_length, np.arange(len(texts.length))
    found = Kept(np.zeros(len(rows), int), np.zeros((len(rows), k), int), np.zeros((len(rows), k), int))
    done = np.zeros(len(rows), int)
    while (running := done < total).any():
        # A token of the policy follows the last draft, and none is committed beyond the limit.
        drafted = np.arange(k)[None] < np.minimum(k, texts.limit - done - 1)[:, None]
        kept = np.cumprod(drafts(done)[:, :k] & drafted, axis=1, dtype=bool)
        kept &= np.arange(k)[None] < (total - done)[:, None]
        kept, drafted = kept & running[:, None], drafted & running[:, None]
        found.verifications[:] += running
        found.drafted[:] += drafted
        found.accepted[:] += kept
        done = np.where(running, np.minimum(done + kept.sum(axis=1) + 1, total), done)
    return found


def by_chance(chances: np.ndarray, seed: int) -> Drafts:
    """Return drafts kept with `chances` [R, N, k]: of draft i behind the first n tokens of an answer.

    Each is drawn once: chances of 0 and 1 say which are kept.
    """
    kept = np.random.default_rng(seed).random(chances.shape, np.float32) < chances
    rows = np.arange(len(chances))
    return lambda done: kept[rows, np.minimum(done, chances.shape[1] - 1)]


class _Searched(NamedTuple):
    """What `look_up` reads of the engine's slots."""

    tokens: jax.Array
    length: jax.Array
    group: jax.Array
    sequence: jax.Array
    lookup_cache: LookupCache | None


def by_lookup(texts: Texts, k: int, *, siblings: int, min_match: int, max_match: int) -> Drafts:
    """Return drafts copied from an answer's own text, and from its `siblings` answers so far where these are several.

    Answers to a prompt stand one behind the other, and advance by one verification at a time.
    """
    R, S = texts.tokens.shape
    tokens = jnp.asarray(np.pad(texts.tokens, ((0, 0), (0, k))))
    group, sequence = np.divmod(np.arange(R), siblings)

    @jax.jit
    def copied(length: jax.Array) -> jax.Array:
        by_group = tokens.reshape(R // siblings, siblings, S + k), length.reshape(-1, siblings)
        cache = LookupCache(*by_group) if siblings > 1 else None
        searched = _Searched(tokens, length, jnp.asarray(group), jnp.asarray(sequence), cache)
        return look_up(cast(Any, searched), k, min_match=min_match, max_match=max_match)[0]

    def drafts(done: np.ndarray) -> np.ndarray:
        length = texts.prompt_length + done
        following = jnp.take_along_axis(tokens, jnp.asarray(length[:, None] + np.arange(k)), axis=1)
        return np.asarray(copied(jnp.asarray(length)) == following)

    return drafts
