"""Read and write Qwen3 checkpoints in Hugging Face format."""

import dataclasses
import os

import jax.numpy as jnp

from specrl_jax.core import Params
from specrl_jax.errors import InputError
from specrl_jax.io.config_json import ConfigJson
from specrl_jax.io.tensors import TensorFolder, hf_tensors, save_folder
from specrl_jax.models import qwen3
from specrl_jax.models.layers import Yarn, yarn_magnitude
from specrl_jax.sharding import Partitioner


def load_config(folder: str, key: str = "policy.path") -> qwen3.Qwen3Config:
    """Read the sizes of a checkpoint; `key` of our config names the folder in messages.

    Raises InputError for a missing folder or another architecture.
    """
    raw = _folder(folder, key).config()
    kind = raw.get("model_type")
    if kind not in ("qwen3", "qwen3_moe"):
        raise InputError(f"{key}: {folder} holds a '{kind}' model, expected qwen3 or qwen3_moe")
    for unsupported in ("attention_bias", "use_sliding_window"):
        if raw.get(unsupported):
            raise raw.error(f"asks for {unsupported}, which is not supported")
    theta, yarn = read_rope(raw)
    config = qwen3.Qwen3Config(
        vocab=raw.integer("vocab_size"),
        embed=raw.integer("hidden_size"),
        layers=raw.integer("num_hidden_layers"),
        heads=raw.integer("num_attention_heads"),
        kv_heads=raw.integer("num_key_value_heads"),
        head_dim=raw.integer("head_dim"),
        mlp=raw.integer("intermediate_size"),
        tied=raw.flag("tie_word_embeddings", default=None),
        max_positions=raw.integer("max_position_embeddings"),
        rope_theta=theta,
        norm_epsilon=raw.number("rms_norm_eps"),
        yarn=yarn,
    )
    return _with_experts(config, raw) if kind == "qwen3_moe" else config


def _with_experts(config: qwen3.Qwen3Config, raw: ConfigJson) -> qwen3.Qwen3Config:
    """Add the sizes of a mixture; transformers 5 writes num_local_experts where Qwen's own files have num_experts."""
    if raw.values.get("decoder_sparse_step", 1) != 1 or raw.get("mlp_only_layers"):
        raise raw.error(
            "has layers without experts among those with (decoder_sparse_step, mlp_only_layers), which is not supported"
        )
    experts = raw.integer("num_local_experts" if "num_local_experts" in raw.values else "num_experts")
    per_token = raw.integer("num_experts_per_tok")
    if not 0 < per_token <= experts:
        raise raw.error(f"has num_experts_per_tok={per_token} of {experts} experts")
    return dataclasses.replace(
        config,
        mlp=raw.integer("moe_intermediate_size"),
        dense_mlp=config.mlp,
        experts=experts,
        experts_per_token=per_token,
        renormalise=raw.flag("norm_topk_prob"),  # absent is false, as transformers reads it
    )


def read_rope(raw: ConfigJson) -> tuple[float, Yarn | None]:
    """Return the rotary base, and the YaRN or None. Raises InputError for another rope_type and for missing entries.

    transformers 4 has rope_theta and rope_scaling at the top, transformers 5 has both in rope_parameters.
    """
    nested = raw.section("rope_parameters")
    scaling = raw.section("rope_scaling") if raw.get("rope_scaling") else nested
    return (raw if "rope_theta" in raw.values else nested).number("rope_theta"), _read_yarn(raw, scaling)


def _read_yarn(raw: ConfigJson, scaling: ConfigJson) -> Yarn | None:
    """Read rope_scaling, or rope_parameters."""
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default" and "factor" not in scaling.values:
        return None
    if kind != "yarn":
        raise raw.error(f"asks for rope_scaling of type '{kind}'; only yarn is supported")
    factor = scaling.number("factor")
    magnitude = None if scaling.get("attention_factor") is None else scaling.number("attention_factor")
    if magnitude is None and scaling.get("mscale") and scaling.get("mscale_all_dim"):
        scales = scaling.number("mscale"), scaling.number("mscale_all_dim")
        magnitude = yarn_magnitude(factor, scales[0]) / yarn_magnitude(factor, scales[1])
    original = "original_max_position_embeddings"
    return Yarn(
        factor,
        scaling.integer(original) if scaling.get(original) else raw.integer("max_position_embeddings"),
        scaling.number("beta_fast") if scaling.get("beta_fast") else 32.0,
        scaling.number("beta_slow") if scaling.get("beta_slow") else 1.0,
        magnitude,
        scaling.flag("truncate", default=True),
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


def check_params(folder: str, config: qwen3.Qwen3Config, key: str = "policy.path") -> None:
    """Raise InputError as `load_params` would, reading headers only."""
    _folder(folder, key).check(qwen3.param_specs(config))


def load_params(
    folder: str,
    config: qwen3.Qwen3Config,
    partition: Partitioner,
    dtype: jnp.dtype | None = None,
    key: str = "policy.path",
) -> Params:
    """Read parameters in the training layout from a local folder of safetensors.

    Args:
      dtype: of the result; None = each tensor's own.
    Raises:
      InputError: a missing folder, file or tensor, a tensor of another shape, or a file that is not safetensors.
    """
    return _folder(folder, key).load(qwen3.param_specs(config), partition, dtype)


def save_params(folder: str, params: Params, config: qwen3.Qwen3Config, dtype: str, tokenizer_from: str = "") -> None:
    """Write a folder that `load_params` and transformers read: config.json, safetensors, and the tokenizer's files.

    Args:
      dtype: storage dtype of the tensors, "float32" or "bfloat16".
      tokenizer_from: a folder whose tokenizer files are copied; '' = none.
    """
    files = [os.path.join(tokenizer_from, name) for name in _TOKENIZER_FILES] if tokenizer_from else []
    tensors = hf_tensors(qwen3.param_specs(config), params, dtype)
    save_folder(folder, tensors, hf_config(config, dtype), filter(os.path.exists, files))


def _folder(path: str, key: str) -> TensorFolder:
    # Folders are usually called checkpoints/<model>: name the command that downloads exactly this one.
    model = os.path.basename(os.path.normpath(path))
    published = model.startswith("Qwen3-")
    return TensorFolder(path, key, f"get it with `hf download Qwen/{model} --local-dir {path}`" if published else "")


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)


def hf_config(c: qwen3.Qwen3Config, dtype: str) -> dict[str, object]:
    """Return the content of config.json."""
    common: dict[str, object] = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": c.vocab,
        "hidden_size": c.embed,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.mlp,
        "tie_word_embeddings": c.tied,
        "max_position_embeddings": c.max_positions,
        "rope_theta": c.rope_theta,
        "rms_norm_eps": c.norm_epsilon,
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
