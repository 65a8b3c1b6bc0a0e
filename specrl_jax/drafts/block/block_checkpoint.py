"""Read and write block drafters as folders, in three formats recognised by config.json:

    deepspec     `block_size`, `target_layer_ids`, `mask_token_id`, `markov_rank` at the top       DeepSpec
    zlab         `dflash_config` with `target_layer_ids` and `mask_token_id`                       z-lab, SpecForge
    speculators  speculators_model_type "dspark" or "dflash", sizes in transformer_layer_config    speculators, vLLM

All name their tensors fc, hidden_norm, norm and layers.N.*. A Markov head is markov_head.markov_w1 and markov_w2, a
confidence head confidence_head.proj.
Copies of the target's embed_tokens and lm_head are ignored, as they are frozen. Layer i of `target_layer_ids` is the
one whose *output* is read, of speculators' `aux_hidden_state_layer_ids` the one that is *entered*. `block_size` counts
slots: of a DSpark block all predict a token, of a DFlash block all but the first; speculators says so in
`sample_from_anchor`, so a drafter whose slots are those of the other kind is written in that format. Blocks that attend
one way (`causal`, `is_causal`) are refused. A reduced vocabulary is an lm_head of so many rows, and d2t, as in EAGLE-3
heads; the first two formats have none, there it is ours.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pydantic

from specrl_jax.core import Params
from specrl_jax.drafts.block.block_network import BlockConfig, param_specs
from specrl_jax.drafts.vocab_ids import read_ids, vocab_tensors
from specrl_jax.io.config_json import ConfigJson, LayerFields, Size
from specrl_jax.io.families import check_heads, hf_config
from specrl_jax.io.rope_json import read_rope
from specrl_jax.io.tensors import TensorFolder, hf_tensors, save_folder
from specrl_jax.json_files import Checked
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.sharding import Partitioner

ARCHITECTURES = {"deepspec": "Qwen3DSparkModel", "zlab": "DFlashDraftModel"}
# Has it a Markov head -> speculators_model_type and architecture.
SPECULATORS = {True: ("dspark", "DSparkDraftModel"), False: ("dflash", "DFlashDraftModel")}
_IGNORED = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
_CONFIDENCE = "confidence_head."


class BlockFile(Checked):
    """The keys of a block drafter's config.json beside the sizes of its layers."""

    block_size: Size | None = None
    draft_vocab_size: Size | None = None
    markov_rank: int = pydantic.Field(default=0, ge=0, le=2**16)
    markov_head_type: str = "vanilla"
    sample_from_anchor: bool | None = None
    is_causal: bool = False
    confidence_head_with_markov: bool = True


class BlockSizes(LayerFields):
    """The sizes of its layers."""

    attention_bias: bool = False
    layer_types: list[str] | None = None


class BlockEntry(Checked):
    """The keys that DeepSpec and speculators have at the top and z-lab in dflash_config."""

    target_layer_ids: list[int] | None = None
    aux_hidden_state_layer_ids: list[int] | None = None
    mask_token_id: int
    block_size: int | None = None
    causal: bool = False


def load_config(folder: str, target: DecoderConfig) -> BlockConfig:
    """Return the sizes of the drafter in `folder`, checked against its target; read headers only.

    Raises InputError for a missing or damaged folder, and sizes that do not go with the target.
    """
    source = TensorFolder(folder, "draft.path")
    raw = source.config()
    name = _find(raw)
    place = raw.section("transformer_layer_config") if name == "speculators" else raw
    file, sizes = raw.check(BlockFile), place.check(BlockSizes)
    entry = (raw.section("dflash_config") if name == "zlab" else raw).check(BlockEntry)
    _check_supported(raw, file, sizes, target)
    if file.is_causal or entry.causal:
        key = "is_causal" if file.is_causal else "causal"
        raise raw.error(f"has {key}=true, which is not supported: the slots of a block read each other both ways")
    slots = file.block_size or entry.block_size
    if not slots:
        raise raw.lacks("block_size")
    if not 0 <= entry.mask_token_id < target.vocab:
        raise raw.error(f"has mask_token_id={entry.mask_token_id}, which the policy's vocabulary lacks")
    config = BlockConfig(
        embed=target.embed,
        heads=sizes.num_attention_heads,
        kv_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        mlp=sizes.intermediate_size,
        rope=read_rope(place),
        norm_epsilon=sizes.rms_norm_eps,
        max_positions=target.max_positions,
        vocab=target.vocab,
        draft_vocab=file.draft_vocab_size or target.vocab,
        layers=sizes.num_hidden_layers,
        aux_layers=_aux_layers(raw, entry, name, target),
        slots=slots,
        from_anchor=_from_anchor(raw, file, name),
        mask_token=entry.mask_token_id,
        markov_rank=file.markov_rank,
        # One that reads the hidden state alone is left out.
        confidence=file.confidence_head_with_markov and f"{_CONFIDENCE}proj.weight" in source.names(),
    )
    known = {*_names(config), *_IGNORED}
    strange = sorted(n for n in source.names() if n not in known and not n.startswith(_CONFIDENCE))
    if strange:
        raise raw.error(f"holds {strange[0]}, which a block drafter does not have")
    source.check(param_specs(config))
    return config


