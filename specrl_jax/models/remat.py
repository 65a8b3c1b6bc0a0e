"""Rematerialisation: what the backward pass of a layer finds kept, and what it computes again.

    full       keeps a layer's input; computes everything else again: the least memory
    selective  keeps the results of matrix products and of attention too; norms, rotations and SwiGLU, which take few
               FLOPs and most of the rest of the memory, are computed again
    none       keeps everything that the backward pass reads

A dense layer of width D with N heads of H, K of keys, and an MLP of F keeps 2 D + (2 N + 2 K) H + 2 F numbers a token
under `selective`, D under `full`. A mixture of experts computes its MLP again under both.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

Inputs = ParamSpec("Inputs")
Result = TypeVar("Result")

FULL, SELECTIVE, NONE = REMAT = ("full", "selective", "none")
KEPT = "kept"
# jax's primitive of cuDNN's attention, whose results include the sums of its softmax, which have no name outside.
CUDNN = "dot_product_attention_fwd"


def kept(x: jax.Array) -> jax.Array:
    """Return x, which `selective` keeps for the backward pass."""
    return checkpoint_name(x, KEPT)


def rematerialised(layer: Callable[Inputs, Result], remat: str) -> Callable[Inputs, Result]:
    """Return `layer` with a backward pass that keeps what `remat`, one of REMAT, says."""
    if remat == NONE:
        return layer
    return jax.checkpoint(layer, policy=_selected if remat == SELECTIVE else None)


_named = jax.checkpoint_policies.save_only_these_names(KEPT)


def _selected(primitive: Any, *args: Any, **params: Any) -> Any:
    return primitive.name.startswith(CUDNN) or _named(primitive, *args, **params)
