"""The rollouts of a step: its problems, their generation, their scores."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specrl_jax import distributed
from specrl_jax.data.problem import Problem
from specrl_jax.data.sources import ProblemStream
from specrl_jax.decoding.continuation import Continuation
from specrl_jax.decoding.lookahead import Lookahead
from specrl_jax.decoding.requests import CallOptions
from specrl_jax.decoding.rollouts import Rollouts, WeightsVersion, group_rows
from specrl_jax.drafts.weights import Weights
from specrl_jax.process_groups import Share
from specrl_jax.rewards.scorer import Scorer
from specrl_jax.rollout.build import RolloutEngines
from specrl_jax.rollout.conversations import Conversations, begin_conversations
from specrl_jax.rollout.groups import (
    ScoredRollouts,
    first_id,
    gather_round,
    needs_round,
    score_rollouts,
    with_rewards,
)
from specrl_jax.rollout.prompt_lengths import PromptLengths
from specrl_jax.rollout.speculation import Speculation
from specrl_jax.rollout.stale.exact import LookaheadBuffer, Upcoming
from specrl_jax.rollout.stale.partial import (
    NO_PARTIAL_ROLLOUTS,
    PartialRollouts,
    enough_groups,
    gather_partial_rollouts,
    split_groups,
)


class RolloutBatch(NamedTuple):
    """One step's rollouts, of all processes."""

    rounds: list[ScoredRollouts]
    position: dict[str, object]  # of the data stream, after the problems drawn for them
    seconds: dict[str, float]  # of data and generate; "idle": the rollout devices waited for weights
    left: list[PartialRollouts]  # of each process: what it has begun beside them (grpo.oversample)


class PrefetchedRollouts(NamedTuple):
    """Rollouts that a checkpoint holds for the steps after it, of all processes."""

    batches: list[RolloutBatch]  # of the next steps
    left: list[PartialRollouts]  # after the last of them


NOTHING_PREFETCHED = PrefetchedRollouts([], [])


class Published(NamedTuple):
    """The policy before a step, and what its rollouts may know."""

    weights: Weights
    version: WeightsVersion
    observed: int  # steps that Speculation had observed


# Asked between two chunks: the policy to go on with; None: the one at hand.
Newer = Callable[[], Published | None]


def never() -> None:
    """Keep the policy at hand."""


def newest_weights(newer: Newer) -> tuple[Weights, WeightsVersion] | None:
    """Return the weights to go on with, and their version, as the engine asks for them."""
    policy = newer()
    return policy and (policy.weights, policy.version)


class _UntilNewer:
    """Ends a call of the engine where it would end, or once there is a newer policy."""

    def __init__(self, enough: Callable[[np.ndarray], bool], newer: Newer) -> None:
        self._enough, self._newer = enough, newer
        self.policy: Published | None = None

    def __call__(self, finished: np.ndarray) -> bool:
        if self._enough(finished):
            return True
        self.policy = self._newer()
        return self.policy is not None


class _Round(NamedTuple):
    """The rollouts that this process's group generates in one round of a step."""

    problems: list[Problem]
    ids: np.ndarray  # of their rollouts
    share: Share  # of the problems of all processes
    policy: Published  # before the step
    newer: Newer
    later: Lookahead | None  # rollouts of later steps that may begin


