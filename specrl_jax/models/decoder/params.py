"""Parameters of a decoder in two layouts of the same weights, and the map between them.

training   stacked [L, ...] and scanned: compile time does not grow with depth, and the optimizer sees few arrays
inference  one dict per layer, q/k/v fused, in the rollout dtype: a decode step never slices a stack of layers

`inference_params` maps the first to the second.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar, cast

import jax
import jax.numpy as jnp

from specrl_jax.core import Params, branch, branches, nested, stand_in
from specrl_jax.models.decoder.config import DecoderConfig
from specrl_jax.models.delta_net import WIDE, delta_specs
from specrl_jax.models.layers import ParamSpec, Specs, layer_specs, norm_spec, table_spec
from specrl_jax.models.lora import merged
from specrl_jax.models.quantized import Quantized, quantize

Leaf = TypeVar("Leaf")  # an array or its spec

FUSED = ("q", "k", "v", "q_bias", "k_bias", "v_bias")  # parts of the training layout that are fused
# Quantised matrices of the inference layout, and the axes that their matmuls sum over. The tables, the norms' scales,
# biases and the router are not: an error of the lm_head or the router reaches the logits or the choice of experts
# directly.
SUMMED = {"qkv": (0,), "o": (0, 1), "gate": (-2,), "up": (-2,), "down": (-2,)}


def param_specs(config: DecoderConfig) -> Specs:
    """Return the specs of the training layout."""
    c = config
    specs = {
        "embed": table_spec(c.vocab, c.embed, "model.embed_tokens", fan_in=2500),
        "final_norm": norm_spec(c.embed, "model.norm", offset=c.norm_offset),
    }
    if not c.tied:
        specs["unembed"] = table_spec(c.vocab, c.embed, "lm_head", fan_in=c.embed)
    layers = {name: _stacked(spec, "layers", c.layers) for name, spec in _of_all_layers(c).items()}
    for mixer, indices in ((_attention(c), c.attention_layers), (_delta(c), c.delta_layers)):
        some = indices if c.delta else ()
        layers |= {name: _stacked(spec, "layers", len(indices), some) for name, spec in mixer.items()}
    return nested(specs, layers=layers)


_LAYER = "model.layers.{layer}"
_ATTENTION = ("q", "k", "v", "o")


def _attention(c: DecoderConfig) -> dict[str, ParamSpec]:
    """Return the specs of one layer's attention."""
    specs = {name: spec for name, spec in layer_specs(c, _LAYER).items() if name in _ATTENTION}
    if c.gated:
        shape = (c.embed, c.projected_heads, c.head_dim)  # query and gate of each head side by side
        specs["q"] = dataclasses.replace(specs["q"], shape=shape)
    if c.qk_norm:
        for part in ("q_norm", "k_norm"):
            specs[part] = norm_spec(c.head_dim, f"{_LAYER}.self_attn.{part}", "head_dim", offset=c.norm_offset)
    if c.qkv_bias:
        specs |= {f"{part}_bias": _bias_spec(specs[part]) for part in "qkv"}
    return specs


def _delta(c: DecoderConfig) -> dict[str, ParamSpec]:
    """Return the specs of one layer's gated delta net."""
    return delta_specs(c.delta, c.embed, f"{_LAYER}.linear_attn") if c.delta else {}


def _of_all_layers(c: DecoderConfig) -> dict[str, ParamSpec]:
    """Return the specs of what a layer of any kind has: its norms, and the mlp or the experts."""
    specs = {name: spec for name, spec in layer_specs(c, _LAYER).items() if name not in _ATTENTION}
    for part in ("attention_norm", "mlp_norm"):
        specs[part] = dataclasses.replace(specs[part], start=1.0 - c.norm_offset)
    if not c.experts:
        return specs
    # A mixture of experts declares the same three matrices once per expert, and a router.
    for part in ("gate", "up", "down"):
        of_one = dataclasses.replace(
            specs[part], hf_name=specs[part].hf_name.replace(".mlp.", ".mlp.experts.{expert}.")
        )
        specs[part] = _stacked(of_one, "experts", c.experts)
    shape, axes = (c.embed, c.experts), ("embed", None)
    return specs | {"router": ParamSpec(shape, axes, c.embed, f"{_LAYER}.mlp.gate.weight", "e d -> d e")}


def _bias_spec(matrix: ParamSpec) -> ParamSpec:
    """Return the spec of the bias of a matrix [D, heads, H], split as its heads are."""
    name = matrix.hf_name.replace(".weight", ".bias")
    return ParamSpec(matrix.shape[1:], matrix.axes[1:], hf_name=name, hf_layout="(n h) -> n h", start=0.0)


def _stacked(spec: ParamSpec, axis: str, size: int, indices: tuple[int, ...] = ()) -> ParamSpec:
    """Return the spec of `size` of these along a leading axis, of the layers `indices` alone where these are given."""
    hf_layers = indices or spec.hf_layers
    return dataclasses.replace(spec, shape=(size, *spec.shape), axes=(axis, *spec.axes), hf_layers=hf_layers)


