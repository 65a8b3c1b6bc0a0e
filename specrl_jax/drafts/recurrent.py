"""Base class of recurrent heads (EAGLE-3, MTP): fed their own outputs, in training and in the engine.

A head reads pairs: pair t = (hidden state of position t, token t + 1) predicts token t + 2, at rotary position t.
For tokens not yet processed by the target, the head's own output takes the place of the hidden state.
"""

import abc
import functools
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.verify.op import Draft
from specrl_jax.core import Params, shift_left
from specrl_jax.decoding.drafters import CommittedTokens, Drafter
from specrl_jax.decoding.state import Slots
from specrl_jax.drafts.autoregressive import draft_tokens, in_blocks
from specrl_jax.drafts.base import DrafterConfig, DraftInputs
from specrl_jax.drafts.head import Angles, FeatureHead, HeadCache
from specrl_jax.drafts.weights import Caches, Weights
from specrl_jax.models import cache as kv
from specrl_jax.models.attention import AttendRows, Queries, by_queries, query_parts
from specrl_jax.sharding import Partitioner


class RecurrentDraft(FeatureHead):
    """Base of heads over pairs that are fed their own outputs; they have one layer.

    A head implements `layer`, and overrides `lm_head_input` where that is not the layer's output.
    """

    @abc.abstractmethod
    def layer(
        self, params: Params, hidden: jax.Array, embedded: jax.Array, *, angles: Angles, attend: AttendRows
    ) -> jax.Array:
        """Apply the head to hidden and embedded [B, Q, D]; return a [B, Q, D], the next application's hidden."""

    def lm_head_input(self, params: Params, a: jax.Array) -> jax.Array:
        """Return the input of the lm_head, given the layer's output."""
        return a

    def extend(
        self,
        params: Params,
        hidden: jax.Array,
        embedded: jax.Array,
        *,
        pairs: kv.Paging,
        cache: HeadCache,
        partition: Partitioner,
    ) -> tuple[jax.Array, HeadCache]:
        """Apply the head to pairs [B, Q], each attending to pairs up to its own; return the output and the cache.

        Under jit, where the output is not read nothing is computed but keys and values.
        """
        attend = kv.PagedAttention(cache.layers[0], pairs, partition)
        a = self.layer(params, hidden, embedded, angles=self.config.angles(pairs.positions), attend=attend)
        return a, cache._replace(layers=(attend.pages,))

    def outputs(self, params: Params, inputs: DraftInputs) -> jax.Array:
        """Apply the head to its own outputs (training-time test, EAGLE-3, arXiv 2503.01840, section 3.2).

        Row t of step i is draft step i of a speculation that starts at pair t. It attends to the step-0 keys of
        pairs <= t, made from true features, and to its own row only of every later step: that speculation's
        provisional entries.

                  keys:  step 0       step 1    step 2
            step 0       causal
            step 1       causal       diagonal
            step 2       causal       diagonal  diagonal

        Returns:
          [steps, B, T, D], inputs of the lm_head; row t of output i predicts token t + 2 + i. Rows within 1 + i of the
          end are meaningless.
        """
        rows, aux = inputs.rows, None if inputs.aux is None else inputs.features
        hidden = self.hidden_states(params, aux, inputs.hidden.astype(inputs.dtype))
        embedded = inputs.tables.embed[rows.tokens].astype(inputs.dtype)
        keys, values, found = list[jax.Array](), list[jax.Array](), list[jax.Array]()

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            keys.append(k)
            values.append(v)
            return _ttt_attention(q, keys, values, rows.segments)

        for i in range(inputs.steps):
            following, angles = shift_left(embedded, 1 + i), self.config.angles(rows.positions + i)
            hidden = self.layer(params, hidden, following, angles=angles, attend=attend)
            found.append(hidden)
        return self.lm_head_input(params, jnp.stack(found))

    def unrolled(self, params: Params, inputs: DraftInputs, partition: Partitioner) -> tuple[jax.Array, jax.Array]:
        return self.outputs(params, inputs), self.lm_head(params, inputs)

    def drafter(self, config: DrafterConfig) -> Drafter:
        return recurrent_drafter(self, config)


def embedded_tokens(table: jax.Array, tokens: jax.Array, config: DrafterConfig) -> jax.Array:
    """Return [B, Q, D] of tokens [B, Q]; `table` [V, D]."""
    return config.partition.constrain(table[tokens].astype(config.dtype), "batch", None, None)


def committed_pairs(
    pool: jax.Array, table: jax.Array, tokens: jax.Array, *, pairs: kv.Paging, config: DrafterConfig
) -> tuple[jax.Array, jax.Array]:
    """Return (hidden, embedded) [B, Q, D] of pairs whose hidden states, in `pool`, and tokens are both known."""
    hidden = kv.read_tokens(pool, pairs, config.partition)
    following = jnp.take_along_axis(tokens, pairs.positions + 1, axis=1, mode="clip")
    return hidden.astype(config.dtype), embedded_tokens(table, following, config)