def _find(raw: ConfigJson) -> str:
    """Return the format of a folder's config.json. Raises InputError for another speculator."""
    kind = raw.get("speculators_model_type")
    if kind is None:
        return "zlab" if "dflash_config" in raw.values else "deepspec"
    kinds = [name for name, _ in SPECULATORS.values()]
    if kind not in kinds:
        raise raw.error(f"holds a '{kind}' speculator, expected {' or '.join(kinds)}")
    return "speculators"


def _check_supported(raw: ConfigJson, file: BlockFile, sizes: BlockSizes, target: DecoderConfig) -> None:
    for name, found, ours in (
        ("hidden_size", sizes.hidden_size, target.embed),
        ("vocab_size", sizes.vocab_size, target.vocab),
    ):
        if found != ours:
            raise raw.error(f"has {name}={found}, the policy has {ours}")
    if sizes.use_sliding_window or sizes.attention_bias or "sliding_attention" in (sizes.layer_types or ()):
        raise raw.error("asks for use_sliding_window or attention_bias, which are not supported")
    check_heads(raw, sizes)
    if file.markov_head_type != "vanilla":
        raise raw.error(f"has markov_head_type={file.markov_head_type}; vanilla is supported")


def _aux_layers(raw: ConfigJson, entry: BlockEntry, name: str, target: DecoderConfig) -> tuple[int, ...]:
    """Return the layers that are entered with what the drafter reads."""
    key, shift = ("aux_hidden_state_layer_ids", 0) if name == "speculators" else ("target_layer_ids", 1)
    ids: list[int] | None = getattr(entry, key)
    if ids is None:
        raise raw.lacks(key)
    layers = tuple(i + shift for i in ids)
    if list(layers) != sorted(set(layers) & set(range(target.layers))):
        kind = "outputs of" if shift else "what enters"
        raise raw.error(f"reads {kind} layers {ids}; they must ascend within 0..{target.layers - 1 - shift}")
    return layers


def _from_anchor(raw: ConfigJson, file: BlockFile, name: str) -> bool:
    if name != "speculators":
        return name == "deepspec"
    said = file.sample_from_anchor
    return raw.get("speculators_model_type") == "dspark" if said is None else said


def load_params(folder: str, config: BlockConfig, partition: Partitioner, *, dtype: jnp.dtype | None = None) -> Params:
    """Read parameters in the training layout; dtype None = each tensor's own. Raises InputError as `load_config`."""
    return TensorFolder(folder, "draft.path").load(param_specs(config), partition, dtype)


def load_vocab_map(folder: str, config: BlockConfig, target: DecoderConfig) -> np.ndarray:
    """Return [Vd] int32 target ids of the draft ids. Raises InputError as `read_ids`."""
    return read_ids(TensorFolder(folder, "draft.path"), config.draft_vocab, target.vocab)


def save(
    folder: str,
    params: Params,
    vocab_map: np.ndarray | None,
    *,
    config: BlockConfig,
    target: DecoderConfig,
    dtype: str,
    dialect: str,
    verifier: str = "",
) -> None:
    """Write a folder that the loaders above read; its config.json has the sizes of the drafter's own layers.

    Args:
      vocab_map: [Vd], of a drafter on a reduced vocabulary.
      dtype: of the stored tensors, "float32" or "bfloat16".
      dialect: "speculators", or the format of the config's kind of slots.
      verifier: folder or name of the target, which speculators' modules take embedding and lm_head from; '' = none.
    """

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        yield from hf_tensors(param_specs(config), params, dtype)
        if vocab_map is not None:
            found = vocab_tensors(vocab_map, target)
            yield from (found if dialect == "speculators" else {"d2t": found["d2t"]}).items()

    keys: dict[str, Any] = {"block_size": config.slots, "mask_token_id": config.mask_token}
    if config.markov_rank:
        keys |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": config.confidence,
        }
        keys["confidence_head_with_markov"] = config.confidence
    as_target = {"tie_word_embeddings": target.tied, "max_position_embeddings": target.longest}
    content = hf_config(config.block, dtype) | as_target
    if dialect == "speculators":
        content = _speculators(config, content, hf_config(target, dtype)["architectures"], verifier)
    else:
        keys["target_layer_ids"] = [i - 1 for i in config.aux_layers]
        keys["architectures"] = [ARCHITECTURES[dialect]]
        if vocab_map is not None:
            keys["draft_vocab_size"] = config.draft_vocab
        if dialect == "zlab":
            keys["dflash_config"] = {name: keys.pop(name) for name in ("target_layer_ids", "mask_token_id")}
    save_folder(folder, tensors(), {**content, **keys})


def _speculators(config: BlockConfig, layers: dict[str, object], of_target: object, verifier: str) -> dict[str, object]:
    """Return speculators' config.json but for the keys that all formats have.

    Args:
      layers: config.json of a model of its layers.
      of_target: the target's architectures.
    """
    kind, architecture = SPECULATORS[bool(config.markov_rank)]
    return {
        "speculators_model_type": kind,
        "architectures": [architecture],
        "transformer_layer_config": layers,
        "draft_vocab_size": config.draft_vocab,
        "aux_hidden_state_layer_ids": list(config.aux_layers),
        "sample_from_anchor": config.from_anchor,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.longest}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier or None, "architectures": of_target},
        },
    }


def _names(config: BlockConfig) -> Iterator[str]:
    """Yield the names of all tensors of a drafter."""
    for spec in jax.tree.leaves(param_specs(config)):
        layers = range(config.layers) if "{layer}" in spec.hf_name else range(1)
        yield from (spec.hf_name.format(layer=i) for i in layers)
