"""Dtypes of the rollout, and what they make of the weights of a policy."""

from typing import NamedTuple

import numpy as np

from specrl_jax.models import flops
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.flops import BYTES, STORED, Array


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


def weight_bytes(c: DecoderConfig, p: Precision) -> float:
    """Count the bytes of the policy's weights in the rollout."""
    return flops.weight_bytes(c, p.weights, p.quantize)


def twin_bytes(c: DecoderConfig, p: Precision) -> float:
    """Count the bytes of the weights that a twin does not share with the policy; 0 without one."""
    return flops.twin_bytes(c, p.twin)


def distinct_experts(c: DecoderConfig, tokens: Array) -> Array:
    """Expected number of experts hit by `tokens` tokens under independent uniform routing: E (1 - (1 - e / E)^n).

    Real routers are less even and hit fewer.
    """
    return c.experts * (1 - (1 - c.experts_per_token / c.experts) ** np.asarray(tokens, float))
