"""Network of an EAGLE-3 draft head (Li et al., arXiv 2503.01840): one layer over [embedding; hidden].

Pair t = (feature of position t, token t + 1) predicts token t + 2. The feature is the target's residual stream entering
three layers (low, middle, high), concatenated and projected by `fc`; of a target of one or two layers, entering each of
them. For tokens not yet processed by the target, the head's own pre-norm output takes its place (the recurrence).
Attention is over pairs, with rotary position t for pair t.

    h   = fc(concat(low, mid, high))                    # or the head's previous output
    z   = concat(norm(embed(x_{t+1})), norm(h))         # embedding first
    a   = h + o(attention(q(z), k(z), v(z)))            # the residual is h itself, not its norm
    a   = a + mlp(norm(a))                              # what the recurrence feeds back
    out = lm_head(norm(a))                              # on the reduced draft vocabulary

The layer is Llama's: no q/k norm. As for the policy, weights have a training layout (named matrices) and an inference
layout (fused).

Published heads differ in four places, each a field of the config:

    norm_before_fc        h = fc(norm(concat(low, mid, high)))                  # one norm over all A D
    fc_norm               h = fc(concat(norm(low), norm(mid), norm(high)))      # EAGLE-3.1
    norm_before_residual  a = norm(h) + o(attention(...))                       # the norm that z has
    norm_output           the recurrence feeds back norm(a), the lm_head's input # EAGLE-3.1
"""

import dataclasses

import jax
import jax.numpy as jnp

from specrl_jax.core import Params, branch, nested
from specrl_jax.drafts.recurrent.recurrent_network import Angles, Attend, HeadConfig
from specrl_jax.errors import InputError
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.layers import (
    ParamSpec,
    Specs,
    einsum,
    layer_specs,
    matmul,
    norm_spec,
    project_heads,
    rms_norm,
    swiglu,
    table_spec,
)
from specrl_jax.models.rotary import rotate


@dataclasses.dataclass(frozen=True)
class Eagle3Config(HeadConfig):
    """Sizes and variants of a head; letters as in specrl_jax.core, A auxiliary layers: three, or as many as the
    target has."""

    draft_vocab: int  # Vd
    aux_layers: tuple[int, ...]  # [A]; the residual stream *entering* these target layers, low first
    norm_before_residual: bool = False
    norm_before_fc: bool = False  # excludes fc_norm
    fc_norm: bool = False
    norm_output: bool = False


def eagle3_config(target: DecoderConfig, draft_vocab: int) -> Eagle3Config:
    """Return the sizes of a new head for a target: its widths, and the layers that `default_aux_layers` names.

    For a mixture of experts the mlp is dense, of the width that config.json gives layers without experts, as in
    SpecForge's first heads for Qwen3-30B-A3B (6,144; other published heads are twice as wide). Rotary positions are
    not stretched by YaRN where the target's are: servers read them from the head's own config.json.

    Raises InputError for a vocabulary larger than the target's.
    """
    if not 0 < draft_vocab <= target.vocab:
        raise InputError(f"draft.vocab_size={draft_vocab} must be in 1..{target.vocab}, the policy's vocabulary")
    return Eagle3Config(
        embed=target.embed,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        mlp=target.dense_mlp or target.mlp,
        draft_vocab=draft_vocab,
        aux_layers=default_aux_layers(target.layers),
        rope=target.rope.pretrained,
        norm_epsilon=target.norm_epsilon,
        max_positions=target.max_positions,
    )


