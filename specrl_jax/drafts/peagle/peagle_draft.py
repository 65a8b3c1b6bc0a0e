"""Draft with a P-EAGLE draft: a few layers over EAGLE-3's pairs that draft k tokens in one pass."""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.verify.op import Draft
from specrl_jax.core import Params, stand_in
from specrl_jax.decoding.drafters import CommittedTokens, Drafter
from specrl_jax.decoding.state import Slots
from specrl_jax.drafts.autoregressive import draft_tokens, in_blocks
from specrl_jax.drafts.base import DrafterConfig, DraftInputs, DraftMethod, DraftOptions
from specrl_jax.drafts.eagle3 import eagle3_network as eagle3
from specrl_jax.drafts.peagle import peagle_checkpoint as checkpoint
from specrl_jax.drafts.peagle import peagle_network as network
from specrl_jax.drafts.recurrent.recurrent_draft import committed_pairs
from specrl_jax.drafts.recurrent.recurrent_network import Angles
from specrl_jax.drafts.trained import TrainedDraft, loaded_config
from specrl_jax.drafts.weights import Caches, Weights
from specrl_jax.models import cache as kv
from specrl_jax.models.decoder import DecoderConfig, Output
from specrl_jax.sharding import Partitioner

FORMATS = tuple(checkpoint.FORMATS)


def make(options: DraftOptions, target: DecoderConfig) -> DraftMethod:
    """Return the draft in draft.path, or a new one for the target. Raises InputError."""
    if options.path:
        config = loaded_config(checkpoint, options, target)
    else:
        config = network.peagle_config(target, options.layers, options.vocab_size or target.vocab)
    draft = PEagleDraft(config, options.dialect or FORMATS[0])
    return DraftMethod(draft.drafter, draft)


class PairsCache(NamedTuple):
    """State of the sequences in the engine, in the pages that the target's cache has; entry t belongs to pair t."""

    hidden: jax.Array  # [C, T, D], the input from the target at each processed position
    layers: kv.KVCache


@dataclasses.dataclass(frozen=True)
class PEagleDraft(TrainedDraft):
    """Implement `DraftModel` for a P-EAGLE draft."""

    NETWORK: ClassVar[Any] = network
    CHECKPOINT: ClassVar[Any] = checkpoint
    takes_anchors = True

    config: network.PEagleConfig
    dialect: str = FORMATS[0]

    def inference_params(self, params: Params, dtype: jnp.dtype) -> Params:
        return network.inference_params(params, self.config, dtype)

    def init_cache(self, shape: kv.PageShape) -> PairsCache:
        c = self.config
        return PairsCache(kv.init_tokens(c.embed, shape), kv.init_cache(c.layers, c.kv_heads, c.head_dim, shape=shape))

    def cache_axes(self) -> PairsCache:
        return PairsCache(stand_in(kv.TOKEN_AXES), (stand_in(kv.PAGE_AXES),) * self.config.layers)

    def update_cache(
        self, params: Params, cache: PairsCache, paging: kv.Paging, *, out: Output, partition: Partitioner
    ) -> PairsCache:
        assert out.aux is not None, "the forward was asked for aux_layers"
        hidden = eagle3.first_hidden(params, self.config, out.aux)
        return cache._replace(hidden=kv.write_tokens(cache.hidden, paging, hidden, partition=partition))

    def drafter(self, config: DrafterConfig) -> Drafter:
        return peagle_drafter(self.config, config)

    def unrolled(self, params: Params, inputs: DraftInputs, partition: Partitioner) -> tuple[jax.Array, jax.Array]:
        return network.unrolled(params, self.config, inputs), params["unembed"]

    def initialise_from_target(self, params: Params, target: Params, lm_head: jax.Array) -> Params:
        """Take the lm_head, the norm before it and an embedding of its own from the target."""
        taken = {"unembed": lm_head, "final_norm": target["final_norm"]}
        return {**params, **taken, **({"embed": target["embed"]} if self.config.own_embedding else {})}


