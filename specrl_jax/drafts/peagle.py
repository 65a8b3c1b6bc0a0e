"""Draft with P-EAGLE (vllm-project/speculators, models/peagle): the k drafts of an EAGLE-3 head in one pass.

An EAGLE-3 head feeds its output back once for each draft. Here the later drafts are slots of the same pass: slot d
behind pair t = (feature of position t, token t + 1) has the embedding of a mask token and a learned hidden state, at
position t + d, and predicts token t + 2 + d; slot 0 is the pair itself. All is causal: slot d reads pairs up to t and
the slots before it.

    h_0 = fc(concat(low, mid, high))        h_d = fc(mask_hidden)           # with the head's norms, as in EAGLE-3
    e_0 = embed(x_{t+1})                    e_d = embed(mask)
    a   = eagle3_layer(h, e)
    a   = llama_layer(a)                                                    # layers - 1 times
    q_d = softmax(lm_head(norm(a_d)) / temperature)                         # on the reduced draft vocabulary

The drafts of a pass are independent of each other given the text. The embedding is the policy's, or one that was
trained with the draft (`own_embedding`).
"""

import dataclasses

import jax
import jax.numpy as jnp

from kernels_pallas.verify.op import Draft
from specrl_jax.core import Params, ahead, branch, nested, shift_left
from specrl_jax.decoding.drafters import CommittedTokens, Drafter
from specrl_jax.decoding.state import Slots
from specrl_jax.drafts.autoregressive import draft_tokens, in_blocks
from specrl_jax.drafts.base import DrafterConfig, DraftInputs, DraftOptions
from specrl_jax.drafts.eagle3 import Eagle3Config, Eagle3Draft, default_aux_layers
from specrl_jax.drafts.head import HeadCache
from specrl_jax.drafts.one_pass import default_mask_token, paged_layers, slot_attention
from specrl_jax.drafts.recurrent import committed_pairs
from specrl_jax.drafts.weights import Caches, Weights
from specrl_jax.models import cache as kv
from specrl_jax.models import decoder
from specrl_jax.models.attention import AttendRows
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.layers import ParamSpec, Specs, layer_specs, rms_norm, table_spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """Sizes and variants of a draft; those of an EAGLE-3 head, whose layer is the first of `layers`."""

    mask_token: int  # target id
    own_embedding: bool = False  # "embed" [V, D] is a parameter


def peagle_config(target: DecoderConfig, layers: int, draft_vocab: int) -> PEagleConfig:
    """Return the sizes of a new draft for a target. Raises InputError for a vocabulary larger than the target's."""
    return PEagleConfig.of_target(
        target,
        draft_vocab,
        layers=layers,
        aux_layers=default_aux_layers(target.layers),
        rope=target.rope.pretrained,
        mask_token=default_mask_token(target),
    )


