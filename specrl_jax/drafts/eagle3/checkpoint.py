"""EAGLE-3 heads as folders, in three dialects, recognised by config.json and by the names of the layer's tensors:

    sglang       midlayer.*  sizes at the top of config.json     SafeAILab, SpecForge, SGLang
    vllm         layers.0.*  sizes at the top of config.json     vLLM, Model Optimizer
    speculators  layers.0.*  sizes in transformer_layer_config   speculators, vLLM

with the same further tensors: fc, norm, lm_head, d2t (target id - draft id), t2d (is a target id drafted), and the
norms of a head that has them. What the dialects say differently, or not at all:

  * Layers that are read. The key eagle_aux_hidden_state_layer_ids names the layers *entered* where it is at the top
    (vLLM, speculators, and Eagle3Config), and those whose *outputs* are read, one less, where it is in eagle_config
    (SpecForge, SGLang, Model Optimizer). Flat configs are written with both. Without either: layers 2, L / 2, L - 3.
  * norm_before_residual, where absent, is False in a flat config and True in a nested one, as vLLM reads them.
  * norm_output feeds the head's own output back after its final norm, in vLLM, speculators and SGLang. SpecForge trains
    on the output before the norm whatever the key says, and writes the same config. So under midlayer.* the key alone
    is refused: `FEEDBACK` beside it says what is meant, and is written here. Where the key is false or absent there is
    a final norm before the unembedding all the same.
  * max_position_embeddings is not read: many heads say 2048, where vLLM clamps their rotary positions. Here angles are
    computed for any position, nothing is clamped, and what is written is the target's own limit.
  * rope_scaling is the head's own, as for vLLM, SGLang and speculators, whatever its target's: a yarn or nothing. Model
    Optimizer trains without and writes a yarn for lengths beyond those of the training; where rollouts are not longer
    than that, take it out of the head's config.json.
  * The embedding is the policy's and is not stored. A copy in the folder (embed_tokens) is ignored, one that was
    trained with the head is refused.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.core import InputError
from specrl_jax.drafts.eagle3 import network as eagle3
from specrl_jax.io.hf import hf_config, number, read_rope, rope_scaling
from specrl_jax.io.tensors import TensorFolder, hf_tensors, save_folder
from specrl_jax.models import qwen3
from specrl_jax.models.layers import ParamSpec
from specrl_jax.sharding import Partitioner


@dataclasses.dataclass(frozen=True)
class Dialect:
    """How one family of checkpoints writes down a head."""

    layer: str  # prefix of the layer's tensors
    nested: bool  # sizes are in config.json's transformer_layer_config


DIALECTS = {
    "sglang": Dialect("midlayer.", nested=False),
    "vllm": Dialect("layers.0.", nested=False),
    "speculators": Dialect("layers.0.", nested=True),
}
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
FEEDBACK = "norm_output_feeds_back"
VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# speculators wants a number of drafted tokens; it is the server's to choose, and this what its own converter writes.
SPECULATIVE_TOKENS = 3


def load_config(folder: str, target: qwen3.Qwen3Config) -> eagle3.Eagle3Config:
    """Sizes and variants of the head in `folder`, checked against its target; reads headers, d2t and t2d only.

    Its heads, their width, its mlp, rotary base and epsilon are its own. Raises InputError for a missing or damaged
    folder, another architecture, what is not supported (see the module), and sizes that do not go with the target.
    """
    source, name = _find(folder)
    raw = source.config()
    sizes = raw["transformer_layer_config"] if DIALECTS[name].nested else raw
    _check_supported(folder, raw, sizes, target)
    try:
        head = eagle3.eagle3_config(target, int(number(raw, "draft_vocab_size")))
        own = {field: type(getattr(head, field))(number(sizes, key)) for field, key in _SIZES.items()}
        own["head_dim"] = int(sizes.get("head_dim") or head.embed // own["heads"])
        own["rope_theta"], own["yarn"] = read_rope(sizes, folder, "draft.path")
    except KeyError as error:
        raise InputError(f"draft.path: {folder}/config.json lacks {error}") from None
    if own["heads"] % own["kv_heads"] or own["head_dim"] % 2:
        raise InputError(
            f"draft.path: {folder} has {own['heads']} heads of {own['head_dim']}, {own['kv_heads']} of keys; "
            "the first must be a multiple of the last, and their width even"
        )
    variants = _variants(folder, raw, name)
    head = dataclasses.replace(head, aux_layers=_aux_layers(folder, raw, head, target), **own, **variants)
    _check_tensors(source, DIALECTS[name], head, raw, target)
    load_vocab_map(folder, head, target)
    return head


def load_params(folder: str, head: eagle3.Eagle3Config, partition: Partitioner, dtype: jnp.dtype | None = None) -> Any:
    """The learner's parameter tree; dtype None keeps each tensor's own. Raises InputError as `load_config` does."""
    source, name = _find(folder)
    return source.load(_specs(head, DIALECTS[name], source), partition, dtype)


def load_vocab_map(folder: str, head: eagle3.Eagle3Config, target: qwen3.Qwen3Config) -> np.ndarray:
    """[Vd] int32 target id of each draft id; the file has d2t, the difference of the two.

    A head over the whole vocabulary may leave it out. Raises InputError where d2t does not name different ids of the
    target, or t2d names others.
    """
    source = _folder(folder)
    names = source.names()
    if "d2t" not in names and head.draft_vocab == target.vocab:
        return np.arange(target.vocab, dtype=np.int32)
    d2t = source.tensor("d2t")
    if d2t.shape != (head.draft_vocab,):
        raise InputError(f"draft.path: d2t in {folder} has shape {d2t.shape}, ({head.draft_vocab},) is needed")
    ids = d2t + np.arange(head.draft_vocab)
    if len(np.unique(ids)) != len(ids) or ids.min() < 0 or ids.max() >= target.vocab:
        raise InputError(f"draft.path: d2t in {folder} does not name {len(ids)} different ids below {target.vocab}")
    if "t2d" in names and not np.array_equal(source.tensor("t2d"), _drafted(ids, target)):
        raise InputError(f"draft.path: t2d in {folder} is not true of exactly the ids that d2t names")
    return ids.astype(np.int32)


def save(
    folder: str,
    params: Any,
    vocab_map: np.ndarray,
    head: eagle3.Eagle3Config,
    target: qwen3.Qwen3Config,
    dtype: str,
    dialect: str = "sglang",
    verifier: str = "",
) -> None:
    """Writes a folder that the loaders above and the users of a dialect read.

    Args:
      dtype: storage dtype of the tensors, "float32" or "bfloat16".
      dialect: a key of DIALECTS.
      verifier: folder or name of the target, '' where it has none. speculators' own module takes the embedding from
        there and does not load without it; the other dialects do not name it.
    """
    ids = np.asarray(vocab_map, np.int64)

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        yield from hf_tensors(_specs(head, DIALECTS[dialect]), params, dtype)
        yield "d2t", ids - np.arange(len(ids))
        yield "t2d", _drafted(ids, target)

    if DIALECTS[dialect].nested:
        config = _nested_config(head, target, dtype, verifier)
    else:
        config = _flat_config(head, target, dtype)
    if dialect == "sglang" and head.norm_output:
        config |= {FEEDBACK: True}
    save_folder(folder, tensors(), config)


# Field of Eagle3Config -> key of config.json, both ways; head_dim and rope_theta may be elsewhere in what is read.
_SIZES = {
    "embed": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "mlp": "intermediate_size",
    "norm_epsilon": "rms_norm_eps",
}
_LAYER = "midlayer."  # in the names of `eagle3.param_specs`
_LEGACY = {f"fc_norm.{i}.weight": f"aux_norm_{name}.weight" for i, name in enumerate(("low", "mid", "high"))}
_EMBEDDING = "embed_tokens.weight"


def _folder(path: str) -> TensorFolder:
    return TensorFolder(path, "draft.path")


def _find(folder: str) -> tuple[TensorFolder, str]:
    """The folder and its dialect, a key of DIALECTS."""
    source = _folder(folder)
    raw = source.config()
    nested = "speculators_model_type" in raw
    if nested and raw["speculators_model_type"] != "eagle3":
        raise InputError(
            f"draft.path: {folder} holds a '{raw['speculators_model_type']}' speculator, expected 'eagle3'"
        )
    if nested and not isinstance(raw.get("transformer_layer_config"), dict):
        raise InputError(f"draft.path: {folder}/config.json lacks 'transformer_layer_config'")
    if not nested and raw.get("architectures") not in [[name] for name in ARCHITECTURES]:
        raise InputError(
            f"draft.path: {folder} holds {raw.get('architectures')}, expected ['{ARCHITECTURES[0]}'] or a speculators "
            "config"
        )
    found = [
        key
        for key, dialect in DIALECTS.items()
        if dialect.nested == nested and any(name.startswith(dialect.layer) for name in source.names())
    ]
    if len(found) != 1:
        prefixes = " or ".join(f"{dialect.layer}*" for dialect in DIALECTS.values() if dialect.nested == nested)
        raise InputError(f"draft.path: {folder} must hold one layer, {prefixes}; it has {len(found)} of these")
    return source, found[0]


def _check_supported(folder: str, raw: dict[str, Any], sizes: dict[str, Any], target: qwen3.Qwen3Config) -> None:
    """Raises InputError for what would make another forward than `eagle3.layer`, or one of another target."""
    for key in ("attention_bias", "mlp_bias", "qkv_bias", "bias", "tie_word_embeddings", "use_sliding_window"):
        if sizes.get(key):
            raise InputError(f"draft.path: {folder} asks for {key}, which is not supported")
    if "sliding_attention" in (sizes.get("layer_types") or ()):
        raise InputError(f"draft.path: {folder} asks for sliding_attention, which is not supported")
    # Key -> the one value that is supported; absent or null is that value.
    only = {"hidden_act": "silu", "num_hidden_layers": 1}
    everywhere = {"target_hidden_size": target.embed, "num_aux_hidden_states": 3}
    for config, values in ((sizes, only), (raw, everywhere)):
        for key, value in values.items():
            if config.get(key) not in (None, value):
                raise InputError(f"draft.path: {folder} has {key}={config[key]}, only {value} is supported")
    for key, ours in (("hidden_size", target.embed), ("vocab_size", target.vocab)):
        if sizes.get(key) is None:
            raise InputError(f"draft.path: {folder}/config.json lacks '{key}'")
        if sizes[key] != ours:
            raise InputError(f"draft.path: {folder} has {key}={sizes[key]}, the policy has {ours}")


def _check_tensors(
    source: TensorFolder, dialect: Dialect, head: eagle3.Eagle3Config, raw: dict[str, Any], target: qwen3.Qwen3Config
) -> None:
    """Raises InputError for tensors that are missing, too many, or of other shapes."""
    specs = _specs(head, dialect, source)
    names = set(source.names())
    strange = sorted(names - {spec.hf_name for spec in jax.tree.leaves(specs)} - {"d2t", "t2d", _EMBEDDING})
    if strange:
        raise InputError(
            f"draft.path: {source.path} holds {strange[0]}, which this head does not have: one layer, no biases, no "
            f"norms of queries or keys, and of {', '.join(VARIANTS[1:3])} what its config.json declares"
        )
    if _EMBEDDING in names:
        source.check(ParamSpec((target.vocab, target.embed), (None, None), 0, _EMBEDDING, "v d -> v d"))
        if raw.get("embed_requires_grad"):
            raise InputError(
                f"draft.path: {source.path} was trained with an embedding of its own (embed_requires_grad), which is "
                "not supported: the head reads the policy's"
            )
    source.check(specs)


def _aux_layers(
    folder: str, raw: dict[str, Any], head: eagle3.Eagle3Config, target: qwen3.Qwen3Config
) -> tuple[int, int, int]:
    """The layers that are entered by what the head reads, from whichever key names them."""
    key, nested = "eagle_aux_hidden_state_layer_ids", raw.get("eagle_config") or {}
    # (key, its ids, how far behind the layer that is named the one is that is entered)
    named = [(key, raw.get(key), 0), (f"eagle_config.{key}", nested.get(key), 1)]
    named.append(("eagle_config.layer_ids", nested.get("layer_ids"), 0))  # vLLM's
    named = [entry for entry in named if entry[1] is not None]
    if not named:
        return head.aux_layers
    for name, ids, _ in named:
        if not (isinstance(ids, list) and len(ids) == 3 and all(type(i) is int for i in ids)):
            raise InputError(f"draft.path: {folder} has {name}={ids}, three layers are needed")
    entered = [tuple(i + shift for i in ids) for _, ids, shift in named]
    if len(set(entered)) > 1:
        said = ", ".join(f"{name}={ids} ({'outputs' if shift else 'inputs'})" for name, ids, shift in named)
        raise InputError(f"draft.path: {folder} names different layers: {said}; take out the wrong ones")
    low, middle, high = entered[0]
    if not 0 <= low < middle < high < target.layers:
        raise InputError(
            f"draft.path: {folder} reads what enters layers {low}, {middle} and {high}; they must ascend within "
            f"0..{target.layers - 1}"
        )
    return low, middle, high


def _variants(folder: str, raw: dict[str, Any], name: str) -> dict[str, bool]:
    """The fields VARIANTS of Eagle3Config."""
    default = {"norm_before_residual": DIALECTS[name].nested}
    nested = raw.get("eagle_config") or {}  # where Model Optimizer writes some of them

    def flag(key: str) -> bool:
        given = [config[key] for config in (raw, nested) if config.get(key) is not None]
        return bool(given[0]) if given else default.get(key, False)

    flags = {key: flag(key) for key in VARIANTS}
    flags["fc_norm"] |= bool(raw.get("use_aux_norm"))  # SGLang's earlier name
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise InputError(f"draft.path: {folder} has both norm_before_fc and fc_norm; a head has one of them at most")
    if flags["norm_output"] and name == "sglang":
        if not isinstance(raw.get(FEEDBACK), bool):
            raise InputError(
                f"draft.path: {folder} has norm_output=true, which says two things: add {FEEDBACK}=true to its "
                "config.json if the head was trained on its output after the final norm (as SGLang runs it), false if "
                "on that before (as SpecForge trains)"
            )
        flags["norm_output"] = raw[FEEDBACK]
    return flags


def _specs(head: eagle3.Eagle3Config, dialect: Dialect, source: TensorFolder | None = None) -> Any:
    """`eagle3.param_specs` in the names of a dialect, and in SGLang's earlier ones where the source has these."""
    names = () if source is None else source.names()

    def named(spec: ParamSpec) -> ParamSpec:
        name = spec.hf_name
        if name.startswith(_LAYER):
            name = dialect.layer + name.removeprefix(_LAYER)
        if _LEGACY.get(name) in names:
            name = _LEGACY[name]
        return dataclasses.replace(spec, hf_name=name)

    return jax.tree.map(named, eagle3.param_specs(head))