@functools.partial(jax.jit, static_argnames=("config", "partition"))
def deeper_layer(
    w: Params,
    x: jax.Array,
    angles: Angles,
    *,
    pages: jax.Array,
    places: kv.Paging,
    config: network.PEagleConfig,
    partition: Partitioner,
) -> tuple[jax.Array, jax.Array]:
    """Apply a layer but the first to x [B, Q, D] over its pages; return both. Jitted: they are traced once."""
    attend = kv.PagedAttention(pages, places, partition)
    x = network.deeper_layer(w, config, x, angles=angles, attend=attend)
    return x, attend.pages


def peagle_drafter(c: network.PEagleConfig, config: DrafterConfig) -> Drafter:
    """Draft up to `config.length` tokens with one pass over the last k + 1 committed pairs and k - 1 mask slots.

    The slots' keys and values stand in the pages behind the last pair's, where the next draft writes pairs.
    """

    def committed(
        params: Weights, tokens: jax.Array, pairs: kv.Paging, cache: PairsCache
    ) -> tuple[jax.Array, jax.Array]:
        table = network.embedding(params.draft, params.policy["embed"])
        return committed_pairs(cache.hidden, table, tokens, pairs=pairs, config=config)

    def run(
        params: Weights, hidden: jax.Array, embedded: jax.Array, places: kv.Paging, cache: PairsCache
    ) -> tuple[jax.Array, PairsCache]:
        """Apply the layers to pairs and slots [B, Q], each attending up to its own place; return a [B, Q, D]."""
        angles, attend = c.angles(places.positions), kv.PagedAttention(cache.layers[0], places, config.partition)
        a = eagle3.layer(params.draft, c, hidden, embedded=embedded, angles=angles, attend=attend)
        deeper = functools.partial(deeper_layer, places=places, config=c, partition=config.partition)
        written = [attend.pages]
        for w, pages in zip(network.deeper_layers(params.draft, c), cache.layers[1:], strict=True):
            a, pages = deeper(w, a, angles, pages=pages)
            written.append(pages)
        return config.partition.constrain(a, "batch", None, None), cache._replace(layers=tuple(written))

    def draft_fn(params: Weights, slots: Slots, seed: jax.Array, k: int) -> tuple[Draft, Caches[PairsCache]]:
        # The last committed pair is length - 2. A prompt shorter than the window has fewer pairs.
        positions = slots.length[:, None] - 2 + jnp.arange(-k, k)[None]
        places = slots.place(jnp.where(positions < 0, -1, positions))
        pairs = places._replace(positions=places.positions[:, : k + 1])
        known = committed(params, slots.tokens, pairs, slots.cache.draft)
        masks = network.mask_slot(params.draft, c, params.policy["embed"])
        shape = (len(positions), k - 1, c.embed)
        inputs = [
            jnp.concatenate([x, jnp.broadcast_to(m.astype(x.dtype), shape)], axis=1) for x, m in zip(known, masks)
        ]
        a, cache = run(params, inputs[0], inputs[1], places, slots.cache.draft)
        scores = eagle3.draft_logits(params.draft, c, a[:, k:])

        def step(i: int, token: jax.Array | None) -> jax.Array:
            return scores[:, i]

        return draft_tokens(step, slots, seed, k=k, vocab_map=params.vocab_map, config=config), slots.cache._replace(
            draft=cache
        )

    def sync_cache(params: Weights, text: CommittedTokens, cache: Caches[PairsCache]) -> Caches[PairsCache]:
        def update(pairs: kv.Paging, cache: PairsCache) -> PairsCache:
            hidden, embedded = committed(params, text.tokens, pairs, cache)
            return run(params, hidden, embedded, pairs, cache)[1]

        # The last committed token has no pair yet.
        return cache._replace(draft=in_blocks(update, text._replace(length=text.length - 1), cache.draft))

    return Drafter(config.length, draft_fn, sync_cache)
