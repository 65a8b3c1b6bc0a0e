"""A multi-token-prediction head (DeepSeek-V3, arXiv 2412.19437, section 2.2): one policy block that drafts for it.

Pair t = (hidden state of position t, token t + 1) predicts token t + 2 over the whole vocabulary. The hidden state is
what the policy's unembedding reads (`qwen3.Output.hidden`); where the policy has not been yet, it is the head's own
output, after the head's final norm and so again what the unembedding reads. One module is applied k times: the
"native" path of arXiv 2604.26779. Attention is over pairs, rotary position t for pair t.

    z = concat(norm(embed(x_{t+1})), norm(h_t))         # embedding first
    x = eh_proj(z)                                      # back to width D
    a = norm(block(x))                                  # a Qwen3 block, q/k norms included; what the recurrence feeds
    out = unembed(a)

Embedding and unembedding are the policy's own: not stored here, and not trained. Two forms of the weights as for the
policy, and the block has the policy's code: `layers` is that of a Qwen3 of one layer. Its rotary positions are the
policy's too, stretched where those are: vLLM and SGLang build it from the config.json that the two share.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specrl_jax.core import InputError
from specrl_jax.drafts.recurrent import network as recurrent
from specrl_jax.drafts.recurrent.network import Angles, Attend, DraftCache, HeadConfig
from specrl_jax.models import qwen3
from specrl_jax.models.layers import ParamSpec, einsum, rms_norm

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class MTPConfig(HeadConfig):
    """Sizes of the head, in the letters of specrl_jax.core; A = 1 feature, the hidden state."""

    vocab: int  # V, the target's

    @property
    def block(self) -> qwen3.Qwen3Config:
        """The Qwen3 of one layer whose layer this head has."""
        shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return qwen3.Qwen3Config(layers=1, tied=True, **shared)


def mtp_config(target: qwen3.Qwen3Config) -> MTPConfig:
    """The head that goes with a target: all its widths. Raises InputError for a mixture of experts.

    Servers build a head's block as the target's layers are, and this one has no experts.
    """
    if target.experts:
        raise InputError(
            "draft.kind=mtp: its block has no experts, as those of a mixture-of-experts policy; take eagle3"
        )
    return MTPConfig(**{field.name: getattr(target, field.name) for field in dataclasses.fields(MTPConfig)})


def param_specs(config: MTPConfig) -> Params:
    """The learner's tree of ParamSpec; Hugging Face names are DeepSeek's, `{layer}` being the target's depth."""
    D = config.embed

    def norm(name: str) -> ParamSpec:
        return ParamSpec((D,), ("embed",), 0, f"model.layers.{{layer}}.{name}.weight", "a -> a")

    # The leading 2 is [embedding; hidden].
    shape, axes = (2, D, D), (None, None, "embed")
    return {
        "embedding_norm": norm("enorm"),
        "hidden_norm": norm("hnorm"),
        "eh_proj": ParamSpec(shape, axes, 2 * D, "model.layers.{layer}.eh_proj.weight", "d (c e) -> c e d"),
        "layers": qwen3.param_specs(config.block)["layers"],
        "final_norm": norm("shared_head.norm"),
    }


def inference_specs(config: MTPConfig) -> Params:
    """Logical axes and shapes of `inference_params`' result."""
    return param_specs(config) | {"layers": qwen3.inference_specs(config.block)["layers"]}


def inference_params(params: Params, dtype: jnp.dtype) -> Params:
    """Learner form to rollout form, as `qwen3.inference_params`: the block's q/k/v fused, cast."""
    return jax.tree.map(lambda w: w.astype(dtype), params | {"layers": qwen3.unstacked(params["layers"])})


def project_features(params: Params, features: jax.Array) -> jax.Array:
    """h [B, T, D] from the target's features [B, T, 1, D]: its hidden state as it is."""
    return features[:, :, 0]


def layer(
    params: Params, config: MTPConfig, hidden: jax.Array, embedded: jax.Array, angles: Angles, attend: Attend
) -> jax.Array:
    """One application of the head: hidden and embedded [B, T, D] -> a [B, T, D], what the unembedding reads."""
    normed = (
        rms_norm(embedded, params["embedding_norm"], config.norm_epsilon),
        rms_norm(hidden, params["hidden_norm"], config.norm_epsilon),
    )
    x = einsum("BTCE,CED->BTD", jnp.stack(normed, axis=2), params["eh_proj"])
    x, *_ = qwen3.layer(x, _block(params), config.block, angles, lambda q, k, v: (attend(q, k, v), None))
    return rms_norm(x, params["final_norm"], config.norm_epsilon)


def _block(params: Params) -> Params:
    """The one layer of either form of the weights."""
    layers = params["layers"]
    return layers[0] if isinstance(layers, list) else jax.tree.map(lambda w: w[0], layers)


def write_pairs(
    params: Params,
    config: MTPConfig,
    hidden: jax.Array,
    embedded: jax.Array,
    positions: jax.Array,
    cache: DraftCache,
) -> DraftCache:
    """The cache with keys and values of pairs `positions` [B, Q], from hidden and embedded [B, Q, D].

    Under jit nothing behind keys and values is computed; the queries are, being part of the fused product.
    """
    return extend(params, config, hidden, embedded, positions, cache)[1]


def extend(
    params: Params,
    config: MTPConfig,
    hidden: jax.Array,
    embedded: jax.Array,
    positions: jax.Array,
    cache: DraftCache,
) -> tuple[jax.Array, DraftCache]:
    """The whole head over pairs `positions` [B, Q], each reading pairs up to its own.

    Returns the output a [B, Q, D] and the cache as `write_pairs` does. Entries beyond its length are dropped.
    """
    head = functools.partial(layer, params, config)
    return recurrent.extend(head, config, hidden, embedded, positions, cache)


def unrolled(
    params: Params,
    config: MTPConfig,
    features: jax.Array,
    embedded: jax.Array,
    steps: int,
    positions: jax.Array,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Training-time test (`recurrent.unroll`): the head over its own outputs, with ground-truth tokens.

    Args:
      features: [B, T, 1, D] hidden state of the target at each position.
      embedded: [B, T, D] embedding of the token at each position; pair t of step i takes that of position t + 1 + i.
      positions, segments: [B, T] int32, as in `recurrent.unroll`.
    Returns:
      [steps, B, T, D], what the policy's unembedding reads; entry (i, t) predicts token t + 2 + i. Rows within 1 + i of
      the end are meaningless.
    """
    head = functools.partial(layer, params, config)
    hidden = project_features(params, features)
    return jnp.stack(recurrent.unroll(head, config, hidden, embedded, steps, positions, segments))
