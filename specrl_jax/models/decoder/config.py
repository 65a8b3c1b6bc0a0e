"""Sizes of Qwen3 models, and the presets that policy.preset names."""

import dataclasses

from specrl_jax.errors import InputError
from specrl_jax.models.layers import Yarn


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes, in the letters of specrl_jax.core. `experts` = 0 is the dense model."""

    vocab: int  # V
    embed: int  # D
    layers: int  # L
    heads: int  # N
    kv_heads: int  # K
    head_dim: int  # H
    mlp: int  # F; of one expert in a mixture of experts
    tied: bool  # the lm_head is the embedding table
    max_positions: int  # tokens
    rope_theta: float = 1e6
    norm_epsilon: float = 1e-6
    experts: int = 0  # E
    experts_per_token: int = 0
    renormalise: bool = True  # the weights of the chosen experts are divided by their sum
    dense_mlp: int = 0  # F in config.json of layers without experts, and of a draft head; 0: the model is dense
    yarn: Yarn | None = None  # positions beyond those of the pretraining

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sequence that the rotary positions support."""
        return max(self.max_positions, self.yarn.reach if self.yarn else 0)

    @property
    def queries_per_kv(self) -> int:
        return self.heads // self.kv_heads


def _published(embed: int, layers: int, heads: int, mlp: int, tied: bool) -> DecoderConfig:
    return DecoderConfig(
        151_936, embed, layers, heads=heads, kv_heads=8, head_dim=128, mlp=mlp, tied=tied, max_positions=40_960
    )


def _published_mixture(embed: int, layers: int, heads: int, mlp: int, dense_mlp: int) -> DecoderConfig:
    return dataclasses.replace(
        _published(embed, layers, heads, mlp, tied=False),
        kv_heads=4,
        experts=128,
        experts_per_token=8,
        dense_mlp=dense_mlp,
    )


# For tests: compiles in seconds.
_NANO = DecoderConfig(128, 64, 2, heads=4, kv_heads=2, head_dim=16, mlp=128, tied=True, max_positions=4096)
# The same with experts: the two of a token are together as wide as the mlp that they replace.
_NANO_MOE = dataclasses.replace(_NANO, mlp=64, experts=8, experts_per_token=2, dense_mlp=128)

PRESETS = {
    "nano": _NANO,
    # The smallest depth that an EAGLE-3 head can read.
    "nano_deep": dataclasses.replace(_NANO, layers=7),
    "nano_moe": _NANO_MOE,
    "nano_moe_deep": dataclasses.replace(_NANO_MOE, layers=7),
    # 3.5 M parameters, for examples on a CPU; deep for its width, so that a one-layer draft head is cheap beside it.
    "tiny": DecoderConfig(128, 192, 8, heads=6, kv_heads=2, head_dim=32, mlp=576, tied=True, max_positions=4096),
    # 0.9 M parameters, for the tasks of rooms: shallow, so that a CPU trains it in minutes.
    "shallow": DecoderConfig(128, 128, 4, heads=4, kv_heads=4, head_dim=32, mlp=384, tied=True, max_positions=4096),
    # 12 M parameters, for `make run`: deep and narrow, so that drafting five tokens costs less than half a forward.
    "mini": DecoderConfig(128, 256, 14, heads=4, kv_heads=2, head_dim=64, mlp=896, tied=True, max_positions=4096),
    # 20 M parameters, larger than the CPU's cache: decoding starts to be bound by reading the weights.
    "small": DecoderConfig(128, 384, 12, heads=6, kv_heads=2, head_dim=64, mlp=1152, tied=True, max_positions=4096),
    "qwen3_0p6b": _published(embed=1024, layers=28, heads=16, mlp=3072, tied=True),
    "qwen3_1p7b": _published(embed=2048, layers=28, heads=16, mlp=6144, tied=True),
    "qwen3_4b": _published(embed=2560, layers=36, heads=32, mlp=9728, tied=True),
    "qwen3_8b": _published(embed=4096, layers=36, heads=32, mlp=12288, tied=False),
    "qwen3_14b": _published(embed=5120, layers=40, heads=40, mlp=17408, tied=False),
    "qwen3_32b": _published(embed=5120, layers=64, heads=64, mlp=25600, tied=False),
    "qwen3_30b_a3b": _published_mixture(embed=2048, layers=48, heads=32, mlp=768, dense_mlp=6144),
    "qwen3_235b_a22b": _published_mixture(embed=4096, layers=94, heads=64, mlp=1536, dense_mlp=12288),
}


def preset(name: str, key: str = "policy.preset") -> DecoderConfig:
    """Return the sizes that a config's `key` names. Raises InputError where there is no such preset."""
    if name not in PRESETS:
        raise InputError(f"{key}: no preset '{name}'; there are {', '.join(PRESETS)}")
    return PRESETS[name]
