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
from specrl_jax.decoding.features.reverify import Reverification
from specrl_jax.decoding.features.router_records import RouterRecords
from specrl_jax.decoding.features.turns import SeveralTurns
from specrl_jax.decoding.programs import Program
from specrl_jax.decoding.state import Slots
from specrl_jax.drafts.weights import Weights
from specrl_jax.learner.build import Learner, make_learner
from specrl_jax.learner.shapes import abstract_microbatch
from specrl_jax.learner.state import TrainState
from specrl_jax.planning.plan import Plan
from specrl_jax.rl.objectives import logprob_passes
from specrl_jax.rollout.build import RolloutEngines, make_rollout
from specrl_jax.training.initial import abstract_frozen, abstract_run_state

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
    phases, grpo = _LearnerPhases(learner), plan.config.grpo
    state, moments, reference = phases.state, phases.moments, phases.reference
    # Jitted where rollouts are on the learner's devices, as in a dry run.
    prepare_step = cast(Jitted[[Params, Params | None, jax.Array | None], Weights], rollout.prepare_step)
    trained = phases.params, state.draft.params if state.draft else None, state.vocab_map
    prepare = functools.partial(prepare_step.lower, *trained)
    found = [
        Phase("prepare", prepare, (PARAMETERS,) * 3, resident=(*moments, *reference), unrolled=True),
        *_generation(rollout, prepare_step.eval_shape(*trained), (*phases.states, *reference)),
    ]
    if logprob_passes(grpo.old_logprobs, grpo.kl_coef):
        found.append(phases.scoring("logprob", learner.logprob_step))
    if plan.limits.feature(RouterRecords):
        found.append(phases.scoring("comparison of experts", learner.unreplayed_step))
    if not state.draft:
        return found + phases.policy_update()
    again = [phases.features()] if plan.config.draft.replay_updates else []
    return [*found, phases.table_copies(), *phases.policy_update(), *phases.draft_learning(), *again]


class _LearnerPhases:
    """The learner's programs, each with what lies on its devices meanwhile."""

    def __init__(self, learner: Learner) -> None:
        state = abstract_run_state(learner)
        policy = dataclasses.replace(state.policy, frozen=abstract_frozen(learner))
        self.learner, self.state = learner, dataclasses.replace(state, policy=policy)
        self.params, draft = learner.merged(policy), state.draft
        self.states: tuple[TrainState, ...] = (policy, draft) if draft else (policy,)
        self.moments = tuple(dataclasses.replace(x, params={}, frozen=None) for x in self.states)
        self.reference = (policy.params,) if learner.plan.config.grpo.kl_coef else ()
        self._microbatch = abstract_microbatch(learner)
        self._tables = learner.read_tables.eval_shape(policy.base, state.vocab_map) if draft else None
        self._sums, self._outputs = learner.policy_step.gradient.eval_shape(policy, *self._microbatch)

    def scoring(self, name: str, step: Jitted[[Params, Rows], object]) -> Phase:
        """Return a forward over rows of rollouts."""
        draft = (self.state.draft.params,) if self.state.draft else ()
        lower = functools.partial(step.lower, self.params, self._microbatch[0])
        return Phase(name, lower, (PARAMETERS, BATCH), resident=(*self.moments, *draft, *self.reference))

    def table_copies(self) -> Phase:
        """Return the copy of the policy's tables for the draft, which the policy's update leaves as they are."""
        draft, policy = self.state.draft, self.state.policy
        assert draft is not None
        read = functools.partial(self.learner.read_tables.lower, policy.base, self.state.vocab_map)
        resident = (*self.moments, draft.params, *self.reference)
        return Phase("tables for the draft", read, (PARAMETERS, PARAMETERS), resident=resident)

    def policy_update(self) -> list[Phase]:
        """Return the policy's gradient of a microbatch, and its update."""
        step, policy = self.learner.policy_step, self.state.policy
        beside = (*self.reference, *self.states[1:], self._tables)
        gradient = functools.partial(step.gradient.lower, policy, *self._microbatch)
        apply = functools.partial(step.apply.lower, policy, self._sums)
        resident = (self.moments[0], *self._earlier(self._sums), *beside)
        return [
            Phase("train policy", gradient, (PARAMETERS, BATCH, BATCH), resident=resident),
            Phase("update policy", apply, (PARAMETERS, OPTIMIZER), resident=beside),
        ]

    def draft_learning(self) -> list[Phase]:
        """Return what a draft does with the features of one policy update: it learns from them, or predicts only."""
        draft, step, predict = self.state.draft, self.learner.draft_step, self.learner.predict_step
        assert draft is not None and step is not None and predict is not None, "there is a draft with weights"
        features, rows = self._outputs.features, self._microbatch[0]
        policy = (*self.reference, self.state.policy, self._sums)
        resident = (*policy, dataclasses.replace(draft, params={}))
        asked = functools.partial(predict.lower, draft.params, self._tables, features, rows)
        predicts = Phase("predict acceptance", asked, (PARAMETERS, PARAMETERS, BATCH, BATCH), resident=resident)
        if not self.learner.plan.config.draft.online:
            return [predicts]
        given = draft, self._tables, stand_in(step.count.eval_shape(draft, rows)), features, rows
        sums = step.update.gradient.eval_shape(*given)[0]
        gradient = functools.partial(step.update.gradient.lower, *given)
        kinds = (PARAMETERS, PARAMETERS, BATCH, BATCH, BATCH)
        apply = functools.partial(step.update.apply.lower, draft, sums)
        return [
            Phase("train draft", gradient, kinds, resident=(*resident, *self._earlier(sums))),
            Phase("update draft", apply, (PARAMETERS, OPTIMIZER), resident=policy),
            predicts,
        ]

    def features(self) -> Phase:
        """Return the forward that makes the features of a further update of the draft (learner/replay.py)."""
        # The policy chooses its own experts of texts that older ones wrote.
        texts = dataclasses.replace(self._microbatch[0], experts=None)
        lower = functools.partial(self.learner.feature_step.lower, self.params, texts)
        resident = (*self.reference, self.moments[0], self.state.draft, self._tables)
        return Phase("features for the draft", lower, (PARAMETERS, BATCH), resident=resident)

    def _earlier(self, sums: object) -> tuple[object, ...]:
        """Return the sums over earlier microbatches of an update; none where it has one."""
        return (sums,) if self.learner.plan.config.grpo.microbatch_tokens else ()


