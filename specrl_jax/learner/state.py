"""The learner's state, and its layout over the mesh."""

import functools
from collections.abc import Sequence
from typing import cast

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from specrl_jax.core import Params, stand_in
from specrl_jax.models.layers import Specs, init_params
from specrl_jax.sharding import Partitioner

Path = Sequence[object]  # of jax.tree keys


@flax.struct.dataclass
class TrainState:
    step: jax.Array  # [] int32: RL or pretraining steps of a policy, updates of a draft
    params: Params  # trained, float32: all weights in the training layout, or adapters
    opt_state: optax.OptState
    frozen: Params | None = None  # base weights under adapters; in no checkpoint, since the config determines them

    @property
    def base(self) -> Params:
        """Return the weights without adapters, which hold embedding and unembedding."""
        return self.params if self.frozen is None else self.frozen


@flax.struct.dataclass
class RunState:
    """Everything that a run trains."""

    policy: TrainState
    draft: TrainState | None  # None: no draft with weights
    vocab_map: jax.Array | None  # [Vd] int32, target id of each draft id
    reference: Params | None = None  # policy.params of the KL reference; None: no KL term


def state_shardings(
    specs: Specs, optimizer: optax.GradientTransformation, partition: Partitioner, *, frozen: Specs | None = None
) -> TrainState:
    """Return shardings of a TrainState of `specs`: moments as their parameter, counters replicated.

    A moment is identified by its path, which ends in its parameter's, and by having the parameter's shape.
    """
    params = partition.shardings(specs)
    by_path = {
        tuple(path): (spec.shape, partition.sharding(spec.axes, spec.shape))
        for path, spec in jax.tree.flatten_with_path(specs)[0]
    }

    def sharding(path: Path, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        for start in range(len(path)):
            shape, found = by_path.get(tuple(path[start:]), (None, None))
            if found is not None and shape == leaf.shape:
                return found
        return partition.replicated

    opt_state = jax.tree.map_with_path(sharding, _state_shapes(specs, optimizer).opt_state)
    frozen_shardings = cast(Params, partition.shardings(frozen)) if frozen else None
    return TrainState(stand_in(partition.replicated), cast(Params, params), opt_state, frozen=frozen_shardings)


def abstract_state(specs: Specs, optimizer: optax.GradientTransformation, partition: Partitioner) -> TrainState:
    """Return ShapeDtypeStructs of the state as a checkpoint holds it, into which it is restored."""
    shapes, shardings = _state_shapes(specs, optimizer), state_shardings(specs, optimizer, partition)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def _state_shapes(specs: Specs, optimizer: optax.GradientTransformation) -> TrainState:
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), specs)
    return TrainState(stand_in(jax.ShapeDtypeStruct((), jnp.int32)), params, jax.eval_shape(optimizer.init, params))


def init_random_params(key: jax.Array, specs: Specs, partition: Partitioner) -> Params:
    """Draw float32 parameters of `specs`, each on its own shard."""
    return jax.jit(functools.partial(init_params, specs=specs), out_shardings=partition.shardings(specs))(key)


def init_state(
    params: Params, specs: Specs, optimizer: optax.GradientTransformation, *, partition: Partitioner
) -> TrainState:
    """Return a fresh state around `params`, which are donated; nothing is frozen."""
    shardings = state_shardings(specs, optimizer, partition)

    def fresh(params: Params) -> TrainState:
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    return jax.jit(fresh, donate_argnums=0, out_shardings=shardings)(params)