def default_aux_layers(layers: int) -> tuple[int, ...]:
    """Return the layers that a new head reads: 2, L / 2, L - 3, as public implementations.

    With fewer than seven layers these are not three different ones. The head then reads what enters the second, the
    middle and the last layer, or each layer where there are at most three.
    """
    if layers >= 7:
        return 2, layers // 2, layers - 3
    return (1, layers // 2, layers - 1) if layers > 3 else tuple(range(layers))


def param_specs(config: Eagle3Config) -> Specs:
    """Return the training layout; Hugging Face names are those of SafeAILab, SpecForge and SGLang."""
    c = config
    D, A = c.embed, len(c.aux_layers)
    layer = layer_specs(c, "midlayer")
    del layer["attention_norm"]
    for name in "qkv":
        spec = layer[name]
        # The leading 2 is [embedding; hidden].
        layer[name] = ParamSpec((2, *spec.shape), (None, *spec.axes), 2 * D, spec.hf_name, "(n h) (c d) -> c d n h")
    specs = layer | {
        "fc": ParamSpec((A, D, D), (None, None, "embed"), A * D, "fc.weight", "d (a e) -> a e d"),
        "input_norm": norm_spec(D, "midlayer.input_layernorm"),
        "hidden_norm": norm_spec(D, "midlayer.hidden_norm"),
        "final_norm": norm_spec(D, "norm"),
        "unembed": table_spec(c.draft_vocab, D, "lm_head", fan_in=D),
    }
    if c.norm_before_fc:
        specs["features_norm"] = norm_spec(A * D, "input_norm", None)
    if c.fc_norm:
        return nested(specs, fc_norm={name: norm_spec(D, f"fc_norm.{i}") for i, name in enumerate(_FEATURES[:A])})
    return specs


_FEATURES = ("low", "middle", "high")
# Weights that differ between the two layouts.
_CHANGED = ("fc", "q", "k", "v", "unembed")


def inference_specs(config: Eagle3Config) -> Specs:
    """Return the shapes and axes of the inference layout, `inference_params`' result."""
    c = config
    return {
        **{name: spec for name, spec in param_specs(c).items() if name not in _CHANGED},
        "fc": ParamSpec((len(c.aux_layers) * c.embed, c.embed), (None, "embed")),
        "q": ParamSpec((2 * c.embed, c.heads, c.head_dim), ("embed", "heads", "head_dim")),
        "kv": ParamSpec((2 * c.embed, 2, c.kv_heads, c.head_dim), ("embed", None, "kv_heads", "head_dim")),
        "to_logits": ParamSpec((c.embed, c.draft_vocab), ("embed", "vocab")),
    }


def inference_params(params: Params, dtype: jnp.dtype) -> Params:
    """Map the training layout to the inference layout in `dtype`: k and v fused, lm_head transposed as the policy's.

    q stays separate, since most pairs need no query. Inputs of several parts become one axis: XLA copies the weight of
    a product over two axes each time.
    """

    def joined(w: jax.Array) -> jax.Array:
        return w.reshape(-1, *w.shape[2:])

    fused = {
        **{name: w for name, w in params.items() if name not in _CHANGED},
        "fc": joined(params["fc"]),
        "q": joined(params["q"]),
        "kv": joined(jnp.stack([params["k"], params["v"]], axis=2)),
        "to_logits": params["unembed"].T,
    }
    return jax.tree.map(lambda w: w.astype(dtype), fused)


def first_hidden(params: Params, config: Eagle3Config, features: jax.Array) -> jax.Array:
    """Return h [B, T, D] of the target's features [B, T, A, D]: `fc` after the norms that this head has."""
    if config.norm_before_fc:
        joined = features.reshape(*features.shape[:2], -1)
        features = rms_norm(joined, params["features_norm"], config.norm_epsilon).reshape(features.shape)
    if config.fc_norm:
        scales = [branch(params, "fc_norm")[name] for name in _FEATURES[: len(config.aux_layers)]]
        normed = [rms_norm(features[:, :, i], scale, config.norm_epsilon) for i, scale in enumerate(scales)]
        features = jnp.stack(normed, axis=2)
    if params["fc"].ndim == 2:
        return einsum("BTE,ED->BTD", features.reshape(*features.shape[:2], -1), params["fc"])
    return einsum("BTAE,AED->BTD", features, params["fc"])


def layer(
    params: Params,
    config: Eagle3Config,
    hidden: jax.Array,
    *,
    embedded: jax.Array,
    angles: Angles,
    attend: Attend,
) -> jax.Array:
    """Apply the head to hidden and embedded [B, T, D]; return a [B, T, D], the next application's hidden.

    That is the pre-norm output, or with norm_output the input of the lm_head.
    """
    z = _inputs(params, config, hidden, embedded)
    q = _queries(z, params)
    k, v = _keys_values(z, params)
    attended = attend(rotate(q, angles), rotate(k, angles), v)
    residual = z[:, :, 1] if config.norm_before_residual else hidden
    a = residual + project_heads(attended, params["o"])
    a = a + swiglu(rms_norm(a, params["mlp_norm"], config.norm_epsilon), params)
    return _final_norm(params, config, a) if config.norm_output else a


def draft_logits(params: Params, config: Eagle3Config, a: jax.Array) -> jax.Array:
    """Return [B, T, Vd] float32 logits of a layer's output."""
    read = lm_head_input(params, config, a)
    if "to_logits" in params:
        return matmul("BTD,DV->BTV", read, params["to_logits"])
    return matmul("BTD,VD->BTV", read, params["unembed"])


def keys_values(
    params: Params, config: Eagle3Config, hidden: jax.Array, *, embedded: jax.Array, angles: Angles
) -> tuple[jax.Array, jax.Array]:
    """Return k and v [B, T, K, H] of pairs: all that later pairs read of them, since there is one layer."""
    k, v = _keys_values(_inputs(params, config, hidden, embedded), params)
    return rotate(k, angles), v


def _final_norm(params: Params, config: Eagle3Config, a: jax.Array) -> jax.Array:
    return rms_norm(a, params["final_norm"], config.norm_epsilon)


def lm_head_input(params: Params, config: Eagle3Config, a: jax.Array) -> jax.Array:
    """Return the input of the lm_head, given a layer's output."""
    return a if config.norm_output else _final_norm(params, config, a)


def _inputs(params: Params, config: Eagle3Config, hidden: jax.Array, embedded: jax.Array) -> jax.Array:
    """Return z [B, T, 2, D], the embedding first."""
    first = rms_norm(embedded, params["input_norm"], config.norm_epsilon)
    return jnp.stack([first, rms_norm(hidden, params["hidden_norm"], config.norm_epsilon)], axis=2)


def _queries(z: jax.Array, params: Params) -> jax.Array:
    """Return q [B, T, N, H], from either layout of the weights."""
    if "kv" in params:
        return einsum("BTE,ENH->BTNH", z.reshape(*z.shape[:2], -1), params["q"])
    return einsum("BTCD,CDNH->BTNH", z, params["q"])


def _keys_values(z: jax.Array, params: Params) -> tuple[jax.Array, jax.Array]:
    """Return k and v [B, T, K, H], from either layout of the weights."""
    if "kv" in params:
        both = einsum("BTE,EPKH->BTPKH", z.reshape(*z.shape[:2], -1), params["kv"])
        return both[:, :, 0], both[:, :, 1]
    return einsum("BTCD,CDKH->BTKH", z, params["k"]), einsum("BTCD,CDKH->BTKH", z, params["v"])
