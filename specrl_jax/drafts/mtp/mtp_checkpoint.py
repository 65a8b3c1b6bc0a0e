"""Read and write MTP heads as folders: the MTP layer of a checkpoint, alone or beside the policy's own tensors.

Two formats, recognised by their tensor names:

    deepseek  model.layers.{N}.    enorm, hnorm, eh_proj, shared_head.norm
    mimo      model.mtp_layers.0.  token_layernorm, hidden_layernorm, input_proj, final_layernorm

N is the target's depth; both have a decoder block in the policy's names under the prefix. The projection reads
[embedding; hidden] in DeepSeek's (and here), [hidden; embedding] in MiMo's. Neither format states the head's input. It
is here as servers run each: after the target's final norm in DeepSeek's (SGLang, and vLLM since its pull request
45895); in MiMo's before it, with zeros for the embedding of pair 0 (vLLM). Then it is the head's own output after its
final norm in both. FastMTP trained MiMo's on the normed state.

Of several MTP layers, the first is read and applied at every step. Its copies of the embedding and the lm_head
(embed_tokens, shared_head.head) are ignored: the head reads the policy's.
"""

import dataclasses
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.core import Params
from specrl_jax.drafts.mtp import mtp_network as mtp
from specrl_jax.errors import InputError
from specrl_jax.io.config_json import LayerFields
from specrl_jax.io.families import DecoderFile, hf_config
from specrl_jax.io.rope_json import read_rope
from specrl_jax.io.tensors import TensorFolder, hf_tensors, save_folder
from specrl_jax.models import decoder
from specrl_jax.models.layers import ParamSpec, Specs
from specrl_jax.sharding import Partitioner


@dataclasses.dataclass(frozen=True)
class MTPFormat:
    """Layout in which one family of checkpoints stores a head."""

    prefix: str  # of every tensor, up to the layer's number
    renamed: dict[str, str]  # DeepSeek's names -> this format's
    hidden_first: bool  # the projection's inputs are [hidden; embedding]
    normed_hidden: bool  # the hidden state is that after the target's final norm
    zeroes_first: bool  # pair 0 has zeros for its embedding

    def config(self, target: decoder.DecoderConfig) -> mtp.MTPConfig:
        """Return the sizes of a head for a target, and how this format's heads compute."""
        return mtp.mtp_config(target, normed_hidden=self.normed_hidden, zeroes_first=self.zeroes_first)

    def name(self, deepseek: str) -> str:
        """Return the tensor's name in this format."""
        return self.renamed.get(deepseek, deepseek)


FORMATS = {
    "deepseek": MTPFormat("model.layers.", {}, hidden_first=False, normed_hidden=True, zeroes_first=False),
    "mimo": MTPFormat(
        "model.mtp_layers.",
        {
            "enorm.weight": "token_layernorm.weight",
            "hnorm.weight": "hidden_layernorm.weight",
            "eh_proj.weight": "input_proj.weight",
            "shared_head.norm.weight": "final_layernorm.weight",
        },
        hidden_first=True,
        normed_hidden=False,
        zeroes_first=True,
    ),
}

_LAYER = "model.layers.{layer}."  # of the names in param_specs
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")


def load_config(folder: str, target: decoder.DecoderConfig) -> mtp.MTPConfig:
    """Return the sizes of the head in `folder`, which are its target's; read headers only.

    Raises InputError for a missing or damaged folder, one without an MTP layer, a block that is not the target's
    (latent attention, experts, other biases), and other sizes.
    """
    _check_config(folder, target)
    source, index = _find(folder)
    head = source.format.config(target)
    if source.format is FORMATS["deepseek"] and index != target.layers:
        raise InputError(
            f"draft.path: {folder} has its MTP layer at {index}, that of this policy is at {target.layers}"
        )
    specs = _specs(head, source.format, index)
    prefix = f"{source.format.prefix}{index}."
    known = {spec.hf_name for spec in jax.tree.leaves(specs)} | {prefix + name for name in _SHARED}
    strange = sorted(name for name in source.names() if name.startswith(prefix) and name not in known)
    if strange:
        raise InputError(
            f"draft.path: {folder} holds {strange[0]}, which this policy's block does not have: no latent "
            f"attention, no experts, {'biases of q, k and v alone' if head.qkv_bias else 'no biases'}"
        )
    source.check(specs)
    return head