@functools.partial(jax.jit, static_argnames=("head", "partition"))
def drafted_step(
    params: Weights,
    hidden: jax.Array,
    embedded: jax.Array,
    *,
    pairs: kv.Paging,
    cache: HeadCache,
    head: RecurrentDraft,
    partition: Partitioner,
) -> tuple[jax.Array, HeadCache, jax.Array]:
    """Apply the head to one pair [B, 1] of each row: the next hidden [B, 1, D], the cache, logits [B, Vd] float32.

    Jitted, so that k steps are traced and lowered once.
    """
    a, cache = head.extend(params.draft, hidden, embedded, pairs=pairs, cache=cache, partition=partition)
    a = partition.constrain(a, "batch", None, None)
    return a, cache, head.logits(params, head.lm_head_input(params.draft, a))[:, 0]


def recurrent_drafter(head: RecurrentDraft, config: DrafterConfig) -> Drafter:
    """Draft up to `config.length` tokens with an EAGLE-3 or MTP head; its input embedding is the policy's."""

    def committed(
        params: Weights, tokens: jax.Array, pairs: kv.Paging, cache: HeadCache
    ) -> tuple[jax.Array, jax.Array]:
        return committed_pairs(cache.hidden, params.policy["embed"], tokens, pairs=pairs, config=config)

    def write_pairs(params: Weights, hidden: jax.Array, embedded: jax.Array, **where: Any) -> HeadCache:
        return head.extend(params.draft, hidden, embedded, **where, partition=config.partition)[1]

    def draft(params: Weights, slots: Slots, seed: jax.Array, k: int) -> tuple[Draft, Caches[HeadCache]]:
        # The last committed pair is length - 2. A prompt shorter than the window repeats pair 0, with equal results.
        pairs = slots.place(jnp.maximum(slots.length[:, None] - 2 - jnp.arange(k, -1, -1)[None], 0))
        hidden, embedded = committed(params, slots.tokens, pairs, slots.cache.draft)
        earlier, own = (pairs._replace(positions=x) for x in (pairs.positions[:, :-1], pairs.positions[:, -1:]))
        cache = write_pairs(params, hidden[:, :-1], embedded[:, :-1], pairs=earlier, cache=slots.cache.draft)
        a, last = hidden[:, -1:], embedded[:, -1:]

        def step(i: int, token: jax.Array | None) -> jax.Array:
            nonlocal a, cache, last, own
            if token is not None:
                last = embedded_tokens(params.policy["embed"], token[:, None], config)
                own = slots.place(slots.length[:, None] - 2 + i)
            a, cache, logits = drafted_step(
                params, a, last, pairs=own, cache=cache, head=head, partition=config.partition
            )
            return logits

        drafted = draft_tokens(step, slots, seed, k=k, vocab_map=params.vocab_map, config=config)
        return drafted, slots.cache._replace(draft=cache)

    def sync_cache(params: Weights, text: CommittedTokens, cache: Caches[HeadCache]) -> Caches[HeadCache]:
        def update(pairs: kv.Paging, cache: HeadCache) -> HeadCache:
            hidden, embedded = committed(params, text.tokens, pairs, cache)
            return write_pairs(params, hidden, embedded, pairs=pairs, cache=cache)

        # The last committed token has no pair yet.
        return cache._replace(draft=in_blocks(update, text._replace(length=text.length - 1), cache.draft))

    return Drafter(config.length, draft, sync_cache)


def _ttt_attention(
    q: jax.Array, keys: list[jax.Array], values: list[jax.Array], segments: jax.Array | None
) -> jax.Array:
    """Attend with q [B, T, N, H] to keys[0] up to its own place and in its segment, and to every later step's own row.

    No maintained attention kernel has this mask. Of long rows some queries at a time: see models/attention.py.
    """
    T = q.shape[1]

    def attend(queries: Queries, part: tuple[jax.Array, list[jax.Array], list[jax.Array]]) -> jax.Array:
        q, own_keys, own_values = part
        readable = queries.readable(segments, T)[:, :, None]
        return _attend(q, readable, own_keys, own_values=own_values, keys=keys[0], values=values[0])

    return by_queries(attend, query_parts(T), segments, arrays=(q, keys[1:], values[1:]))


def _attend(
    q: jax.Array,
    readable: jax.Array,
    own_keys: list[jax.Array],
    own_values: list[jax.Array],
    keys: jax.Array,
    values: jax.Array,
) -> jax.Array:
    """Attend to keys [B, T, K, H] and, of each later step, to the query's own row [B, Q, K, H]; float32 softmax."""
    B, Q, N, H = q.shape
    T, K = keys.shape[1:3]
    q = q.reshape(B, Q, K, N // K, H)
    shared = jnp.einsum("BQKRH,BSKH->BKRQS", q, keys, preferred_element_type=jnp.float32)
    scores = [jnp.where(readable, shared, -jnp.inf)]
    for k in own_keys:
        own = jnp.einsum("BQKRH,BQKH->BKRQ", q, k, preferred_element_type=jnp.float32)
        scores.append(own[..., None])
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1) * H**-0.5, axis=-1).astype(q.dtype)
    out = jnp.einsum("BKRQS,BSKH->BQKRH", weights[..., :T], values)
    for j, v in enumerate(own_values):
        out = out + jnp.einsum("BKRQ,BQKH->BQKRH", weights[..., T + j], v)
    return out.reshape(B, Q, N, H)
