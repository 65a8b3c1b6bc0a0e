"""Network of a multi-token-prediction head (DeepSeek-V3, arXiv 2412.19437, section 2.2): one block of the policy.

Pair t = (hidden state of position t, token t + 1) predicts token t + 2 over the whole vocabulary. The hidden state is
the input of the policy's lm_head (`decoder.Output.hidden`); in MiMo, what its final norm reads. For tokens not yet
processed by the policy it is the head's own output after its final norm, which is the lm_head's input too. One module
is applied k times: the "native" path of arXiv 2604.26779. Attention is over pairs, with rotary position t for pair t.

    z = concat(norm(embed(x_{t+1})), norm(h_t))         # embedding first; in MiMo 0 for the embedding of pair 0
    x = eh_proj(z)                                      # back to width D
    a = norm(block(x))                                  # with the policy's biases and norms; fed back
    out = lm_head(a)

Embedding and lm_head are the policy's: neither stored here nor trained. The weights have the policy's two layouts, and
the block runs the policy's code: `layers` is that of one with one layer. Rotary positions are the policy's, stretched
where those are: vLLM and SGLang build the head from the config.json that the two share.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specrl_jax.core import Params, branch, branches, nested
from specrl_jax.drafts.recurrent.recurrent_network import Angles, Attend, HeadConfig
from specrl_jax.errors import InputError
from specrl_jax.models import decoder
from specrl_jax.models.layers import ParamSpec, Specs, einsum, norm_spec, rms_norm


@dataclasses.dataclass(frozen=True)
class MTPConfig(HeadConfig):
    """Sizes of a head; letters as in specrl_jax.core."""

    vocab: int  # V, the target's
    qk_norm: bool
    qkv_bias: bool
    aux_layers: tuple[int, ...] = ()  # (L,): the hidden state is what leaves the last layer; (): what the lm_head reads
    zeroes_first: bool = False  # pair 0 has zeros for its embedding

    @property
    def block(self) -> decoder.DecoderConfig:
        """Return the sizes and options of the policy of one layer that has this head's layer."""
        return decoder.DecoderConfig(layers=1, tied=True, **_shared(self))


def _shared(config: MTPConfig | decoder.DecoderConfig) -> dict[str, Any]:
    """Return what a head has from its target."""
    names = {field.name for field in dataclasses.fields(decoder.DecoderConfig)}
    return {x.name: getattr(config, x.name) for x in dataclasses.fields(MTPConfig) if x.name in names}


def mtp_config(target: decoder.DecoderConfig, *, normed_hidden: bool = True, zeroes_first: bool = False) -> MTPConfig:
    """Return the sizes of a head for a target: all its widths. Raises InputError for a mixture of experts.

    Servers give a head's block the target's layer type, and this block has no experts.
    """
    if target.experts:
        raise InputError(
            "draft.kind=mtp: its block has no experts, as those of a mixture-of-experts policy; take eagle3"
        )
    aux_layers = () if normed_hidden else (target.layers,)
    return MTPConfig(**_shared(target), aux_layers=aux_layers, zeroes_first=zeroes_first)


def param_specs(config: MTPConfig) -> Specs:
    """Return the training layout; Hugging Face names are DeepSeek's, with the target's depth for `{layer}`."""
    D, layer = config.embed, "model.layers.{layer}"
    # The leading 2 is [embedding; hidden].
    shape, axes = (2, D, D), (None, None, "embed")
    leaves = {
        "embedding_norm": norm_spec(D, f"{layer}.enorm"),
        "hidden_norm": norm_spec(D, f"{layer}.hnorm"),
        "eh_proj": ParamSpec(shape, axes, 2 * D, f"{layer}.eh_proj.weight", "d (c e) -> c e d"),
        "final_norm": norm_spec(D, f"{layer}.shared_head.norm"),
    }
    return nested(leaves, layers=branch(decoder.param_specs(config.block), "layers"))


def inference_specs(config: MTPConfig) -> Specs:
    """Return the shapes and axes of the inference layout, `inference_params`' result."""
    return nested(param_specs(config), layers=branches(decoder.inference_specs(config.block), "layers"))


def inference_params(params: Params, dtype: jnp.dtype) -> Params:
    """Map the training layout to the inference layout in `dtype`: the block's q/k/v fused, as the policy's."""
    fused = nested(params, layers=decoder.unstacked(branch(params, "layers")))
    return jax.tree.map(lambda w: w.astype(dtype), fused)


def layer(
    params: Params, config: MTPConfig, hidden: jax.Array, *, embedded: jax.Array, angles: Angles, attend: Attend
) -> jax.Array:
    """Apply the head to hidden and embedded [B, T, D]; return a [B, T, D], the input of the lm_head."""
    if config.zeroes_first:
        # Position 0 alone is not turned at all.
        embedded = jnp.where((angles[0] == 0).all(axis=-1), 0, embedded)
    normed = (
        rms_norm(embedded, params["embedding_norm"], config.norm_epsilon),
        rms_norm(hidden, params["hidden_norm"], config.norm_epsilon),
    )
    x = einsum("BTCE,CED->BTD", jnp.stack(normed, axis=2), params["eh_proj"])
    x, _ = decoder.layer(x, _block(params), config.block, angles=angles, attend=attend)
    return rms_norm(x, params["final_norm"], config.norm_epsilon)


def _block(params: Params) -> Params:
    """Return the one layer, from either layout of the weights."""
    layers: object = params["layers"]
    return branches(params, "layers")[0] if isinstance(layers, list) else jax.tree.map(lambda w: w[0], layers)
