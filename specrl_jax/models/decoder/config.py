"""Sizes and options of a decoder: one pre-norm block, of which the families are variants."""

import dataclasses

from specrl_jax.models.delta_net import DeltaNet
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
    rotary_dim: int = 0  # dimensions of a head that turn, the first ones; 0: all
    gated: bool = False  # attention's output is multiplied by the sigmoid of a gate beside each query
    norm_offset: float = 0.0  # added to the scale of every norm (layers.rms_norm)
    delta: DeltaNet | None = None  # the layers that are gated delta nets instead of attention
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
    def turned(self) -> int:
        """Return the dimensions of a head that have rotary positions."""
        return self.rotary_dim or self.head_dim

    @property
    def projected_heads(self) -> int:
        """Return the heads that a token's queries are projected to: of each its gate too, where there is one."""
        return self.heads * (2 if self.gated else 1)

    @property
    def fused_heads(self) -> tuple[int, int, int]:
        """Return the shape (K, R + 2, H) of what the inference layout projects to: R queries, a key, a value.

        Each query with its gate behind it, where there is one.
        """
        return self.kv_heads, self.projected_heads // self.kv_heads + 2, self.head_dim

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """Return the indices of the layers that are gated delta nets."""
        return self.delta.layers if self.delta else ()

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Return the indices of the other layers, which have keys and values."""
        return tuple(i for i in range(self.layers) if i not in self.delta_layers)

    @property
    def period(self) -> int:
        """Return after how many layers their kinds repeat: 1 where all are of one kind."""
        kinds = [i in self.delta_layers for i in range(self.layers)]
        sizes = [p for p in range(1, self.layers + 1) if self.layers % p == 0]
        return next(p for p in sizes if kinds == kinds[:p] * (self.layers // p))
