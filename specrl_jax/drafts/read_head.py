"""Read config.json of trained heads: fields of a head's config, checked against its target.

Heads, their width, mlp, rotary base and epsilon are the head's own. Every reader raises InputError for missing entries,
unsupported ones, and sizes that do not go with the target. Where the libraries differ, or leave something open:

  * Layers that are read. EAGLE-3's eagle_aux_hidden_state_layer_ids names the layers *entered* where it is at the top
    (vLLM, speculators, and Eagle3Config), and those whose *outputs* are read, one less, where it is in eagle_config
    (SpecForge, SGLang, Model Optimizer). Flat configs are written with both. Without either: those of a new head. A
    head for a policy of one or two layers reads as many (num_aux_hidden_states). Of block drafters, target_layer_ids
    are outputs, speculators' aux_hidden_state_layer_ids layers that are entered.
  * norm_before_residual, where absent, is False in a flat config and True in a nested one, as vLLM reads them.
  * norm_output feeds the head's own output back after its final norm, in vLLM, speculators and SGLang. SpecForge trains
    on the output before the norm whatever the key says, and writes the same config. So under midlayer.* the key alone
    is refused: `FEEDBACK` beside it decides, and is written here. Where the key is false or absent, the final norm
    before the lm_head remains.
  * max_position_embeddings is not read: many heads say 2048, where vLLM clamps their rotary positions. Here angles are
    computed for any position, nothing is clamped, and the target's own limit is written.
  * rope_scaling is the head's own, whatever its target's, as for vLLM, SGLang and speculators: a yarn or nothing. Model
    Optimizer trains without and writes a yarn for lengths beyond those of the training. Where rollouts are not longer
    than that, remove it from the head's config.json.
  * block_size counts slots: of a DSpark block all predict a token, of a DFlash block all but the first; speculators
    says so in sample_from_anchor. Blocks that attend one way (causal, is_causal) are refused.
"""

import dataclasses
from typing import Annotated, Any, Literal

import pydantic

from specrl_jax.io.config_json import ConfigJson, LayerFields, Size
from specrl_jax.io.families import HYBRID_ROPE, DecoderFile, check_heads, hf_config, text_part
from specrl_jax.io.rope_json import read_rope
from specrl_jax.io.tensors import TensorFolder
from specrl_jax.json_files import Checked
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.layers import table_spec

NESTED = "speculators"  # the format whose sizes are in transformer_layer_config
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
FEEDBACK = "norm_output_feeds_back"
VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
AuxLayers = Annotated[list[int], pydantic.Field(min_length=1, max_length=3)]
EMBEDDING, CONFIDENCE = "embed_tokens.weight", "confidence_head.proj.weight"
_UNSUPPORTED = ("attention_bias", "mlp_bias", "qkv_bias", "bias", "use_sliding_window")


