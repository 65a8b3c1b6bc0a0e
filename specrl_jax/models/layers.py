"""Building blocks of every network: parameter specs, mixed-precision matmul, RMSNorm, SwiGLU."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from specrl_jax.core import Params, at_least_float32
from specrl_jax.models.quantized import Quantized
from specrl_jax.models.remat import kept


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Declare one weight; initialisation, shardings, restore, counts and Hugging Face names derive from it.

    Attributes:
      shape: of the learner's array; a leading "layers" axis is scanned.
      axes: logical axis of each dimension (specrl_jax.sharding).
      fan_in: input width; weights start with standard deviation 1 / sqrt(fan_in), 0: each is `start`.
      hf_name: Hugging Face tensor name, `{layer}` and `{expert}` standing for the leading axes; '' = not stored.
      hf_layout: einops pattern from one Hugging Face tensor to one slice of `shape` without those leading axes; the
        sizes of the names on its right are that slice's shape.
      start: of each number, where fan_in is 0: 1 of a norm's scale, 0 of a bias.
      hf_rows: (first, end, all) rows of the Hugging Face tensor, where other leaves have the rest; () = all of it.
      hf_layers: which layers the leading axis has; () = all of them.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    fan_in: int = 0
    hf_name: str = ""
    hf_layout: str = ""
    start: float = 1.0
    hf_rows: tuple[int, ...] = ()
    hf_layers: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Specs = Mapping[str, ParamSpec]  # the tree of ParamSpec that describes a tree of Params


class LayerSizes(Protocol):
    """Sizes of a dense layer, in the letters of specrl_jax.core."""

    @property
    def embed(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def mlp(self) -> int: ...


def layer_specs(c: LayerSizes, name: str) -> dict[str, ParamSpec]:
    """Return the training layout of one dense Llama layer, whose Hugging Face tensors are `name`.*."""
    D, H = c.embed, c.head_dim

    def heads(count: int, axis: str, part: str) -> ParamSpec:
        axes = ("embed", axis, "head_dim")
        return ParamSpec((D, count, H), axes, D, f"{name}.self_attn.{part}.weight", hf_layout="(n h) d -> d n h")

    def matrix(shape: tuple[int, int], axes: tuple[str, str], part: str) -> ParamSpec:
        return ParamSpec(shape, axes, shape[0], f"{name}.mlp.{part}.weight", hf_layout="o i -> i o")

    out_name = f"{name}.self_attn.o_proj.weight"
    return {
        "attention_norm": norm_spec(D, f"{name}.input_layernorm"),
        "q": heads(c.heads, "heads", "q_proj"),
        "k": heads(c.kv_heads, "kv_heads", "k_proj"),
        "v": heads(c.kv_heads, "kv_heads", "v_proj"),
        "o": ParamSpec((c.heads, H, D), ("heads", "head_dim", "embed"), c.heads * H, out_name, "d (n h) -> n h d"),
        "mlp_norm": norm_spec(D, f"{name}.post_attention_layernorm"),
        "gate": matrix((D, c.mlp), ("embed", "mlp"), "gate_proj"),
        "up": matrix((D, c.mlp), ("embed", "mlp"), "up_proj"),
        "down": matrix((c.mlp, D), ("mlp", "embed"), "down_proj"),
    }


def norm_spec(width: int, name: str, axis: str | None = "embed", *, offset: float = 0.0) -> ParamSpec:
    """Return the spec of a norm's scale; `offset` as of `rms_norm`."""
    return ParamSpec((width,), (axis,), hf_name=f"{name}.weight", hf_layout="a -> a", start=1.0 - offset)


def table_spec(vocab: int, width: int, name: str, *, fan_in: int, axis: str | None = "embed") -> ParamSpec:
    """Return the spec of a table [V, width] with a row for each id."""
    return ParamSpec((vocab, width), ("vocab", axis), fan_in, hf_name=f"{name}.weight", hf_layout="v d -> v d")


def init_params(key: jax.Array, specs: Specs, dtype: jnp.dtype = jnp.float32) -> Params:
    """Draw random parameters for a tree of specs."""
    leaves, treedef = jax.tree.flatten(specs)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(treedef, [_init_leaf(leaf_key, spec, dtype) for leaf_key, spec in zip(keys, leaves)])


def _init_leaf(key: jax.Array, spec: ParamSpec, dtype: jnp.dtype) -> jax.Array:
    if spec.fan_in == 0:
        return jnp.full(spec.shape, spec.start, dtype)
    return (jax.random.normal(key, spec.shape, jnp.float32) / math.sqrt(spec.fan_in)).astype(dtype)


def abstract_params(specs: Specs, dtype: jnp.dtype, shardings: Mapping[str, NamedSharding]) -> Params:
    """Return the tree of ShapeDtypeStruct that a step is lowered with and a checkpoint is restored into."""
    return jax.tree.map(lambda spec, s: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=s), specs, shardings)


