"""Write config.json of trained heads, as `read_head` and the libraries of each format read it."""

from typing import Any

from specrl_jax.drafts.read_head import ARCHITECTURES, AUX_LAYERS, FEEDBACK, NESTED, VARIANTS
from specrl_jax.io.families import hf_config
from specrl_jax.io.rope_json import rope_entries
from specrl_jax.models.decoder import DecoderConfig

# speculators_model_type -> its architecture
SPECULATORS = {
    "eagle3": "Eagle3DraftModel",
    "peagle": "PEagleDraftModel",
    "dspark": "DSparkDraftModel",
    "dflash": "DFlashDraftModel",
}
BLOCK_ARCHITECTURES = {"deepspec": "Qwen3DSparkModel", "zlab": "DFlashDraftModel"}
# speculators requires a number of drafted tokens. The server chooses it; its own converter writes this one.
SPECULATIVE_TOKENS = 3


def write_eagle(head: Any, name: str, target: DecoderConfig, *, kind: str, dtype: str, verifier: str) -> dict[str, Any]:
    """Return the config.json of an EAGLE-3 or P-EAGLE head in format `name`."""
    sizes = {
        "hidden_size": head.embed,
        "num_attention_heads": head.heads,
        "num_key_value_heads": head.kv_heads,
        "intermediate_size": head.mlp,
        "rms_norm_eps": head.norm_epsilon,
        "model_type": "llama",
        "num_hidden_layers": head.layers,
        "vocab_size": target.vocab,
        "head_dim": head.head_dim,
        "max_position_embeddings": target.longest,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **rope_entries(head.rope),
    }
    # Readers take three for granted.
    count = {} if len(head.aux_layers) == 3 else {"num_aux_hidden_states": len(head.aux_layers)}
    entered = {"draft_vocab_size": head.draft_vocab, **count, AUX_LAYERS: list(head.aux_layers)}
    if name == NESTED:
        # Every variant, on or off, so that no reader's default decides.
        own = {"mask_token_id": head.mask_token} if kind == "peagle" else {}
        return {
            "target_hidden_size": head.embed,
            **entered,
            **{key: getattr(head, key) for key in VARIANTS},
            "embed_requires_grad": kind == "peagle" and head.own_embedding,
            "torch_dtype": dtype,
            "transformer_layer_config": {**sizes, "attention_bias": False, "mlp_bias": False},
            **_speculators(kind, SPECULATIVE_TOKENS, target, verifier),
            **own,
        }
    # Variants only where they are on: SpecForge reads norm_output=false as no final norm at all.
    feedback = {FEEDBACK: True} if name == "sglang" and head.norm_output else {}
    own = {"parallel_drafting": True, "ptd_token_id": head.mask_token} if kind == "peagle" else {}
    return {
        **sizes,
        "architectures": [ARCHITECTURES[0]],
        **entered,
        "eagle_config": {AUX_LAYERS: [i - 1 for i in head.aux_layers]},
        **{key: True for key in VARIANTS if getattr(head, key)},
        **feedback,
        **own,
    }


def write_block(head: Any, name: str, target: DecoderConfig, *, kind: str, dtype: str, verifier: str) -> dict[str, Any]:
    """Return the config.json of a block drafter in format `name`."""
    layers = hf_config(head.block, dtype)
    layers |= {"tie_word_embeddings": target.tied, "max_position_embeddings": target.longest}
    keys = {"block_size": head.slots, "mask_token_id": head.mask_token}
    if head.markov_rank:
        keys |= {"markov_rank": head.markov_rank, "markov_head_type": "vanilla"}
        keys |= dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), head.confidence)
    if name == NESTED:
        return {
            "transformer_layer_config": layers,
            "draft_vocab_size": head.draft_vocab,
            "aux_hidden_state_layer_ids": list(head.aux_layers),
            "sample_from_anchor": head.from_anchor,
            **_speculators(kind, head.longest, target, verifier),
            **keys,
        }
    keys |= {"target_layer_ids": [i - 1 for i in head.aux_layers], "architectures": [BLOCK_ARCHITECTURES[name]]}
    if head.draft_vocab < head.vocab:
        keys["draft_vocab_size"] = head.draft_vocab
    if name == "zlab":
        keys["dflash_config"] = {key: keys.pop(key) for key in ("target_layer_ids", "mask_token_id")}
    return {**layers, **keys}


def write_mtp(head: Any, name: str, target: DecoderConfig, *, kind: str, dtype: str, verifier: str) -> dict[str, Any]:
    """Return the config.json of an MTP head, its target's with one MTP layer."""
    layers = "mtp_num_hidden_layers" if target.delta else "num_nextn_predict_layers"
    return {**hf_config(target, dtype), layers: 1}


def _speculators(kind: str, drafts: int, target: DecoderConfig, verifier: str) -> dict[str, Any]:
    """Return the entries that speculators has of every kind; `verifier`: the target's folder or name, '' = none."""
    return {
        "architectures": [SPECULATORS[kind]],
        "speculators_model_type": kind,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": verifier or None,
                "architectures": hf_config(target, "")["architectures"],
            },
        },
    }