def _drafted(ids: np.ndarray, target: qwen3.Qwen3Config) -> np.ndarray:
    """t2d: [V] bool."""
    return np.isin(np.arange(target.vocab), ids)


def _sizes_config(head: eagle3.Eagle3Config, target: qwen3.Qwen3Config, dtype: str) -> dict[str, Any]:
    return (
        {key: getattr(head, field) for field, key in _SIZES.items()}
        | {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "vocab_size": target.vocab,
            "head_dim": head.head_dim,
            "rope_theta": head.rope_theta,
            "max_position_embeddings": target.max_positions,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
        }
        | rope_scaling(head.yarn)
    )


def _flat_config(head: eagle3.Eagle3Config, target: qwen3.Qwen3Config, dtype: str) -> dict[str, Any]:
    # Variants only where they are on: what SpecForge would read in norm_output=false is no final norm at all.
    return _sizes_config(head, target, dtype) | {
        "architectures": [ARCHITECTURES[0]],
        "draft_vocab_size": head.draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(head.aux_layers),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in head.aux_layers]},
        **{key: True for key in VARIANTS if getattr(head, key)},
    }


def _nested_config(head: eagle3.Eagle3Config, target: qwen3.Qwen3Config, dtype: str, verifier: str) -> dict[str, Any]:
    # Every variant, on or off, so that no reader's default decides.
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": head.draft_vocab,
        "target_hidden_size": head.embed,
        "eagle_aux_hidden_state_layer_ids": list(head.aux_layers),
        **{key: getattr(head, key) for key in VARIANTS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "transformer_layer_config": _sizes_config(head, target, dtype) | {"attention_bias": False, "mlp_bias": False},
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": SPECULATIVE_TOKENS}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier or None, "architectures": hf_config(target, dtype)["architectures"]},
        },
    }
