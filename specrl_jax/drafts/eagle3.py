"""Draft with an EAGLE-3 head (Li et al., arXiv 2503.01840): one layer over [embedding; hidden], fed its own outputs.

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
from specrl_jax.drafts.base import DraftOptions
from specrl_jax.drafts.head import Angles, HeadConfig
from specrl_jax.drafts.recurrent import RecurrentDraft
from specrl_jax.models.attention import AttendRows
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.layers import (
    ParamSpec,
    Specs,
    einsum,
    layer_specs,
    norm_spec,
    project_heads,
    rms_norm,
    swiglu,
    table_spec,
)
from specrl_jax.models.rotary import rotate

_FEATURES = ("low", "middle", "high")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """Sizes and variants of a head; it reads three auxiliary layers, or as many as the target has."""

    norm_before_residual: bool = False
    norm_before_fc: bool = False  # excludes fc_norm
    fc_norm: bool = False
    norm_output: bool = False


def eagle3_config(target: DecoderConfig, draft_vocab: int) -> Eagle3Config:
    """Return the sizes of a new head for a target. Raises InputError for a vocabulary larger than the target's.

    Rotary positions are not stretched by YaRN where the target's are: servers read them from the head's config.json.
    """
    aux_layers, rope = default_aux_layers(target.layers), target.rope.pretrained
    return Eagle3Config.of_target(target, draft_vocab, aux_layers=aux_layers, rope=rope)


def default_aux_layers(layers: int) -> tuple[int, ...]:
    """Return the layers that a new head reads: 2, L / 2, L - 3, as public implementations.

    With fewer than seven layers these are not three different ones. The head then reads what enters the second, the
    middle and the last layer, or each layer where there are at most three.
    """
    if layers >= 7:
        return 2, layers // 2, layers - 3
    return (1, layers // 2, layers - 1) if layers > 3 else tuple(range(layers))


@dataclasses.dataclass(frozen=True)
class Eagle3Draft(RecurrentDraft):
    """Implement `DraftModel` for an EAGLE-3 head."""

    kind = "eagle3"
    config: Eagle3Config
    dialect: str = "sglang"

    @classmethod
    def new_config(cls, target: DecoderConfig, options: DraftOptions) -> Eagle3Config:
        return eagle3_config(target, options.vocab_size or target.vocab)

    @property
    def specs(self) -> Specs:
        """Return the training layout; Hugging Face names are those of SafeAILab, SpecForge and SGLang."""
        c = self.config
        D, A = c.embed, len(c.aux_layers)
        layer = layer_specs(c, "midlayer")
        del layer["attention_norm"]
        for name in "qkv":
            spec = layer[name]
            # The leading 2 is [embedding; hidden].
            shape, axes = (2, *spec.shape), (None, *spec.axes)
            layer[name] = ParamSpec(shape, axes, 2 * D, spec.hf_name, "(n h) (c d) -> c d n h")
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

    @property
    def inference_specs(self) -> Specs:
        c = self.config
        return {name: spec for name, spec in super().inference_specs.items() if name not in ("k", "v")} | {
            "q": ParamSpec((2 * c.embed, c.heads, c.head_dim), ("embed", "heads", "head_dim")),
            "kv": ParamSpec((2 * c.embed, 2, c.kv_heads, c.head_dim), ("embed", None, "kv_heads", "head_dim")),
        }

    def inference_params(self, params: Params, dtype: jnp.dtype) -> Params:
        """Fuse k and v. q stays separate, since most pairs need no query."""

        def joined(w: jax.Array) -> jax.Array:
            return w.reshape(-1, *w.shape[2:])

        fused = {name: w for name, w in params.items() if name not in ("k", "v")}
        fused |= {"q": joined(params["q"]), "kv": joined(jnp.stack([params["k"], params["v"]], axis=2))}
        return super().inference_params(fused, dtype)

    def hidden_states(self, params: Params, aux: jax.Array | None, hidden: jax.Array) -> jax.Array:
        """Return h [B, T, D] of the target's features [B, T, A, D]: `fc` after the norms that this head has.

        A third of the three features' size, and drafting needs it anyway.
        """
        assert aux is not None, "the forward was asked for aux_layers"
        c, features = self.config, aux
        if c.norm_before_fc:
            joined = features.reshape(*features.shape[:2], -1)
            features = rms_norm(joined, params["features_norm"], c.norm_epsilon).reshape(features.shape)
        if c.fc_norm:
            scales = [branch(params, "fc_norm")[name] for name in _FEATURES[: len(c.aux_layers)]]
            normed = [rms_norm(features[:, :, i], scale, c.norm_epsilon) for i, scale in enumerate(scales)]
            features = jnp.stack(normed, axis=2)
        if params["fc"].ndim == 2:
            return einsum("BTE,ED->BTD", features.reshape(*features.shape[:2], -1), params["fc"])
        return einsum("BTAE,AED->BTD", features, params["fc"])

    def layer(
        self, params: Params, hidden: jax.Array, embedded: jax.Array, *, angles: Angles, attend: AttendRows
    ) -> jax.Array:
        """Return the pre-norm output, or with norm_output the input of the lm_head."""
        epsilon = self.config.norm_epsilon
        first = rms_norm(embedded, params["input_norm"], epsilon)
        z = jnp.stack([first, rms_norm(hidden, params["hidden_norm"], epsilon)], axis=2)  # the embedding first
        q, k, v = _queries_keys_values(z, params)
        attended = attend(rotate(q, angles), rotate(k, angles), v)
        residual = z[:, :, 1] if self.config.norm_before_residual else hidden
        a = residual + project_heads(attended, params["o"])
        a = a + swiglu(rms_norm(a, params["mlp_norm"], epsilon), params)
        return rms_norm(a, params["final_norm"], epsilon) if self.config.norm_output else a

    def lm_head_input(self, params: Params, a: jax.Array) -> jax.Array:
        return a if self.config.norm_output else rms_norm(a, params["final_norm"], self.config.norm_epsilon)


def _queries_keys_values(z: jax.Array, params: Params) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return q [B, T, N, H], k and v [B, T, K, H] of z [B, T, 2, D], from either layout of the weights."""
    if "kv" not in params:
        q, k, v = (einsum("BTCD,CDNH->BTNH", z, params[name]) for name in "qkv")
        return q, k, v
    joined = z.reshape(*z.shape[:2], -1)
    both = einsum("BTE,EPKH->BTPKH", joined, params["kv"])
    return einsum("BTE,ENH->BTNH", joined, params["q"]), both[:, :, 0], both[:, :, 1]
