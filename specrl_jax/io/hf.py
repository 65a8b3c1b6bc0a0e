"""Qwen3 checkpoints in Hugging Face format, in and out."""

import os
from typing import Any

import jax.numpy as jnp

from specrl_jax.core import InputError
from specrl_jax.io.tensors import TensorFolder, hf_tensors, save_folder
from specrl_jax.models import qwen3
from specrl_jax.models.layers import Yarn, yarn_magnitude
from specrl_jax.sharding import Partitioner


def load_config(folder: str, key: str = "policy.path") -> qwen3.Qwen3Config:
    """Sizes from a checkpoint's config.json; `key` of our config names it in messages.

    Raises InputError for a missing folder or another architecture.
    """
    raw = _folder(folder, key).config()
    if raw.get("model_type") not in ("qwen3", "qwen3_moe"):
        raise InputError(f"{key}: {folder} holds a '{raw.get('model_type')}' model, expected qwen3 or qwen3_moe")
    for unsupported in ("attention_bias", "use_sliding_window"):
        if raw.get(unsupported):
            raise InputError(f"{key}: {folder} asks for {unsupported}, which is not supported")
    try:
        theta, yarn = read_rope(raw, folder, key)
        experts = _read_experts(raw, folder, key) if raw["model_type"] == "qwen3_moe" else {}
        return qwen3.Qwen3Config(
            vocab=raw["vocab_size"],
            embed=raw["hidden_size"],
            layers=raw["num_hidden_layers"],
            heads=raw["num_attention_heads"],
            kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            mlp=raw["moe_intermediate_size" if experts else "intermediate_size"],
            tied=raw["tie_word_embeddings"],
            max_positions=raw["max_position_embeddings"],
            rope_theta=theta,
            norm_epsilon=raw["rms_norm_eps"],
            yarn=yarn,
            **experts,
        )
    except KeyError as error:
        raise InputError(f"{key}: {folder}/config.json lacks {error}") from None


def _read_experts(raw: dict[str, Any], folder: str, key: str) -> dict[str, Any]:
    """Fields of Qwen3Config; transformers 5 writes num_local_experts where Qwen's own files have num_experts."""
    if raw.get("decoder_sparse_step", 1) != 1 or raw.get("mlp_only_layers"):
        raise InputError(
            f"{key}: {folder} has layers without experts among those with (decoder_sparse_step, mlp_only_layers), "
            "which is not supported"
        )
    experts = {
        "experts": raw["num_local_experts" if "num_local_experts" in raw else "num_experts"],
        "experts_per_token": raw["num_experts_per_tok"],
        "renormalise": raw.get("norm_topk_prob", False),  # absent is false, as transformers reads it
        "dense_mlp": raw["intermediate_size"],
    }
    if not 0 < experts["experts_per_token"] <= experts["experts"]:
        raise InputError(
            f"{key}: {folder} has num_experts_per_tok={experts['experts_per_token']} of {experts['experts']} experts"
        )
    return experts


def read_rope(raw: dict[str, Any], folder: str, key: str) -> tuple[float, Yarn | None]:
    """(theta, YaRN or None) of a config.json. Raises InputError for another rope_type and for what it lacks.

    transformers 4 has rope_theta and rope_scaling at the top, transformers 5 has both in rope_parameters.
    """
    nested = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or nested
    try:
        return number(raw if "rope_theta" in raw else nested, "rope_theta"), _read_yarn(raw, scaling, folder, key)
    except KeyError as error:
        raise InputError(f"{key}: {folder}/config.json lacks {error}") from None


def _read_yarn(raw: dict[str, Any], scaling: dict[str, Any], folder: str, key: str) -> Yarn | None:
    """Of rope_scaling, or rope_parameters."""
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default" and "factor" not in scaling:
        return None
    if kind != "yarn":
        raise InputError(f"{key}: {folder} asks for rope_scaling of type '{kind}'; only yarn is supported")
    factor, magnitude = number(scaling, "factor"), scaling.get("attention_factor")
    if magnitude is None and scaling.get("mscale") and scaling.get("mscale_all_dim"):
        magnitude = yarn_magnitude(factor, scaling["mscale"]) / yarn_magnitude(factor, scaling["mscale_all_dim"])
    return Yarn(
        factor,
        scaling.get("original_max_position_embeddings") or raw["max_position_embeddings"],
        float(scaling.get("beta_fast") or 32),
        float(scaling.get("beta_slow") or 1),
        magnitude,
        scaling.get("truncate", True),
    )


def number(config: dict[str, Any], key: str) -> float:
    """Raises KeyError where it is absent or not a number."""
    if isinstance(config.get(key), bool) or not isinstance(config.get(key), int | float):
        raise KeyError(key)
    return float(config[key])


def rope_scaling(yarn: Yarn | None) -> dict[str, Any]:
    """The entry of config.json that `read_rope` reads; nothing for plain positions."""
    if yarn is None:
        return {}
    entry = {
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
    """Raises InputError as `load_params` would, reading headers only."""
    _folder(folder, key).check(qwen3.param_specs(config))


def load_params(
    folder: str,
    config: qwen3.Qwen3Config,
    partition: Partitioner,
    dtype: jnp.dtype | None = None,
    key: str = "policy.path",
) -> Any:
    """The learner's parameter tree from a local folder of safetensors.

    Args:
      dtype: of the result; None keeps each tensor's own.
    Raises:
      InputError: a missing folder, file or tensor, a tensor of another shape, or a file that is not safetensors.
    """
    return _folder(folder, key).load(qwen3.param_specs(config), partition, dtype)


def save_params(folder: str, params: Any, config: qwen3.Qwen3Config, dtype: str, tokenizer_from: str = "") -> None:
    """Writes a folder that `load_params` and transformers read: config.json, safetensors, and the tokenizer's files.

    Args:
      dtype: storage dtype of the tensors, "float32" or "bfloat16".
      tokenizer_from: a folder whose tokenizer files are copied; '' for none.
    """
    files = [os.path.join(tokenizer_from, name) for name in _TOKENIZER_FILES] if tokenizer_from else []
    tensors = hf_tensors(qwen3.param_specs(config), params, dtype)
    save_folder(folder, tensors, hf_config(config, dtype), filter(os.path.exists, files))


def _folder(path: str, key: str) -> TensorFolder:
    # The usual layout is checkpoints/<model>; name the command that makes exactly this folder.
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


def hf_config(c: qwen3.Qwen3Config, dtype: str) -> dict[str, Any]:
    """The content of config.json."""
    common = {
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
    } | rope_scaling(c.yarn)
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
