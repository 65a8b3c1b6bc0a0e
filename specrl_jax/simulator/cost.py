"""Arithmetic of a forward of the policy."""

from specrl_jax.models.qwen3 import Qwen3Config


def products_per_token(c: Qwen3Config) -> int:
    """Weights that a token is multiplied with: of a mixture its own experts', of the embedding none."""
    attention = c.embed * (2 * c.heads + 2 * c.kv_heads) * c.head_dim
    mlp = 3 * c.embed * c.mlp * (c.experts_per_token if c.experts else 1) + c.embed * c.experts
    return c.layers * (attention + mlp) + c.vocab * c.embed


def forward_flops(c: Qwen3Config, tokens: float, context: float) -> float:
    """Floating-point operations of `tokens` tokens that read `context` keys in sum; a product counts two."""
    return 2 * products_per_token(c) * tokens + 4 * c.layers * c.heads * c.head_dim * context
