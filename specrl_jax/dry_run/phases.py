"""The programs of one training step, lowered without arrays, and the arrays that stay on the devices meanwhile."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from specrl_jax.core import Jitted, Params, stand_in
from specrl_jax.data.rows import Rows
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.decoding.programs import Program
from specrl_jax.decoding.state import Slots
from specrl_jax.drafts.weights import Weights
from specrl_jax.learner.state import RunState, TrainState
from specrl_jax.rl.objectives import LossInputs, logprob_passes
from specrl_jax.training.build import Learner, make_learner
from specrl_jax.training.engines import RolloutEngines, make_rollout
from specrl_jax.training.initial import abstract_frozen, abstract_run_state
from specrl_jax.training.plan import Plan
from specrl_jax.training.shapes import abstract_microbatch, abstract_rows

# Kinds of memory.
PARAMETERS, OPTIMIZER, CACHE, BATCH = KINDS = ("parameters", "optimizer", "cache", "batch")


@dataclasses.dataclass(frozen=True)
class Phase:
    """One program of a step."""

    name: str
    lower: Callable[[], jax.stages.Lowered]
    arguments: tuple[str, ...]  # kind of each; a TrainState is divided into parameters and optimizer
    resident: tuple[object, ...] = ()  # TrainStates, slots and weights on the devices that are not arguments
    unrolled: bool = False  # layers are unrolled, which takes long to compile; else they are scanned


def find_phases(plan: Plan) -> list[Phase]:
    """Return the programs in the order of a synchronous step, not compiled yet."""
    learner, rollout = make_learner(plan), make_rollout(plan, tokenizer=CharTokenizer())
    state, g = abstract_state(learner), plan.config.grpo
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
            resident=(*moments, *reference),
            unrolled=True,
        ),
        *_generation(rollout, weights, (*states, *reference)),
    ]
    if logprob_passes(g.old_logprobs, g.kl_coef):
        phases.append(
            Phase(
                "logprob",
                lambda: learner.logprob_step.lower(params, abstract_rows(learner)),
                (PARAMETERS, BATCH),
                resident=(*moments, *([draft.params] if draft else []), *reference),
            )
        )
    if plan.limits.records:
        phases.append(
            Phase(
                "comparison of experts",
                lambda: learner.unreplayed_step.lower(params, abstract_rows(learner)),
                (PARAMETERS, BATCH),
                resident=(*moments, *([draft.params] if draft else []), *reference),
            )
        )
    microbatch = abstract_microbatch(learner)
    tables = (learner.read_tables.eval_shape(state.policy.base, state.vocab_map),) if draft else ()
    beside = (*reference, *states[1:], *tables)
    sums = learner.policy_step.gradient.eval_shape(state.policy, *microbatch)[0]
    train = [
        Phase(
            "train policy",
            lambda: learner.policy_step.gradient.lower(state.policy, *microbatch),
            (PARAMETERS, BATCH, BATCH),
            resident=(moments[0], *_earlier(learner, sums), *beside),
        ),
        Phase(
            "update policy",
            lambda: learner.policy_step.apply.lower(state.policy, sums),
            (PARAMETERS, OPTIMIZER),
            resident=beside,
        ),
    ]
    if not draft:
        return [*phases, *train]
    read = _table_copies(learner, (*moments, draft.params, *reference))
    learning = _draft_learning(learner, microbatch, reference)
    again = [_features(learner, microbatch[0], reference)] if plan.config.draft.replay_updates else []
    return [*phases, read, *train, *learning, *again]


def count_programs(plan: Plan) -> dict[str, int]:
    """Return the programs of a run's engines by what they are for; parking's, which few runs need, are left out."""
    rollout = make_rollout(plan, tokenizer=CharTokenizer())
    training, evaluation = rollout.engine.compiled, rollout.eval_engine.compiled
    own = 0 if evaluation is training else len(evaluation.all())
    return {"rollouts": len(training.all()), "evaluation": own}


def abstract_state(learner: Learner) -> RunState:
    """Return the state of a run, including frozen parameters."""
    state = abstract_run_state(learner)
    policy = dataclasses.replace(state.policy, frozen=abstract_frozen(learner))
    return dataclasses.replace(state, policy=policy)


def _generation(rollout: RolloutEngines, weights: Weights, resident: tuple[object, ...]) -> list[Phase]:
    """Return the engine's programs: those of `CompiledFunctions.all` and of parking, at the full batch size.

    Of the decode chunks, all of which calibration runs on one batch, plain ones and those of the longest drafts: the
    others need less than these (temporaries of a 0.6B policy on an H100: 78, 294, 361 and 456 MB for 0 to 3 drafts).
    """
    programs, limits = rollout.engine.compiled, rollout.config.limits
    size, drafted = limits.num_slots, rollout.engine.draft_length
    slots = programs.describe(Program("read_row", size), weights)[1][0]
    assert isinstance(slots, Slots)

    def phase(name: str, program: Program, *arguments: str, beside: tuple[object, ...] = ()) -> Phase:
        own = () if PARAMETERS in arguments else (weights,)
        lower = functools.partial(programs.lower, program, weights)
        return Phase(f"generate: {name}", lower, arguments, resident=(*resident, *own, *beside), unrolled=True)

    def parking(name: str, kind: str, *arguments: str, beside: tuple[object, ...] = ()) -> Phase:
        return phase(name, Program(kind, size), CACHE, BATCH, *arguments, beside=beside)

    def computing(name: str, program: Program) -> Phase:
        return phase(name, program, PARAMETERS, CACHE, BATCH)

    def chunk(name: str, k: int) -> Phase:
        return computing(name, Program("decode", size, k))

    def records() -> Phase:
        rest = dataclasses.replace(slots, cache=slots.cache._replace(experts=None))
        return phase("experts to the host", Program("read_records", size), CACHE, BATCH, BATCH, beside=(rest,))

    return [
        phase("empty slots", Program("empty", size)),
        phase("refill", Program("refill", size), PARAMETERS, CACHE, CACHE, BATCH),
        chunk("plain chunk", 0),
        *([chunk(f"speculative chunk, k={drafted}", drafted)] if drafted else []),
        *([computing("chunk of earlier tokens", Program("reverify", size))] if limits.earlier else []),
        *([computing("extension", Program("extend", size))] if limits.turns else []),
        *(phase(f"compact to {n}", Program("compact", n), CACHE, CACHE, BATCH) for n in programs.sizes[1:]),
        # The program does not read the pages.
        parking("row to the host", "read_row", beside=(slots.not_by_row(),)),
        parking("pages to the host", "read_pages", BATCH),
        parking("end of a row", "drop_row"),
        parking("row from the host", "restore_row", BATCH),
        parking("pages from the host", "write_pages", BATCH, BATCH),
        *([records()] if limits.records else []),
    ]


def _table_copies(learner: Learner, resident: tuple[object, ...]) -> Phase:
    """Return the copy of the policy's tables for the draft, which the policy's update leaves as they are."""
    state = abstract_state(learner)
    read = functools.partial(learner.read_tables.lower, state.policy.base, state.vocab_map)
    return Phase("tables for the draft", read, (PARAMETERS, PARAMETERS), resident=resident)


def _draft_learning(
    learner: Learner, microbatch: tuple[Rows, LossInputs], reference: tuple[object, ...]
) -> list[Phase]:
    """Return what a draft does with the features of one policy update: it learns from them, or predicts only."""
    state, online = abstract_state(learner), learner.plan.config.draft.online
    draft, step, predict = state.draft, learner.draft_step, learner.predict_step
    assert draft is not None and step is not None and predict is not None, "there is a draft with weights"
    of_policy, outputs = learner.policy_step.gradient.eval_shape(state.policy, *microbatch)
    features, rows, policy = outputs.features, microbatch[0], (state.policy, of_policy)
    tables = learner.read_tables.eval_shape(state.policy.base, state.vocab_map)
    resident = (*reference, *policy, dataclasses.replace(draft, params={}))
    asked = functools.partial(predict.lower, draft.params, tables, features, rows)
    predicts = Phase("predict acceptance", asked, (PARAMETERS, PARAMETERS, BATCH, BATCH), resident=resident)
    if not online:
        return [predicts]
    counts = stand_in(step.count.eval_shape(draft, rows))
    given = draft, tables, counts, features, rows
    sums = step.update.gradient.eval_shape(*given)[0]
    lower = functools.partial(step.update.gradient.lower, *given)
    kinds = (PARAMETERS, PARAMETERS, BATCH, BATCH, BATCH)
    apply = functools.partial(step.update.apply.lower, draft, sums)
    return [
        Phase("train draft", lower, kinds, resident=(*resident, *_earlier(learner, sums))),
        Phase("update draft", apply, (PARAMETERS, OPTIMIZER), resident=(*reference, *policy)),
        predicts,
    ]


def _earlier(learner: Learner, sums: object) -> tuple[object, ...]:
    """Return the sums over earlier microbatches of an update; none where it has one."""
    return (sums,) if learner.plan.config.grpo.microbatch_tokens else ()


def _features(learner: Learner, rows: Rows, reference: tuple[object, ...]) -> Phase:
    """Return the forward that makes the features of a further update of the draft (training/replay.py)."""
    state = abstract_state(learner)
    # The policy chooses its own experts of texts that older ones wrote.
    texts = dataclasses.replace(rows, experts=None)
    tables = learner.read_tables.eval_shape(state.policy.base, state.vocab_map)
    moments = dataclasses.replace(state.policy, params={}, frozen=None)
    lower = functools.partial(learner.feature_step.lower, learner.merged(state.policy), texts)
    return Phase(
        "features for the draft", lower, (PARAMETERS, BATCH), resident=(*reference, moments, state.draft, tables)
    )


def bytes_by_kind(tree: object) -> dict[str, int]:
    """Return the bytes of TrainStates, slots and weights on one device."""
    found = dict.fromkeys(KINDS, 0)
    for part in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, TrainState | Slots)):
        if isinstance(part, Slots):
            found[CACHE] += device_bytes(part)
        elif isinstance(part, TrainState):
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
