"""The config.json of EAGLE-3 heads in three formats, read and written.

`checkpoint.py` says how the formats differ; `draft.dialect` names the one that is written.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from specrl_jax.drafts.eagle3.eagle3_network import Eagle3Config, eagle3_config
from specrl_jax.io.config_json import ConfigJson, Epsilon, Roped, Size
from specrl_jax.io.families import hf_config
from specrl_jax.io.rope_json import read_rope, rope_entries
from specrl_jax.json_files import Checked
from specrl_jax.models.decoder import DecoderConfig


@dataclasses.dataclass(frozen=True)
class Eagle3Format:
    """Layout in which one family of checkpoints stores a head."""

    layer: str  # prefix of the layer's tensors
    nested: bool  # sizes are in config.json's transformer_layer_config


FORMATS = {
    "sglang": Eagle3Format("midlayer.", nested=False),
    "vllm": Eagle3Format("layers.0.", nested=False),
    "speculators": Eagle3Format("layers.0.", nested=True),
}
NESTED = {"eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel"}  # architectures that speculators writes
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
FEEDBACK = "norm_output_feeds_back"
VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# speculators requires a number of drafted tokens. The server chooses it; its own converter writes this one.
SPECULATIVE_TOKENS = 3
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
AuxLayers = Annotated[list[int], Field(min_length=1, max_length=3)]


class LayerFile(Roped):
    """The sizes of a head's layer."""

    hidden_size: Size
    vocab_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size | None = None
    intermediate_size: Size
    rms_norm_eps: Epsilon
    hidden_act: Literal["silu"] = "silu"
    num_hidden_layers: Size = 1
    attention_bias: bool = False
    mlp_bias: bool = False
    qkv_bias: bool = False
    bias: bool = False
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    layer_types: list[str] | None = None


class Variants(Checked):
    """The fields VARIANTS of Eagle3Config, where the file has them."""

    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None


class EagleEntry(Variants):
    """The entry eagle_config, where Model Optimizer writes some of them."""

    eagle_aux_hidden_state_layer_ids: AuxLayers | None = None
    layer_ids: AuxLayers | None = None  # vLLM's


class HeadFile(Variants):
    """The keys of a head beside its layer's sizes."""

    draft_vocab_size: Size
    target_hidden_size: Size | None = None
    num_aux_hidden_states: int | None = None
    eagle_aux_hidden_state_layer_ids: AuxLayers | None = None
    eagle_config: EagleEntry = EagleEntry()
    norm_output_feeds_back: bool | None = None
    use_aux_norm: bool = False  # SGLang's earlier name of fc_norm
    embed_requires_grad: bool = False


def find_format(raw: ConfigJson, tensors: Sequence[str], kind: str = "eagle3") -> str:
    """Return the key of FORMATS of a head, given its tensors' names. Raises InputError for no head of this kind."""
    nested = "speculators_model_type" in raw.values
    if nested and raw.get("speculators_model_type") != kind:
        raise raw.error(f"holds a '{raw.get('speculators_model_type')}' speculator, expected '{kind}'")
    if nested and not isinstance(raw.get("transformer_layer_config"), dict):
        raise raw.lacks("transformer_layer_config")
    if not nested and raw.get("architectures") not in [[name] for name in ARCHITECTURES]:
        raise raw.error(f"holds {raw.get('architectures')}, expected ['{ARCHITECTURES[0]}'] or a speculators config")
    candidates = {name: found.layer for name, found in FORMATS.items() if found.nested == nested}
    found = [name for name, layer in candidates.items() if any(tensor.startswith(layer) for tensor in tensors)]
    if len(found) != 1:
        prefixes = " or ".join(f"{layer}*" for layer in candidates.values())
        raise raw.error(f"must hold one layer, {prefixes}; it has {len(found)} of these")
    return found[0]


def read_layers(raw: ConfigJson, name: str) -> int:
    """Return the number of layers of a head in format `name`."""
    return _layer_sizes(raw, name).check(LayerFile).num_hidden_layers


def _layer_sizes(raw: ConfigJson, name: str) -> ConfigJson:
    return raw.section("transformer_layer_config") if FORMATS[name].nested else raw


def read_head(raw: ConfigJson, name: str, target: DecoderConfig) -> Eagle3Config:
    """Return sizes and variants of the first layer of a head in format `name`, checked against its target.

    Heads, their width, mlp, rotary base and epsilon are the head's own. Raises InputError for missing entries,
    unsupported ones, and sizes that do not go with the target.
    """
    file = raw.check(HeadFile)
    place = _layer_sizes(raw, name)
    sizes = place.check(LayerFile)
    _check_supported(raw, file, sizes, target)
    head = eagle3_config(target, file.draft_vocab_size)
    heads, kv_heads = sizes.num_attention_heads, sizes.num_key_value_heads
    head_dim = sizes.head_dim or head.embed // heads
    if heads % kv_heads or head_dim % 2:
        raise raw.error(
            f"has {heads} heads of {head_dim}, {kv_heads} of keys; "
            "the first must be a multiple of the last, and their width even"
        )
    aux_layers = _aux_layers(raw, file, target) or head.aux_layers
    count = file.num_aux_hidden_states or min(3, target.layers)
    if len(aux_layers) != count:
        raise raw.error(f"reads {len(aux_layers)} layers, and num_aux_hidden_states={count}")
    return dataclasses.replace(
        head,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=sizes.intermediate_size,
        rope=read_rope(place),
        norm_epsilon=sizes.rms_norm_eps,
        aux_layers=aux_layers,
        **_variants(raw, file, name),
    )