def inference_specs(config: DecoderConfig, kind: str = "none") -> Specs:
    """Return the shapes and axes of the inference layout.

    Under a `kind` of quantization, `Quantized` of two specs stands for a quantised matrix.
    """
    c = config
    attention = {name: spec for name, spec in _attention(c).items() if name not in FUSED}
    attention["qkv"] = ParamSpec((c.embed, *c.fused_heads), ("embed", "kv_heads", None, "head_dim"))
    if c.qkv_bias:
        attention["qkv_bias"] = ParamSpec(c.fused_heads, ("kv_heads", None, "head_dim"))
    tables = {name: param_specs(c)[name] for name in ("embed", "final_norm")}
    tables["to_logits"] = ParamSpec((c.embed, c.vocab), ("embed", "vocab"))
    layers = [_of_all_layers(c) | (_delta(c) if i in c.delta_layers else attention) for i in range(c.layers)]
    if kind != "none":
        layers = [
            {name: _quantized_spec(w, SUMMED[name], kind) if name in SUMMED else w for name, w in layer.items()}
            for layer in layers
        ]
    return nested(tables, layers=layers)


def _quantized_spec(spec: ParamSpec, summed: tuple[int, ...], kind: str) -> ParamSpec:
    gone = {axis % len(spec.shape) for axis in summed}
    shape = tuple(1 if i in gone else size for i, size in enumerate(spec.shape))
    axes = tuple(None if i in gone else axis for i, axis in enumerate(spec.axes))
    values = spec
    if kind == "int4":  # two in a byte
        values = dataclasses.replace(spec, shape=(*spec.shape[:-1], spec.shape[-1] // 2))
    return cast(ParamSpec, Quantized(stand_in(values), stand_in(ParamSpec(shape, axes))))


def inference_params(params: Params, config: DecoderConfig, dtype: jnp.dtype, *, kind: str = "none") -> Params:
    """Map the training layout to the inference layout: unstacked, q/k/v fused, cast to `dtype` or quantised as `kind`.

    Pure; jit it with shardings. The lm_head is transposed to [D, V]: a CPU reads it up to twice as fast in a matmul of
    few rows (768 x 32,000, 8 rows). Where it is the embedding table too, both copies are kept.

    Each key/value head is fused with its query heads, [D, K, R + 2, H], so that a split over kv_heads stays local.
    """

    def kept(name: str, w: jax.Array) -> jax.Array:
        if name in WIDE:
            return w
        if kind == "none" or name not in SUMMED:
            return w.astype(dtype)
        return stand_in(quantize(w, SUMMED[name], kind, dtype=dtype))

    params = merged(params)
    tables = {name: params[name] for name in ("embed", "final_norm")}
    tables["to_logits"] = params["embed" if config.tied else "unembed"].T
    layers = [
        {name: kept(name, w) for name, w in layer.items()} for layer in unstacked(branch(params, "layers"), config)
    ]
    return nested({name: w.astype(dtype) for name, w in tables.items()}, layers=layers)


def twin_specs(config: DecoderConfig, kind: str) -> Specs:
    """Return the specs of `twin_params`."""
    return _of_a_twin(inference_specs(config, kind), lambda spec: _quantized_spec(spec, (0,), kind))


def twin_params(params: Params, dtype: jnp.dtype, config: DecoderConfig, *, kind: str) -> Params:
    """Map the training layout to what a twin of the policy has of its own, quantised: matrices of layers, the lm_head.

    A draft's error costs acceptance alone, so the lm_head is quantised too.
    """
    whole = inference_params(params, config, dtype, kind=kind)
    return _of_a_twin(whole, lambda w: stand_in(quantize(w, (0,), kind, dtype=dtype)))


def _of_a_twin(whole: Mapping[str, Leaf], quantized: Callable[[Leaf], Leaf]) -> dict[str, Leaf]:
    layers = [{name: layer[name] for name in SUMMED} for layer in branches(whole, "layers")]
    return nested({"to_logits": quantized(whole["to_logits"])}, layers=layers)


def unstacked(layers: Params, config: DecoderConfig) -> list[Params]:
    """Map the layers of the training layout, [L, ...], to those of the inference layout: a dict each, q/k/v fused."""
    stacked = {name: w for name, w in layers.items() if name not in FUSED}
    stacked["qkv"] = _fused(layers["q"], layers["k"], layers["v"])
    if "q_bias" in layers:
        stacked["qkv_bias"] = _fused(layers["q_bias"], layers["k_bias"], layers["v_bias"])
    return [
        {
            name: jax.tree.map(lambda w, i=i: w[i], stacked[name])
            for name, i in weights_of_layer(stacked, config, number).items()
        }
        for number in range(config.layers)
    ]


def weights_of_layer(names: Iterable[str], config: DecoderConfig, layer: int) -> dict[str, int]:
    """Return which weights of the training layout a layer has, each with its place in the stack."""
    delta = config.delta_layers
    if not delta:
        return dict.fromkeys(names, layer)
    every, of_delta, is_delta = _of_all_layers(config), _delta(config), layer in delta
    place = sum(1 for i in range(layer) if (i in delta) == is_delta)
    own = [name for name in names if name in every or (name in of_delta) == is_delta]
    return {name: layer if name in every else place for name in own}


def _fused(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Fuse [..., N, H] and twice [..., K, H] to [..., K, N / K + 2, H]."""
    grouped = q.reshape(*k.shape[:-1], -1, k.shape[-1])
    return jnp.concatenate([grouped, k[..., None, :], v[..., None, :]], axis=-2)
