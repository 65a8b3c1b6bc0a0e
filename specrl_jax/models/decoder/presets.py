"""Sizes of published policies, and small ones for tests and examples: what policy.preset names."""

import dataclasses

from specrl_jax.errors import InputError
from specrl_jax.models.decoder.config import DecoderConfig
from specrl_jax.models.delta_net import DeltaNet
from specrl_jax.models.rotary import Llama3Scaling, Rope


def _qwen3(embed: int, layers: int, heads: int, mlp: int, tied: bool) -> DecoderConfig:
    return DecoderConfig(
        151_936, embed, layers, heads=heads, kv_heads=8, head_dim=128, mlp=mlp, tied=tied, max_positions=40_960
    )


def _qwen3_moe(embed: int, layers: int, heads: int, mlp: int, dense_mlp: int) -> DecoderConfig:
    return dataclasses.replace(
        _qwen3(embed, layers, heads, mlp, tied=False),
        kv_heads=4,
        experts=128,
        experts_per_token=8,
        dense_mlp=dense_mlp,
        family="qwen3_moe",
    )


def _qwen2p5(embed: int, layers: int, heads: int, kv_heads: int, mlp: int, tied: bool = True) -> DecoderConfig:
    return DecoderConfig(
        151_936 if tied else 152_064,
        embed,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=embed // heads,
        mlp=mlp,
        tied=tied,
        max_positions=32_768,
        qk_norm=False,
        qkv_bias=True,
        family="qwen2",
    )


def _llama3(embed: int, layers: int, heads: int, mlp: int, factor: float) -> DecoderConfig:
    return DecoderConfig(
        128_256,
        embed,
        layers,
        heads=heads,
        kv_heads=8,
        head_dim=embed // heads,
        mlp=mlp,
        tied=factor == 32,  # of 3.2
        max_positions=131_072,
        rope=Rope(5e5, Llama3Scaling(factor, 8192)),
        norm_epsilon=1e-5,
        qk_norm=False,
        family="llama",
    )


def _smollm2(embed: int, layers: int, heads: int, kv_heads: int, mlp: int, theta: float = 1e5) -> DecoderConfig:
    return DecoderConfig(
        49_152,
        embed,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=64,
        mlp=mlp,
        tied=True,
        max_positions=8192,
        rope=Rope(theta),
        norm_epsilon=1e-5,
        qk_norm=False,
        family="llama",
    )


def _hybrid(layers: int) -> tuple[int, ...]:
    """Return the layers that are gated delta nets: all but every fourth."""
    return tuple(i for i in range(layers) if (i + 1) % 4)


# For tests: compiles in seconds.
_NANO = DecoderConfig(128, 64, 2, heads=4, kv_heads=2, head_dim=16, mlp=128, tied=True, max_positions=4096)
# The same with experts: the two of a token are together as wide as the mlp that they replace.
_NANO_MOE = dataclasses.replace(_NANO, mlp=64, experts=8, experts_per_token=2, dense_mlp=128, family="qwen3_moe")
_NANO_LLAMA = dataclasses.replace(_NANO, qk_norm=False, family="llama", norm_epsilon=1e-5)
_NANO_QWEN2 = dataclasses.replace(_NANO, qk_norm=False, qkv_bias=True, family="qwen2")

