"""The config.json of EAGLE-3 heads in three formats, read and written.

`checkpoint.py` says how the formats differ; `draft.dialect` names the one that is written.
"""

import dataclasses
from collections.abc import Sequence

from specrl_jax.drafts.eagle3.network import Eagle3Config, eagle3_config
from specrl_jax.io.config_json import ConfigJson
from specrl_jax.io.hf import hf_config, read_rope, rope_scaling
from specrl_jax.models.qwen3 import Qwen3Config


@dataclasses.dataclass(frozen=True)
class Format:
    """How one family of checkpoints stores a head."""

    layer: str  # prefix of the layer's tensors
    nested: bool  # sizes are in config.json's transformer_layer_config


FORMATS = {
    "sglang": Format("midlayer.", nested=False),
    "vllm": Format("layers.0.", nested=False),
    "speculators": Format("layers.0.", nested=True),
}
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
FEEDBACK = "norm_output_feeds_back"
VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# speculators requires a number of drafted tokens. The server chooses it; its own converter writes this one.
SPECULATIVE_TOKENS = 3
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


def find_format(raw: ConfigJson, tensors: Sequence[str]) -> str:
    """Return the key of FORMATS of a head, given its tensors' names. Raises InputError for no head."""
    nested = "speculators_model_type" in raw.values
    if nested and raw.get("speculators_model_type") != "eagle3":
        raise raw.error(f"holds a '{raw.get('speculators_model_type')}' speculator, expected 'eagle3'")
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


def read_head(raw: ConfigJson, name: str, target: Qwen3Config) -> Eagle3Config:
    """Return sizes and variants of a head in format `name`, checked against its target.

    Heads, their width, mlp, rotary base and epsilon are the head's own. Raises InputError for missing entries,
    unsupported ones, and sizes that do not go with the target.
    """
    sizes = raw.section("transformer_layer_config") if FORMATS[name].nested else raw
    _check_supported(raw, sizes, target)
    head = eagle3_config(target, raw.integer("draft_vocab_size"))
    heads, kv_heads = sizes.integer("num_attention_heads"), sizes.integer("num_key_value_heads")
    head_dim = sizes.integer("head_dim") if sizes.get("head_dim") else head.embed // heads
    if heads % kv_heads or head_dim % 2:
        raise raw.error(
            f"has {heads} heads of {head_dim}, {kv_heads} of keys; "
            "the first must be a multiple of the last, and their width even"
        )
    theta, yarn = read_rope(sizes)
    return dataclasses.replace(
        head,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=sizes.integer("intermediate_size"),
        rope_theta=theta,
        yarn=yarn,
        norm_epsilon=sizes.number("rms_norm_eps"),
        aux_layers=_aux_layers(raw, target) or head.aux_layers,
        **_variants(raw, name),
    )


def _check_supported(raw: ConfigJson, sizes: ConfigJson, target: Qwen3Config) -> None:
    """Raise InputError for entries that change the forward of `network.layer`, and for another target's sizes."""
    for key in ("attention_bias", "mlp_bias", "qkv_bias", "bias", "tie_word_embeddings", "use_sliding_window"):
        if sizes.get(key):
            raise raw.error(f"asks for {key}, which is not supported")
    layer_types = sizes.get("layer_types")
    if isinstance(layer_types, list) and "sliding_attention" in layer_types:
        raise raw.error("asks for sliding_attention, which is not supported")
    # Key -> its one supported value, which it also has where it is absent or null.
    only: dict[str, object] = {"hidden_act": "silu", "num_hidden_layers": 1}
    everywhere: dict[str, object] = {"target_hidden_size": target.embed, "num_aux_hidden_states": 3}
    for config, values in ((sizes, only), (raw, everywhere)):
        for key, value in values.items():
            if config.get(key) not in (None, value):
                raise raw.error(f"has {key}={config.get(key)}, only {value} is supported")
    for key, ours in (("hidden_size", target.embed), ("vocab_size", target.vocab)):
        if sizes.get(key) is None:
            raise raw.lacks(key)
        if sizes.get(key) != ours:
            raise raw.error(f"has {key}={sizes.get(key)}, the policy has {ours}")


