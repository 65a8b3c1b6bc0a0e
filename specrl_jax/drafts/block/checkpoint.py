"""Read and write block drafters as folders, in two formats recognised by config.json:

    deepspec  `block_size`, `target_layer_ids`, `mask_token_id`, `markov_rank` at the top     DeepSpec
    zlab      `dflash_config` with `target_layer_ids` and `mask_token_id`                     z-lab's DFlash, SpecForge

Both name tensors fc, hidden_norm, norm and layers.N.*; DeepSpec adds markov_head.markov_w1 and markov_w2, and copies of
the target's embed_tokens and lm_head, which are ignored here as they are frozen there. Layer i of `target_layer_ids` is
the one whose *output* is read. `block_size` counts slots: of a DSpark block all predict a token, of a DFlash block all
but the first. A reduced vocabulary is ours: lm_head.weight of so many rows and d2t, as in EAGLE-3 heads.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pydantic

from specrl_jax.core import Params
from specrl_jax.drafts.block.network import BlockConfig, param_specs
from specrl_jax.drafts.vocab_ids import read_ids, stored_ids
from specrl_jax.io.config_json import Qwen3Sizes, Size
from specrl_jax.io.hf import check_heads, hf_config, read_rope
from specrl_jax.io.tensors import TensorFolder, hf_tensors, save_folder
from specrl_jax.json_files import Checked
from specrl_jax.models.qwen3 import Qwen3Config
from specrl_jax.sharding import Partitioner

ARCHITECTURES = {"deepspec": "Qwen3DSparkModel", "zlab": "DFlashDraftModel"}
_IGNORED = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
_CONFIDENCE = "confidence_head."


class BlockFile(Qwen3Sizes):
    """The keys of a block drafter's config.json that are read."""

    block_size: Size | None = None
    draft_vocab_size: Size | None = None
    markov_rank: int = pydantic.Field(default=0, ge=0, le=2**16)
    markov_head_type: str = "vanilla"
    attention_bias: bool = False


class BlockEntry(Checked):
    """The keys that DeepSpec has at the top and z-lab in dflash_config."""

    target_layer_ids: list[int]
    mask_token_id: int
    block_size: int | None = None


def load_config(folder: str, target: Qwen3Config) -> BlockConfig:
    """Return the sizes of the drafter in `folder`, checked against its target; read headers only.

    Raises InputError for a missing or damaged folder, and sizes that do not go with the target.
    """
    source = TensorFolder(folder, "draft.path")
    raw = source.config()
    file, nested = raw.check(BlockFile), "dflash_config" in raw.values
    entry = (raw.section("dflash_config") if nested else raw).check(BlockEntry)
    for name, found, ours in (
        ("hidden_size", file.hidden_size, target.embed),
        ("vocab_size", file.vocab_size, target.vocab),
    ):
        if found != ours:
            raise raw.error(f"has {name}={found}, the policy has {ours}")
    if file.use_sliding_window or file.attention_bias:
        raise raw.error("asks for use_sliding_window or attention_bias, which are not supported")
    check_heads(raw, file)
    if file.markov_head_type != "vanilla":
        raise raw.error(f"has markov_head_type={file.markov_head_type}; vanilla is supported")
    slots = file.block_size or entry.block_size
    if not slots:
        raise raw.lacks("block_size")
    aux_layers = tuple(1 + i for i in entry.target_layer_ids)
    if list(aux_layers) != sorted(set(aux_layers) & set(range(target.layers))):
        raise raw.error(
            f"reads outputs of layers {entry.target_layer_ids}; they must ascend within 0..{target.layers - 2}"
        )
    if not 0 <= entry.mask_token_id < target.vocab:
        raise raw.error(f"has mask_token_id={entry.mask_token_id}, which the policy's vocabulary lacks")
    theta, yarn = read_rope(raw)
    config = BlockConfig(
        embed=target.embed,
        heads=file.num_attention_heads,
        kv_heads=file.num_key_value_heads,
        head_dim=file.head_dim,
        mlp=file.intermediate_size,
        rope_theta=theta,
        yarn=yarn,
        norm_epsilon=file.rms_norm_eps,
        max_positions=target.max_positions,
        vocab=target.vocab,
        draft_vocab=file.draft_vocab_size or target.vocab,
        layers=file.num_hidden_layers,
        aux_layers=aux_layers,
        slots=slots,
        from_anchor=not nested,
        mask_token=entry.mask_token_id,
        markov_rank=file.markov_rank,
    )
    known = {*_names(config), *_IGNORED}
    strange = sorted(n for n in source.names() if n not in known and not n.startswith(_CONFIDENCE))
    if strange:
        raise raw.error(f"holds {strange[0]}, which a block drafter does not have")
    source.check(param_specs(config))
    return config


def load_params(folder: str, config: BlockConfig, partition: Partitioner, dtype: jnp.dtype | None = None) -> Params:
    """Read parameters in the training layout; dtype None = each tensor's own. Raises InputError as `load_config`."""
    return TensorFolder(folder, "draft.path").load(param_specs(config), partition, dtype)


def load_vocab_map(folder: str, config: BlockConfig) -> np.ndarray:
    """Return [Vd] int32 target ids of the draft ids. Raises InputError as `read_ids`."""
    return read_ids(TensorFolder(folder, "draft.path"), config.draft_vocab, config.vocab)


def save(
    folder: str,
    params: Params,
    vocab_map: np.ndarray | None,
    config: BlockConfig,
    target: Qwen3Config,
    dtype: str,
) -> None:
    """Write a folder that the loaders above read; its config.json is the target's with the drafter's keys.

    Args:
      vocab_map: [Vd], of a drafter on a reduced vocabulary.
      dtype: of the stored tensors, "float32" or "bfloat16".
    """
    dialect = "deepspec" if config.from_anchor else "zlab"

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        yield from hf_tensors(param_specs(config), params, dtype)
        if vocab_map is not None:
            yield "d2t", stored_ids(vocab_map)

    entry: dict[str, Any] = {
        "target_layer_ids": [i - 1 for i in config.aux_layers],
        "mask_token_id": config.mask_token,
    }
    keys: dict[str, Any] = {
        "architectures": [ARCHITECTURES[dialect]],
        "num_hidden_layers": config.layers,
        "intermediate_size": config.mlp,
        "block_size": config.slots,
    }
    if config.markov_rank:
        keys |= {"markov_rank": config.markov_rank, "markov_head_type": "vanilla", "enable_confidence_head": False}
    if vocab_map is not None:
        keys["draft_vocab_size"] = config.draft_vocab
    keys |= {"dflash_config": entry} if dialect == "zlab" else entry
    save_folder(folder, tensors(), {**hf_config(target, dtype), **keys})


def _names(config: BlockConfig) -> Iterator[str]:
    """Yield the names of all tensors of a drafter."""
    for spec in jax.tree.leaves(param_specs(config)):
        layers = range(config.layers) if "{layer}" in spec.hf_name else range(1)
        yield from (spec.hf_name.format(layer=i) for i in layers)
