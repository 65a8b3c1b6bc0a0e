"""EAGLE-3 heads as folders, in the dialect of SafeAILab, SpecForge and SGLang: midlayer.*, d2t, t2d, flat config.json.

The embedding is the policy's and is not stored.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from specrl_jax.core import BadInput
from specrl_jax.io.tensors import TensorFolder, hf_tensors, save_folder
from specrl_jax.models import eagle3, qwen3
from specrl_jax.sharding import Partitioner

ARCHITECTURE = "LlamaForCausalLMEagle3"


def load_config(folder: str, target: qwen3.Qwen3Config) -> eagle3.Eagle3Config:
    """Sizes of the head in `folder`, checked against its target; reads headers and d2t only.

    Raises BadInput for a missing or damaged folder, another architecture, and sizes that do not go with the target.
    """
    raw = _folder(folder).config()
    if raw.get("architectures") != [ARCHITECTURE]:
        raise BadInput(f"draft.path: {folder} holds {raw.get('architectures')}, expected ['{ARCHITECTURE}']")
    if raw.get("rope_scaling"):
        raise BadInput(f"draft.path: {folder} asks for rope_scaling, which is not supported")
    try:
        head = eagle3.eagle3_config(target, raw["draft_vocab_size"])
        sizes = {field: raw[name] for field, name in _FIELDS.items()}
        vocab = raw["vocab_size"]
    except KeyError as error:
        raise BadInput(f"draft.path: {folder}/config.json lacks {error}") from None
    for field, theirs in sizes.items():
        ours = getattr(head, field)
        if field != "max_positions" and ours != theirs:
            raise BadInput(f"draft.path: {folder} has {_FIELDS[field]}={theirs}, a head of this policy has {ours}")
    if vocab != target.vocab:
        raise BadInput(f"draft.path: {folder} has vocab_size={vocab}, the policy has {target.vocab}")
    _folder(folder).check(eagle3.param_specs(head))
    load_vocab_map(folder, head, target)
    return head


def load_params(folder: str, head: eagle3.Eagle3Config, partition: Partitioner, dtype: jnp.dtype | None = None) -> Any:
    """The learner's parameter tree; dtype None keeps each tensor's own. Raises BadInput as `load_config` does."""
    return _folder(folder).load(eagle3.param_specs(head), partition, dtype)


def load_vocab_map(folder: str, head: eagle3.Eagle3Config, target: qwen3.Qwen3Config) -> np.ndarray:
    """[Vd] int32 target id of each draft id; the file has d2t, the difference of the two.

    Raises BadInput where d2t does not name different ids of the target.
    """
    d2t = _folder(folder).tensor("d2t")
    if d2t.shape != (head.draft_vocab,):
        raise BadInput(f"draft.path: d2t in {folder} has shape {d2t.shape}, ({head.draft_vocab},) is needed")
    ids = d2t + np.arange(head.draft_vocab)
    if len(np.unique(ids)) != len(ids) or ids.min() < 0 or ids.max() >= target.vocab:
        raise BadInput(f"draft.path: d2t in {folder} does not name {len(ids)} different ids below {target.vocab}")
    return ids.astype(np.int32)


def save(
    folder: str, params: Any, vocab_map: np.ndarray, head: eagle3.Eagle3Config, target: qwen3.Qwen3Config, dtype: str
) -> None:
    """Writes a folder that the loaders above, SGLang and SpecForge read; dtype is "float32" or "bfloat16"."""

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        yield from hf_tensors(eagle3.param_specs(head), params, dtype)
        ids = np.asarray(vocab_map, np.int64)
        yield "d2t", ids - np.arange(len(ids))
        yield "t2d", np.isin(np.arange(target.vocab), ids)

    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": target.vocab,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        # 0-based layers whose *outputs* are read, as SGLang and Model Optimizer count them.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in head.aux_layers]},
        "torch_dtype": dtype,
    }
    save_folder(folder, tensors(), config | {name: getattr(head, field) for field, name in _FIELDS.items()})


_FIELDS = {
    "embed": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp": "intermediate_size",
    "draft_vocab": "draft_vocab_size",
    "rope_theta": "rope_theta",
    "norm_epsilon": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
}


def _folder(path: str) -> TensorFolder:
    return TensorFolder(path, "draft.path")
