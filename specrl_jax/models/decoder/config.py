"""Sizes and options of a decoder: one pre-norm block, of which the families are variants."""

import dataclasses

from specrl_jax.models.rotary import Rope


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes, in the letters of specrl_jax.core, and options of the block; defaults are those of Qwen3."""

    vocab: int  # V
    embed: int  # D
    layers: int  # L
    heads: int  # N
    kv_heads: int  # K
    head_dim: int  # H
    mlp: int  # F; of one expert in a mixture of experts
    tied: bool  # the lm_head is the embedding table
    max_positions: int  # tokens
    rope: Rope = dataclasses.field(default_factory=Rope)
    norm_epsilon: float = 1e-6
    qk_norm: bool = True  # RMSNorm over each head of queries and keys
    qkv_bias: bool = False
    no_rope_layers: tuple[int, ...] = ()  # indices of the layers without rotary positions
    # model_type of config.json, for io/families.py alone: all that it means is in the options.
    family: str = "qwen3"
    experts: int = 0  # E; 0: the model is dense
    experts_per_token: int = 0
    renormalise: bool = True  # the weights of the chosen experts are divided by their sum
    dense_mlp: int = 0  # F in config.json of layers without experts, and of a draft head; 0: the model is dense

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sequence that the rotary positions support."""
        return max(self.max_positions, self.rope.reach)

    @property
    def queries_per_kv(self) -> int:
        return self.heads // self.kv_heads

    @property
    def fused_heads(self) -> tuple[int, int, int]:
        """Return the shape (K, R + 2, H) of what the inference layout projects to: R queries, a key, a value."""
        return self.kv_heads, self.queries_per_kv + 2, self.head_dim
