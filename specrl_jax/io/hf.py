"""Qwen3 checkpoints in Hugging Face format, in and out.

Loading streams: a tensor is read when the leaf it belongs to is built, straight into that leaf's shards, from a file
that is opened for that tensor alone, so that mapped pages of the checkpoint do not pile up. Leaves go from largest to
smallest, which keeps the peak near the checkpoint's size.
"""

import json
import os
import shutil
from collections.abc import Callable
from typing import Any

import einops
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from specrl_jax.core import BadInput, read_json
from specrl_jax.models import qwen3
from specrl_jax.models.layers import ParamSpec
from specrl_jax.sharding import Partitioner

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_FILE_BYTES = 5 * 2**30


def load_config(folder: str) -> qwen3.Qwen3Config:
    """Sizes from a checkpoint's config.json. Raises BadInput for a missing folder or another architecture."""
    raw = read_json(_require_file(folder, "config.json"))
    if raw.get("model_type") not in ("qwen3", "qwen3_moe"):
        raise BadInput(f"policy.path: {folder} holds a '{raw.get('model_type')}' model, expected qwen3")
    rope = raw.get("rope_parameters") or {}  # transformers 5 nests what 4 kept at the top
    if raw.get("rope_scaling") or rope.get("rope_type", "default") != "default":
        raise BadInput(f"policy.path: {folder} asks for rope_scaling, which is not supported")
    for key in ("attention_bias", "use_sliding_window"):
        if raw.get(key):
            raise BadInput(f"policy.path: {folder} asks for {key}, which is not supported")
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
        raise BadInput(f"policy.path: {folder}/config.json lacks {error}") from None


def check_params(folder: str, config: qwen3.Qwen3Config) -> None:
    """Raises BadInput as `load_params` would, reading headers only."""
    _check_shapes(folder, _tensor_files(folder), jax.tree.leaves(qwen3.param_specs(config)))


def load_params(folder: str, config: qwen3.Qwen3Config, partition: Partitioner, dtype: jnp.dtype | None = None) -> Any:
    """The learner's parameter tree from a local folder of safetensors.

    Args:
      dtype: of the result; None keeps each tensor's own.
    Raises:
      BadInput: a missing folder, file or tensor, a tensor of another shape, or a file that is not safetensors.
    """
    files = _tensor_files(folder)
    specs = qwen3.param_specs(config)
    leaves, treedef = jax.tree.flatten(specs)
    shardings = treedef.flatten_up_to(partition.tree(specs))
    _check_shapes(folder, files, leaves)
    loaded: list[Any] = [None] * len(leaves)
    for i in sorted(range(len(leaves)), key=lambda i: -leaves[i].size):
        read = _leaf_reader(folder, files, leaves[i], dtype)
        # Waiting keeps one leaf on its way at a time; the host would otherwise read ahead of the copies to the device
        # (measured: peak 1.36 times the checkpoint instead of 1.07).
        loaded[i] = jax.block_until_ready(jax.make_array_from_callback(leaves[i].shape, shardings[i], read))
    return treedef.unflatten(loaded)


def save_params(folder: str, params: Any, config: qwen3.Qwen3Config, dtype: str, tokenizer_from: str = "") -> None:
    """Writes a folder that `load_params` and transformers read: config.json, safetensors, and the tokenizer's files.

    Everything is written beside the folder first, so a save that fails leaves an earlier one as it was.

    Args:
      dtype: storage dtype of the tensors, "float32" or "bfloat16".
      tokenizer_from: a folder whose tokenizer files are copied; '' for none.
    """
    partial = os.path.normpath(folder) + ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    os.makedirs(partial)
    _write_shards(partial, _shards(params, config, dtype))
    with open(os.path.join(partial, "config.json"), "w") as file:
        json.dump(_hf_config(config, dtype), file, indent=2)
    for name in _TOKENIZER_FILES:
        if tokenizer_from and os.path.exists(os.path.join(tokenizer_from, name)):
            shutil.copy(os.path.join(tokenizer_from, name), partial)
    _move_into(partial, folder)


def _move_into(partial: str, folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    # Weights of an earlier save under other file names would be read instead of these, or with them.
    for name in os.listdir(folder):
        if name == INDEX or (name.startswith("model") and name.endswith(".safetensors")):
            os.remove(os.path.join(folder, name))
    for name in os.listdir(partial):
        os.replace(os.path.join(partial, name), os.path.join(folder, name))
    os.rmdir(partial)


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)


def _require_file(folder: str, name: str) -> str:
    if not os.path.isdir(folder):
        # The usual layout is checkpoints/<model>; name the command that makes exactly this folder.
        model = os.path.basename(os.path.normpath(folder))
        raise BadInput(
            f"policy.path: no folder '{folder}'; get it with `hf download Qwen/{model} --local-dir {folder}`"
        )
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        raise BadInput(f"policy.path: '{folder}' has no {name}")
    return path


def _tensor_files(folder: str) -> dict[str, str]:
    """Tensor name -> path of the file that holds it."""
    if os.path.exists(os.path.join(folder, INDEX)):
        index = read_json(os.path.join(folder, INDEX)).get("weight_map")
        if not isinstance(index, dict):
            raise BadInput(f"policy.path: {os.path.join(folder, INDEX)} has no weight_map")
        return {name: _require_file(folder, file) for name, file in index.items()}
    path = _require_file(folder, SINGLE)
    with _open(path) as file:
        return dict.fromkeys(file.keys(), path)