PRESETS = {
    "nano": _NANO,
    # The smallest depth that an EAGLE-3 head can read.
    "nano_deep": dataclasses.replace(_NANO, layers=7),
    "nano_moe": _NANO_MOE,
    "nano_moe_deep": dataclasses.replace(_NANO_MOE, layers=7),
    "nano_qwen2": _NANO_QWEN2,
    "nano_llama": dataclasses.replace(_NANO_LLAMA, rope=Rope(5e5, Llama3Scaling(8.0, 256))),
    "nano_smollm3": dataclasses.replace(_NANO_LLAMA, layers=4, no_rope_layers=(3,), family="smollm3"),
    "nano_mistral": dataclasses.replace(_NANO_LLAMA, tied=False, family="mistral"),
    "nano_hybrid": dataclasses.replace(
        _NANO,
        layers=4,
        rotary_dim=8,
        gated=True,
        norm_offset=1.0,
        delta=DeltaNet(_hybrid(4), 2, 4, key_dim=16, value_dim=16),
        family="qwen3_5_text",
    ),
    "nano_mimo": dataclasses.replace(_NANO_QWEN2, tied=False, family="mimo"),
    # 3.5 M parameters, for examples on a CPU; deep for its width, so that a one-layer draft head is cheap beside it.
    "tiny": DecoderConfig(128, 192, 8, heads=6, kv_heads=2, head_dim=32, mlp=576, tied=True, max_positions=4096),
    # 0.9 M parameters, for the tasks of rooms: shallow, so that a CPU trains it in minutes.
    "shallow": DecoderConfig(128, 128, 4, heads=4, kv_heads=4, head_dim=32, mlp=384, tied=True, max_positions=4096),
    # 12 M parameters, for `make run`: deep and narrow, so that drafting five tokens costs less than half a forward.
    "mini": DecoderConfig(128, 256, 14, heads=4, kv_heads=2, head_dim=64, mlp=896, tied=True, max_positions=4096),
    # 20 M parameters, larger than the CPU's cache: decoding starts to be bound by reading the weights.
    "small": DecoderConfig(128, 384, 12, heads=6, kv_heads=2, head_dim=64, mlp=1152, tied=True, max_positions=4096),
    "qwen3_0p6b": _qwen3(embed=1024, layers=28, heads=16, mlp=3072, tied=True),
    "qwen3_1p7b": _qwen3(embed=2048, layers=28, heads=16, mlp=6144, tied=True),
    "qwen3_4b": _qwen3(embed=2560, layers=36, heads=32, mlp=9728, tied=True),
    "qwen3_8b": _qwen3(embed=4096, layers=36, heads=32, mlp=12288, tied=False),
    "qwen3_14b": _qwen3(embed=5120, layers=40, heads=40, mlp=17408, tied=False),
    "qwen3_32b": _qwen3(embed=5120, layers=64, heads=64, mlp=25600, tied=False),
    "qwen3_30b_a3b": _qwen3_moe(embed=2048, layers=48, heads=32, mlp=768, dense_mlp=6144),
    "qwen3_235b_a22b": _qwen3_moe(embed=4096, layers=94, heads=64, mlp=1536, dense_mlp=12288),
    "qwen2p5_0p5b": _qwen2p5(embed=896, layers=24, heads=14, kv_heads=2, mlp=4864),
    "qwen2p5_1p5b": _qwen2p5(embed=1536, layers=28, heads=12, kv_heads=2, mlp=8960),
    "qwen2p5_7b": _qwen2p5(embed=3584, layers=28, heads=28, kv_heads=4, mlp=18944, tied=False),
    "llama3p2_1b": _llama3(embed=2048, layers=16, heads=32, mlp=8192, factor=32.0),
    "llama3p2_3b": _llama3(embed=3072, layers=28, heads=24, mlp=8192, factor=32.0),
    "llama3p1_8b": _llama3(embed=4096, layers=32, heads=32, mlp=14336, factor=8.0),
    "smollm2_135m": _smollm2(embed=576, layers=30, heads=9, kv_heads=3, mlp=1536),
    "smollm2_360m": _smollm2(embed=960, layers=32, heads=15, kv_heads=5, mlp=2560),
    "smollm2_1p7b": _smollm2(embed=2048, layers=24, heads=32, kv_heads=32, mlp=8192, theta=130_000.0),
    "qwen3p5_9b": DecoderConfig(
        248_320,
        4096,
        32,
        heads=16,
        kv_heads=4,
        head_dim=256,
        mlp=12_288,
        tied=False,
        max_positions=262_144,
        rope=Rope(1e7),
        rotary_dim=64,
        gated=True,
        norm_offset=1.0,
        delta=DeltaNet(_hybrid(32), 16, 32, key_dim=128, value_dim=128),
        family="qwen3_5_text",
    ),
    "mimo_7b": DecoderConfig(
        151_680,
        4096,
        36,
        heads=32,
        kv_heads=8,
        head_dim=128,
        mlp=11_008,
        tied=False,
        max_positions=32_768,
        rope=Rope(640_000.0),
        norm_epsilon=1e-5,
        qk_norm=False,
        qkv_bias=True,
        family="mimo",
    ),
}


def preset(name: str, key: str = "policy.preset") -> DecoderConfig:
    """Return the sizes that a config's `key` names. Raises InputError where there is no such preset."""
    if name not in PRESETS:
        raise InputError(f"{key}: no preset '{name}'; there are {', '.join(PRESETS)}")
    return PRESETS[name]