class RolloutGenerator:
    """Draws, generates and scores the rollouts of one step after the other."""

    def __init__(
        self,
        rollout: RolloutEngines,
        stream: ProblemStream,
        scorer: Scorer,
        *,
        speculation: Speculation,
        on_progress: Callable[[int, int], None],
        partial: PartialRollouts = NO_PARTIAL_ROLLOUTS,
    ) -> None:
        """
        Args:
          stream: batches of prompts_per_step problems; single problems with grpo.oversample.
          on_progress: of the engine.
          partial: what this process has begun beside the rollouts of the step before.
        """
        config = rollout.plan.config
        self._rollout, self._scorer, self._speculation = rollout, scorer, speculation
        self._on_progress, self._partial, self._lengths = on_progress, partial, PromptLengths(partial.seen)
        self._config, self._grpo, self._groups = config, config.grpo, rollout.plan.groups
        self._outnumbered = self._grpo.prompts_at_once * self._grpo.group_size > config.rollout.num_slots
        self._synchronous, exact = not config.pipeline.asynchronous, config.pipeline.schedule == "exact"
        self._upcoming = Upcoming(stream, self._grpo.sampling_rounds if exact else 1)
        self.begins_early = exact  # rollouts of a step may begin under the weights before its own
        self._lookahead: LookaheadBuffer | None = None
        if exact:
            self._lookahead = LookaheadBuffer(
                self._upcoming,
                rollout.tokenizer.encode_prompt,
                self._grpo,
                lag=config.pipeline.lag,
                last=config.steps,
                groups=self._groups,
            )

    def draw(self) -> list[Problem]:
        """Return the problems that the next step begins with, which all processes draw alike."""
        if not self._grpo.oversample:
            return self._upcoming.take()
        # As many as go on are not drawn; their number is the same in all groups of processes.
        count = self._grpo.prompts_at_once - len(self._groups.groups) * len(self._partial.problems)
        return [problem for _ in range(count) for problem in self._upcoming.take()]

    def generate(self, step: int, problems: list[Problem], policy: Published, *, newer: Newer = never) -> RolloutBatch:
        """Return the rollouts of a step: of all processes where these generate in turn with learning, else its part.

        Args:
          problems: what `draw` returned.
          newer: weights that running rollouts go on with.
        """
        start, later = time.perf_counter(), self._lookahead.after(step) if self._lookahead else None
        rounds = list[ScoredRollouts]()
        while needs_round(rounds, self._grpo):
            if rounds:
                problems = self._upcoming.take_more()
            first = first_id(self._grpo, step, len(rounds))
            rounds.append(self._round(step, self._own(problems, first, policy, newer, later)))
        if self._lookahead and later:
            self._lookahead.texts = later.texts
        if self._outnumbered:
            self._partial = self._partial._replace(seen=self._lengths.seen())
        seconds = {"generate": time.perf_counter() - start}
        return RolloutBatch(rounds, self._upcoming.position, seconds, left=[self._partial])

    def gather(self, batch: RolloutBatch) -> RolloutBatch:
        """Return a step's rollouts of all processes, and what each has left, from its own `batch`. Collective."""
        rounds = batch.rounds
        if not self._synchronous:
            rounds = [gather_round(part, self._groups.order) for part in rounds]
        return batch._replace(rounds=rounds, left=gather_partial_rollouts(*batch.left))

    def begin(self, step: int, policy: Published, until: Callable[[], bool]) -> bool:
        """Begin the rollouts of a step under an earlier policy; return whether all are finished.

        Args:
          until: says after a chunk that it is enough.
        """
        assert self._lookahead is not None
        later = self._lookahead.after(step - 1)
        lengths, history = self._speculation.as_of(policy.observed)
        finished = self._rollout.engine.begin(
            policy.weights,
            later,
            self._grpo.group_size,
            seed=self._config.rollout.seed,
            until=until,
            lengths=lengths,
            history=history,
        )
        self._lookahead.texts = later.texts
        return finished

    def _own(
        self, problems: list[Problem], first: int, policy: Published, newer: Newer, later: Lookahead | None
    ) -> _Round:
        """Return the part of this process's group in a round of `problems`, whose first rollout has the id `first`."""
        share, G = self._groups.share(len(problems)), self._grpo.group_size
        ids = first + np.arange(share.group.start * G, share.group.stop * G)
        return _Round(problems[share.group], ids, share=share, policy=policy, newer=newer, later=later)

    def _round(self, step: int, asked: _Round) -> ScoredRollouts:
        """Generate and score a round: of all processes, or this one's part where it generates beside the learner."""
        # Beside the learner a process generates without the others, whose parts are gathered when it takes them.
        if not self._synchronous:
            return self._scored_round(step, asked)
        with distributed.together():
            own = self._scored_round(step, asked)
        return gather_round(own, self._groups.order)

    def _scored_round(self, step: int, asked: _Round) -> ScoredRollouts:
        """Return this process's part of a round: of the rollouts of its group it scores its own."""
        if self._config.environment.name:
            return self._conversations(step, asked)
        # A further round goes on with what the last one began of later steps.
        earlier = self._lookahead.texts | asked.later.texts if self._lookahead and asked.later else {}
        how: Continuation[Weights] = Continuation(
            asked.policy.version,
            earlier,
            asked.later,
            partial=self._partial.rollouts,
            versions=self._config.pipeline.schedule in ("inflight", "partial"),
        )
        if self._grpo.oversample:
            return self._oversampled(asked, how)
        return self._scored(self._rollouts(asked, how), asked)

    def _oversampled(self, asked: _Round, how: Continuation[Weights]) -> ScoredRollouts:
        """Return the first groups to be finished, of those left from the last step and new ones; keep the others."""
        partial, G, carries = self._partial, self._grpo.group_size, self._config.pipeline.schedule == "partial"
        if partial.rollouts is not None:
            ids = np.concatenate([partial.rollouts.rollout_id, asked.ids])
            asked = asked._replace(problems=partial.problems + asked.problems, ids=ids)
        share = self._groups.share(self._grpo.prompts_per_step)
        groups = share.group.stop - share.group.start
        rollouts = self._rollouts(asked, dataclasses.replace(how, enough=enough_groups(groups, G)))
        learned, problems, self._partial = split_groups(rollouts, asked.problems, groups, group_size=G, carries=carries)
        return self._scored(learned, asked._replace(problems=problems, share=share))

    def _rollouts(self, asked: _Round, how: Continuation[Weights]) -> Rollouts:
        """Generate, where rollouts outnumber the slots those first whose prompts had the longest responses."""
        if not self._outnumbered:
            return self._in_order(asked, how)
        problems, G = asked.problems, self._grpo.group_size
        order = self._lengths.longest_first(problems)
        ordered = asked._replace(problems=[problems[i] for i in order], ids=asked.ids[group_rows(order, G)])
        rollouts = self._in_order(ordered, how).take_groups(np.argsort(order), G)
        complete = np.flatnonzero(np.all(rollouts.finished.reshape(-1, G), axis=1))
        self._lengths.observe([problems[i] for i in complete], rollouts.response_length.reshape(-1, G)[complete])
        return rollouts

    def _in_order(self, asked: _Round, how: Continuation[Weights]) -> Rollouts:
        """Generate, in one call for each policy where keys and values are computed anew."""
        call = functools.partial(self._call, asked, self._encoded(asked.problems))
        if not self._config.pipeline.recompute_cache:
            newest = functools.partial(newest_weights, asked.newer)
            return call(asked.policy, dataclasses.replace(how, newest=newest))
        policy = asked.policy
        while True:
            until = _UntilNewer(how.enough, asked.newer)
            rollouts = call(policy, dataclasses.replace(how, version=policy.version, enough=until))
            if until.policy is None:
                return rollouts
            policy, how = until.policy, dataclasses.replace(how, partial=rollouts)

    def _conversations(self, step: int, asked: _Round) -> ScoredRollouts:
        """Generate and score rollouts of several turns. Each process has a copy of the weights of its own."""
        problems, turns = begin_conversations(
            self._scorer,
            self._config,
            self._rollout.tokenizer,
            problems=asked.problems,
            samples=self._grpo.group_size,
            step=step,
            waiting=functools.partial(self._on_progress, 0, len(asked.ids)),
        )
        asked = asked._replace(problems=list(problems))
        prompts = self._encoded(asked.problems)
        rollouts = self._call(asked, prompts, asked.policy, Continuation(asked.policy.version), turns=turns)
        return self._scored(rollouts, asked, turns)

    def _encoded(self, problems: list[Problem]) -> list[list[int]]:
        return [self._rollout.tokenizer.encode_prompt(problem.prompt) for problem in problems]

    def _call(
        self,
        asked: _Round,
        prompts: list[list[int]],
        policy: Published,
        how: Continuation[Weights],
        *,
        turns: Conversations | None = None,
    ) -> Rollouts:
        """Call the engine; draft lengths and history are those that the round began with."""
        lengths, history = self._speculation.as_of(asked.policy.observed)
        return self._rollout.engine.generate(
            policy.weights,
            prompts,
            self._grpo.group_size,
            seed=self._config.rollout.seed,
            options=CallOptions(first_id=asked.ids, history=history, continuation=how, turns=turns),
            on_progress=self._on_progress,
            lengths=lengths,
        )

    def _scored(self, rollouts: Rollouts, asked: _Round, turns: Conversations | None = None) -> ScoredRollouts:
        """Score this process's share of its group's rollouts."""
        share = asked.share
        own, problems = rollouts.of_prompts(share.within), asked.problems[share.within]
        scores = score_rollouts(
            own,
            problems,
            self._rollout.tokenizer,
            scorer=self._scorer,
            while_waiting=functools.partial(self._while_scoring, len(rollouts.length)),
            turns=turns,
        )
        return with_rewards(own, problems, scores, grpo=self._grpo, longest=self._config.rollout.max_response_tokens)

    def _while_scoring(self, count: int) -> None:
        # Processes of one copy that generate beside the learner end in the engine, all at one place.
        if self._synchronous or len(self._groups.own) == 1:
            self._on_progress(count, count)
