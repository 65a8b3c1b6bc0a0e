"""The learner's state, its optimizer, and how both are laid out over the mesh."""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from specrl_jax.core import BadInput
from specrl_jax.models.layers import init_params
from specrl_jax.sharding import Partitioner


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """`learning_rate` after `warmup` steps; then constant, or a cosine to a tenth of it over `decay_steps`.

    A warm-up before a constant rate starts above zero, since a short run must not waste its first step; before a cosine
    it starts from zero.
    """

    name: str
    learning_rate: float
    warmup: int  # optimizer steps
    clip: float  # global gradient norm
    weight_decay: float
    b2: float
    decay_steps: int  # optimizer steps, warm-up included; 0 = constant


OPTIMIZERS = {"adamw": optax.adamw}


def make_optimizer(config: OptimizerConfig, section: str = "optimizer") -> optax.GradientTransformation:
    """`section`: of the config, for messages. Raises BadInput."""
    if config.name not in OPTIMIZERS:
        raise BadInput(f"{section}.name: no optimizer '{config.name}'; there are {', '.join(OPTIMIZERS)}")
    peak = config.learning_rate
    if config.decay_steps:
        if config.decay_steps <= config.warmup:
            raise BadInput(f"{section}.decay_steps={config.decay_steps} must be above {section}.warmup={config.warmup}")
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, config.warmup, config.decay_steps, end_value=peak / 10)
    else:
        schedule = optax.linear_schedule(peak / (config.warmup + 1), peak, config.warmup)
    optimizer = OPTIMIZERS[config.name](schedule, b2=config.b2, weight_decay=config.weight_decay)
    return optax.chain(optax.clip_by_global_norm(config.clip), optimizer)


@flax.struct.dataclass
class TrainState:
    step: jax.Array  # [] int32: RL or pretraining steps of a policy, updates of a draft
    params: Any  # learner form, float32
    opt_state: Any


@flax.struct.dataclass
class RunState:
    """All that a run learns."""

    policy: TrainState
    draft: TrainState | None
    vocab_map: jax.Array | None  # [Vd] int32, target id of each draft id


def apply_gradient(state: TrainState, gradient: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """The state after one optimizer update; `step` is the caller's to count."""
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    return state.replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state)


def state_shardings(specs: Any, optimizer: optax.GradientTransformation, partition: Partitioner) -> TrainState:
    """Shardings of a TrainState of `specs`: moments lie where their parameter lies, counters everywhere."""
    params = partition.tree(specs)
    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        _state_shapes(specs, optimizer).opt_state,
        params,
        transform_non_params=lambda _: partition.replicated,
    )
    return TrainState(step=partition.replicated, params=params, opt_state=opt_state)


def abstract_state(specs: Any, optimizer: optax.GradientTransformation, partition: Partitioner) -> TrainState:
    """ShapeDtypeStructs of the state: what a checkpoint is restored into and a step is lowered with."""
    shapes, shardings = _state_shapes(specs, optimizer), state_shardings(specs, optimizer, partition)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def _state_shapes(specs: Any, optimizer: optax.GradientTransformation) -> TrainState:
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), specs)
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, jax.eval_shape(optimizer.init, params))


def init_random_params(key: jax.Array, specs: Any, partition: Partitioner) -> Any:
    """Random float32 parameters of `specs`, each born on its own shard."""
    return jax.jit(functools.partial(init_params, specs=specs), out_shardings=partition.tree(specs))(key)


def init_state(params: Any, specs: Any, optimizer: optax.GradientTransformation, partition: Partitioner) -> TrainState:
    """Fresh state around `params`, which it takes over (they are donated)."""
    shardings = state_shardings(specs, optimizer, partition)

    def fresh(params: Any) -> TrainState:
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    return jax.jit(fresh, donate_argnums=0, out_shardings=shardings)(params)
