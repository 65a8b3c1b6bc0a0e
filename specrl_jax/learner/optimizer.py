"""Optimizers of the policy and of a draft: AdamW, or Muon on matrices, behind a clip of the global gradient norm.

Weight decay has no mask: norms and biases decay too.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from specrl_jax.config import OptimizerConfig
from specrl_jax.core import Params
from specrl_jax.learner.state import TrainState


def _muon(schedule: optax.Schedule, b2: float, weight_decay: float) -> optax.GradientTransformation:
    """Return Muon on the matrices of the layers and AdamW on tables, norms and routers, at one learning rate.

    Both use Nesterov's momentum; updates of a matrix are scaled to AdamW's RMS (Moonlight, arXiv 2502.16982, section
    2.2).
    """
    return optax.contrib.muon(
        schedule,
        weight_decay=weight_decay,
        adam_b2=b2,
        adam_weight_decay=weight_decay,
        muon_weight_dimension_numbers=lambda params: jax.tree.map_with_path(_matrix_axes, params),
        consistent_rms=0.2,
    )


def _matrix_axes(path: Sequence[jax.tree_util.DictKey], weight: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
    """Return a matrix's input and output axes; None for a weight of AdamW's.

    Other axes are layers, experts and, in a draft head, the parts of its input (embedding and hidden state; three
    features): each entry is a matrix of its own.
    """
    heads = dict.fromkeys(("q", "k", "v"), ((-3,), (-2, -1))) | {"o": ((-3, -2), (-1,))}
    matrices = heads | dict.fromkeys(("gate", "up", "down", "fc", "eh_proj"), ((-2,), (-1,)))
    if path[-1].key not in matrices:
        return None
    inputs, outputs = (tuple(weight.ndim + axis for axis in axes) for axes in matrices[path[-1].key])
    return optax.contrib.MuonDimensionNumbers(inputs, outputs)


OPTIMIZERS = {"adamw": optax.adamw, "muon": _muon}


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return the optimizer of a config, behind a clip of the global gradient norm."""
    peak = config.learning_rate
    if config.decay_steps:
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, config.warmup, config.decay_steps, end_value=peak / 10)
    else:
        schedule = optax.linear_schedule(peak / (config.warmup + 1), peak, config.warmup)
    optimizer = OPTIMIZERS[config.name](schedule, b2=config.b2, weight_decay=config.weight_decay)
    return optax.chain(optax.clip_by_global_norm(config.clip), optimizer)


def apply_gradient(
    state: TrainState, gradient: Params, optimizer: optax.GradientTransformation, healthy: jax.Array
) -> tuple[TrainState, jax.Array]:
    """Return (the state after one update, unchanged where not `healthy` ([] bool); its parameters' norm over their norm
    before, [] float32). The caller counts `step`.
    """

    def apply(state: TrainState) -> tuple[TrainState, jax.Array]:
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        growth = (optax.tree.norm(params) / optax.tree.norm(state.params)).astype(jnp.float32)
        return dataclasses.replace(state, params=params, opt_state=opt_state), growth

    return jax.lax.cond(healthy, apply, lambda state: (state, jnp.ones((), jnp.float32)), state)
