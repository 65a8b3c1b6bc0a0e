"""Families of policies: what the config.json of each `model_type` says, read to a DecoderConfig and written back.

A family is an entry of FAMILIES. All of them are one block with options; nothing outside this file asks for a name.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import pydantic
from pydantic import Field

from specrl_jax.errors import InputError
from specrl_jax.io.config_json import ConfigJson, Experts, LayerFields, Layers, Positions, Roped, Size
from specrl_jax.io.rope_json import read_rope, rope_entries
from specrl_jax.json_files import Checked
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.delta_net import DeltaNet


@dataclasses.dataclass(frozen=True)
class Family:
    """Say what a model_type means, and what its config.json has beside sizes."""

    architecture: str
    qk_norm: bool = False
    qkv_bias: bool = False
    tied: bool = False  # where tie_word_embeddings is absent, as transformers
    mixture: bool = False
    skips_positions: bool = False  # no_rope_layers: a 0 marks a layer without rotary positions
    hybrid: bool = False  # layer_types: some layers are gated delta nets; gated attention, norms stored less 1
    written: Mapping[str, object] = dataclasses.field(default_factory=dict)  # further entries


_NO_BIASES = {"attention_bias": False}
FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, written=_NO_BIASES),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm=True, mixture=True, written=_NO_BIASES),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "llama": Family("LlamaForCausalLM", written=_NO_BIASES | {"mlp_bias": False}),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        tied=True,
        skips_positions=True,
        # transformers takes a padding token that a small vocabulary does not have.
        written=_NO_BIASES | {"mlp_bias": False, "pad_token_id": None},
    ),
    "mistral": Family("MistralForCausalLM", written={"sliding_window": None}),
    "mimo": Family("MiMoForCausalLM", qkv_bias=True, written={"attention_bias": True}),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", qk_norm=True, hybrid=True, written=_NO_BIASES),
}
# Models of text and images, whose text part alone is read: model_type -> that of the part, at text_config.
_WITH_IMAGES = {"qwen3_5": "qwen3_5_text"}
_ATTENTION, _DELTA = "full_attention", "linear_attention"
# Entries of rope_parameters that a hybrid has. Of text alone the three positions of mrope are equal: a plain rotation.
HYBRID_ROPE = {"partial_rotary_factor", "mrope_section", "mrope_interleaved"}

# Keys of config.json, and the fields of our config.
_SIZES = {
    "vocab_size": "vocab",
    "hidden_size": "embed",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "mlp",
    "tie_word_embeddings": "tied",
    "max_position_embeddings": "max_positions",
    "rms_norm_eps": "norm_epsilon",
}


class DecoderFile(LayerFields):
    """The keys of a policy's config.json that are read."""

    tie_word_embeddings: bool | None = None
    max_position_embeddings: Positions
    hidden_act: Literal["silu"] = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    layer_types: list[str] | None = None
    quantization_config: dict[str, object] | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _with_heads(cls, values: dict[str, object]) -> dict[str, object]:
        """Add what may be missing: keys of each head, heads that together are as wide as the model."""
        heads, width = values.get("num_attention_heads"), values.get("hidden_size")
        if not (isinstance(heads, int) and isinstance(width, int) and heads > 0):
            return values
        given = {key: value for key, value in values.items() if value is not None}
        return {"num_key_value_heads": heads, "head_dim": width // heads} | given


class PositionsFile(Checked):
    """Say which layers have rotary positions: 1 in a list of all of them, or each but every so many."""

    no_rope_layers: list[Literal[0, 1]] | None = None
    no_rope_layer_interval: Layers = 4


class MixtureFile(Checked):
    """The further keys of a mixture of experts; transformers 5 writes num_local_experts where Qwen has num_experts."""

    num_experts: Experts | None = None
    num_local_experts: Experts | None = None
    num_experts_per_tok: Experts
    moe_intermediate_size: Size
    norm_topk_prob: bool = False  # as transformers reads it
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None


class HybridFile(Roped):
    """The further keys of a policy some of whose layers are gated delta nets."""

    linear_num_key_heads: Size
    linear_num_value_heads: Size
    linear_key_head_dim: Size
    linear_value_head_dim: Size
    linear_conv_kernel_dim: int = Field(ge=2, le=16)
    layer_types: list[str] | None = None
    full_attention_interval: Layers = 4
    partial_rotary_factor: float | None = Field(default=None, gt=0, le=1)
    attn_output_gate: Literal[True] = True


def text_part(raw: ConfigJson) -> ConfigJson:
    """Return the config.json of a model's text part: itself, or the section of a model that also reads images."""
    part = _WITH_IMAGES.get(str(raw.get("model_type")))
    if part is None:
        return raw
    text = raw.section("text_config")
    # transformers 4 wrote no type there.
    return dataclasses.replace(text, values={"model_type": part, **text.values})


def read_config(raw: ConfigJson) -> DecoderConfig:
    """Return the sizes and options. Raises InputError for another architecture, and entries that no model has."""
    raw = text_part(raw)
    kind = raw.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        *first, last = FAMILIES
        raise InputError(f"{raw.key}: {raw.folder} holds a '{kind}' model, expected {', '.join(first)} or {last}")
    file = raw.check(DecoderFile)
    _check_supported(raw, file, family)
    check_heads(raw, file)
    sizes = {ours: getattr(file, theirs) for theirs, ours in _SIZES.items()}
    tied = family.tied if file.tie_word_embeddings is None else file.tie_word_embeddings
    config = DecoderConfig(
        **sizes | {"tied": tied},
        rope=read_rope(raw, HYBRID_ROPE if family.hybrid else frozenset()),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        family=str(kind),
        no_rope_layers=_without_positions(raw, file.num_hidden_layers) if family.skips_positions else (),
    )
    if family.hybrid:
        config = _with_delta_nets(config, raw)
    return _with_experts(config, raw) if family.mixture else config


def _check_supported(raw: ConfigJson, file: DecoderFile, family: Family) -> None:
    """Raise InputError for entries that change the forward: biases, sliding windows, quantised weights."""
    for key in ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config"):
        # MiMo calls its biases of q, k, v so; elsewhere o has one too.
        if getattr(file, key) and not (key == "attention_bias" and family.qkv_bias):
            raise raw.error(f"asks for {key}, which is not supported")
    # Qwen2 states the window that use_sliding_window=false switches off.
    if raw.get("sliding_window") is not None and raw.get("use_sliding_window") is None:
        raise raw.error("asks for sliding_window, which is not supported")
    if strange := sorted(set(file.layer_types or ()) - {_ATTENTION, *([_DELTA] if family.hybrid else [])}):
        raise raw.error(f"asks for layers of {strange[0]}, which is not supported")


def check_heads(raw: ConfigJson, file: LayerFields) -> None:
    """Raise InputError where queries cannot share keys evenly, or rotary positions cannot pair a head's numbers."""
    if file.num_attention_heads % file.num_key_value_heads or file.head_dim % 2:
        raise raw.error(
            f"has num_attention_heads={file.num_attention_heads}, num_key_value_heads={file.num_key_value_heads} and "
            f"head_dim={file.head_dim}; the first must be a multiple of the second, and the last even"
        )


def _without_positions(raw: ConfigJson, layers: int) -> tuple[int, ...]:
    """Return the layers without rotary positions."""
    file = raw.check(PositionsFile)
    turned: Sequence[int] = file.no_rope_layers or [(i + 1) % file.no_rope_layer_interval for i in range(layers)]
    if len(turned) != layers:
        raise raw.error(f"has {len(turned)} entries in no_rope_layers, and num_hidden_layers={layers}")
    return tuple(i for i, has in enumerate(turned) if not has)


def _with_delta_nets(config: DecoderConfig, raw: ConfigJson) -> DecoderConfig:
    """Add what a hybrid has: which layers are gated delta nets and their sizes, gates, norms stored less 1."""
    file, L = raw.check(HybridFile), config.layers
    every = file.full_attention_interval
    kinds = file.layer_types or [_DELTA if (i + 1) % every else _ATTENTION for i in range(L)]
    if len(kinds) != L:
        raise raw.error(f"has {len(kinds)} entries in layer_types, and num_hidden_layers={L}")
    if len(set(kinds)) < 2:
        raise raw.error(f"has layers of {kinds[0]} alone; a {config.family} model has some of both kinds")
    if file.linear_num_value_heads % file.linear_num_key_heads:
        raise raw.error(
            f"has linear_num_value_heads={file.linear_num_value_heads}, which must be a multiple of "
            f"linear_num_key_heads={file.linear_num_key_heads}"
        )
    entry = file.rope_parameters or file.rope_scaling
    factor = file.partial_rotary_factor or (entry and entry.partial_rotary_factor) or 0.25
    turned = int(config.head_dim * factor)
    if turned < 2 or turned % 2:
        raise raw.error(f"has partial_rotary_factor={factor:g} of head_dim={config.head_dim}: {turned} must be even")
    delta = DeltaNet(
        tuple(i for i, kind in enumerate(kinds) if kind == _DELTA),
        file.linear_num_key_heads,
        file.linear_num_value_heads,
        key_dim=file.linear_key_head_dim,
        value_dim=file.linear_value_head_dim,
        window=file.linear_conv_kernel_dim,
    )
    return dataclasses.replace(config, gated=True, norm_offset=1.0, rotary_dim=turned, delta=delta)


def _hybrid_entries(c: DecoderConfig, delta: DeltaNet) -> dict[str, object]:
    return {
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.window,
        "layer_types": [_DELTA if i in delta.layers else _ATTENTION for i in range(c.layers)],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": c.rope.theta,
            "partial_rotary_factor": c.turned / c.head_dim,
        },
    }