def _aux_layers(raw: ConfigJson, target: Qwen3Config) -> tuple[int, int, int] | None:
    """Return the layers whose inputs the head reads, from whichever key names them; None where none does."""
    nested = raw.section("eagle_config")
    # (key, layers, the distance from each to the layer that is entered)
    entries = [(AUX_LAYERS, raw.get(AUX_LAYERS), 0), (f"eagle_config.{AUX_LAYERS}", nested.get(AUX_LAYERS), 1)]
    entries.append(("eagle_config.layer_ids", nested.get("layer_ids"), 0))  # vLLM's
    named: list[tuple[str, list[int], int]] = []
    for name, ids, shift in entries:
        if ids is None:
            continue
        if not (isinstance(ids, list) and len(ids) == 3 and all(type(i) is int for i in ids)):
            raise raw.error(f"has {name}={ids}, three layers are needed")
        named.append((name, ids, shift))
    if not named:
        return None
    entered = [tuple(i + shift for i in ids) for _, ids, shift in named]
    if len(set(entered)) > 1:
        said = ", ".join(f"{name}={ids} ({'outputs' if shift else 'inputs'})" for name, ids, shift in named)
        raise raw.error(f"names different layers: {said}; take out the wrong ones")
    low, middle, high = entered[0]
    if not 0 <= low < middle < high < target.layers:
        raise raw.error(
            f"reads what enters layers {low}, {middle} and {high}; they must ascend within 0..{target.layers - 1}"
        )
    return low, middle, high


def _variants(raw: ConfigJson, name: str) -> dict[str, bool]:
    """Return the fields VARIANTS of Eagle3Config."""
    nested = raw.section("eagle_config")  # where Model Optimizer writes some of them
    flags = {key: (nested if raw.get(key) is None else raw).flag(key) for key in VARIANTS}
    if raw.get("norm_before_residual") is None:
        flags["norm_before_residual"] = nested.flag("norm_before_residual", default=FORMATS[name].nested)
    flags["fc_norm"] |= bool(raw.get("use_aux_norm"))  # SGLang's earlier name
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise raw.error("has both norm_before_fc and fc_norm; a head has one of them at most")
    if flags["norm_output"] and name == "sglang":
        if not isinstance(raw.get(FEEDBACK), bool):
            raise raw.error(
                f"has norm_output=true, which says two things: add {FEEDBACK}=true to its config.json if the head was "
                "trained on its output after the final norm (as SGLang runs it), false if on that before (as SpecForge "
                "trains)"
            )
        flags["norm_output"] = raw.flag(FEEDBACK)
    return flags


def write_head(head: Eagle3Config, target: Qwen3Config, dtype: str, name: str, verifier: str) -> dict[str, object]:
    """Return the content of config.json in format `name`; arguments as in `checkpoint.save`."""
    sizes = {
        "hidden_size": head.embed,
        "num_attention_heads": head.heads,
        "num_key_value_heads": head.kv_heads,
        "intermediate_size": head.mlp,
        "rms_norm_eps": head.norm_epsilon,
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": target.vocab,
        "head_dim": head.head_dim,
        "rope_theta": head.rope_theta,
        "max_position_embeddings": target.max_positions,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **rope_scaling(head.yarn),
    }
    variants: dict[str, bool] = {key: getattr(head, key) for key in VARIANTS}
    if not FORMATS[name].nested:
        # Variants only where they are on: SpecForge reads norm_output=false as no final norm at all.
        flags = {key: True for key, on in variants.items() if on}
        if name == "sglang" and head.norm_output:
            flags[FEEDBACK] = True
        return {
            **sizes,
            "architectures": [ARCHITECTURES[0]],
            "draft_vocab_size": head.draft_vocab,
            AUX_LAYERS: list(head.aux_layers),
            "eagle_config": {AUX_LAYERS: [i - 1 for i in head.aux_layers]},
            **flags,
        }
    # Every variant, on or off, so that no reader's default decides.
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": head.draft_vocab,
        "target_hidden_size": head.embed,
        AUX_LAYERS: list(head.aux_layers),
        **variants,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "transformer_layer_config": {**sizes, "attention_bias": False, "mlp_bias": False},
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": SPECULATIVE_TOKENS}],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": verifier or None,
                "architectures": hf_config(target, dtype)["architectures"],
            },
        },
    }
