"""Low-rank adapters of the policy's matrices (LoRA, Hu et al., arXiv 2106.09685): W + alpha / r * A B, W frozen.

A starts random and B zero, so that training starts at the base policy (section 4.1). Rollouts, export and verification
use the merged weights; only the learner's forward has the parts, and merges them layer by layer.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import cast

import flax.struct
import jax
import jax.numpy as jnp

from specrl_jax.core import Leaf, Params, branch, nested, stand_in
from specrl_jax.errors import InputError
from specrl_jax.models.layers import ParamSpec, Specs, init_params

# Einsum of A and B for each matrix: leading axes (layer, expert), inputs, outputs.
EQUATIONS = dict.fromkeys("qkv", "...dr,...rnh->...dnh") | {"o": "...nhr,...rd->...nhd"}
EQUATIONS |= dict.fromkeys(("gate", "up", "down"), "...ir,...ro->...io")


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Options of the adapters. Raises InputError for values without a meaning."""

    rank: int  # r
    alpha: float
    targets: tuple[str, ...] = tuple(EQUATIONS)  # matrices of each layer

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.targets or self.alpha <= 0 or not set(self.targets) <= EQUATIONS.keys():
            matrices = f"matrices of {', '.join(EQUATIONS)}"
            raise InputError(f"policy.lora_rank, policy.lora_alpha: at least 1 and above 0 are needed, for {matrices}")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@flax.struct.dataclass
class Adapted:
    """A matrix of the training layout with its adapters."""

    weight: jax.Array  # frozen
    a: jax.Array
    b: jax.Array
    equation: str = flax.struct.field(pytree_node=False)
    scale: float = flax.struct.field(pytree_node=False)

    def merged(self) -> jax.Array:
        """Return W + alpha / r * A B."""
        weight = jax.lax.stop_gradient(self.weight)
        return weight + self.scale * jnp.einsum(self.equation, self.a, self.b).astype(weight.dtype)


def merged(tree: Params) -> Params:
    """Merge all adapters of a tree into plain matrices."""
    is_adapted = lambda w: isinstance(w, Adapted)  # noqa: E731
    return jax.tree.map(lambda w: w.merged() if is_adapted(w) else w, tree, is_leaf=is_adapted)


def adapter_specs(specs: Specs, lora: LoRA) -> Specs:
    """Return the specs {"a", "b"} of each target's adapters, from the policy's specs."""
    layers = branch(specs, "layers")
    return nested({}, **{name: _parts(layers[name], EQUATIONS[name], lora.rank) for name in lora.targets})


def _parts(spec: ParamSpec, equation: str, rank: int) -> dict[str, ParamSpec]:
    inputs = equation.index("r") - len("...")
    outputs = len(equation.split("->")[1]) - len("...") - inputs
    lead, middle = len(spec.shape) - inputs - outputs, len(spec.shape) - outputs
    a = ParamSpec((*spec.shape[:middle], rank), (*spec.axes[:middle], None), fan_in=math.prod(spec.shape[lead:middle]))
    shape, axes = (*spec.shape[:lead], rank, *spec.shape[middle:]), (*spec.axes[:lead], None, *spec.axes[middle:])
    return {"a": a, "b": ParamSpec(shape, axes, rank)}


def init_adapters(key: jax.Array, specs: Specs) -> Params:
    """Draw A and set B to zero."""
    drawn = init_params(key, specs)
    parts = {name: branch(drawn, name) for name in drawn}
    return nested({}, **{name: {**part, "b": jnp.zeros_like(part["b"])} for name, part in parts.items()})


def attach(params: Mapping[str, Leaf], adapters: Mapping[str, Leaf], lora: LoRA) -> Mapping[str, Leaf]:
    """Replace the adapted matrices of a training layout by `Adapted`; of arrays, specs or shardings."""
    layers = dict(branch(params, "layers"))
    for name in adapters:
        parts = branch(adapters, name)
        adapted = Adapted(
            stand_in(layers[name]),
            stand_in(parts["a"]),
            stand_in(parts["b"]),
            equation=EQUATIONS[name],
            scale=lora.scale,
        )
        layers[name] = cast("Leaf", adapted)
    return nested({name: leaf for name, leaf in params.items() if name != "layers"}, layers=layers)