@dataclasses.dataclass(frozen=True)
class PEagleDraft(Eagle3Draft):
    """Implement `DraftModel` for a P-EAGLE draft."""

    kind = "peagle"
    takes_anchors = True
    config: PEagleConfig
    dialect: str = "speculators"

    @classmethod
    def new_config(cls, target: DecoderConfig, options: DraftOptions) -> PEagleConfig:
        return peagle_config(target, options.layers, options.vocab_size or target.vocab)

    @property
    def specs(self) -> Specs:
        """Return the training layout; names of tensors are those of speculators, except for the first layer's."""
        c, A = self.config, len(self.aux_layers)
        mask = ParamSpec((A, c.embed), (None, "embed"), 1, "mask_hidden", "1 1 (a e) -> a e")
        specs = {**super().specs, "mask_hidden": mask}
        if c.own_embedding:
            specs["embed"] = table_spec(c.vocab, c.embed, "embed_tokens", fan_in=1)
        return nested(specs, **{f"layer_{i}": layer_specs(c, f"layers.{i}") for i in range(1, c.layers)})

    def deeper_layers(self, params: Params) -> list[Params]:
        """Return the weights of all layers but the first, which both layouts share."""
        return [branch(params, f"layer_{i}") for i in range(1, self.config.layers)]

    def mask_slot(self, params: Params, embed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return hidden and embedding [1, 1, D] of a slot without a token; `embed` [V, D] is the policy's table."""
        hidden = self.hidden_states(params, params["mask_hidden"][None, None], embed)
        return hidden, embedding(params, embed)[jnp.full((1, 1), self.config.mask_token)]

    def initialise_from_target(self, params: Params, target: Params, lm_head: jax.Array) -> Params:
        """Take an embedding of its own from the target, too."""
        taken = super().initialise_from_target(params, target, lm_head)
        return {**taken, "embed": target["embed"]} if self.config.own_embedding else taken

    def drafter(self, config: DrafterConfig) -> Drafter:
        return peagle_drafter(self, config)

    def outputs(self, params: Params, inputs: DraftInputs) -> jax.Array:
        """Draft `steps` tokens on ground-truth text in one pass: slot d of row t is slot d behind pair t.

        A draft has all depths. P-EAGLE itself drops more of the deeper ones (COD), to save memory.

        Returns:
          [steps, B, A, D], inputs of the lm_head; draft d of row t predicts token t + 2 + d. Rows within 1 + d of the
          end are meaningless.
        """
        config, rows, embed, anchors = self.config, inputs.rows, inputs.tables.embed, inputs.anchors
        B, T = rows.tokens.shape
        M, D, dtype = inputs.steps - 1, config.embed, inputs.dtype  # M mask slots
        places = ahead(rows.positions, 0, anchors)
        A = places.shape[1]
        of_pairs = (
            self.hidden_states(params, inputs.features, inputs.hidden),
            embedding(params, embed)[shift_left(rows.tokens, 1)].astype(dtype),
        )
        masks = self.mask_slot(params, embed)
        # All pairs, then the slots behind the anchors.
        hidden, embedded = (
            jnp.concatenate([pairs, jnp.broadcast_to(mask.astype(dtype), (B, A * M, D))], axis=1)
            for pairs, mask in zip(of_pairs, masks, strict=True)
        )
        of_slots = (places[:, :, None] + 1 + jnp.arange(M)[None, None]).reshape(B, A * M)
        attend = _pairs_and_slots(T, M, segments=rows.segments, anchors=anchors)
        angles = config.angles(jnp.concatenate([rows.positions, of_slots], axis=1))
        a = self.layer(params, hidden, embedded, angles=angles, attend=attend)
        for w in self.deeper_layers(params):
            a, _ = decoder.layer(a, w, config.block, angles=angles, attend=attend)
        a = rms_norm(a, params["final_norm"], config.norm_epsilon)
        drafts = jnp.concatenate([ahead(a[:, :T], 0, anchors)[:, :, None], a[:, T:].reshape(B, A, M, D)], axis=2)
        return jnp.moveaxis(drafts, 2, 0)


def embedding(params: Params, embed: jax.Array) -> jax.Array:
    """Return the table that the draft reads: its own, or the policy's, `embed`."""
    return params.get("embed", embed)


def _pairs_and_slots(T: int, M: int, *, segments: jax.Array | None, anchors: jax.Array | None) -> AttendRows:
    """Return causal attention of T pairs, then of the M slots behind each anchor to the pairs and to earlier slots."""
    causal = jnp.tril(jnp.ones((M, M), bool))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        def behind(x: jax.Array) -> jax.Array:
            return x[:, T:].reshape(x.shape[0], -1, M, *x.shape[2:])

        pairs = k[:, :T], v[:, :T]
        none = k[:, :T, None][:, :, :0], v[:, :T, None][:, :, :0]
        out = slot_attention(q[:, :T, None], none, pairs, segments=segments)
        if not M:
            return out
        slots = slot_attention(
            behind(q), (behind(k), behind(v)), pairs, segments=segments, anchors=anchors, readable=causal
        )
        return jnp.concatenate([out, slots], axis=1)

    return attend


def peagle_drafter(head: PEagleDraft, config: DrafterConfig) -> Drafter:
    """Draft up to `config.length` tokens with one pass over the last k + 1 committed pairs and k - 1 mask slots.

    The slots' keys and values stand in the pages behind the last pair's, where the next draft writes pairs.
    """

    c = head.config

    def committed(
        params: Weights, tokens: jax.Array, pairs: kv.Paging, cache: HeadCache
    ) -> tuple[jax.Array, jax.Array]:
        table = embedding(params.draft, params.policy["embed"])
        return committed_pairs(cache.hidden, table, tokens, pairs=pairs, config=config)

    def run(
        params: Weights, hidden: jax.Array, embedded: jax.Array, places: kv.Paging, cache: HeadCache
    ) -> tuple[jax.Array, HeadCache]:
        """Apply the layers to pairs and slots [B, Q], each attending up to its own place; return a [B, Q, D]."""
        angles, attend = c.angles(places.positions), kv.PagedAttention(cache.layers[0], places, config.partition)
        a = head.layer(params.draft, hidden, embedded, angles=angles, attend=attend)
        a, deeper = paged_layers(
            a,
            head.deeper_layers(params.draft),
            cache.layers[1:],
            angles=angles,
            paging=places,
            block=c.block,
            partition=config.partition,
        )
        return config.partition.constrain(a, "batch", None, None), cache._replace(layers=(attend.pages, *deeper))

    def draft_fn(params: Weights, slots: Slots, seed: jax.Array, k: int) -> tuple[Draft, Caches[HeadCache]]:
        # The last committed pair is length - 2. A prompt shorter than the window has fewer pairs.
        positions = slots.length[:, None] - 2 + jnp.arange(-k, k)[None]
        places = slots.place(jnp.where(positions < 0, -1, positions))
        pairs = places._replace(positions=places.positions[:, : k + 1])
        known = committed(params, slots.tokens, pairs, slots.cache.draft)
        masks = head.mask_slot(params.draft, params.policy["embed"])
        shape = (len(positions), k - 1, c.embed)
        inputs = [
            jnp.concatenate([x, jnp.broadcast_to(m.astype(x.dtype), shape)], axis=1) for x, m in zip(known, masks)
        ]
        a, cache = run(params, inputs[0], inputs[1], places, slots.cache.draft)
        scores = head.logits(params, head.lm_head_input(params.draft, a[:, k:]))

        def step(i: int, token: jax.Array | None) -> jax.Array:
            return scores[:, i]

        return draft_tokens(step, slots, seed, k=k, vocab_map=params.vocab_map, config=config), slots.cache._replace(
            draft=cache
        )

    def sync_cache(params: Weights, text: CommittedTokens, cache: Caches[HeadCache]) -> Caches[HeadCache]:
        def update(pairs: kv.Paging, cache: HeadCache) -> HeadCache:
            hidden, embedded = committed(params, text.tokens, pairs, cache)
            return run(params, hidden, embedded, pairs, cache)[1]

        # The last committed token has no pair yet.
        return cache._replace(draft=in_blocks(update, text._replace(length=text.length - 1), cache.draft))

    return Drafter(config.length, draft_fn, sync_cache)
