"""Building blocks of every network: parameter specs, mixed-precision matmul, RMSNorm, SwiGLU, rotary positions."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
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
      fan_in: input width; weights start with standard deviation 1 / sqrt(fan_in), 0 means ones (norm scales).
      hf_name: Hugging Face tensor name, `{layer}` and `{expert}` standing for the leading axes; '' = not stored.
      hf_layout: einops pattern from one Hugging Face tensor to one slice of `shape` without those leading axes; the
        sizes of the names on its right are that slice's shape.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    fan_in: int = 0
    hf_name: str = ""
    hf_layout: str = ""

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


def norm_spec(width: int, name: str, axis: str | None = "embed") -> ParamSpec:
    """Return the spec of a norm's scale."""
    return ParamSpec((width,), (axis,), hf_name=f"{name}.weight", hf_layout="a -> a")


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
        return jnp.ones(spec.shape, dtype)
    return (jax.random.normal(key, spec.shape, jnp.float32) / math.sqrt(spec.fan_in)).astype(dtype)


def abstract_params(specs: Specs, dtype: jnp.dtype, shardings: Mapping[str, NamedSharding]) -> Params:
    """Return the tree of ShapeDtypeStruct that a step is lowered with and a checkpoint is restored into."""
    return jax.tree.map(lambda spec, s: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=s), specs, shardings)


def count_params(specs: Specs) -> int:
    return sum(spec.size for spec in jax.tree.leaves(specs))


def einsum(equation: str, x: jax.Array, w: jax.Array | Quantized, *, sums: jnp.dtype | None = None) -> jax.Array:
    """Compute `matmul` in the dtype of `x`: accumulated in float32 on each device and rounded once at its end."""
    return matmul(equation, x, w, sums).astype(x.dtype)


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


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Apply RMSNorm over the last axis: statistics in float32 at least, scaled after rounding back, as in Qwen3."""
    wide = at_least_float32(x)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    scale = jnp.expand_dims(scale, range(x.ndim - scale.ndim))
    return scale.astype(x.dtype) * normed.astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al., arXiv 2309.00071): rotary positions beyond those of the pretraining.

    A dimension that turns more than `beta_fast` times within `original` positions keeps its frequency; one that turns
    less than `beta_slow` times has it divided by `factor`; between them the two are interpolated. Queries and keys are
    scaled. Keys and defaults are those of config.json. Qwen3 was pretrained on 32,768 positions (its
    max_position_embeddings, 40,960, includes an answer): for four times the length, Yarn(4.0, 32_768).
    """

    factor: float
    original: int  # tokens, of the pretraining
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # scale of queries and of keys; None: 0.1 ln(factor) + 1
    truncate: bool = True  # round the bounds of the interpolation to whole dimensions

    @property
    def reach(self) -> int:
        """Return the tokens of the longest sequence."""
        return int(self.factor * self.original)

    @property
    def magnitude(self) -> float:
        """Scale of sine and cosine."""
        return yarn_magnitude(self.factor) if self.attention_factor is None else self.attention_factor

    def slowed(self, head_dim: int, theta: float) -> np.ndarray:
        """Return the weight [H/2] float32, 0..1, of the divided frequency in each dimension."""

        def dimension(turns: float) -> float:
            return head_dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 1e-3)
        return np.clip(ramp, 0, 1).astype(np.float32)


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return the paper's recommended scale, 0.1 ln(factor) + 1; 1 for a factor of at most 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary_angles(
    positions: jax.Array, head_dim: int, theta: float, *, yarn: Yarn | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return (sin, cos), each [B, T, 1, H/2] float32, of positions [B, T] in tokens.

    float32 whatever the model's dtype: position 257 is not a bfloat16 number.
    """
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if yarn:
        slowed = yarn.slowed(head_dim, theta)
        frequency = frequency / yarn.factor * slowed + frequency * (1 - slowed)
    angle = positions.astype(jnp.float32)[..., None, None] * frequency[None, None, None]
    if yarn:
        return jnp.sin(angle) * yarn.magnitude, jnp.cos(angle) * yarn.magnitude
    return jnp.sin(angle), jnp.cos(angle)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Apply the rotary embedding to x [B, T, heads, H]; dimension i is paired with i + H/2, as in Hugging Face."""
    sin, cos = angles
    halves = at_least_float32(x).reshape(*x.shape[:-1], 2, -1)
    # Reversed, not split and concatenated: one pass, which XLA vectorises on a CPU.
    turned = jnp.stack([-sin, sin], axis=-2) * halves[..., ::-1, :]
    return (halves * cos[..., None, :] + turned).reshape(x.shape).astype(x.dtype)
