"""Low-rank adapters of the policy's matrices (LoRA, Hu et al., arXiv 2106.09685): W + alpha / r * A B, W as it is.

A learns from random values and B from zeros, so that the policy begins as it was (section 4.1). Rollouts, export and
verification run on the sum; only the learner's forward knows the parts, and adds them up layer by layer.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specrl_jax.core import InputError
from specrl_jax.models.layers import ParamSpec, init_params

# A B by the matrix's name: leading axes (layer, expert), inputs, outputs.
EQUATIONS = dict.fromkeys("qkv", "...dr,...rnh->...dnh") | {"o": "...nhr,...rd->...nhd"}
EQUATIONS |= dict.fromkeys(("gate", "up", "down"), "...ir,...ro->...io")


@dataclasses.dataclass(frozen=True)
class LoRA:
    rank: int  # r
    alpha: float
    targets: tuple[str, ...]  # of EQUATIONS

    def __post_init__(self) -> None:
        for name in self.targets:
            if name not in EQUATIONS:
                raise InputError(f"policy.lora_targets: there is no '{name}'; there are {', '.join(EQUATIONS)}")
        if self.rank < 1 or not self.targets or self.alpha <= 0:
            raise InputError(
                "policy.lora_rank, lora_alpha and lora_targets: at least 1, above 0 and one name are needed"
            )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@flax.struct.dataclass
class Adapted:
    """In the place of a matrix of the learner's tree."""

    weight: Any  # does not learn
    a: Any
    b: Any
    equation: str = flax.struct.field(pytree_node=False)
    scale: float = flax.struct.field(pytree_node=False)

    def merged(self) -> jax.Array:
        weight = jax.lax.stop_gradient(self.weight)
        # Summed in float32, whatever the weight is stored in.
        return weight + self.scale * jnp.einsum(self.equation, self.a, self.b).astype(weight.dtype)


def merged(tree: Any) -> Any:
    """The tree with plain matrices, as a policy without adapters has them."""
    return jax.tree.map(lambda w: w.merged() if isinstance(w, Adapted) else w, tree, is_leaf=_is_adapted)


def _is_adapted(w: Any) -> bool:
    return isinstance(w, Adapted)


def adapter_specs(specs: Any, lora: LoRA) -> dict[str, dict[str, ParamSpec]]:
    """{"a", "b"} for each target, of the policy's `specs`."""
    return {name: _parts(specs["layers"][name], EQUATIONS[name], lora.rank) for name in lora.targets}


def _parts(spec: ParamSpec, equation: str, rank: int) -> dict[str, ParamSpec]:
    inputs = equation.index("r") - len("...")
    outputs = len(equation.split("->")[1]) - len("...") - inputs
    lead, middle = len(spec.shape) - inputs - outputs, len(spec.shape) - outputs
    fan_in = 1
    for size in spec.shape[lead:middle]:
        fan_in *= size
    a = ParamSpec((*spec.shape[:middle], rank), (*spec.axes[:middle], None), fan_in, "", "")
    shape, axes = (*spec.shape[:lead], rank, *spec.shape[middle:]), (*spec.axes[:lead], None, *spec.axes[middle:])
    return {"a": a, "b": ParamSpec(shape, axes, rank, "", "")}


def init_adapters(key: jax.Array, specs: Any) -> Any:
    return {name: parts | {"b": jnp.zeros_like(parts["b"])} for name, parts in init_params(key, specs).items()}


def attach(params: Any, adapters: Any, lora: LoRA) -> Any:
    """The learner's tree with `Adapted` matrices; of arrays, specs or shardings."""
    layers = dict(params["layers"])
    for name, parts in adapters.items():
        layers[name] = Adapted(layers[name], parts["a"], parts["b"], EQUATIONS[name], lora.scale)
    return params | {"layers": layers}
