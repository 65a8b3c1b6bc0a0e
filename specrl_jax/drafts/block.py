"""Draft k tokens in one pass over a block (DFlash, arXiv 2602.06036; DSpark, DeepSpec's DSpark_paper.pdf).

A block starts at an anchor, the last committed token, which the target has not read yet. Its slots are the anchor and
mask tokens, slot i at the anchor's position + i. In DSpark it predicts the token after its own position; in DFlash the
token at its own position, and the anchor's slot predicts none. A few Qwen3 layers read the slots. Queries are the
slots'; keys and values are those of the target's features at every position before the anchor, then those of all slots
of the block, later ones too: they hold no drafts.

    c    = norm(fc(concat(features)))                   # the same for every layer, without its input norm
    x    = embed([anchor, mask, ..., mask])
    x    = layer(x; keys and values of [c before the anchor; x])       # L times
    U_i  = lm_head(norm(x_i))
    q_i  = softmax((U_i + W2 W1[x_(i-1)]) / temperature)               # DSpark's Markov head, of rank r
    c_i  = sigmoid(w [norm(x_i); W1[x_(i-1)]] + b)                     # its confidence head: how likely i is kept

U depends on committed tokens alone, so q is autoregressive in closed form. Without a Markov head (r = 0, DFlash) the
drafts of a block are independent of each other given the text. Embedding and lm_head are the target's; on a reduced
vocabulary the lm_head is the draft's own.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kernels_pallas.verify.op import Draft
from specrl_jax.core import Params, ahead, branch, branches, nested, stand_in
from specrl_jax.decoding.drafters import CommittedTokens, Drafter
from specrl_jax.decoding.state import Slots
from specrl_jax.drafts.autoregressive import draft_tokens
from specrl_jax.drafts.base import DrafterConfig, DraftInputs, DraftOptions, confidence_logits
from specrl_jax.drafts.head import Angles, HeadConfig, TrainedHead
from specrl_jax.drafts.one_pass import default_mask_token, paged_layers, slot_attention
from specrl_jax.drafts.weights import Caches, Weights
from specrl_jax.errors import InputError
from specrl_jax.models import cache as kv
from specrl_jax.models import decoder
from specrl_jax.models.attention import AttendRows
from specrl_jax.models.decoder import DecoderConfig, Output
from specrl_jax.models.layers import ParamSpec, Specs, einsum, matmul, norm_spec, rms_norm, table_spec
from specrl_jax.models.rotary import rotate
from specrl_jax.sharding import Partitioner

MARKOV_RANK = 256  # of a new head, at most a quarter of the target's width
OWN = {True: ("dspark", "deepspec"), False: ("dflash", "zlab")}  # has it a Markov head -> its kind, that kind's format


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadConfig):
    """Sizes of a block drafter."""

    slots: int  # S, of a block
    from_anchor: bool  # slots predict the token after their position, the anchor's too; False: the token at it
    mask_token: int  # target id of a slot without a token
    markov_rank: int  # r; 0 = no Markov head
    confidence: bool = False  # has a confidence head
    qk_norm: bool = True

    @property
    def unused(self) -> int:
        """Return how many slots predict nothing: the first, or none."""
        return 0 if self.from_anchor else 1

    @property
    def longest(self) -> int:
        """Return the most tokens that a block drafts."""
        return self.slots - self.unused


def block_config(target: DecoderConfig, slots: int, layers: int, *, draft_vocab: int, markov: bool) -> BlockConfig:
    """Return the sizes of a new drafter for a target. Raises InputError for a vocabulary larger than the target's."""
    return BlockConfig.of_target(
        target,
        draft_vocab,
        layers=layers,
        aux_layers=default_aux_layers(target.layers),
        slots=slots,
        from_anchor=markov,
        mask_token=default_mask_token(target),
        markov_rank=min(MARKOV_RANK, target.embed // 4) if markov else 0,
        confidence=markov,
    )


def default_aux_layers(layers: int, count: int = 5) -> tuple[int, ...]:
    """Return the layers that a new drafter reads: of 36 layers the outputs of 1, 9, 17, 25 and 33, as DFlash.

    Of fewer than eight these are not five different ones. The drafter then reads what enters the last five, except for
    the first layer where there are more than three.
    """
    if layers < count + 3:
        return tuple(range(0 if layers < 4 else 1, layers))[-count:]
    return tuple(2 + round(i * (layers - 4) / (count - 1)) for i in range(count))


@dataclasses.dataclass(frozen=True)
class BlockDraft(TrainedHead[kv.KVCache]):
    """Implement `DraftModel` for a block drafter."""

    takes_anchors = True
    config: BlockConfig

    @classmethod
    def new_config(cls, target: DecoderConfig, options: DraftOptions) -> BlockConfig:
        vocab, markov = options.vocab_size or target.vocab, options.kind == "dspark"
        return block_config(target, options.slots, options.layers, draft_vocab=vocab, markov=markov)

    @classmethod
    def find_dialect(cls, config: BlockConfig, options: DraftOptions, stored: str) -> str:
        """Return draft.dialect or the kind's own format, or speculators for slots that this does not have."""
        kind, own = OWN[config.markov_rank > 0]
        if kind != options.kind:
            raise InputError(f"draft.path: {options.path} is a drafter of draft.kind={kind}")
        fits = config.from_anchor == (config.markov_rank > 0)
        if options.dialect == own and not fits:
            said = str(config.from_anchor).lower()
            raise InputError(
                f"draft.dialect={own}: the drafter {options.path} has sample_from_anchor={said}, which speculators "
                "alone can say; leave '' or draft.dialect=speculators"
            )
        return options.dialect or (own if fits else "speculators")

    @property
    def kind(self) -> str:
        return OWN[self.config.markov_rank > 0][0]

    @property
    def longest(self) -> int:
        return self.config.longest

    @property
    def has_vocab_map(self) -> bool:
        return self.config.draft_vocab < self.config.vocab

    @property
    def specs(self) -> Specs:
        """Return the training layout; Hugging Face names are DeepSpec's."""
        c = self.config
        D, A, r = c.embed, len(c.aux_layers), c.markov_rank

        def own_name(spec: ParamSpec) -> ParamSpec:
            return dataclasses.replace(spec, hf_name=spec.hf_name.removeprefix("model."))

        leaves = {
            "fc": ParamSpec((A, D, D), (None, None, "embed"), A * D, "fc.weight", "d (a e) -> a e d"),
            "hidden_norm": norm_spec(D, "hidden_norm"),
            "final_norm": norm_spec(D, "norm"),
        }
        if r:
            leaves["markov_in"] = table_spec(c.vocab, r, "markov_head.markov_w1", fan_in=r, axis=None)
            leaves["markov_out"] = table_spec(c.draft_vocab, r, "markov_head.markov_w2", fan_in=r, axis=None)
        if c.confidence:
            width, name = D + r, "confidence_head.proj"
            leaves["confidence"] = ParamSpec((1, width), (None, None), width, f"{name}.weight", "o a -> o a")
            leaves["confidence_bias"] = ParamSpec((1,), (None,), 0, f"{name}.bias", "o -> o")
        if self.has_vocab_map:
            leaves["unembed"] = table_spec(c.draft_vocab, D, "lm_head", fan_in=D)
        return nested(leaves, layers=jax.tree.map(own_name, branch(decoder.param_specs(c.block), "layers")))

    def init_cache(self, shape: kv.PageShape) -> kv.KVCache:
        return kv.init_cache(self.config.layers, self.config.kv_heads, self.config.head_dim, shape=shape)

    def cache_axes(self) -> kv.KVCache:
        return (stand_in(kv.PAGE_AXES),) * self.config.layers

    def update_cache(
        self, params: Params, cache: kv.KVCache, paging: kv.Paging, *, out: Output, partition: Partitioner
    ) -> kv.KVCache:
        assert out.aux is not None, "the forward was asked for aux_layers"
        c, angles = self.context(params, out.aux), self.config.angles(paging.positions)
        written = []
        for pages, w in zip(cache, branches(params, "layers"), strict=True):
            k, v = self.keys_values(w, c, angles=angles)
            written.append(kv.write(pages, k, v, paging=paging, partition=partition))
        return tuple(written)

    def drafter(self, config: DrafterConfig) -> Drafter:
        return block_drafter(self, config)

    def initialise_from_target(self, params: Params, target: Params, lm_head: jax.Array) -> Params:
        """Take what every head takes; the Markov and the confidence head start at 0. Layers at random, as DFlash's."""
        taken = super().initialise_from_target(params, target, lm_head)
        zeros = [name for name in ("markov_out", "confidence", "confidence_bias") if name in params]
        return {**taken, **{name: jnp.zeros_like(params[name]) for name in zeros}}

    def context(self, params: Params, features: jax.Array) -> jax.Array:
        """Return c [B, T, D] of the target's features [B, T, A, D]."""
        fc = params["fc"].reshape(-1, self.config.embed)
        c = einsum("BTE,ED->BTD", features.reshape(*features.shape[:2], -1), fc)
        return rms_norm(c, params["hidden_norm"], self.config.norm_epsilon)

    def keys_values(self, w: Params, c: jax.Array, *, angles: Angles) -> tuple[jax.Array, jax.Array]:
        """Return one layer's k and v [B, T, K, H] of `context`, from either layout of the layer's weights."""
        if "qkv" in w:
            both = einsum("BTD,DKPH->BTKPH", c, w["qkv"][:, :, self.config.block.queries_per_kv :])
            k, v = both[:, :, :, 0], both[:, :, :, 1]
        else:
            k, v = (einsum("BTD,DKH->BTKH", c, w[name]) for name in "kv")
        return rotate(rms_norm(k, w["k_norm"], self.config.norm_epsilon), angles), v

    def slot_tokens(self, anchor: jax.Array) -> jax.Array:
        """Return [..., S] int32: the anchor [...] and mask tokens."""
        masks = jnp.full((*anchor.shape, self.config.slots - 1), self.config.mask_token, anchor.dtype)
        return jnp.concatenate([anchor[..., None], masks], axis=-1)

    def outputs(self, params: Params, inputs: DraftInputs) -> jax.Array:
        """Draft blocks on ground-truth text: that of row t has its anchor at token t + 1.

        Returns:
          [steps, B, A, D + r], inputs of the lm_head and of the Markov head's output, with steps at most `longest`;
          draft i of row t predicts token t + 2 + i. Rows within 1 + i of the end are meaningless.
        """
        config, rows, anchors, steps = self.config, inputs.rows, inputs.anchors, inputs.steps
        S, D, features = config.slots, config.embed, inputs.features
        c, anchor = self.context(params, features), ahead(rows.tokens, 1, anchors)
        B, A = anchor.shape
        x = inputs.tables.embed[self.slot_tokens(anchor)].astype(features.dtype).reshape(B, A * S, D)
        here = config.angles(rows.positions)
        of_slots = ahead(rows.positions, 0, anchors)[:, :, None] + 1 + jnp.arange(S)[None, None]
        angles = config.angles(of_slots.reshape(B, A * S))

        def attention(w: Params) -> AttendRows:
            k, v = self.keys_values(w, c, angles=here)

            def attend(q: jax.Array, own_k: jax.Array, own_v: jax.Array) -> jax.Array:
                q, own_k, own_v = (x.reshape(B, A, S, *x.shape[2:]) for x in (q, own_k, own_v))
                return slot_attention(q, (own_k, own_v), (k, v), segments=rows.segments, anchors=anchors)

            return attend

        for i in range(config.layers):
            w = jax.tree.map(lambda w, i=i: w[i], branch(params, "layers"))
            x, _ = decoder.layer(x, w, config.block, angles=angles, attend=attention(w))
        x = rms_norm(x, params["final_norm"], config.norm_epsilon).reshape(B, A, S, D)
        out = jnp.moveaxis(x[:, :, config.unused :][:, :, :steps], 2, 0)
        if not config.markov_rank:
            return out
        before = jnp.stack([ahead(rows.tokens, 1 + i, anchors) for i in range(steps)])
        return jnp.concatenate([out, params["markov_in"][before].astype(out.dtype)], axis=-1)

    def unrolled(self, params: Params, inputs: DraftInputs, partition: Partitioner) -> tuple[jax.Array, jax.Array]:
        outputs, lm_head = self.outputs(params, inputs), self.lm_head(params, inputs)
        if self.config.markov_rank:
            lm_head = jnp.concatenate([lm_head, params["markov_out"].astype(lm_head.dtype)], axis=1)
        return outputs, lm_head


def block_drafter(draft: BlockDraft, config: DrafterConfig) -> Drafter:
    """Draft up to `config.length` tokens with one pass over a whole block, however few of them are wanted.

    The slots' keys and values stand in the pages from the anchor's position on, where those of the target's features
    replace them as soon as the target has read the tokens.
    """
    c = draft.config

    def block(params: Weights, slots: Slots, anchor: jax.Array, k: int) -> tuple[jax.Array, kv.KVCache]:
        """Return what the lm_head reads [B, k, D] of the blocks behind anchor [B], and the cache."""
        x = params.policy["embed"][draft.slot_tokens(anchor)].astype(config.dtype)
        positions = slots.length[:, None] - 1 + jnp.arange(c.slots)[None]
        # No slot reads beyond the row's limit, where nothing is written.
        last = slots.place(jnp.broadcast_to(jnp.minimum(positions[:, -1:], slots.limit[:, None] - 1), positions.shape))
        x = config.partition.constrain(x, "batch", None, None)
        x, cache = paged_layers(
            x,
            branches(params.draft, "layers"),
            slots.cache.draft,
            angles=c.angles(positions),
            paging=slots.place(positions),
            last=last.positions,
            block=c.block,
            partition=config.partition,
        )
        x = rms_norm(x, params.draft["final_norm"], c.norm_epsilon)
        return x[:, c.unused : c.unused + k], cache

    def draft_fn(params: Weights, slots: Slots, seed: jax.Array, k: int) -> tuple[Draft, Caches[kv.KVCache]]:
        anchor = jnp.take_along_axis(slots.tokens, slots.length[:, None] - 1, axis=1)[:, 0]
        hidden, cache = block(params, slots, anchor, k)
        scores = config.partition.constrain(draft.logits(params, hidden), "batch", None, "vocab")

        def step(i: int, token: jax.Array | None) -> jax.Array:
            if not c.markov_rank:
                return scores[:, i]
            latent = params.draft["markov_in"][anchor if token is None else token]
            return scores[:, i] + matmul("BR,VR->BV", latent, params.draft["markov_out"])

        drafted = draft_tokens(step, slots, seed, k=k, vocab_map=params.vocab_map, config=config)
        if c.confidence:
            before = jnp.concatenate([anchor[:, None], drafted.tokens[:, :-1]], axis=1)
            read = jnp.concatenate([hidden, params.draft["markov_in"][before]], axis=-1) if c.markov_rank else hidden
            drafted = dataclasses.replace(drafted, confidence=jax.nn.sigmoid(confidence_logits(params.draft, read)))
        return drafted, slots.cache._replace(draft=cache)

    def sync_cache(params: Weights, text: CommittedTokens, cache: Caches[kv.KVCache]) -> Caches[kv.KVCache]:
        return cache  # every forward of the target brings it level

    return Drafter(config.length, draft_fn, sync_cache, uncommitted=c.slots - 1)
