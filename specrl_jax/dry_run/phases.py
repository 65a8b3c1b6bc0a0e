"""The programs of one training step, lowered without arrays, and the arrays that stay on the devices meanwhile."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from specrl_jax.core import Jitted, Params, stand_in
from specrl_jax.data.rows import KeptTokens, Rows
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.decoding.compiled import Program
from specrl_jax.drafts.weights import Weights
from specrl_jax.learner.batch import ids_per_row, pack_parts
from specrl_jax.learner.state import RunState, TrainState
from specrl_jax.rl.objectives import LossInputs
from specrl_jax.training.build import Learner, Rollout, make_learner, make_rollout
from specrl_jax.training.initial import abstract_frozen, abstract_run_state
from specrl_jax.training.performance import logprob_passes
from specrl_jax.training.plan import Plan

# Kinds of memory.
PARAMETERS, OPTIMIZER, CACHE, BATCH = KINDS = ("parameters", "optimizer", "cache", "batch")


@dataclasses.dataclass(frozen=True)
class Phase:
    """One program of a step."""

    name: str
    lower: Callable[[], jax.stages.Lowered]
    arguments: tuple[str, ...]  # kind of each; a TrainState is divided into parameters and optimizer
    resident: tuple[object, ...] = ()  # TrainStates and weights on the devices that are not arguments
    unrolled: bool = False  # layers are unrolled, which takes long to compile; else they are scanned
    pages: int = 0  # C, of a shard, where an iteration of the decode loop is counted


def find_phases(plan: Plan) -> list[Phase]:
    """Return the programs in the order of a synchronous step, not compiled yet."""
    learner, rollout = make_learner(plan), make_rollout(plan, tokenizer=CharTokenizer())
    state, g, d = abstract_state(learner), plan.config.grpo, plan.config.draft
    rows = g.prompts_per_step * g.group_size
    states = (state.policy, *([state.draft] if state.draft else []))
    params, draft = learner.merged(state.policy), state.draft
    moments = tuple(dataclasses.replace(x, params={}, frozen=None) for x in states)
    reference = (state.policy.params,) if g.kl_coef else ()
    # Jitted where rollouts are on the learner's devices, as in a dry run.
    prepare_step = cast(Jitted[[Params, Params | None, jax.Array | None], Weights], rollout.prepare_step)
    weights = prepare_step.eval_shape(params, draft.params if draft else None, state.vocab_map)

    phases = [
        Phase(
            "prepare",
            lambda: prepare_step.lower(params, draft.params if draft else None, state.vocab_map),
            (PARAMETERS, PARAMETERS, PARAMETERS),
            (*moments, *reference),
            unrolled=True,
        ),
        *_generation(rollout, weights, (*states, *reference)),
    ]
    if logprob_passes(learner):
        phases.append(
            Phase(
                "logprob",
                lambda: learner.logprob_step.lower(params, abstract_rows(learner, rows, learner.packing.parts)),
                (PARAMETERS, BATCH),
                (*moments, *([draft.params] if draft else []), *reference),
            )
        )
    minibatch = abstract_minibatch(learner)
    phases.append(
        Phase(
            "train policy",
            lambda: learner.policy_step.lower(state.policy, *minibatch),
            (PARAMETERS, BATCH, BATCH),
            (*reference, *([draft] if draft else [])),
        )
    )
    return phases + (_draft_learning(learner, minibatch, (*reference, state.policy)) if draft and d.online else [])


def abstract_state(learner: Learner) -> RunState:
    """Return the state of a run, including frozen parameters."""
    state = abstract_run_state(learner)
    policy = dataclasses.replace(state.policy, frozen=abstract_frozen(learner))
    return dataclasses.replace(state, policy=policy)


def _generation(rollout: Rollout, weights: Weights, resident: tuple[object, ...]) -> list[Phase]:
    """Return refill, a plain chunk and a chunk of the longest drafts at the full batch size; what makes the batch
    smaller, and what copies pages of a row to the host and back.
    """
    programs, size = rollout.engine.compiled, rollout.config.limits.num_slots
    drafted, pages = rollout.engine.draft_length, rollout.config.limits.shard_pages

    def phase(name: str, program: Program, *arguments: str, pages: int = 0) -> Phase:
        beside = resident if PARAMETERS in arguments else (*resident, weights)
        lower = functools.partial(programs.lower, program, weights)
        return Phase(f"generate: {name}", lower, arguments, beside, unrolled=True, pages=pages)

    chunk = (PARAMETERS, CACHE, BATCH, BATCH, BATCH, BATCH)
    phases = [
        phase("refill", Program("refill", size), PARAMETERS, CACHE, CACHE, BATCH),
        phase("plain chunk", Program("decode", size, 0), *chunk, pages=pages),
    ]
    if drafted:
        name = f"speculative chunk, k={drafted}"
        phases.append(phase(name, Program("decode", size, drafted), *chunk, pages=pages))
    if len(programs.sizes) > 1:
        smaller = programs.sizes[1]
        phases.append(phase(f"compact to {smaller}", Program("compact", smaller), CACHE, CACHE, BATCH))
    phases.append(phase("pages to the host", Program("read_pages", size), CACHE, BATCH, BATCH))
    phases.append(phase("pages from the host", Program("write_pages", size), CACHE, BATCH, BATCH, BATCH))
    return phases


def _draft_learning(learner: Learner, minibatch: tuple[Rows, LossInputs], resident: tuple[object, ...]) -> list[Phase]:
    """Return the draft update from the features of one policy update."""
    state, d = abstract_state(learner), learner.plan.config.draft
    features = jax.eval_shape(learner.policy_step, state.policy, *minibatch)[2].features
    tables = jax.eval_shape(learner.read_tables, state.policy.base, state.vocab_map)

    def part(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((x.shape[0] // d.minibatches, *x.shape[1:]), x.dtype, sharding=x.sharding)

    arguments = (state.draft, tables, *jax.tree.map(part, (features, minibatch[0])))
    kinds = (PARAMETERS, PARAMETERS, BATCH, BATCH)
    step = learner.draft_step
    assert step is not None, "a draft that learns online has a step"
    return [Phase("train draft", lambda: step.lower(*arguments), kinds, resident)]


def abstract_minibatch(learner: Learner) -> tuple[Rows, LossInputs]:
    """Return the shapes of the inputs of one policy update."""
    g, o = learner.plan.config.grpo, learner.objective
    n = g.minibatches
    rows = abstract_rows(learner, g.prompts_per_step * g.group_size // n, learner.packing.parts // n)
    floats = stand_in(jax.ShapeDtypeStruct(rows.mask.shape, jnp.float32, sharding=rows_sharding(learner)))
    inputs = LossInputs(
        old_logprobs=None if o.old_logprobs == "current" else floats,
        ref_logprobs=floats if o.kl_coef else None,
        advantages=floats,
        behaviour=floats if o.correction != "none" else None,
        loss_mask=rows.mask if g.leaves_out else None,
    )
    return rows, inputs


def rows_sharding(learner: Learner) -> NamedSharding:
    return learner.plan.learner_partition.sharding(("batch", "sequence"))


def abstract_rows(learner: Learner, rollouts: int, parts: int) -> Rows:
    """Return the shapes of the rows of so many rollouts, each as long as it may be."""
    limits = learner.plan.limits
    places = pack_parts(np.full(rollouts, limits.cache_length), learner.packing._replace(parts=parts))
    (B, T), most_kept = (places.rows, places.tokens), limits.most_kept
    shape, sharding = (B, T), rows_sharding(learner)
    ints = stand_in(jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding))
    # As many ids as top-k and top-p can keep; top-p usually keeps a few.
    ids = stand_in(jax.ShapeDtypeStruct((B, ids_per_row(T, T * most_kept)), jnp.int32, sharding=sharding))
    mask = stand_in(jax.ShapeDtypeStruct(shape, jnp.bool_, sharding=sharding))
    kept = KeptTokens(ids, ints) if most_kept else None
    return Rows(ints, ints, ints, mask, ints, kept)


def bytes_by_kind(tree: object) -> dict[str, int]:
    """Return the bytes of TrainStates and weights on one device."""
    found = dict.fromkeys(KINDS, 0)
    for part in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, TrainState)):
        if isinstance(part, TrainState):
            found[PARAMETERS] += device_bytes((part.params, part.frozen))
            found[OPTIMIZER] += device_bytes((part.step, part.opt_state))
        else:
            found[PARAMETERS] += device_bytes(part)
    return found


def device_bytes(tree: object) -> int:
    """Return the bytes of ShapeDtypeStructs with shardings on one device."""
    return sum(shard_bytes(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(tree))


def shard_bytes(shape: tuple[int, ...], dtype: jnp.dtype, sharding: Sharding) -> int:
    return jnp.dtype(dtype).itemsize * math.prod(sharding.shard_shape(shape))
