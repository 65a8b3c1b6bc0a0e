"""Read and write Qwen3 checkpoints in Hugging Face format."""

import dataclasses
import os
from typing import Literal

import jax.numpy as jnp
import numpy as np

from specrl_jax.core import Params
from specrl_jax.errors import InputError
from specrl_jax.io.config_json import ConfigJson, Experts, Positions, Qwen3Sizes, Rope, Roped, Size
from specrl_jax.io.tensors import TensorFolder, hf_tensors, save_folder
from specrl_jax.json_files import Checked
from specrl_jax.models import decoder
from specrl_jax.models.layers import Yarn, yarn_magnitude
from specrl_jax.sharding import Partitioner

_EMBEDDING, _LM_HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "input_layernorm.weight"

# Keys of a Qwen3's config.json, and the fields of our config.
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
    "rope_theta": "rope_theta",
    "rms_norm_eps": "norm_epsilon",
}


class Qwen3File(Qwen3Sizes):
    """The keys of a Qwen3's config.json that are read."""

    model_type: str
    tie_word_embeddings: bool
    max_position_embeddings: Positions
    hidden_act: Literal["silu"] = "silu"
    attention_bias: bool = False


class MixtureFile(Checked):
    """The further keys of a mixture of experts; transformers 5 writes num_local_experts where Qwen has num_experts."""

    num_experts: Experts | None = None
    num_local_experts: Experts | None = None
    num_experts_per_tok: Experts
    moe_intermediate_size: Size
    norm_topk_prob: bool = False  # as transformers reads it
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None


def load_config(folder: str, key: str = "policy.path") -> decoder.DecoderConfig:
    """Read the sizes of a checkpoint; `key` of our config names the folder in messages.

    Raises InputError for a missing folder, another architecture, and entries that no model has.
    """
    raw = _folder(folder, key).config()
    kind = raw.get("model_type")
    if kind not in ("qwen3", "qwen3_moe"):
        raise InputError(f"{key}: {folder} holds a '{kind}' model, expected qwen3 or qwen3_moe")
    file = raw.check(Qwen3File)
    for unsupported in ("attention_bias", "use_sliding_window"):
        if getattr(file, unsupported):
            raise raw.error(f"asks for {unsupported}, which is not supported")
    check_heads(raw, file)
    theta, yarn = read_rope(raw)
    sizes = {ours: getattr(file, theirs) for theirs, ours in _SIZES.items()}
    config = decoder.DecoderConfig(**sizes | {"rope_theta": theta, "yarn": yarn})
    return _with_experts(config, raw) if kind == "qwen3_moe" else config


def check_heads(raw: ConfigJson, file: Qwen3Sizes) -> None:
    """Raise InputError where queries cannot share keys evenly, or rotary positions cannot pair a head's numbers."""
    if file.num_attention_heads % file.num_key_value_heads or file.head_dim % 2:
        raise raw.error(
            f"has num_attention_heads={file.num_attention_heads}, num_key_value_heads={file.num_key_value_heads} and "
            f"head_dim={file.head_dim}; the first must be a multiple of the second, and the last even"
        )


def _with_experts(config: decoder.DecoderConfig, raw: ConfigJson) -> decoder.DecoderConfig:
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


def read_rope(raw: ConfigJson) -> tuple[float, Yarn | None]:
    """Return the rotary base, and the YaRN or None. Raises InputError for another rope_type and for missing entries.

    transformers 4 has rope_theta and rope_scaling at the top, transformers 5 has both in rope_parameters.
    """
    file = raw.check(Roped)
    nested = file.rope_parameters or Rope()
    theta = file.rope_theta or nested.rope_theta
    if theta is None:
        raise raw.lacks("rope_theta")
    return theta, _read_yarn(raw, file.rope_scaling or nested, file.max_position_embeddings)


