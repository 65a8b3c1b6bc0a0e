"""The programs of one training step, each to be lowered without arrays, and what else lies on the devices meanwhile."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specrl_jax.data.rows import Rows
from specrl_jax.decoding.programs import Program
from specrl_jax.training.setup import Setup
from specrl_jax.training.state import TrainState
from specrl_jax.training.steps import Signal

# What memory is for.
PARAMETERS, OPTIMIZER, CACHE, BATCH = KINDS = ("parameters", "optimizer", "cache", "batch")


@dataclasses.dataclass(frozen=True)
class Phase:
    """One program."""

    name: str
    lower: Callable[[], jax.stages.Lowered]
    arguments: tuple[str, ...]  # the kind of each; of a TrainState, parameters and optimizer are told apart
    resident: tuple[Any, ...] = ()  # TrainStates and weights that are no argument, yet on the devices all the while
    unrolled: bool = False  # over the layers, which takes long to compile; else they are scanned


def find_phases(setup: Setup) -> list[Phase]:
    """In the order of a step of the synchronous loop. Nothing of them is compiled yet."""
    s, state = setup.settings, setup.abstract_state()
    g, d = s.grpo, s.draft
    rows = g.prompts_per_step * g.group_size
    learner = (state.policy, *([state.draft] if state.draft else []))
    params, draft = state.policy.params, state.draft
    moments = tuple(x.replace(params=None) for x in learner)
    reference = (params,) if g.kl_coef else ()
    weights = setup.prepare_step.eval_shape(params, draft.params if draft else None, state.vocab_map)

    phases = [
        Phase(
            "prepare",
            lambda: setup.prepare_step.lower(params, draft.params if draft else None, state.vocab_map),
            (PARAMETERS, PARAMETERS, PARAMETERS),
            (*moments, *reference),
            unrolled=True,
        ),
        *_generation(setup, weights, (*learner, *reference)),
        Phase(
            "logprob",
            lambda: setup.logprob_step.lower(params, abstract_rows(setup, rows)),
            (PARAMETERS, BATCH),
            # The rollout weights stay until the step is over.
            (weights, *moments, *([draft.params] if draft else []), *reference),
        ),
    ]
    minibatch = abstract_minibatch(setup)
    others = (weights, *reference)
    phases.append(
        Phase(
            "train policy",
            lambda: setup.policy_step.lower(state.policy, *minibatch),
            (PARAMETERS, BATCH, BATCH),
            (*others, *([draft] if draft else [])),
        )
    )
    return phases + (_draft_learning(setup, minibatch, (*others, state.policy)) if draft and d.online else [])


def _generation(setup: Setup, weights: Any, resident: tuple[Any, ...]) -> list[Phase]:
    """Refill, a chunk without speculation, and one with the longest drafts, all of the full batch."""
    programs, size = setup.engine.programs, setup.rollout.limits.num_slots
    drafted = setup.engine.draft_length

    def phase(name: str, program: Program, arguments: tuple[str, ...]) -> Phase:
        return Phase(name, functools.partial(programs.lower, program, weights), arguments, resident, unrolled=True)

    chunk = (PARAMETERS, CACHE, BATCH, BATCH, BATCH, BATCH)
    phases = [
        phase("generate: refill", Program("refill", size), (PARAMETERS, CACHE, CACHE, BATCH)),
        phase("generate: plain chunk", Program("run", size, 0), chunk),
        phase(f"generate: speculative chunk, k={drafted}", Program("run", size, drafted), chunk),
    ]
    return phases if drafted else phases[:-1]


def _draft_learning(setup: Setup, minibatch: tuple[Rows, Signal], resident: tuple[Any, ...]) -> list[Phase]:
    """One update of the draft, from the features of one policy update."""
    state, d = setup.abstract_state(), setup.settings.draft
    features = setup.policy_step.eval_shape(state.policy, *minibatch)[2]
    tables = setup.read_tables.eval_shape(state.policy.params, state.vocab_map)

    def part(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((x.shape[0] // d.minibatches, *x.shape[1:]), x.dtype, sharding=x.sharding)

    arguments = (state.draft, tables, *jax.tree.map(part, (features, minibatch[0])))
    kinds = (PARAMETERS, PARAMETERS, BATCH, BATCH)
    return [Phase("train draft", lambda: setup.draft_step.lower(*arguments), kinds, resident)]


def abstract_minibatch(setup: Setup) -> tuple[Rows, Signal]:
    """What one policy update learns from."""
    g, place = setup.settings.grpo, setup.learner_partition.sharding
    B, T = g.prompts_per_step * g.group_size // g.minibatches, setup.rollout.limits.cache_length
    floats = jax.ShapeDtypeStruct((B, T), jnp.float32, sharding=place(("batch", "sequence")))
    advantages = jax.ShapeDtypeStruct((B,), jnp.float32, sharding=place(("batch",)))
    return abstract_rows(setup, B), Signal(floats, floats if g.kl_coef else None, advantages)


def abstract_rows(setup: Setup, B: int) -> Rows:
    sharding = setup.learner_partition.sharding(("batch", "sequence"))
    shape = (B, setup.rollout.limits.cache_length)
    ints = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    return Rows(ints, ints, ints, jax.ShapeDtypeStruct(shape, jnp.bool_, sharding=sharding))


def bytes_by_kind(tree: Any) -> dict[str, int]:
    """Of TrainStates and weights, on one device."""
    found = dict.fromkeys(KINDS, 0)
    for part in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, TrainState)):
        if isinstance(part, TrainState):
            found[PARAMETERS] += device_bytes(part.params)
            found[OPTIMIZER] += device_bytes((part.step, part.opt_state))
        else:
            found[PARAMETERS] += device_bytes(part)
    return found


def device_bytes(tree: Any) -> int:
    """Of ShapeDtypeStructs with shardings, on one device."""
    return sum(shard_bytes(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(tree))


def shard_bytes(shape: tuple[int, ...], dtype: Any, sharding: Any) -> int:
    size = jnp.dtype(dtype).itemsize
    for n in sharding.shard_shape(shape):
        size *= n
    return size
