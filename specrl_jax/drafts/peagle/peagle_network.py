"""Network of a P-EAGLE draft (vllm-project/speculators, models/peagle): the k drafts of an EAGLE-3 head in one pass.

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
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from specrl_jax.core import Leaf, Params, ahead, branch, nested, shift_left
from specrl_jax.drafts.base import DraftInputs
from specrl_jax.drafts.eagle3 import eagle3_network as eagle3
from specrl_jax.drafts.eagle3.eagle3_network import Eagle3Config
from specrl_jax.drafts.recurrent.recurrent_network import Angles, Attend
from specrl_jax.drafts.slots import default_mask_token, slot_attention
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.layers import (
    ParamSpec,
    Specs,
    einsum,
    layer_specs,
    project_heads,
    rms_norm,
    swiglu,
    table_spec,
)
from specrl_jax.models.rotary import rotate


@dataclasses.dataclass(frozen=True)
class PEagleConfig(Eagle3Config):
    """Sizes and variants of a draft; those of an EAGLE-3 head, whose layer is the first of `layers`."""

    layers: int = 1  # L
    mask_token: int = 0  # target id
    own_embedding: bool = False  # "embed" [V, D] is a parameter
    vocab: int = 0  # V, the target's


def peagle_config(target: DecoderConfig, layers: int, draft_vocab: int) -> PEagleConfig:
    """Return the sizes of a new draft for a target. Raises InputError for a vocabulary larger than the target's."""
    return extended(eagle3.eagle3_config(target, draft_vocab), target, layers, mask_token=default_mask_token(target))


def extended(
    head: Eagle3Config, target: DecoderConfig, layers: int, *, mask_token: int, own_embedding: bool = False
) -> PEagleConfig:
    """Return the draft whose first layer is `head`."""
    sizes = {field.name: getattr(head, field.name) for field in dataclasses.fields(head)}
    return PEagleConfig(**sizes, layers=layers, mask_token=mask_token, own_embedding=own_embedding, vocab=target.vocab)


def param_specs(config: PEagleConfig) -> Specs:
    """Return the training layout; names of tensors are those of speculators, except for the first layer's."""
    c = config
    D, A = c.embed, len(c.aux_layers)
    specs = {
        **eagle3.param_specs(c),
        "mask_hidden": ParamSpec((A, D), (None, "embed"), 1, "mask_hidden", "1 1 (a e) -> a e"),
    }
    if c.own_embedding:
        specs["embed"] = table_spec(c.vocab, D, "embed_tokens", fan_in=1)
    return nested(specs, **{_name(i): layer_specs(c, f"layers.{i}") for i in range(1, c.layers)})


def _name(i: int) -> str:
    return f"layer_{i}"


def _beyond_eagle3(params: Mapping[str, Leaf], config: PEagleConfig) -> dict[str, Leaf]:
    """Return the parameters, or their specs, that an EAGLE-3 head does not have; both layouts share them."""
    names = ("mask_hidden", "embed", *map(_name, range(1, config.layers)))
    return {name: params[name] for name in names if name in params}


def inference_specs(config: PEagleConfig) -> Specs:
    """Return the shapes and axes of the inference layout, `inference_params`' result."""
    return {**_beyond_eagle3(param_specs(config), config), **eagle3.inference_specs(config)}


def inference_params(params: Params, config: PEagleConfig, dtype: jnp.dtype) -> Params:
    """Map the training layout to the inference layout in `dtype`: the first layer's as EAGLE-3's."""
    more = _beyond_eagle3(params, config)
    head = {name: w for name, w in params.items() if name not in more}
    return {**jax.tree.map(lambda w: w.astype(dtype), more), **eagle3.inference_params(head, dtype)}


