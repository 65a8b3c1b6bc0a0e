"""Draft a block of tokens in one pass over the policy's features, with or without a Markov head."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from kernels_pallas.verify.op import Draft
from specrl_jax.core import Params, branches, stand_in
from specrl_jax.decoding.drafters import CommittedTokens, Drafter
from specrl_jax.decoding.state import Slots
from specrl_jax.drafts.autoregressive import draft_tokens
from specrl_jax.drafts.base import (
    DrafterConfig,
    DraftInputs,
    DraftMethod,
    DraftOptions,
    confidence_logits,
)
from specrl_jax.drafts.block import block_checkpoint as checkpoint
from specrl_jax.drafts.block import block_network as network
from specrl_jax.drafts.trained import TrainedDraft, loaded_config
from specrl_jax.drafts.weights import Caches, Weights
from specrl_jax.errors import InputError
from specrl_jax.models import cache as kv
from specrl_jax.models.decoder import DecoderConfig, Output
from specrl_jax.models.layers import matmul, rms_norm
from specrl_jax.sharding import Partitioner


def make_dspark(options: DraftOptions, target: DecoderConfig) -> DraftMethod:
    """Return the drafter with a Markov head in draft.path, or a new one for the target. Raises InputError."""
    return _make(options, target, markov=True)


def make_dflash(options: DraftOptions, target: DecoderConfig) -> DraftMethod:
    """Return the drafter without a Markov head in draft.path, or a new one for the target. Raises InputError."""
    return _make(options, target, markov=False)


def _make(options: DraftOptions, target: DecoderConfig, markov: bool) -> DraftMethod:
    if options.path:
        config = loaded_config(checkpoint, options, target)
        if bool(config.markov_rank) != markov:
            kind = "dspark" if config.markov_rank else "dflash"
            raise InputError(f"draft.path: {options.path} is a drafter of draft.kind={kind}")
    else:
        vocab = options.vocab_size or target.vocab
        config = network.block_config(target, options.slots, options.layers, draft_vocab=vocab, markov=markov)
    draft = BlockDraft(config, _dialect(options, config))
    return DraftMethod(draft.drafter, draft)


def _dialect(options: DraftOptions, config: network.BlockConfig) -> str:
    """Return the format to save in: the kind's own, or speculators for slots that it does not have.

    Raises InputError where draft.dialect names a format that cannot say which slots predict.
    """
    own = "deepspec" if config.markov_rank else "zlab"
    fits = config.from_anchor == bool(config.markov_rank)
    if options.dialect == own and not fits:
        said = str(config.from_anchor).lower()
        raise InputError(
            f"draft.dialect={own}: the drafter {options.path} has sample_from_anchor={said}, which speculators alone "
            "can say; leave '' or draft.dialect=speculators"
        )
    return options.dialect or (own if fits else "speculators")


@dataclasses.dataclass(frozen=True)
class BlockDraft(TrainedDraft):
    """Implement `DraftModel` for a block drafter."""

    NETWORK: ClassVar[Any] = network
    CHECKPOINT: ClassVar[Any] = checkpoint
    takes_anchors = True

    config: network.BlockConfig
    dialect: str

    @property
    def longest(self) -> int:
        return self.config.longest

    @property
    def has_vocab_map(self) -> bool:
        return self.config.draft_vocab < self.config.vocab

    def init_cache(self, shape: kv.PageShape) -> kv.KVCache:
        return kv.init_cache(self.config.layers, self.config.kv_heads, self.config.head_dim, shape=shape)

    def cache_axes(self) -> kv.KVCache:
        return (stand_in(kv.PAGE_AXES),) * self.config.layers

    def update_cache(
        self, params: Params, cache: kv.KVCache, paging: kv.Paging, *, out: Output, partition: Partitioner
    ) -> kv.KVCache:
        assert out.aux is not None, "the forward was asked for aux_layers"
        c, angles = network.context(params, self.config, out.aux), self.config.angles(paging.positions)
        written = []
        for pages, w in zip(cache, branches(params, "layers"), strict=True):
            k, v = network.keys_values(w, self.config, c, angles=angles)
            written.append(kv.write(pages, k, v, paging=paging, partition=partition))
        return tuple(written)

    def drafter(self, config: DrafterConfig) -> Drafter:
        return block_drafter(self, config)

    def unrolled(self, params: Params, inputs: DraftInputs, partition: Partitioner) -> tuple[jax.Array, jax.Array]:
        outputs = network.unrolled(params, self.config, inputs)
        lm_head = params["unembed"] if self.has_vocab_map else inputs.tables.lm_head
        if self.config.markov_rank:
            lm_head = jnp.concatenate([lm_head, params["markov_out"].astype(lm_head.dtype)], axis=1)
        return outputs, lm_head

    def initialise_from_target(self, params: Params, target: Params, lm_head: jax.Array) -> Params:
        """Take the last norm and, on a reduced vocabulary, the lm_head from the target; the other heads start at 0.

        Layers start at random, as DFlash's.
        """
        taken = {"final_norm": target["final_norm"]}
        taken |= {"unembed": lm_head} if self.has_vocab_map else {}
        zeros = [name for name in ("markov_out", "confidence", "confidence_bias") if name in params]
        return {**params, **taken, **{name: jnp.zeros_like(params[name]) for name in zeros}}


@functools.partial(jax.jit, static_argnames=("config", "partition"))
def drafted_layer(
    x: jax.Array,
    w: Params,
    pages: jax.Array,
    *,
    angles: network.Angles,
    paging: kv.Paging,
    last: jax.Array,
    config: network.BlockConfig,
    partition: Partitioner,
) -> tuple[jax.Array, jax.Array]:
    """Apply a layer to the slots x [B, Q, D] over its pages; return both. Jitted: all layers are traced once.

    Args:
      last: [B, Q], the position up to which a slot attends.
    """
    attend = kv.PagedAttention(pages, paging, partition, last=last)
    x = network.hidden_states([w], config, x, angles=angles, attends=[attend])
    return x, attend.pages


def block_drafter(draft: BlockDraft, config: DrafterConfig) -> Drafter:
    """Draft up to `config.length` tokens with one pass over a whole block, however few of them are wanted.

    The slots' keys and values stand in the pages from the anchor's position on, where those of the target's features
    replace them as soon as the target has read the tokens.
    """
    c = draft.config

    def logits(params: Weights, x: jax.Array) -> jax.Array:
        table = params.draft["to_logits"] if draft.has_vocab_map else params.policy["to_logits"]
        return config.partition.constrain(matmul("BTD,DV->BTV", x, table), "batch", None, "vocab")

    def block(params: Weights, slots: Slots, anchor: jax.Array, k: int) -> tuple[jax.Array, kv.KVCache]:
        """Return what the lm_head reads [B, k, D] of the blocks behind anchor [B], and the cache."""
        x = params.policy["embed"][network.slot_tokens(c, anchor)].astype(config.dtype)
        positions = slots.length[:, None] - 1 + jnp.arange(c.slots)[None]
        # No slot reads beyond the row's limit, where nothing is written.
        last = slots.place(jnp.broadcast_to(jnp.minimum(positions[:, -1:], slots.limit[:, None] - 1), positions.shape))
        x = config.partition.constrain(x, "batch", None, None)
        layer = functools.partial(
            drafted_layer,
            angles=c.angles(positions),
            paging=slots.place(positions),
            last=last.positions,
            config=c,
            partition=config.partition,
        )
        written = list[jax.Array]()
        for w, pages in zip(branches(params.draft, "layers"), slots.cache.draft, strict=True):
            x, new = layer(x, w, pages)
            written.append(new)
        x = rms_norm(x, params.draft["final_norm"], c.norm_epsilon)
        return x[:, c.unused : c.unused + k], tuple(written)

    def draft_fn(params: Weights, slots: Slots, seed: jax.Array, k: int) -> tuple[Draft, Caches[kv.KVCache]]:
        anchor = jnp.take_along_axis(slots.tokens, slots.length[:, None] - 1, axis=1)[:, 0]
        hidden, cache = block(params, slots, anchor, k)
        scores = logits(params, hidden)

        def step(i: int, token: jax.Array | None) -> jax.Array:
            if not c.markov_rank:
                return scores[:, i]
            latent = params.draft["markov_in"][anchor if token is None else token]
            return scores[:, i] + matmul("BR,VR->BV", latent, params.draft["markov_out"])

        draft = draft_tokens(step, slots, seed, k=k, vocab_map=params.vocab_map, config=config)
        if c.confidence:
            before = jnp.concatenate([anchor[:, None], draft.tokens[:, :-1]], axis=1)
            read = jnp.concatenate([hidden, params.draft["markov_in"][before]], axis=-1) if c.markov_rank else hidden
            draft = dataclasses.replace(draft, confidence=jax.nn.sigmoid(confidence_logits(params.draft, read)))
        return draft, slots.cache._replace(draft=cache)

    def sync_cache(params: Weights, text: CommittedTokens, cache: Caches[kv.KVCache]) -> Caches[kv.KVCache]:
        return cache  # every forward of the target brings it level

    return Drafter(config.length, draft_fn, sync_cache, uncommitted=c.slots - 1)
