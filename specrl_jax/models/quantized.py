"""Weights in 8 or 4 bits, with one scale for each output channel (`rollout.quantize`, `draft.quantize`).

Only weights are quantised: a matmul converts them to the dtype of the activations inside its kernel, which all formats
fit without rounding, and the scale multiplies the product. Memory is read once, in 8 or 4 bits.

qwix (aa623ac) multiplies a weight by its scale before the matmul where activations are not quantised: that rounds the
weight once more in bfloat16, and leaves it to the compiler that no copy is written.
"""

import flax.struct
import jax
import jax.numpy as jnp

from specrl_jax.core import at_least_float32

# Format and its largest number.
FORMATS = {
    "int8": (jnp.int8, 127.0),
    "fp8": (jnp.float8_e4m3fn, 448.0),
    "int4": (jnp.int4, 7.0),
}


@flax.struct.dataclass
class Quantized:
    """A weight: `values` times `scale`. Either may be what stands for an array in a tree of specs or shardings."""

    values: jax.Array  # shape of the weight in 8 bits; of int4 two in a byte along the last axis, uint8
    scale: jax.Array  # the same shape with 1 for the axes that a matmul sums over, in the rollout dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.scale.dtype

    def numbers(self, dtype: jnp.dtype) -> jax.Array:
        """Return the values, exact in any dtype that a matmul has."""
        values = self.values
        if values.dtype == jnp.uint8:
            # A compiled program refuses int4 arguments on a CPU (jax 0.10.2), but may have them inside.
            values = jax.lax.bitcast_convert_type(values, jnp.int4).reshape(*values.shape[:-1], -1)
        return values.astype(dtype)

    def scale_of(self, equation: str) -> jax.Array:
        """Return the scale as a factor of the result of `equation`, whose second operand is the weight."""
        inputs, out = equation.split("->")
        sizes = dict(zip(inputs.split(",")[1], self.scale.shape))
        return self.scale.reshape([sizes.get(letter, 1) for letter in out])


def quantize(w: jax.Array, axes: tuple[int, ...], kind: str, *, dtype: jnp.dtype) -> Quantized:
    """Round w to the nearest numbers of a format of FORMATS, symmetric about 0.

    Args:
      axes: those that a matmul sums over; the others have a scale each, in `dtype`.
    """
    storage, largest = FORMATS[kind]
    w = at_least_float32(w)
    peak = jnp.max(jnp.abs(w), axis=axes, keepdims=True)
    # Rounded first, so that the values make up for it; a channel of zeros stays zero.
    scale = jnp.where(peak > 0, peak / largest, 1.0).astype(dtype)
    values = jnp.clip(w / scale.astype(w.dtype), -largest, largest)
    values = (values if kind == "fp8" else jnp.round(values)).astype(storage)
    if kind == "int4":
        values = jax.lax.bitcast_convert_type(values.reshape(*w.shape[:-1], -1, 2), jnp.uint8)
    return Quantized(values, scale)
