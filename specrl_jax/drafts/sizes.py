"""Sizes of drafts with weights, by which memory and time are estimated before a draft is made."""

from specrl_jax.drafts.block import BlockConfig, block_config
from specrl_jax.drafts.eagle3 import Eagle3Config, eagle3_config
from specrl_jax.drafts.peagle import PEagleConfig, peagle_config
from specrl_jax.models.decoder import DecoderConfig

# Slots of a new drafter's block, as of the published ones: both draft seven tokens.
NEW_SLOTS = {"dspark": 7, "dflash": 8}
Head = Eagle3Config | PEagleConfig | BlockConfig
ONE_PASS = ("peagle", "dspark", "dflash")  # kinds that are priced as what they are, others as an EAGLE-3 head


def priced_head(kind: str, model: DecoderConfig, draft_vocab: int, *, slots: int, layers: int) -> Head:
    """Return what a draft with weights is priced as: a new draft of one pass of its sizes, or an EAGLE-3 head.

    Args:
      draft_vocab: 0: the policy's.
    """
    vocab = draft_vocab or model.vocab
    if kind == "peagle":
        return peagle_config(model, layers, vocab)
    if kind not in ONE_PASS:
        return eagle3_config(model, vocab)
    return block_config(model, slots, layers, draft_vocab=vocab, markov=kind == "dspark")


def head_parameters(h: Head) -> int:
    """Count the weights in the matmuls of a head's drafts, `fc` included, without norms."""
    layers = h.layers * ((2 * h.heads + 2 * h.kv_heads) * h.head_dim + 3 * h.mlp)
    if not isinstance(h, BlockConfig):  # q, k and v of the first layer read an embedding too
        layers += (h.heads + 2 * h.kv_heads) * h.head_dim
    return h.embed * (layers + len(h.aux_layers) * h.embed) + vocabulary_parameters(h)


def vocabulary_parameters(h: Head) -> int:
    """Count the weights of a head's lm_head, and of what the Markov head adds to its logits."""
    return h.draft_vocab * (h.embed + (h.markov_rank if isinstance(h, BlockConfig) else 0))
