"""Memory of a run's devices: an estimate from sums of sizes, without a compiler.

`task=dry_run` compiles the real programs and reads what they allocate; prefer its answer where it is available.
"""

from typing import NamedTuple

from specrl_jax.drafts.block import BlockConfig
from specrl_jax.drafts.sizes import Head
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.delta_net import CHUNK
from specrl_jax.models.flops import BYTES, Array

USABLE = 0.9  # of the memory; the rest goes to the runtime and to fragmentation
# Tokens of a response while it runs, on average, over the longest: E[L^2] / (2 E[L]) of log-normal lengths, cut at the
# longest, whose mean is half of it and whose logarithm spreads by 0.8.
RUNNING = 0.338957131039596


class MemoryEstimate(NamedTuple):
    """Bytes on the fullest device; pages of keys and values take what is left."""

    state: float  # the learner's float32 parameters, gradient, two moments and reference
    activations: float  # of one microbatch: what layers keep, and float32 logits of one row
    weights: float  # the rollout's, with the head's or the twin's

    def free(self, memory: float, apart: bool) -> float:
        """Return what is left for pages in the memory of a device; `apart`: the learner has devices of its own."""
        return USABLE * memory - self.weights - (0.0 if apart else self.state + self.activations)


def state_bytes(policy: int, head: int, reference: bool) -> int:
    """Return the bytes of the learner's state, for so many parameters."""
    return 16 * (policy + head) + (4 * policy if reference else 0)


def activation_bytes(
    c: DecoderConfig, tokens: Array, longest: float, *, remat: str, dtype: str, tensor: int = 1
) -> Array:
    """Return the bytes that a pass over `tokens` tokens keeps for its backward pass, in rows of up to `longest`.

    Args:
      tensor: devices that split widths.
    """
    kept = tokens * c.layers * kept_numbers(c, remat) * BYTES[dtype] / tensor
    if c.delta:  # a state a chunk, of one layer at a time
        kept += tokens / CHUNK * c.delta.state_numbers * BYTES["float32"] / tensor
    return kept + longest * c.vocab * BYTES["float32"] / tensor


def kept_numbers(c: DecoderConfig, remat: str) -> int:
    """Return the numbers that a layer keeps of a token for its backward pass (models/remat.py)."""
    mixer = (c.projected_heads + c.heads + 2 * c.kv_heads) * c.head_dim
    if c.delta:  # the mean of both kinds
        share = len(c.delta.layers) / c.layers
        mixer = round((1 - share) * mixer + share * c.delta.matrix_weights)
    products = mixer + c.embed + (0 if c.experts else 2 * c.mlp)
    # Nothing repeated: about the inputs of every product.
    return {"full": c.embed, "selective": c.embed + products, "none": 12 * c.embed}[remat]


def row_bytes(c: DecoderConfig, *, tensor: int = 1) -> int:
    """Return the bytes of what layers without keys and values remember of one sequence, on one device."""
    return len(c.delta.layers) * c.delta.state_numbers * BYTES["float32"] // tensor if c.delta else 0


def token_bytes(c: DecoderConfig, head: Head | None, dtype: str, *, tensor: int = 1) -> float:
    """Return the cache bytes of one token on one device: keys and values, also a draft's, and a head's hidden state.

    Args:
      tensor: devices that split heads.
    """
    numbers = 2 * len(c.attention_layers) * max(c.kv_heads / tensor, 1) * c.head_dim
    if head is not None:
        hidden = 0 if isinstance(head, BlockConfig) else head.embed
        numbers += hidden + 2 * head.layers * max(head.kv_heads / tensor, 1) * head.head_dim
    return numbers * BYTES[dtype]
