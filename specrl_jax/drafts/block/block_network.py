"""Network of a block drafter: k tokens in one pass (DFlash, arXiv 2602.06036; DSpark, DeepSpec's DSpark_paper.pdf).

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
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specrl_jax.core import Params, ahead, branch, branches, nested
from specrl_jax.drafts.base import DraftInputs
from specrl_jax.drafts.recurrent.recurrent_network import Angles, HeadConfig
from specrl_jax.drafts.slots import default_mask_token, slot_attention
from specrl_jax.errors import InputError
from specrl_jax.models import decoder
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.layers import ParamSpec, Specs, einsum, norm_spec, rms_norm, table_spec
from specrl_jax.models.rotary import rotate

# (q [B, Q, N, H], k [B, Q, K, H], v [B, Q, K, H]) -> [B, Q, N, H]
AttendBlock = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
MARKOV_RANK = 256  # of a new head, at most a quarter of the target's width


@dataclasses.dataclass(frozen=True)
class BlockConfig(HeadConfig):
    """Sizes of a block drafter; letters as in specrl_jax.core, A auxiliary layers."""

    vocab: int  # V, the target's
    draft_vocab: int  # Vd
    layers: int  # L
    aux_layers: tuple[int, ...]  # [A]; the residual stream *entering* these target layers, low first
    slots: int  # S, of a block
    from_anchor: bool  # slots predict the token after their position, the anchor's too; False: the token at it
    mask_token: int  # target id of a slot without a token
    markov_rank: int  # r; 0 = no Markov head
    confidence: bool = False  # has a confidence head

    @property
    def unused(self) -> int:
        """Return how many slots predict nothing: the first, or none."""
        return 0 if self.from_anchor else 1

    @property
    def longest(self) -> int:
        """Return the most tokens that a block drafts."""
        return self.slots - self.unused

    @property
    def block(self) -> DecoderConfig:
        """Return the sizes of the Qwen3 that has these layers."""
        names = [field.name for field in dataclasses.fields(HeadConfig)]
        shared = {name: getattr(self, name) for name in names}
        return DecoderConfig(vocab=self.vocab, layers=self.layers, tied=True, **shared)


def block_config(target: DecoderConfig, slots: int, layers: int, *, draft_vocab: int, markov: bool) -> BlockConfig:
    """Return the sizes of a new drafter for a target. Raises InputError for a vocabulary larger than the target's."""
    if not 0 < draft_vocab <= target.vocab:
        raise InputError(f"draft.vocab_size={draft_vocab} must be in 1..{target.vocab}, the policy's vocabulary")
    names = [field.name for field in dataclasses.fields(HeadConfig)]
    shared = {name: getattr(target, name) for name in names} | {"mlp": target.dense_mlp or target.mlp}
    return BlockConfig(
        **shared,
        vocab=target.vocab,
        draft_vocab=draft_vocab,
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


def param_specs(config: BlockConfig) -> Specs:
    """Return the training layout; Hugging Face names are DeepSpec's."""
    c = config
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
    if c.draft_vocab < c.vocab:
        leaves["unembed"] = table_spec(c.draft_vocab, D, "lm_head", fan_in=D)
    return nested(leaves, layers=jax.tree.map(own_name, branch(decoder.param_specs(c.block), "layers")))


def inference_specs(config: BlockConfig) -> Specs:
    """Return the shapes and axes of the inference layout, `inference_params`' result."""
    specs = {name: spec for name, spec in param_specs(config).items() if name not in ("layers", "unembed")}
    specs["fc"] = ParamSpec((len(config.aux_layers) * config.embed, config.embed), (None, "embed"))
    if config.draft_vocab < config.vocab:
        specs["to_logits"] = ParamSpec((config.embed, config.draft_vocab), ("embed", "vocab"))
    return nested(specs, layers=branches(decoder.inference_specs(config.block), "layers"))


def inference_params(params: Params, dtype: jnp.dtype) -> Params:
    """Map the training layout to the inference layout in `dtype`: the layers' q/k/v fused, as the policy's."""
    fused = {name: w for name, w in params.items() if name not in ("layers", "unembed")}
    # One axis: XLA copies the weight of a product over two axes each time.
    fused["fc"] = params["fc"].reshape(-1, params["fc"].shape[-1])
    if "unembed" in params:
        fused["to_logits"] = params["unembed"].T
    return jax.tree.map(lambda w: w.astype(dtype), nested(fused, layers=decoder.unstacked(branch(params, "layers"))))


def context(params: Params, config: BlockConfig, features: jax.Array) -> jax.Array:
    """Return c [B, T, D] of the target's features [B, T, A, D]."""
    fc = params["fc"].reshape(-1, config.embed)
    c = einsum("BTE,ED->BTD", features.reshape(*features.shape[:2], -1), fc)
    return rms_norm(c, params["hidden_norm"], config.norm_epsilon)


def keys_values(w: Params, config: BlockConfig, c: jax.Array, *, angles: Angles) -> tuple[jax.Array, jax.Array]:
    """Return one layer's k and v [B, T, K, H] of `context`, from either layout of the layer's weights."""
    if "qkv" in w:
        both = einsum("BTD,DKPH->BTKPH", c, w["qkv"][:, :, config.block.queries_per_kv :])
        k, v = both[:, :, :, 0], both[:, :, :, 1]
    else:
        k, v = (einsum("BTD,DKH->BTKH", c, w[name]) for name in "kv")
    return rotate(rms_norm(k, w["k_norm"], config.norm_epsilon), angles), v


def slot_tokens(config: BlockConfig, anchor: jax.Array) -> jax.Array:
    """Return [..., S] int32: the anchor [...] and mask tokens."""
    masks = jnp.full((*anchor.shape, config.slots - 1), config.mask_token, anchor.dtype)
    return jnp.concatenate([anchor[..., None], masks], axis=-1)


def hidden_states(
    layers: list[Params], config: BlockConfig, x: jax.Array, *, angles: Angles, attends: list[AttendBlock]
) -> jax.Array:
    """Apply the layers, each with its attention, to the slots x [B, Q, D]; return [B, Q, D] before the last norm."""
    for w, attend in zip(layers, attends, strict=True):
        x, _ = decoder.layer(x, w, config.block, angles=angles, attend=attend)
    return x


def unrolled(params: Params, config: BlockConfig, inputs: DraftInputs) -> jax.Array:
    """Draft blocks on ground-truth text: that of row t has its anchor at token t + 1.

    Returns:
      [steps, B, A, D + r], inputs of the lm_head and of the Markov head's output, with steps at most `longest`; draft
      i of row t predicts token t + 2 + i. Rows within 1 + i of the end are meaningless.
    """
    S, D, rows, features = config.slots, config.embed, inputs.rows, inputs.features
    tokens, anchors, steps = rows.tokens, inputs.anchors, inputs.steps
    c, anchor = context(params, config, features), ahead(tokens, 1, anchors)
    B, A = anchor.shape
    x = inputs.tables.embed[slot_tokens(config, anchor)].astype(features.dtype).reshape(B, A * S, D)
    here = config.angles(rows.positions)
    of_slots = ahead(rows.positions, 0, anchors)[:, :, None] + 1 + jnp.arange(S)[None, None]
    layers = [jax.tree.map(lambda w, i=i: w[i], branch(params, "layers")) for i in range(config.layers)]

    def attention(w: Params) -> AttendBlock:
        k, v = keys_values(w, config, c, angles=here)

        def attend(q: jax.Array, own_k: jax.Array, own_v: jax.Array) -> jax.Array:
            q, own_k, own_v = (x.reshape(B, A, S, *x.shape[2:]) for x in (q, own_k, own_v))
            return slot_attention(q, (own_k, own_v), (k, v), segments=rows.segments, anchors=anchors)

        return attend

    angles = config.angles(of_slots.reshape(B, A * S))
    x = hidden_states(layers, config, x, angles=angles, attends=[attention(w) for w in layers])
    x = rms_norm(x, params["final_norm"], config.norm_epsilon).reshape(B, A, S, D)[:, :, config.unused :][:, :, :steps]
    out = jnp.moveaxis(x, 2, 0)
    if not config.markov_rank:
        return out
    before = jnp.stack([ahead(tokens, 1 + i, anchors) for i in range(steps)])
    return jnp.concatenate([out, params["markov_in"][before].astype(out.dtype)], axis=-1)