def dialect_of(folder: str) -> str:
    """Return the key of FORMATS that the head in `folder` has. Raises InputError as `load_config`."""
    source, _ = _find(folder)
    return next(name for name, candidate in FORMATS.items() if candidate is source.format)


def load_params(
    folder: str, config: mtp.MTPConfig, partition: Partitioner, *, dtype: jnp.dtype | None = None
) -> Params:
    """Read parameters in the training layout; dtype None = each tensor's own. Raises InputError as `load_config`."""
    source, index = _find(folder)
    return source.load(_specs(config, source.format, index), partition, dtype)


def save(
    folder: str,
    params: Params,
    config: mtp.MTPConfig,
    *,
    target: decoder.DecoderConfig,
    dtype: str,
    dialect: str = "deepseek",
) -> None:
    """Write a folder that the loaders above read; its config.json is the target's with one MTP layer.

    Args:
      dtype: storage dtype of the tensors, "float32" or "bfloat16".
      dialect: a key of FORMATS.
    """
    chosen = FORMATS[dialect]
    specs = _specs(config, chosen, 0 if dialect == "mimo" else target.layers)

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in hf_tensors(specs, params, dtype):
            yield name, _embedding_first(tensor, chosen, name)

    save_folder(folder, tensors(), {**hf_config(target, dtype), "num_nextn_predict_layers": 1})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _HeadFolder(TensorFolder):
    """A folder whose projection is read embedding first, whatever its format."""

    format: MTPFormat

    def tensor(self, name: str) -> np.ndarray:
        return _embedding_first(super().tensor(name), self.format, name)


def _embedding_first(tensor: np.ndarray, found: MTPFormat, name: str) -> np.ndarray:
    """Exchange the two halves of a projection's inputs where the format's order is not ours; its own inverse."""
    if not (found.hidden_first and name.endswith("." + found.name("eh_proj.weight"))):
        return tensor
    return np.concatenate(np.split(tensor, 2, axis=1)[::-1], axis=1)


def _find(folder: str) -> tuple[_HeadFolder, int]:
    """Return the folder, and the number of its first MTP layer."""
    found = []
    for candidate in FORMATS.values():
        source = _HeadFolder(folder, "draft.path", format=candidate)
        pattern = re.escape(candidate.prefix) + r"(\d+)\." + re.escape(candidate.name("eh_proj.weight"))
        numbers = [int(match[1]) for name in source.names() if (match := re.fullmatch(pattern, name))]
        found += [(source, min(numbers))] if numbers else []
    if len(found) != 1:
        names = " and ".join(f"{d.prefix}*.{d.name('eh_proj.weight')}" for d in FORMATS.values())
        raise InputError(
            f"draft.path: '{folder}' must hold an MTP layer in one dialect: it has {len(found)} of {names}"
        )
    return found[0]


def _specs(config: mtp.MTPConfig, found: MTPFormat, index: int) -> Specs:
    """Return `mtp.param_specs` in the names of a format."""

    def named(spec: ParamSpec) -> ParamSpec:
        name = found.name(spec.hf_name.removeprefix(_LAYER))
        return dataclasses.replace(spec, hf_name=f"{found.prefix}{index}.{name}")

    return jax.tree.map(named, mtp.param_specs(config))


def _check_config(folder: str, target: decoder.DecoderConfig) -> None:
    """Raise InputError where the folder's sizes are not the target's."""
    raw = TensorFolder(folder, "draft.path").config()
    file = raw.check(DecoderFile)
    if file.use_sliding_window:
        raise raw.error("asks for use_sliding_window, which is not supported")
    rope = read_rope(raw)
    found, wanted = file.model_dump() | {"rope_theta": rope.theta}, hf_config(target, "")
    # The head has the policy's tables, whether or not they are one.
    for key in LayerFields.model_fields.keys() & wanted.keys() - {"rope_scaling", "max_position_embeddings"}:
        if found[key] != wanted[key]:
            raise raw.error(f"has {key}={found[key]}, this policy has {wanted[key]}")
    # Plain positions are stretched with the policy's: the checkpoint does not state the lengths that it is served at.
    if rope not in (target.rope.pretrained, target.rope):
        raise raw.error(f"has {rope.scaling}, this policy has {target.rope.scaling}")
