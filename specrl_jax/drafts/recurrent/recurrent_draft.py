"""Base class of drafts with a recurrent head of one layer: their cache in the engine and their drafter."""

import functools

import jax
import jax.numpy as jnp

from kernels_pallas.verify.op import Draft
from specrl_jax.core import Params, stand_in
from specrl_jax.decoding.drafters import CommittedTokens, Drafter
from specrl_jax.decoding.state import Slots
from specrl_jax.drafts.autoregressive import draft_tokens, in_blocks
from specrl_jax.drafts.base import DrafterConfig, DraftInputs
from specrl_jax.drafts.recurrent import recurrent_network as network
from specrl_jax.drafts.recurrent.recurrent_network import Angles, Attend, DraftCache, HeadConfig
from specrl_jax.drafts.trained import TrainedDraft
from specrl_jax.drafts.weights import Caches, Weights
from specrl_jax.models import cache as kv
from specrl_jax.models.decoder import Output
from specrl_jax.sharding import Partitioner


class RecurrentDraft(TrainedDraft):
    """Base of drafts with a head over pairs (hidden state of position t, token t + 1), fed its own outputs.

    A head overrides `config`, `layer`, `logits` and `lm_head`; `hidden_states` where these are not the target's;
    `lm_head_input` where that is not the layer's output; `write_pairs` where it can do with less than the whole layer.
    """

    config: HeadConfig

    def layer(
        self, params: Params, hidden: jax.Array, embedded: jax.Array, *, angles: Angles, attend: Attend
    ) -> jax.Array:
        """Apply the head to hidden and embedded [B, Q, D]; return the next application's hidden."""
        raise NotImplementedError

    def logits(self, weights: Weights, a: jax.Array) -> jax.Array:
        """Return [B, Q, Vd] float32 of the layer's output [B, Q, D]."""
        raise NotImplementedError

    def lm_head(self, params: Params, inputs: DraftInputs) -> jax.Array:
        """Return the lm_head's table [Vd, D] in training."""
        raise NotImplementedError

    def hidden_states(self, params: Params, aux: jax.Array | None, hidden: jax.Array) -> jax.Array:
        """Return the head's hidden states [B, T, D] of the target's features [B, T, A, D] and hidden states."""
        return hidden

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
        cache: DraftCache,
        partition: Partitioner,
    ) -> tuple[jax.Array, DraftCache]:
        """Apply the head to pairs [B, Q], each attending to pairs up to its own; return the output and the cache."""
        attend = kv.PagedAttention(cache.pages, pairs, partition)
        a = self.layer(params, hidden, embedded, angles=self.config.angles(pairs.positions), attend=attend)
        return a, cache._replace(pages=attend.pages)

    def write_pairs(
        self,
        params: Params,
        hidden: jax.Array,
        embedded: jax.Array,
        *,
        pairs: kv.Paging,
        cache: DraftCache,
        partition: Partitioner,
    ) -> DraftCache:
        """Write keys and values of pairs [B, Q]. Under jit nothing after them is computed."""
        return self.extend(params, hidden, embedded, pairs=pairs, cache=cache, partition=partition)[1]

    def outputs(self, params: Params, inputs: DraftInputs) -> jax.Array:
        """Apply the head to its own outputs (training-time test, EAGLE-3, arXiv 2503.01840, section 3.2).

        Returns [steps, B, T, D], inputs of the lm_head.
        """
        rows, aux = inputs.rows, None if inputs.aux is None else inputs.features
        embedded = inputs.tables.embed[rows.tokens].astype(inputs.dtype)
        found = network.unroll(
            functools.partial(self.layer, params),
            self.config,
            self.hidden_states(params, aux, inputs.hidden.astype(inputs.dtype)),
            embedded=embedded,
            steps=inputs.steps,
            positions=rows.positions,
            segments=rows.segments,
        )
        return self.lm_head_input(params, jnp.stack(found))

    def unrolled(self, params: Params, inputs: DraftInputs, partition: Partitioner) -> tuple[jax.Array, jax.Array]:
        return self.outputs(params, inputs), self.lm_head(params, inputs)

    def init_cache(self, shape: kv.PageShape) -> DraftCache:
        return network.init_cache(self.config, shape)

    def update_cache(
        self, params: Params, cache: DraftCache, paging: kv.Paging, *, out: Output, partition: Partitioner
    ) -> DraftCache:
        hidden = self.hidden_states(params, out.aux, out.hidden)
        return cache._replace(hidden=kv.write_tokens(cache.hidden, paging, hidden, partition=partition))

    def cache_axes(self) -> DraftCache:
        return DraftCache(stand_in(kv.TOKEN_AXES), stand_in(kv.PAGE_AXES))

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
    cache: DraftCache,
    head: RecurrentDraft,
    partition: Partitioner,
) -> tuple[jax.Array, DraftCache, jax.Array]:
    """Apply the head to one pair [B, 1] of each row: the next hidden [B, 1, D], the cache, logits [B, Vd] float32.

    Jitted, so that k steps are traced and lowered once.
    """
    a, cache = head.extend(params.draft, hidden, embedded, pairs=pairs, cache=cache, partition=partition)
    a = partition.constrain(a, "batch", None, None)
    return a, cache, head.logits(params, a)[:, 0]


def recurrent_drafter(head: RecurrentDraft, config: DrafterConfig) -> Drafter:
    """Draft up to `config.length` tokens with an EAGLE-3 or MTP head; its input embedding is the policy's."""

    def committed(
        params: Weights, tokens: jax.Array, pairs: kv.Paging, cache: DraftCache
    ) -> tuple[jax.Array, jax.Array]:
        return committed_pairs(cache.hidden, params.policy["embed"], tokens, pairs=pairs, config=config)

    def draft(params: Weights, slots: Slots, seed: jax.Array, k: int) -> tuple[Draft, Caches[DraftCache]]:
        # The last committed pair is length - 2. A prompt shorter than the window repeats pair 0, with equal results.
        pairs = slots.place(jnp.maximum(slots.length[:, None] - 2 - jnp.arange(k, -1, -1)[None], 0))
        hidden, embedded = committed(params, slots.tokens, pairs, slots.cache.draft)
        earlier, own = (pairs._replace(positions=x) for x in (pairs.positions[:, :-1], pairs.positions[:, -1:]))
        cache = head.write_pairs(
            params.draft,
            hidden[:, :-1],
            embedded[:, :-1],
            pairs=earlier,
            cache=slots.cache.draft,
            partition=config.partition,
        )
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

    def sync_cache(params: Weights, text: CommittedTokens, cache: Caches[DraftCache]) -> Caches[DraftCache]:
        def update(pairs: kv.Paging, cache: DraftCache) -> DraftCache:
            hidden, embedded = committed(params, text.tokens, pairs, cache)
            return head.write_pairs(
                params.draft, hidden, embedded, pairs=pairs, cache=cache, partition=config.partition
            )

        # The last committed token has no pair yet.
        return cache._replace(draft=in_blocks(update, text._replace(length=text.length - 1), cache.draft))

    return Drafter(config.length, draft, sync_cache)
