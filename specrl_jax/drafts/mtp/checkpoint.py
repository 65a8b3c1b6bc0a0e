"""Multi-token-prediction heads as folders: the MTP layer of a checkpoint, alone or beside the policy's own tensors.

Two dialects, recognised by their names:

    deepseek  model.layers.{N}.    enorm, hnorm, eh_proj, shared_head.norm
    mimo      model.mtp_layers.0.  token_layernorm, hidden_layernorm, input_proj, final_layernorm

N being the target's depth, and under both prefixes a decoder block in Qwen3's names. The projection reads [embedding;
hidden] in DeepSeek's (and here), [hidden; embedding] in MiMo's. Neither says what the head is applied to. Here it is
the hidden state after the target's final norm, and then the head's own after its final norm: SGLang and vLLM run
DeepSeek's so (vLLM since its pull request 45895), and FastMTP trained MiMo's so. vLLM's MiMo reads the target's hidden
state *before* its final norm.

Where a checkpoint has several MTP layers, the first is read and applied at every step. Its copies of the embedding and
the unembedding (embed_tokens, shared_head.head) are ignored: the head reads the policy's.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.core import InputError
from specrl_jax.drafts.mtp import network as mtp
from specrl_jax.io.hf import hf_config, read_rope
from specrl_jax.io.tensors import TensorFolder, hf_tensors, save_folder
from specrl_jax.models import qwen3
from specrl_jax.models.layers import ParamSpec
from specrl_jax.sharding import Partitioner


@dataclasses.dataclass(frozen=True)
class Dialect:
    """How one family of checkpoints writes down a head."""

    prefix: str  # of every name, up to the layer's number
    renamed: dict[str, str]  # DeepSeek's names -> this dialect's
    hidden_first: bool  # the projection's inputs are [hidden; embedding]

    def name(self, deepseek: str) -> str:
        return self.renamed.get(deepseek, deepseek)


DIALECTS = {
    "deepseek": Dialect("model.layers.", {}, hidden_first=False),
    "mimo": Dialect(
        "model.mtp_layers.",
        {
            "enorm.weight": "token_layernorm.weight",
            "hnorm.weight": "hidden_layernorm.weight",
            "eh_proj.weight": "input_proj.weight",
            "shared_head.norm.weight": "final_layernorm.weight",
        },
        hidden_first=True,
    ),
}

_LAYER = "model.layers.{layer}."  # of the names in param_specs
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")
_SIZES = (
    "num_hidden_layers",
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rope_theta",
    "rms_norm_eps",
)


def load_config(folder: str, target: qwen3.Qwen3Config) -> mtp.MTPConfig:
    """Sizes of the head in `folder`, which are its target's; reads headers only.

    Raises InputError for a missing or damaged folder, one without an MTP layer, a block that is not Qwen3's (latent
    attention, experts, biases), and sizes that are not the target's.
    """
    head = mtp.mtp_config(target)
    _check_config(folder, target)
    source, index = _find(folder)
    if source.dialect is DIALECTS["deepseek"] and index != target.layers:
        raise InputError(
            f"draft.path: {folder} has its MTP layer at {index}, that of this policy is at {target.layers}"
        )
    specs = _specs(head, source.dialect, index)
    prefix = f"{source.dialect.prefix}{index}."
    known = {spec.hf_name for spec in jax.tree.leaves(specs)} | {prefix + name for name in _SHARED}
    strange = sorted(name for name in source.names() if name.startswith(prefix) and name not in known)
    if strange:
        raise InputError(
            f"draft.path: {folder} holds {strange[0]}, which a Qwen3 block does not have: no latent attention, no "
            "experts, no biases"
        )
    source.check(specs)
    return head


def load_params(folder: str, config: mtp.MTPConfig, partition: Partitioner, dtype: jnp.dtype | None = None) -> Any:
    """The learner's parameter tree; dtype None keeps each tensor's own. Raises InputError as `load_config` does."""
    source, index = _find(folder)
    return source.load(_specs(config, source.dialect, index), partition, dtype)


def save(
    folder: str, params: Any, config: mtp.MTPConfig, target: qwen3.Qwen3Config, dtype: str, dialect: str = "deepseek"
) -> None:
    """Writes a folder that the loaders above read; its config.json is the target's with one MTP layer more.

    Args:
      dtype: storage dtype of the tensors, "float32" or "bfloat16".
      dialect: a key of DIALECTS.
    """
    chosen = DIALECTS[dialect]
    specs = _specs(config, chosen, 0 if dialect == "mimo" else target.layers)

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in hf_tensors(specs, params, dtype):
            yield name, _turned(tensor, chosen, name)

    save_folder(folder, tensors(), hf_config(target, dtype) | {"num_nextn_predict_layers": 1})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _HeadFolder(TensorFolder):
    """A folder whose projection is read embedding first, whatever its dialect."""

    dialect: Dialect

    def tensor(self, name: str) -> np.ndarray:
        return _turned(super().tensor(name), self.dialect, name)


def _turned(tensor: np.ndarray, dialect: Dialect, name: str) -> np.ndarray:
    """The tensor, the two halves of a projection's inputs exchanged where ours and the dialect's order differ."""
    if not (dialect.hidden_first and name.endswith("." + dialect.name("eh_proj.weight"))):
        return tensor
    return np.concatenate(np.split(tensor, 2, axis=1)[::-1], axis=1)


def _find(folder: str) -> tuple[_HeadFolder, int]:
    """The folder, and the number of its first MTP layer."""
    found = []
    for dialect in DIALECTS.values():
        source = _HeadFolder(folder, "draft.path", dialect=dialect)
        pattern = re.escape(dialect.prefix) + r"(\d+)\." + re.escape(dialect.name("eh_proj.weight"))
        matches = filter(None, (re.fullmatch(pattern, name) for name in source.names()))
        numbers = [int(match[1]) for match in matches]
        found += [(source, min(numbers))] if numbers else []
    if len(found) != 1:
        names = " and ".join(f"{d.prefix}*.{d.name('eh_proj.weight')}" for d in DIALECTS.values())
        raise InputError(
            f"draft.path: '{folder}' must hold an MTP layer in one dialect: it has {len(found)} of {names}"
        )
    return found[0]


def _specs(config: mtp.MTPConfig, dialect: Dialect, index: int) -> Any:
    """`mtp.param_specs` in the names of a dialect."""

    def named(spec: ParamSpec) -> ParamSpec:
        name = dialect.name(spec.hf_name.removeprefix(_LAYER))
        return dataclasses.replace(spec, hf_name=f"{dialect.prefix}{index}.{name}")

    return jax.tree.map(named, mtp.param_specs(config))


def _check_config(folder: str, target: qwen3.Qwen3Config) -> None:
    found = TensorFolder(folder, "draft.path").config()
    raw = (found.get("rope_parameters") or {}) | found  # transformers 5 nests what 4 kept at the top
    if raw.get("use_sliding_window"):
        raise InputError(f"draft.path: {folder} asks for use_sliding_window, which is not supported")
    wanted = hf_config(target, "")
    for key in _SIZES:
        if key not in raw:
            raise InputError(f"draft.path: {folder}/config.json lacks '{key}'")
        if raw[key] != wanted[key]:
            raise InputError(f"draft.path: {folder} has {key}={raw[key]}, this policy has {wanted[key]}")
    # Plain positions are stretched with the policy's: a checkpoint's MTP layer says nothing of what it is served at.
    _, yarn = read_rope(found, folder, "draft.path")
    if yarn not in (None, target.yarn):
        raise InputError(f"draft.path: {folder} has {yarn}, this policy has {target.yarn}")