def count_params(specs: Specs) -> int:
    return sum(spec.size for spec in jax.tree.leaves(specs))


def einsum(
    equation: str,
    x: jax.Array,
    w: jax.Array | Quantized,
    *,
    bias: jax.Array | None = None,
    sums: jnp.dtype | None = None,
) -> jax.Array:
    """Compute `matmul`, and add a bias, in the dtype of `x`: in float32 on each device, rounded once at its end."""
    product = matmul(equation, x, w, sums)
    if bias is not None:
        product += jnp.expand_dims(bias.astype(product.dtype), range(product.ndim - bias.ndim))
    return product.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def matmul(equation: str, x: jax.Array, w: jax.Array | Quantized, sums: jnp.dtype | None = None) -> jax.Array:
    """Multiply activations and a weight: operands in the narrower of the two dtypes, result at least float32.

    A CPU reads weights at 1.5 GB/s where the result of the dot is bfloat16; with float32 results it keeps the fast
    path. The matrix units of GPUs and TPUs accumulate in float32 anyway.

    Both matmuls of the derivative have their operands in the dtype of `x` and untransposed: the derivative of
    jnp.einsum transposes the larger operand of a weight's gradient, which costs a CPU a fifth of a training step (4
    layers, d 256: 0.43 against 0.34 s).

    A quantised weight has no derivative.

    Args:
      sums: dtype of the result (`Partitioner.sums`). Devices that have parts of the contracted axis add their results
        in it. None: at least float32.
    """
    if isinstance(w, Quantized):
        return matmul(equation, x, w.numbers(narrower(x.dtype, w.dtype)), sums) * w.scale_of(equation)
    dtype = narrower(x.dtype, w.dtype)
    result = sums or accumulator(dtype)
    return jnp.einsum(equation, x.astype(dtype), w.astype(dtype), preferred_element_type=result)


def narrower(a: jnp.dtype, b: jnp.dtype) -> jnp.dtype:
    """Return the narrower dtype, in which activations of one and weights of the other are multiplied."""
    return min(jnp.dtype(a), jnp.dtype(b), key=lambda dtype: dtype.itemsize)


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype in which numbers of `dtype` are summed: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def _matmul_forward(
    equation: str, x: jax.Array, w: jax.Array, sums: jnp.dtype | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return matmul(equation, x, w, sums), (x, w)


def _matmul_backward(
    equation: str, sums: jnp.dtype | None, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    inputs, out = equation.split("->")
    left, right = inputs.split(",")
    gradient = gradient.astype(x.dtype)
    wide = accumulator(x.dtype)
    dx = jnp.einsum(f"{out},{right}->{left}", gradient, w.astype(x.dtype), preferred_element_type=wide)
    dw = jnp.einsum(f"{left},{out}->{right}", x, gradient, preferred_element_type=wide)
    return dx.astype(x.dtype), dw.astype(w.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


def project_heads(x: jax.Array, w: jax.Array, sums: jnp.dtype | None = None) -> jax.Array:
    """Project heads x [B, T, N, H] by w [N, H, D] to [B, T, D]; `sums` as of `matmul`.

    The contraction is over one merged axis: over two, XLA copies w each time.
    """
    merged = jax.tree.map(lambda part: part.reshape(-1, part.shape[-1]), w)
    return einsum("BTF,FD->BTD", x.reshape(*x.shape[:2], -1), merged, sums=sums)


def swiglu(x: jax.Array, w: Params, sums: jnp.dtype | None = None) -> jax.Array:
    """Compute down(silu(gate x) * up x), x [B, T, D] -> [B, T, D]; `sums` as of `matmul`, of the last product.

    Gate and up stay two matmuls in both layouts: a CPU runs them in parallel, and one of twice the width takes 1.7
    times as long as both (8 to 32 rows, d 192).
    """
    gate, up = (kept(einsum("BTD,DF->BTF", x, w[name])) for name in ("gate", "up"))
    return einsum("BTF,FD->BTD", jax.nn.silu(gate) * up, w["down"], sums=sums)


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float, *, offset: float = 0.0) -> jax.Array:
    """Apply RMSNorm over the last axis: statistics in float32 at least, scaled after rounding back, as in Qwen3.

    Args:
      offset: added to the scale, which is then multiplied before rounding back, as in Qwen3.5 (1); 0: neither.
    """
    wide = at_least_float32(x)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    scale = jnp.expand_dims(scale, range(x.ndim - scale.ndim))
    if offset:
        return (normed * (offset + at_least_float32(scale))).astype(x.dtype)
    return scale.astype(x.dtype) * normed.astype(x.dtype)