def hidden_states(
    params: Params,
    config: PEagleConfig,
    hidden: jax.Array,
    *,
    embedded: jax.Array,
    angles: Angles,
    attends: list[Attend],
) -> jax.Array:
    """Apply the layers, each with its attention, to pairs and slots; hidden, embedded and the result are [B, Q, D]."""
    a = eagle3.layer(params, config, hidden, embedded=embedded, angles=angles, attend=attends[0])
    for w, attend in zip(deeper_layers(params, config), attends[1:], strict=True):
        a = deeper_layer(w, config, a, angles=angles, attend=attend)
    return a


def deeper_layers(params: Params, config: PEagleConfig) -> list[Params]:
    """Return the weights of all layers but the first."""
    return [branch(params, _name(i)) for i in range(1, config.layers)]


def deeper_layer(w: Params, config: PEagleConfig, x: jax.Array, *, angles: Angles, attend: Attend) -> jax.Array:
    """Apply a layer but the first to x [B, Q, D]."""
    z = rms_norm(x, w["attention_norm"], config.norm_epsilon)
    q, k, v = (einsum("BTD,DNH->BTNH", z, w[name]) for name in "qkv")
    x = x + project_heads(attend(rotate(q, angles), rotate(k, angles), v), w["o"])
    return x + swiglu(rms_norm(x, w["mlp_norm"], config.norm_epsilon), w)


def mask_slot(params: Params, config: PEagleConfig, embed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return hidden and embedding [1, 1, D] of a slot without a token; `embed` [V, D] is the policy's table."""
    hidden = eagle3.first_hidden(params, config, params["mask_hidden"][None, None])
    return hidden, embedding(params, embed)[jnp.full((1, 1), config.mask_token)]


def embedding(params: Params, embed: jax.Array) -> jax.Array:
    """Return the table that the draft reads: its own, or the policy's, `embed`."""
    return params.get("embed", embed)


def unrolled(params: Params, config: PEagleConfig, inputs: DraftInputs) -> jax.Array:
    """Draft `steps` tokens on ground-truth text in one pass: slot d of row t is slot d behind pair t.

    A draft has all depths. P-EAGLE itself drops more of the deeper ones (COD), to save memory.

    Returns:
      [steps, B, A, D], inputs of the lm_head; draft d of row t predicts token t + 2 + d. Rows within 1 + d of the end
      are meaningless.
    """
    rows, embed, features = inputs.rows, inputs.tables.embed, inputs.features
    positions, segments, anchors = rows.positions, rows.segments, inputs.anchors
    B, T = rows.tokens.shape
    M, D, dtype = inputs.steps - 1, config.embed, inputs.dtype  # M mask slots
    places = ahead(positions, 0, anchors)
    A = places.shape[1]
    of_pairs = (
        eagle3.first_hidden(params, config, features),
        embedding(params, embed)[shift_left(rows.tokens, 1)].astype(dtype),
    )
    masks = mask_slot(params, config, embed)
    # All pairs, then the slots behind the anchors.
    hidden, embedded = (
        jnp.concatenate([pairs, jnp.broadcast_to(mask.astype(dtype), (B, A * M, D))], axis=1)
        for pairs, mask in zip(of_pairs, masks, strict=True)
    )
    of_slots = (places[:, :, None] + 1 + jnp.arange(M)[None, None]).reshape(B, A * M)
    attend = _pairs_and_slots(T, M, segments=segments, anchors=anchors)
    angles = config.angles(jnp.concatenate([positions, of_slots], axis=1))
    a = hidden_states(params, config, hidden, embedded=embedded, angles=angles, attends=[attend] * config.layers)
    a = rms_norm(a, params["final_norm"], config.norm_epsilon)
    drafts = jnp.concatenate([ahead(a[:, :T], 0, anchors)[:, :, None], a[:, T:].reshape(B, A, M, D)], axis=2)
    return jnp.moveaxis(drafts, 2, 0)


def _pairs_and_slots(T: int, M: int, *, segments: jax.Array | None, anchors: jax.Array | None) -> Attend:
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