def _check_supported(raw: ConfigJson, file: HeadFile, sizes: LayerFile, target: DecoderConfig) -> None:
    """Raise InputError for entries that change the forward of `network.layer`, and for another target's sizes."""
    for key in ("attention_bias", "mlp_bias", "qkv_bias", "bias", "tie_word_embeddings", "use_sliding_window"):
        if getattr(sizes, key):
            raise raw.error(f"asks for {key}, which is not supported")
    if "sliding_attention" in (sizes.layer_types or ()):
        raise raw.error("asks for sliding_attention, which is not supported")
    # Key -> its one supported value, which it also has where it is absent or null.
    for key, found, value in (("target_hidden_size", file.target_hidden_size, target.embed),):
        if found not in (None, value):
            raise raw.error(f"has {key}={found}, only {value} is supported")
    for key, found, ours in (
        ("hidden_size", sizes.hidden_size, target.embed),
        ("vocab_size", sizes.vocab_size, target.vocab),
    ):
        if found != ours:
            raise raw.error(f"has {key}={found}, the policy has {ours}")


def _aux_layers(raw: ConfigJson, file: HeadFile, target: DecoderConfig) -> tuple[int, ...] | None:
    """Return the layers whose inputs the head reads, from whichever key names them; None where none does."""
    nested = file.eagle_config
    # (key, layers, the distance from each to the layer that is entered)
    entries = [
        (AUX_LAYERS, file.eagle_aux_hidden_state_layer_ids, 0),
        (f"eagle_config.{AUX_LAYERS}", nested.eagle_aux_hidden_state_layer_ids, 1),
        ("eagle_config.layer_ids", nested.layer_ids, 0),
    ]
    named = [(name, ids, shift) for name, ids, shift in entries if ids is not None]
    if not named:
        return None
    entered = [tuple(i + shift for i in ids) for _, ids, shift in named]
    if len(set(entered)) > 1:
        said = ", ".join(f"{name}={ids} ({'outputs' if shift else 'inputs'})" for name, ids, shift in named)
        raise raw.error(f"names different layers: {said}; take out the wrong ones")
    layers = entered[0]
    if list(layers) != sorted(set(layers) & set(range(target.layers))):
        shown = ", ".join(map(str, layers))
        raise raw.error(f"reads what enters layers {shown}; they must ascend within 0..{target.layers - 1}")
    return layers


def _variants(raw: ConfigJson, file: HeadFile, name: str) -> dict[str, bool]:
    """Return the fields VARIANTS of Eagle3Config."""
    defaults = dict.fromkeys(VARIANTS, False) | {"norm_before_residual": FORMATS[name].nested}
    said = file.eagle_config.model_dump(include=set(VARIANTS)), file.model_dump(include=set(VARIANTS))
    flags = defaults | {key: on for entry in said for key, on in entry.items() if on is not None}
    flags["fc_norm"] |= file.use_aux_norm
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise raw.error("has both norm_before_fc and fc_norm; a head has one of them at most")
    if flags["norm_output"] and name == "sglang":
        if file.norm_output_feeds_back is None:
            raise raw.error(
                f"has norm_output=true, which says two things: add {FEEDBACK}=true to its config.json if the head was "
                "trained on its output after the final norm (as SGLang runs it), false if on that before (as SpecForge "
                "trains)"
            )
        flags["norm_output"] = file.norm_output_feeds_back
    return flags


def write_head(
    head: Eagle3Config,
    target: DecoderConfig,
    dtype: str,
    *,
    name: str,
    verifier: str,
    kind: str = "eagle3",
    layers: int = 1,
) -> dict[str, object]:
    """Return the content of config.json in format `name`; arguments as in `checkpoint.save`."""
    sizes = {
        "hidden_size": head.embed,
        "num_attention_heads": head.heads,
        "num_key_value_heads": head.kv_heads,
        "intermediate_size": head.mlp,
        "rms_norm_eps": head.norm_epsilon,
        "model_type": "llama",
        "num_hidden_layers": layers,
        "vocab_size": target.vocab,
        "head_dim": head.head_dim,
        "max_position_embeddings": target.longest,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **rope_entries(head.rope),
    }
    if FORMATS[name].nested:
        of_target = {"name_or_path": verifier or None, "architectures": hf_config(target, dtype)["architectures"]}
        return _nested(head, sizes, kind=kind, verifier=of_target)
    return _flat(head, sizes, feedback=name == "sglang" and head.norm_output)


def _flat(head: Eagle3Config, sizes: dict[str, object], feedback: bool) -> dict[str, object]:
    # Variants only where they are on: SpecForge reads norm_output=false as no final norm at all.
    return {
        **sizes,
        "architectures": [ARCHITECTURES[0]],
        "draft_vocab_size": head.draft_vocab,
        **_count(head),
        AUX_LAYERS: list(head.aux_layers),
        "eagle_config": {AUX_LAYERS: [i - 1 for i in head.aux_layers]},
        **{key: True for key in VARIANTS if getattr(head, key)},
        **({FEEDBACK: True} if feedback else {}),
    }


def _nested(
    head: Eagle3Config, sizes: dict[str, object], *, kind: str, verifier: dict[str, object]
) -> dict[str, object]:
    # Every variant, on or off, so that no reader's default decides.
    return {
        "architectures": [NESTED[kind]],
        "speculators_model_type": kind,
        "draft_vocab_size": head.draft_vocab,
        "target_hidden_size": head.embed,
        **_count(head),
        AUX_LAYERS: list(head.aux_layers),
        **{key: getattr(head, key) for key in VARIANTS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": sizes["torch_dtype"],
        "transformer_layer_config": {**sizes, "attention_bias": False, "mlp_bias": False},
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": SPECULATIVE_TOKENS}],
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
    }


def _count(head: Eagle3Config) -> dict[str, int]:
    # Readers take three for granted.
    return {} if len(head.aux_layers) == 3 else {"num_aux_hidden_states": len(head.aux_layers)}
