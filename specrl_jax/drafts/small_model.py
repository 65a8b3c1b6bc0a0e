"""Draft with a smaller model that has the target's vocabulary and a cache of its own."""

import dataclasses

import jax
import jax.numpy as jnp

from kernels_pallas.verify.op import Draft
from specrl_jax.core import Params, shift_left, stand_in
from specrl_jax.decoding.drafters import CommittedTokens, Drafter
from specrl_jax.decoding.state import Slots
from specrl_jax.drafts.autoregressive import draft_tokens, in_blocks
from specrl_jax.drafts.base import DrafterConfig, DraftInputs, DraftMethod, DraftModel, DraftOptions, VocabMap
from specrl_jax.drafts.weights import Caches, Weights
from specrl_jax.errors import InputError
from specrl_jax.io import hf
from specrl_jax.models import cache as kv
from specrl_jax.models import decoder
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.layers import Specs
from specrl_jax.sharding import Partitioner


def make(options: DraftOptions, target: DecoderConfig) -> DraftMethod:
    """Return the model of draft.path or draft.preset. Raises InputError where its vocabulary is not the target's."""
    if options.path:
        config = hf.load_config(options.path, key="draft.path")
        hf.check_params(options.path, config, key="draft.path")
    else:
        config = decoder.preset(options.preset, key="draft.preset")
    if config.vocab != target.vocab:
        raise InputError(f"draft.kind=model: its vocabulary is {config.vocab}, the policy's {target.vocab}")
    if config.delta:
        raise InputError(
            "draft.kind=model: a model with gated delta nets (linear_attention) cannot draft; take another"
        )
    draft = SmallModelDraft(config)
    return DraftMethod(draft.drafter, draft)


@dataclasses.dataclass(frozen=True)
class SmallModelDraft(DraftModel[kv.KVCache]):
    """Implement `DraftModel` for a smaller policy; it takes nothing from the target, whose widths are others."""

    config: DecoderConfig

    @property
    def vocab(self) -> int:
        return self.config.vocab

    @property
    def specs(self) -> Specs:
        return decoder.param_specs(self.config)

    @property
    def inference_specs(self) -> Specs:
        return decoder.inference_specs(self.config)

    def inference_params(self, params: Params, dtype: jnp.dtype) -> Params:
        return decoder.inference_params(params, self.config, dtype)

    def init_cache(self, shape: kv.PageShape) -> kv.KVCache:
        return kv.init_cache(self.config.layers, self.config.kv_heads, self.config.head_dim, shape=shape)

    def cache_axes(self) -> kv.KVCache:
        return (stand_in(kv.PAGE_AXES),) * self.config.layers

    def drafter(self, config: DrafterConfig) -> Drafter:
        return small_model_drafter(self.config, config)

    def unrolled(self, params: Params, inputs: DraftInputs, partition: Partitioner) -> tuple[jax.Array, jax.Array]:
        """Run one forward: on ground-truth tokens, step i is the same pass shifted by i."""
        rows, options = inputs.rows, decoder.Options(dtype=inputs.dtype, return_logits=False)
        text = decoder.ModelInputs(rows.tokens, rows.positions, rows.segments)
        out = decoder.forward(params, self.config, text, partition=partition, options=options)
        outputs = jnp.stack([shift_left(out.hidden, 1 + i) for i in range(inputs.steps)])
        return outputs, decoder.lm_head_weight(params, self.config)

    def load(self, folder: str, partition: Partitioner) -> Params:
        return hf.load_params(folder, self.config, partition, dtype=jnp.float32, key="draft.path")

    def save(
        self,
        folder: str,
        params: Params,
        vocab_map: VocabMap,
        *,
        target: DecoderConfig,
        dtype: str,
        target_path: str = "",
    ) -> None:
        hf.save_params(folder, params, self.config, dtype=dtype)


def small_model_drafter(model: DecoderConfig, config: DrafterConfig) -> Drafter:
    """Draft up to `config.length` tokens, each by one forward of the small model over its cache."""

    def forward(
        params: Weights, tokens: jax.Array, paging: kv.Paging, cache: kv.KVCache
    ) -> tuple[jax.Array, kv.KVCache]:
        options, inputs = (
            decoder.Options(dtype=config.dtype, return_logits=False),
            decoder.ModelInputs(tokens, paging.positions),
        )
        out = decoder.forward(
            params.draft, model, inputs, partition=config.partition, options=options, cache=cache, table=paging.table
        )
        assert out.cache is not None, "a forward over a cache returns it"
        return out.hidden, out.cache

    def draft(params: Weights, slots: Slots, seed: jax.Array, k: int) -> tuple[Draft, Caches[kv.KVCache]]:
        positions = jnp.maximum(slots.length[:, None] - 1 - jnp.arange(k, -1, -1)[None], 0)
        tokens = jnp.take_along_axis(slots.tokens, positions, axis=1)
        hidden, cache = forward(params, tokens, slots.place(positions), slots.cache.draft)

        def step(i: int, token: jax.Array | None) -> jax.Array:
            nonlocal hidden, cache
            if token is not None:
                hidden, cache = forward(params, token[:, None], slots.place(slots.length[:, None] - 1 + i), cache)
            return decoder.lm_head_logits(params.draft, model, hidden[:, -1:], partition=config.partition)[:, 0]

        drafted = draft_tokens(step, slots, seed, k=k, vocab_map=None, config=config)
        return drafted, slots.cache._replace(draft=cache)

    def sync_cache(params: Weights, text: CommittedTokens, cache: Caches[kv.KVCache]) -> Caches[kv.KVCache]:
        def update(paging: kv.Paging, cache: kv.KVCache) -> kv.KVCache:
            tokens = jnp.take_along_axis(text.tokens, paging.positions, axis=1, mode="clip")
            return forward(params, tokens, paging, cache)[1]

        return cache._replace(draft=in_blocks(update, text, cache.draft))

    return Drafter(config.length, draft, sync_cache)