def _with_experts(config: DecoderConfig, raw: ConfigJson) -> DecoderConfig:
    """Add the sizes of a mixture."""
    file = raw.check(MixtureFile)
    if file.decoder_sparse_step != 1 or file.mlp_only_layers:
        raise raw.error(
            "has layers without experts among those with (decoder_sparse_step, mlp_only_layers), which is not supported"
        )
    experts, per_token = file.num_local_experts or file.num_experts, file.num_experts_per_tok
    if experts is None:
        raise raw.lacks("num_experts")
    if per_token > experts:
        raise raw.error(f"has num_experts_per_tok={per_token} of {experts} experts")
    return dataclasses.replace(
        config,
        mlp=file.moe_intermediate_size,
        dense_mlp=config.mlp,
        experts=experts,
        experts_per_token=per_token,
        renormalise=file.norm_topk_prob,
    )


def hf_config(c: DecoderConfig, dtype: str) -> dict[str, object]:
    """Return the content of config.json, as the policy's family has it."""
    family = FAMILIES[c.family]
    entries: dict[str, object] = {
        "model_type": c.family,
        "architectures": [family.architecture],
        **{theirs: getattr(c, ours) for theirs, ours in _SIZES.items()},
        **rope_entries(c.rope),
        "hidden_act": "silu",
        "torch_dtype": dtype,
        **family.written,
    }
    if c.delta:
        entries |= _hybrid_entries(c, c.delta)
    if family.skips_positions:
        entries["no_rope_layers"] = [int(i not in c.no_rope_layers) for i in range(c.layers)]
    if not family.mixture:
        return entries
    return entries | {
        "intermediate_size": c.dense_mlp,
        "moe_intermediate_size": c.mlp,
        "num_experts": c.experts,
        "num_experts_per_tok": c.experts_per_token,
        "norm_topk_prob": c.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
