"""What machines can do at most."""

import time

import jax
import jax.numpy as jnp

# Dense bfloat16 products, FLOP/s a device, by how its name begins in jax (device_kind). From the vendors' data sheets:
# NVIDIA H100 SXM, H200, B200, GB200 (without sparsity), A100; Google Cloud TPU v4, v5e, v5p, v6e.
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}


def peak_flops(device: jax.Device, dtype: jnp.dtype) -> float:
    """FLOP/s of dense products: the data sheet's for bfloat16, whatever the dtype, where the device is known, as model
    FLOP utilisation is quoted everywhere; else measured here, in `dtype`.
    """
    for name, flops in PEAK_FLOPS.items():
        if device.device_kind.startswith(name):
            return flops
    return _measured_flops(device, dtype)


def _measured_flops(device: jax.Device, dtype: jnp.dtype, size: int = 1024, rounds: int = 5) -> float:
    """The best of a few square products."""
    x = jax.device_put(jnp.ones((size, size), dtype), device)
    product = jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32))
    product(x).block_until_ready()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        product(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