def _read_yarn(raw: ConfigJson, scaling: Rope, positions: int | None) -> Yarn | None:
    """Read rope_scaling, or rope_parameters; `positions` are those of the pretraining where it does not say them."""
    kind = scaling.rope_type or scaling.type or "default"
    if kind == "default" and scaling.factor is None:
        return None
    if kind != "yarn":
        raise raw.error(f"asks for rope_scaling of type '{kind}'; only yarn is supported")
    if scaling.factor is None:
        raise raw.lacks("factor")
    original = scaling.original_max_position_embeddings or positions
    if original is None:
        raise raw.lacks("max_position_embeddings")
    magnitude = scaling.attention_factor
    if magnitude is None and scaling.mscale and scaling.mscale_all_dim:
        whole = yarn_magnitude(scaling.factor, scaling.mscale_all_dim)
        magnitude = yarn_magnitude(scaling.factor, scaling.mscale) / whole
    return Yarn(
        scaling.factor,
        original,
        beta_fast=scaling.beta_fast or 32.0,
        beta_slow=scaling.beta_slow or 1.0,
        attention_factor=magnitude,
        truncate=scaling.truncate,
    )


def rope_scaling(yarn: Yarn | None) -> dict[str, object]:
    """Return the entry of config.json that `read_rope` reads; an empty one for plain positions."""
    if yarn is None:
        return {}
    entry: dict[str, object] = {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }
    if yarn.attention_factor is not None:
        entry["attention_factor"] = yarn.attention_factor
    return {"rope_scaling": entry if yarn.truncate else entry | {"truncate": False}}


def check_params(folder: str, config: decoder.DecoderConfig, key: str = "policy.path") -> None:
    """Raise InputError as `load_params` would; headers are read, and an lm_head where there should be none."""
    source, specs = _folder(folder, key), decoder.param_specs(config)
    source.check(specs)
    # Without its last layers a model still runs. What follows them may be an MTP head, which has an eh_proj.
    following = f"model.layers.{config.layers}."
    if following + _NORM in source.names() and following + "eh_proj.weight" not in source.names():
        raise InputError(
            f"{key}: {folder}/config.json: num_hidden_layers={config.layers}, but the folder holds {following}{_NORM}"
        )
    # A folder may store the tied lm_head as well. One of its own would be lost without a word.
    has_both = config.tied and _LM_HEAD in source.names()
    if has_both and not np.array_equal(source.tensor(_EMBEDDING), source.tensor(_LM_HEAD)):
        raise InputError(f"{key}: {folder}/config.json: tie_word_embeddings=true, but {_LM_HEAD} is not {_EMBEDDING}")


def load_params(
    folder: str,
    config: decoder.DecoderConfig,
    partition: Partitioner,
    *,
    dtype: jnp.dtype | None = None,
    key: str = "policy.path",
) -> Params:
    """Read parameters in the training layout from a local folder of safetensors.

    Args:
      dtype: of the result; None = each tensor's own.
    Raises:
      InputError: a missing folder, file or tensor, a tensor of another shape, or a file that is not safetensors.
    """
    return _folder(folder, key).load(decoder.param_specs(config), partition, dtype)


def save_params(
    folder: str, params: Params, config: decoder.DecoderConfig, *, dtype: str, tokenizer_from: str = ""
) -> None:
    """Write a folder that `load_params` and transformers read: config.json, safetensors, and the tokenizer's files.

    Args:
      dtype: storage dtype of the tensors, "float32" or "bfloat16".
      tokenizer_from: a folder whose tokenizer files are copied; '' = none.
    """
    files = [os.path.join(tokenizer_from, name) for name in TOKENIZER_FILES] if tokenizer_from else []
    tensors = hf_tensors(decoder.param_specs(config), params, dtype)
    save_folder(folder, tensors, hf_config(config, dtype), copies=filter(os.path.isfile, files))


def _folder(path: str, key: str) -> TensorFolder:
    # Folders are usually called checkpoints/<model>: name the command that downloads exactly this one.
    model = os.path.basename(os.path.normpath(path))
    published = model.startswith("Qwen3-")
    get_it = f"get it with `hf download Qwen/{model} --local-dir {path}`" if published else ""
    return TensorFolder(path, key, get_it, prefix="model.")


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)


def hf_config(c: decoder.DecoderConfig, dtype: str) -> dict[str, object]:
    """Return the content of config.json."""
    common: dict[str, object] = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        **{theirs: getattr(c, ours) for theirs, ours in _SIZES.items()},
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": dtype,
        **rope_scaling(c.yarn),
    }
    if not c.experts:
        return common
    return common | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "intermediate_size": c.dense_mlp,
        "moe_intermediate_size": c.mlp,
        "num_experts": c.experts,
        "num_experts_per_tok": c.experts_per_token,
        "norm_topk_prob": c.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
