"""Draft with a bigram model: logits of the next token given the last."""

import dataclasses

import jax
import jax.numpy as jnp

from kernels_pallas.verify.op import Draft
from specrl_jax.core import Params, shift_left
from specrl_jax.decoding.drafters import Drafter
from specrl_jax.decoding.state import Slots
from specrl_jax.drafts.autoregressive import draft_tokens
from specrl_jax.drafts.base import DrafterConfig, DraftInputs, DraftMethod, DraftModel, DraftOptions
from specrl_jax.drafts.weights import Caches, Weights
from specrl_jax.io.tensors import TensorFolder
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.layers import Specs, matmul, table_spec
from specrl_jax.sharding import Partitioner


def make(options: DraftOptions, target: DecoderConfig) -> DraftMethod:
    draft = BigramDraft(target)
    if options.path:
        TensorFolder(options.path, "draft.path").check(draft.specs)
    return DraftMethod(draft.drafter, draft)


@dataclasses.dataclass(frozen=True)
class BigramDraft(DraftModel[tuple[()]]):
    target: DecoderConfig

    @property
    def vocab(self) -> int:
        return self.target.vocab

    @property
    def specs(self) -> Specs:
        V, D = self.target.vocab, self.target.embed
        return {"embed": table_spec(V, D, "embed", fan_in=D), "unembed": table_spec(V, D, "lm_head", fan_in=D)}

    # The engine.
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