def _open(path: str) -> Any:
    try:
        return safetensors.safe_open(path, framework="numpy")
    except Exception as error:  # the library's own error type changed its home between versions
        raise BadInput(f"policy.path: {path} is not a readable safetensors file: {error}") from None


def _slice_name(spec: ParamSpec, index: tuple[int, ...]) -> str:
    return spec.hf_name.format(**dict(zip(("layer", "expert"), index)))


def _leading(spec: ParamSpec) -> tuple[int, ...]:
    """Sizes of the axes that Hugging Face spreads over tensor names: layers, experts."""
    return tuple(size for size, axis in zip(spec.shape, spec.axes) if axis in ("layers", "experts"))


def _hf_shape(spec: ParamSpec) -> tuple[int, ...]:
    """Shape of one Hugging Face tensor of this leaf."""
    # Every stride is zero, so merging axes copies nothing.
    return _rearrange_to_hf(spec, np.broadcast_to(np.False_, spec.shape[len(_leading(spec)) :])).shape


def _to_hf(spec: ParamSpec, ours: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(_rearrange_to_hf(spec, ours))


def _rearrange_to_hf(spec: ParamSpec, ours: np.ndarray) -> np.ndarray:
    left, right = spec.hf_layout.split(" -> ")
    return einops.rearrange(ours, f"{right} -> {left}")


def _from_hf(spec: ParamSpec, tensor: np.ndarray) -> np.ndarray:
    names = spec.hf_layout.split(" -> ")[1].split()
    sizes = dict(zip(names, spec.shape[len(_leading(spec)) :], strict=True))
    return einops.rearrange(tensor, spec.hf_layout, **sizes)


def _check_shapes(folder: str, files: dict[str, str], leaves: list[ParamSpec]) -> None:
    """Every tensor is present and of the right shape, before anything large is read."""
    shapes = [(spec, _hf_shape(spec)) for spec in leaves]
    wanted = {_slice_name(spec, i): shape for spec, shape in shapes for i in np.ndindex(*_leading(spec))}
    missing = sorted(wanted.keys() - files.keys())
    if missing:
        raise BadInput(f"policy.path: '{folder}' lacks {len(missing)} tensors, the first is {missing[0]}")
    for path in sorted({files[name] for name in wanted}):
        with _open(path) as file:
            present = set(file.keys())
            for name, shape in wanted.items():
                if files[name] != path:
                    continue
                if name not in present:
                    raise BadInput(f"policy.path: {INDEX} says {path} holds {name}, and it does not")
                found = tuple(file.get_slice(name).get_shape())
                if found != shape:
                    raise BadInput(f"policy.path: {name} has shape {found}, the preset needs {shape}")


def _leaf_reader(
    folder: str, files: dict[str, str], spec: ParamSpec, dtype: jnp.dtype | None
) -> Callable[[tuple[slice, ...]], np.ndarray]:
    """A function from a shard's index to that shard's values; only the layers and experts it covers are read."""
    leading = _leading(spec)

    def tensor(index: tuple[int, ...]) -> np.ndarray:
        name = _slice_name(spec, index)
        with _open(files[name]) as file:
            return _from_hf(spec, file.get_tensor(name))

    def read(index: tuple[slice, ...]) -> np.ndarray:
        outer, inner = index[: len(leading)], index[len(leading) :]
        ranges = [range(size)[part] for size, part in zip(leading, outer)]
        out: np.ndarray | None = None
        for place in np.ndindex(*map(len, ranges)):
            part = tensor(tuple(r[i] for r, i in zip(ranges, place)))[inner]
            if out is None:
                out = np.empty((*map(len, ranges), *part.shape), dtype or part.dtype)
            out[place] = part
        return out

    return read


def _hf_tensors(spec: ParamSpec, leaf: np.ndarray) -> list[tuple[str, np.ndarray]]:
    return [(_slice_name(spec, i), _to_hf(spec, leaf[i])) for i in np.ndindex(*_leading(spec))]


def _shards(params: Any, config: qwen3.Qwen3Config, dtype: str) -> list[dict[str, np.ndarray]]:
    """Tensors by Hugging Face name, dealt over files of at most MAX_FILE_BYTES."""
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for spec, leaf in zip(jax.tree.leaves(qwen3.param_specs(config)), jax.tree.leaves(params), strict=True):
        for name, tensor in _hf_tensors(spec, np.asarray(leaf).astype(jnp.dtype(dtype))):
            if size + tensor.nbytes > MAX_FILE_BYTES and shards[-1]:
                shards.append({})
                size = 0
            shards[-1][name] = tensor
            size += tensor.nbytes
    return shards


def _write_shards(folder: str, shards: list[dict[str, np.ndarray]]) -> None:
    metadata = {"format": "pt"}  # transformers refuses a file without it
    if len(shards) == 1:
        safetensors.numpy.save_file(shards[0], os.path.join(folder, SINGLE), metadata)
        return
    weight_map = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        safetensors.numpy.save_file(shard, os.path.join(folder, name), metadata)
        weight_map |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    with open(os.path.join(folder, INDEX), "w") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, file, indent=2)


def _hf_config(c: qwen3.Qwen3Config, dtype: str) -> dict[str, Any]:
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