class HeadLayers(LayerFields):
    """The sizes of a head's layers."""

    hidden_act: Literal["silu"] = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    qkv_bias: bool = False
    bias: bool = False
    layer_types: list[str] | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _with_usual(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Add what may be missing: one layer, and heads that together are as wide as the model."""
        given = {key: value for key, value in values.items() if value is not None}
        heads, width = given.get("num_attention_heads"), given.get("hidden_size")
        usual = {"head_dim": width // heads} if isinstance(heads, int) and isinstance(width, int) and heads > 0 else {}
        return {"num_hidden_layers": 1} | usual | given


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


class Eagle3File(Variants):
    """The keys of an EAGLE-3 or P-EAGLE head beside its layers' sizes."""

    draft_vocab_size: Size
    target_hidden_size: Size | None = None
    num_aux_hidden_states: int | None = None
    eagle_aux_hidden_state_layer_ids: AuxLayers | None = None
    eagle_config: EagleEntry = EagleEntry()
    norm_output_feeds_back: bool | None = None
    use_aux_norm: bool = False  # SGLang's earlier name of fc_norm
    embed_requires_grad: bool | None = None
    parallel_drafting: bool = False
    mask_token_id: int | None = None
    ptd_token_id: int | None = None
    pard_token: int | None = None


class BlockFile(Checked):
    """The keys of a block drafter beside its layers' sizes; z-lab has some of them in dflash_config."""

    block_size: Size | None = None
    draft_vocab_size: Size | None = None
    target_layer_ids: list[int] | None = None
    aux_hidden_state_layer_ids: list[int] | None = None
    mask_token_id: int
    markov_rank: int = pydantic.Field(default=0, ge=0, le=2**16)
    markov_head_type: str = "vanilla"
    sample_from_anchor: bool | None = None
    is_causal: bool = False
    causal: bool = False
    confidence_head_with_markov: bool = True


def read_eagle3(source: TensorFolder, name: str, target: DecoderConfig) -> dict[str, Any]:
    """Return the fields of an EAGLE-3 head in format `name`."""
    raw = source.config()
    file = raw.check(Eagle3File)
    if EMBEDDING in source.names():
        source.check({"embed": table_spec(target.vocab, target.embed, "embed_tokens", fan_in=0)})
        if file.embed_requires_grad:
            raise raw.error(
                "was trained with an embedding of its own (embed_requires_grad), which is not supported: the head "
                "reads the policy's"
            )
    fields = _eagle_fields(raw, file, name, target)
    if (layers := fields.pop("layers")) != 1:
        raise raw.error(f"has num_hidden_layers={layers}, a head of 1 is supported")
    return fields


def read_peagle(source: TensorFolder, name: str, target: DecoderConfig) -> dict[str, Any]:
    """Return the fields of a P-EAGLE draft in format `name`."""
    raw = source.config()
    file = raw.check(Eagle3File)
    if name != NESTED and not file.parallel_drafting:
        raise raw.error("has no parallel_drafting: it is an EAGLE-3 head, draft.kind=eagle3")
    tokens = [x for x in (file.mask_token_id, file.ptd_token_id, file.pard_token) if x is not None]
    if len(set(tokens)) != 1 or not 0 <= tokens[0] < target.vocab:
        raise raw.error(
            f"has the mask tokens {tokens}; mask_token_id, ptd_token_id or pard_token must name one of the policy's "
            f"{target.vocab}"
        )
    return _eagle_fields(raw, file, name, target) | {
        "mask_token": tokens[0],
        "own_embedding": EMBEDDING in source.names() and file.embed_requires_grad is not False,
        # That of EAGLE-3.1 is about what the recurrence feeds back, and there is none.
        "norm_output": False,
    }


def read_block(source: TensorFolder, name: str, target: DecoderConfig) -> dict[str, Any]:
    """Return the fields of a block drafter in format `name`."""
    raw = source.config()
    inner = raw.section("dflash_config")
    raw = dataclasses.replace(raw, values={**raw.values, **{key: inner.get(key) for key in inner.present()}})
    file = raw.check(BlockFile)
    for key in ("is_causal", "causal"):
        if getattr(file, key):
            raise raw.error(f"has {key}=true, which is not supported: the slots of a block read each other both ways")
    if not file.block_size:
        raise raw.lacks("block_size")
    if not 0 <= file.mask_token_id < target.vocab:
        raise raw.error(f"has mask_token_id={file.mask_token_id}, which the policy's vocabulary lacks")
    if file.markov_head_type != "vanilla":
        raise raw.error(f"has markov_head_type={file.markov_head_type}; vanilla is supported")
    key, outputs = ("aux_hidden_state_layer_ids", False) if name == NESTED else ("target_layer_ids", True)
    from_anchor = raw.get("speculators_model_type") == "dspark" if name == NESTED else name == "deepspec"
    return _layer_fields(raw, name, target) | {
        "draft_vocab": file.draft_vocab_size or target.vocab,
        "aux_layers": _entered_layers(raw, [(key, getattr(file, key), outputs)], target),
        "slots": file.block_size,
        "from_anchor": from_anchor if name != NESTED or file.sample_from_anchor is None else file.sample_from_anchor,
        "mask_token": file.mask_token_id,
        "markov_rank": file.markov_rank,
        # One that reads the hidden state alone is left out.
        "confidence": file.confidence_head_with_markov and CONFIDENCE in source.names(),
    }


def read_mtp(source: TensorFolder, name: str, target: DecoderConfig) -> dict[str, Any]:
    """Check that the sizes of an MTP head are its target's; there are no other fields."""
    raw = text_part(source.config())
    rope = read_rope(raw, HYBRID_ROPE if target.delta else frozenset())
    file, ours = raw.check(DecoderFile), hf_config(target, "")
    if file.use_sliding_window:
        raise raw.error("asks for use_sliding_window, which is not supported")
    found = file.model_dump() | {"rope_theta": rope.theta}
    # The head has the policy's tables, whether or not they are one.
    for key in LayerFields.model_fields.keys() & ours.keys() - {
        "rope_scaling",
        "rope_parameters",
        "max_position_embeddings",
    }:
        if found[key] != ours[key]:
            raise raw.error(f"has {key}={found[key]}, this policy has {ours[key]}")
    # Plain positions are stretched with the policy's: the checkpoint does not state the lengths that it is served at.
    if rope not in (target.rope.pretrained, target.rope):
        raise raw.error(f"has {rope.scaling}, this policy has {target.rope.scaling}")
    return {}


def _layer_fields(raw: ConfigJson, name: str, target: DecoderConfig) -> dict[str, Any]:
    """Return the sizes of a head's layers, wherever format `name` has them."""
    place = raw.section("transformer_layer_config") if name == NESTED else raw
    sizes = place.check(HeadLayers)
    for key in _UNSUPPORTED:
        if getattr(sizes, key):
            raise raw.error(f"asks for {key}, which is not supported")
    if "sliding_attention" in (sizes.layer_types or ()):
        raise raw.error("asks for sliding_attention, which is not supported")
    for key, found, ours in (
        ("hidden_size", sizes.hidden_size, target.embed),
        ("vocab_size", sizes.vocab_size, target.vocab),
    ):
        if found != ours:
            raise raw.error(f"has {key}={found}, the policy has {ours}")
    check_heads(raw, sizes)
    return {
        "heads": sizes.num_attention_heads,
        "kv_heads": sizes.num_key_value_heads,
        "head_dim": sizes.head_dim,
        "mlp": sizes.intermediate_size,
        "rope": read_rope(place),
        "norm_epsilon": sizes.rms_norm_eps,
        "layers": sizes.num_hidden_layers,
    }


def _entered_layers(
    raw: ConfigJson, entries: list[tuple[str, list[int] | None, bool]], target: DecoderConfig
) -> tuple[int, ...]:
    """Return the layers whose inputs a head reads, of entries (key, layers or None, are these their outputs)."""
    named = [(key, ids, outputs) for key, ids, outputs in entries if ids is not None]
    if not named:
        raise raw.lacks(entries[0][0])
    entered = {tuple(i + outputs for i in ids) for _, ids, outputs in named}
    if len(entered) > 1:
        said = ", ".join(f"{key}={ids} ({'outputs' if outputs else 'inputs'})" for key, ids, outputs in named)
        raise raw.error(f"names different layers: {said}; take out the wrong ones")
    (layers,) = entered
    if list(layers) != sorted(set(layers) & set(range(target.layers))):
        shown = ", ".join(map(str, layers))
        raise raw.error(f"reads what enters layers {shown}; they must ascend within 0..{target.layers - 1}")
    return layers


def _eagle_fields(raw: ConfigJson, file: Eagle3File, name: str, target: DecoderConfig) -> dict[str, Any]:
    if file.target_hidden_size not in (None, target.embed):
        raise raw.error(f"has target_hidden_size={file.target_hidden_size}, only {target.embed} is supported")
    if (raw.section("transformer_layer_config") if name == NESTED else raw).get("tie_word_embeddings"):
        raise raw.error("asks for tie_word_embeddings, which is not supported")
    fields = _layer_fields(raw, name, target) | {"draft_vocab": file.draft_vocab_size} | _variants(raw, file, name)
    inner, usual = file.eagle_config, min(3, target.layers)
    entries = [
        (AUX_LAYERS, file.eagle_aux_hidden_state_layer_ids, False),
        (f"eagle_config.{AUX_LAYERS}", inner.eagle_aux_hidden_state_layer_ids, True),
        ("eagle_config.layer_ids", inner.layer_ids, False),
    ]
    if any(ids is not None for _, ids, _ in entries):
        fields["aux_layers"] = _entered_layers(raw, entries, target)
    count = len(fields["aux_layers"]) if "aux_layers" in fields else usual
    if count != (file.num_aux_hidden_states or usual):
        raise raw.error(f"reads {count} layers, and num_aux_hidden_states={file.num_aux_hidden_states or usual}")
    return fields


def _variants(raw: ConfigJson, file: Eagle3File, name: str) -> dict[str, bool]:
    """Return the fields VARIANTS."""
    defaults = dict.fromkeys(VARIANTS, False) | {"norm_before_residual": name == NESTED}
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
