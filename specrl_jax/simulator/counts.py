"""Dtypes of the rollout, and weights, bytes and FLOP counted from the configs of a policy and its draft head."""

from typing import NamedTuple

import numpy as np

from specrl_jax.drafts.block.network import BlockConfig
from specrl_jax.drafts.eagle3.network import Eagle3Config
from specrl_jax.drafts.peagle.network import PEagleConfig
from specrl_jax.models.qwen3 import Qwen3Config
from specrl_jax.simulator.hardware import Array

BYTES = {"float32": 4, "bfloat16": 2, "float8": 1}
STORED = {"int8": 1.0, "fp8": 1.0, "int4": 0.5}  # bytes of a weight under rollout.quantize and draft.quantize

Head = Eagle3Config | PEagleConfig | BlockConfig


class Precision(NamedTuple):
    """Rollout dtypes: weights and matmuls, keys and values, activations."""

    weights: str = "bfloat16"
    cache: str = "bfloat16"
    activations: str = "bfloat16"
    quantize: str = "none"  # or a key of STORED: the matrices of the policy's layers
    lm_head: str = "none"  # or a key of STORED
    twin: str = "none"  # or a key of STORED: the policy drafts with matrices and lm_head of its own in this format

    @property
    def matrix_bytes(self) -> float:
        """Bytes of a weight in the matrices of the policy's layers."""
        return STORED.get(self.quantize, BYTES[self.weights])

    def of_twin(self) -> "Precision":
        return self._replace(quantize=self.twin, lm_head=self.twin, twin="none")


BFLOAT16 = Precision()


# ---- the policy


def matmul_weights(c: Qwen3Config) -> int:
    """Count the weights in the matmuls of one token: only its own experts in a mixture, without the embedding."""
    attention = c.embed * (2 * c.heads + 2 * c.kv_heads) * c.head_dim
    mlp = 3 * c.embed * c.mlp * (c.experts_per_token if c.experts else 1) + c.embed * c.experts
    return c.layers * (attention + mlp) + c.vocab * c.embed


def parameters(c: Qwen3Config) -> int:
    """Count all weights except norms."""
    return (
        matmul_weights(c)
        + 3 * c.layers * c.embed * c.mlp * max(0, c.experts - c.experts_per_token)
        + (0 if c.tied else c.vocab * c.embed)
    )


def weight_bytes(c: Qwen3Config, p: Precision) -> float:
    """Count the bytes of the policy's weights, norms and scales excepted: tables and routers are not quantised."""
    matrices = layer_matrices(c)
    return (parameters(c) - matrices) * BYTES[p.weights] + matrices * p.matrix_bytes


def twin_bytes(c: Qwen3Config, p: Precision) -> float:
    """Count the bytes of the weights that a twin does not share with the policy; 0 without one."""
    return (layer_matrices(c) + c.vocab * c.embed) * STORED.get(p.twin, 0.0)


def layer_matrices(c: Qwen3Config) -> int:
    """Count the weights of all layers' matrices, all experts' too, without the routers."""
    return parameters(c) - (1 if c.tied else 2) * c.vocab * c.embed - c.layers * c.embed * c.experts


def forward_flops(c: Qwen3Config, tokens: Array, context: Array) -> Array:
    """Count the FLOPs of `tokens` tokens that read `context` keys in total; a multiply-add is two."""
    return 2 * matmul_weights(c) * tokens + 4 * c.layers * c.heads * c.head_dim * context


def distinct_experts(c: Qwen3Config, tokens: Array) -> Array:
    """Expected number of experts hit by `tokens` tokens under independent uniform routing: E (1 - (1 - e / E)^n).

    Real routers are less even and hit fewer.
    """
    return c.experts * (1 - (1 - c.experts_per_token / c.experts) ** np.asarray(tokens, float))


# ---- the draft head


def head_parameters(h: Head) -> int:
    """Count the weights in the matmuls of a head's drafts, `fc` included, without norms."""
    if isinstance(h, BlockConfig):
        per_layer = (2 * h.heads + 2 * h.kv_heads) * h.head_dim + 3 * h.mlp
        return h.embed * (h.layers * per_layer + len(h.aux_layers) * h.embed) + vocabulary_parameters(h)
    per_layer = (3 * h.heads + 4 * h.kv_heads) * h.head_dim + 3 * h.mlp
    if isinstance(h, PEagleConfig):
        per_layer += (h.layers - 1) * ((2 * h.heads + 2 * h.kv_heads) * h.head_dim + 3 * h.mlp)
    return h.embed * (per_layer + len(h.aux_layers) * h.embed) + vocabulary_parameters(h)


def vocabulary_parameters(h: Head) -> int:
    """Count the weights of a head's lm_head, and of what the Markov head adds to its logits."""
    return h.draft_vocab * (h.embed + (h.markov_rank if isinstance(h, BlockConfig) else 0))


def head_layers(h: Head) -> int:
    """Return the layers of a head, each with keys and values of its own."""
    return h.layers if isinstance(h, BlockConfig | PEagleConfig) else 1
