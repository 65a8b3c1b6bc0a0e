"""The learner's state, its optimizer, and how both are laid out over the mesh."""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from specrl_jax.models.layers import init_params
from specrl_jax.sharding import Partitioner


@flax.struct.dataclass
class TrainState:
    step: jax.Array  # [] int32: RL or pretraining steps of a policy, updates of a draft
    params: Any  # what learns, float32: the learner form, or its adapters
    opt_state: Any
    frozen: Any = None  # the learner form under adapters; in no checkpoint, since it is where it was read

    @property
    def base(self) -> Any:
        """The learner form, without what adapters add: where embedding and unembedding are."""
        return self.params if self.frozen is None else self.frozen


@flax.struct.dataclass
class RunState:
    """All that a run learns."""

    policy: TrainState
    draft: TrainState | None
    vocab_map: jax.Array | None  # [Vd] int32, target id of each draft id
    reference: Any = None  # policy.params that the KL term looks back to; None: the first, or there is no such term


def state_shardings(
    specs: Any, optimizer: optax.GradientTransformation, partition: Partitioner, frozen: Any = None
) -> TrainState:
    """Shardings of a TrainState of `specs`: moments lie where their parameter lies, counters everywhere.

    A moment is known by its place: the path to it ends in its parameter's, and it has the parameter's shape.
    """
    params = partition.shardings(specs)
    by_path = {tuple(path): (spec.shape, partition.sharding(spec.axes, spec.shape)) for path, spec in _paths(specs)}

    def sharding(path: Any, leaf: Any) -> Any:
        for start in range(len(path)):
            shape, found = by_path.get(tuple(path[start:]), (None, None))
            if shape == leaf.shape:
                return found
        return partition.replicated

    opt_state = jax.tree.map_with_path(sharding, _state_shapes(specs, optimizer).opt_state)
    return TrainState(partition.replicated, params, opt_state, partition.shardings(frozen) if frozen else None)


def _paths(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree.flatten_with_path(tree)[0]


def abstract_state(specs: Any, optimizer: optax.GradientTransformation, partition: Partitioner) -> TrainState:
    """ShapeDtypeStructs of the state as a checkpoint holds it, which it is restored into."""
    shapes, shardings = _state_shapes(specs, optimizer), state_shardings(specs, optimizer, partition)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def _state_shapes(specs: Any, optimizer: optax.GradientTransformation) -> TrainState:
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), specs)
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, jax.eval_shape(optimizer.init, params))


def init_random_params(key: jax.Array, specs: Any, partition: Partitioner) -> Any:
    """Random float32 parameters of `specs`, each born on its own shard."""
    return jax.jit(functools.partial(init_params, specs=specs), out_shardings=partition.shardings(specs))(key)


def init_state(params: Any, specs: Any, optimizer: optax.GradientTransformation, partition: Partitioner) -> TrainState:
    """Fresh state around `params`, which it takes over (they are donated); nothing under it is frozen."""
    shardings = state_shardings(specs, optimizer, partition)

    def fresh(params: Any) -> TrainState:
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    return jax.jit(fresh, donate_argnums=0, out_shardings=shardings)(params)
