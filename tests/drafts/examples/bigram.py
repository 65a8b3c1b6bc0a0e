"""Draft with a bigram model: logits of the next token given the last."""

import dataclasses

import jax
import jax.numpy as jnp

from kernels_pallas.verify.op import Draft
from specrl_jax.core import Params, shift_left
from specrl_jax.decoding.drafters import Drafter
from specrl_jax.decoding.state import Slots
from specrl_jax.drafts.autoregressive import draft_tokens
from specrl_jax.drafts.base import DrafterConfig, DraftInputs, DraftMethod, DraftOptions, VocabMap
from specrl_jax.drafts.weights import Caches, Weights
from specrl_jax.io.tensors import TensorFolder, hf_tensors, save_folder
from specrl_jax.models.cache import PageShape, Paging
from specrl_jax.models.decoder import DecoderConfig, Output
from specrl_jax.models.layers import ParamSpec, Specs, matmul
from specrl_jax.sharding import Partitioner


def make(options: DraftOptions, target: DecoderConfig) -> DraftMethod:
    draft = BigramDraft(target.vocab, target.embed)
    if options.path:
        TensorFolder(options.path, "draft.path").check(draft.specs)
    return DraftMethod(draft.drafter, draft)


@dataclasses.dataclass(frozen=True)
class BigramDraft:
    vocab: int
    embed: int

    aux_layers = ()  # reads no layer of the target
    has_vocab_map = False  # drafts on the target's vocabulary
    longest = None  # drafts any number of tokens

    @property
    def specs(self) -> Specs:
        shape, axes = (self.vocab, self.embed), ("vocab", "embed")
        return {
            "embed": ParamSpec(shape, axes, self.embed, "embed.weight", "v d -> v d"),
            "unembed": ParamSpec(shape, axes, self.embed, "lm_head.weight", "v d -> v d"),
        }

    @property
    def inference_specs(self) -> Specs:
        return self.specs

    def inference_params(self, params: Params, dtype: jnp.dtype) -> Params:
        return jax.tree.map(lambda w: w.astype(dtype), params)

    # The engine's cache: the last token is in the slots, so nothing is kept.
    def init_cache(self, shape: PageShape) -> tuple[()]:
        return ()

    def cache_axes(self) -> tuple[()]:
        return ()

    def update_cache(
        self, params: Params, cache: tuple[()], paging: Paging, *, out: Output, partition: Partitioner
    ) -> tuple[()]:
        return cache

    def drafter(self, config: DrafterConfig) -> Drafter:
        def draft(params: Weights, slots: Slots, seed: jax.Array, k: int) -> tuple[Draft, Caches]:
            last = jnp.take_along_axis(slots.tokens, slots.length[:, None] - 1, axis=1)[:, 0]

            def step(i: int, token: jax.Array | None) -> jax.Array:
                hidden = params.draft["embed"][last if token is None else token].astype(config.dtype)
                return matmul("BD,VD->BV", hidden, params.draft["unembed"])

            return draft_tokens(step, slots, seed, k=k, vocab_map=None, config=config), slots.cache

        return Drafter(config.length, draft, sync_cache=lambda params, text, cache: cache)

    # The learner: step i of pair t predicts token t + 2 + i, from token t + 1 + i.
    def unrolled(self, params: Params, inputs: DraftInputs, partition: Partitioner) -> tuple[jax.Array, jax.Array]:
        hidden = params["embed"][inputs.rows.tokens].astype(inputs.dtype)
        return jnp.stack([shift_left(hidden, 1 + i) for i in range(inputs.steps)]), params["unembed"]

    def initialise_from_target(self, params: Params, target: Params, lm_head: jax.Array) -> Params:
        return {**params, "embed": target["embed"]}

    # Folders.
    def load(self, folder: str, partition: Partitioner) -> Params:
        return TensorFolder(folder, "draft.path").load(self.specs, partition, jnp.float32)

    def load_vocab_map(self, folder: str, target: DecoderConfig) -> None:
        return None

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
        save_folder(folder, hf_tensors(self.specs, params, dtype), {"architectures": ["Bigram"]})