def _generation(rollout: RolloutEngines, weights: Weights, resident: tuple[object, ...]) -> list[Phase]:
    """Return the engine's programs: those of `CompiledFunctions.all` and of parking, at the full batch size.

    Of the decode chunks, all of which calibration runs on one batch, plain ones and those of the longest drafts: the
    others need less than these (temporaries of a 0.6B policy on an H100: 78, 294, 361 and 456 MB for 0 to 3 drafts).
    """
    programs, limits = rollout.engine.compiled, rollout.config.limits
    size, k = limits.num_slots, rollout.engine.draft_length
    slots = programs.describe(Program("read_row", size), weights)[1][0]
    assert isinstance(slots, Slots)

    def phase(name: str, kind: str, *arguments: str, k: int = 0, n: int = size, beside: object = ()) -> Phase:
        own = () if PARAMETERS in arguments else (weights,)
        lower = functools.partial(programs.lower, Program(kind, n, k), weights)
        return Phase(f"generate: {name}", lower, arguments, resident=(*resident, own, beside), unrolled=True)

    def records() -> Phase:
        others = dataclasses.replace(slots, cache=slots.cache._replace(experts=None))
        return phase("experts to the host", "read_records", CACHE, BATCH, BATCH, beside=others)

    return [
        phase("empty slots", "empty"),
        phase("refill", "refill", PARAMETERS, CACHE, CACHE, BATCH),
        phase("plain chunk", "decode", PARAMETERS, CACHE, BATCH),
        *([phase(f"speculative chunk, k={k}", "decode", PARAMETERS, CACHE, BATCH, k=k)] if k else []),
        *(
            [phase("chunk of earlier tokens", "reverify", PARAMETERS, CACHE, BATCH)]
            if limits.feature(Reverification)
            else []
        ),
        *([phase("extension", "extend", PARAMETERS, CACHE, BATCH)] if limits.feature(SeveralTurns) else []),
        *(phase(f"compact to {n}", "compact", CACHE, CACHE, BATCH, n=n) for n in programs.sizes[1:]),
        # The program does not read the pages.
        phase("row to the host", "read_row", CACHE, BATCH, beside=slots.not_by_row()),
        phase("pages to the host", "read_pages", CACHE, BATCH, BATCH),
        phase("end of a row", "drop_row", CACHE, BATCH),
        phase("row from the host", "restore_row", CACHE, BATCH, BATCH),
        phase("pages from the host", "write_pages", CACHE, BATCH, BATCH, BATCH),
        *([records()] if limits.feature(RouterRecords) else []),
    ]


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
