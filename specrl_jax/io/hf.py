"""Qwen3 checkpoints in Hugging Face format, in and out."""

import os
from typing import Any

import jax.numpy as jnp

from specrl_jax.core import BadInput
from specrl_jax.io.tensors import TensorFolder, hf_tensors, save_folder
from specrl_jax.models import qwen3
from specrl_jax.sharding import Partitioner


def load_config(folder: str, key: str = "policy.path") -> qwen3.Qwen3Config:
    """Sizes from a checkpoint's config.json; `key` of our config names it in messages.

    Raises BadInput for a missing folder or another architecture.
    """
    raw = _folder(folder, key).config()
    if raw.get("model_type") not in ("qwen3", "qwen3_moe"):
        raise BadInput(f"{key}: {folder} holds a '{raw.get('model_type')}' model, expected qwen3")
    rope = raw.get("rope_parameters") or {}  # transformers 5 nests what 4 kept at the top
    if raw.get("rope_scaling") or rope.get("rope_type", "default") != "default":
        raise BadInput(f"{key}: {folder} asks for rope_scaling, which is not supported")
    for key in ("attention_bias", "use_sliding_window"):
        if raw.get(key):
            raise BadInput(f"{key}: {folder} asks for {key}, which is not supported")
    try:
        experts = raw.get("num_experts", 0) if raw["model_type"] == "qwen3_moe" else 0
        return qwen3.Qwen3Config(
            vocab=raw["vocab_size"],
            embed=raw["hidden_size"],
            layers=raw["num_hidden_layers"],
            heads=raw["num_attention_heads"],
            kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            mlp=raw["moe_intermediate_size"] if experts else raw["intermediate_size"],
            tied=raw["tie_word_embeddings"],
            max_positions=raw["max_position_embeddings"],
            rope_theta=float(raw.get("rope_theta") or rope["rope_theta"]),
            norm_epsilon=raw["rms_norm_eps"],
            experts=experts,
            experts_per_token=raw.get("num_experts_per_tok", 0) if experts else 0,
        )
    except KeyError as error:
        raise BadInput(f"{key}: {folder}/config.json lacks {error}") from None


def check_params(folder: str, config: qwen3.Qwen3Config, key: str = "policy.path") -> None:
    """Raises BadInput as `load_params` would, reading headers only."""
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
      BadInput: a missing folder, file or tensor, a tensor of another shape, or a file that is not safetensors.
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
    }
    if not c.experts:
        return common
    return common | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": c.mlp,
        "num_experts": c.experts,
        "num_experts_per_tok": c.experts_per_token,
        "norm_topk_prob": True,
    }
