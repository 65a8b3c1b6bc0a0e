"""Weights, bytes and FLOPs counted from a policy's sizes, and the FLOP/s of an accelerator."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.models.decoder import DecoderConfig

# A number, or one for each of several configurations.
Array = float | np.ndarray

BYTES = {"float32": 4, "bfloat16": 2, "float8": 1}
STORED = {"int8": 1.0, "fp8": 1.0, "int4": 0.5}  # bytes of a weight under rollout.quantize and draft.quantize

# FLOP/s by how jax.Device.device_kind begins: dense bfloat16 matmuls, from the data sheets of NVIDIA and from Google
# Cloud's documentation ("TPU v5" is v5p's other name).
PEAK_FLOPS = {
    "NVIDIA GB200": 2500e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H100": 989e12,
    "NVIDIA A100": 312e12,
    "TPU v6 lite": 918e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v4": 275e12,
}


# ---- weights


def matmul_weights(c: DecoderConfig) -> int:
    """Count the weights in the matmuls of one token: only its own experts in a mixture, without the embedding."""
    attention = c.embed * (c.projected_heads + c.heads + 2 * c.kv_heads) * c.head_dim
    mixers = len(c.attention_layers) * attention
    if c.delta:
        mixers += len(c.delta.layers) * c.embed * c.delta.matrix_weights
    mlp = 3 * c.embed * c.mlp * (c.experts_per_token if c.experts else 1) + c.embed * c.experts
    return mixers + c.layers * mlp + c.vocab * c.embed


def parameters(c: DecoderConfig) -> int:
    """Count all weights except norms and biases."""
    return (
        matmul_weights(c)
        + 3 * c.layers * c.embed * c.mlp * max(0, c.experts - c.experts_per_token)
        + (0 if c.tied else c.vocab * c.embed)
    )


def layer_matrices(c: DecoderConfig) -> int:
    """Count the weights of all layers' matrices, all experts' too, without the routers."""
    return parameters(c) - (1 if c.tied else 2) * c.vocab * c.embed - c.layers * c.embed * c.experts


def weight_bytes(c: DecoderConfig, dtype: str, quantize: str) -> float:
    """Count the bytes of the rollouts' weights, norms and scales excepted: tables and routers are not quantised."""
    matrices = layer_matrices(c)
    return (parameters(c) - matrices) * BYTES[dtype] + matrices * STORED.get(quantize, BYTES[dtype])


def twin_bytes(c: DecoderConfig, quantize: str) -> float:
    """Count the bytes of the weights that a twin does not share with the policy; 0 for 'none'."""
    return (layer_matrices(c) + c.vocab * c.embed) * STORED.get(quantize, 0.0)


# ---- FLOPs


def forward_flops(c: DecoderConfig, tokens: Array, context: Array) -> Array:
    """Count the FLOPs of `tokens` tokens that read `context` keys in total; a multiply-add is two."""
    attended = 4 * len(c.attention_layers) * c.heads * c.head_dim * context
    # A token decays, reads, writes and reads each state of a gated delta net.
    entered = 7 * len(c.delta.layers) * c.delta.state_numbers * tokens if c.delta else 0
    return 2 * matmul_weights(c) * tokens + attended + entered


def peak_flops(device: jax.Device, dtype: jnp.dtype) -> float:
    """Return the peak FLOP/s for model FLOP utilisation: of a known device the data sheet's bfloat16 figure for any
    dtype, as is customary; else measured here, in `dtype`.
    """
    for name, flops in PEAK_FLOPS.items():
        if device.device_kind.startswith(name):
            return flops
    return _measured_flops(device, dtype)


def _measured_flops(device: jax.Device, dtype: jnp.dtype, size: int = 1024, rounds: int = 5) -> float:
    """Time square matmuls and return the best rate."""
    x = jax.device_put(jnp.ones((size, size), dtype), device)
    product = jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32))
    product(x).block_until_ready()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        product(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
