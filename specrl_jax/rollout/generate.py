"""The rollouts of a step: its problems, their generation, their scores."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
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
    gather_round,
    sample_rounds,
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
        self._synchronous, exact = config.pipeline.mode == "sync", config.pipeline.weight_update == "exact"
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

        def generate(problems: list[Problem], first_id: int) -> ScoredRollouts:
            own = functools.partial(self._own, step, problems, first_id, policy=policy, newer=newer, later=later)
            # Beside the learner a process generates without the others, whose parts are gathered when it takes them.
            return gather_round(distributed.together(own), self._groups.order) if self._synchronous else own()

        rounds = sample_rounds(generate, problems, self._upcoming.take_more, grpo=self._grpo, step=step)
        if self._lookahead and later:
            self._lookahead.texts = later.texts
        if self._config.rollout.order == "longest":
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
        self,
        step: int,
        problems: list[Problem],
        first_id: int,
        policy: Published,
        newer: Newer,
        later: Lookahead | None,
    ) -> ScoredRollouts:
        """Return this process's part of a round: of the rollouts of its group it scores its own."""
        share, G = self._groups.share(len(problems)), self._grpo.group_size
        begins = range(len(problems))[share.group]
        asked, ids = problems[share.group], first_id + begins.start * G + np.arange(len(begins) * G)
        if self._config.environment.name:
            return self._conversations(step, asked, ids, policy, share)
        # A further round goes on with what the last one began of later steps.
        earlier = self._lookahead.texts | later.texts if self._lookahead and later else {}
        how: Continuation[Weights] = Continuation(
            policy.version,
            earlier,
            later,
            partial=self._partial.rollouts,
            versions=self._config.pipeline.weight_update == "inflight" or self._config.rollout.carry > 0,
        )
        if self._grpo.oversample:
            return self._oversampled(asked, ids, policy, newer, how)
        return self._scored(self._rollouts(asked, ids, policy, newer, how), asked, share)

    def _oversampled(
        self, problems: list[Problem], ids: np.ndarray, policy: Published, newer: Newer, how: Continuation[Weights]
    ) -> ScoredRollouts:
        """Return the first groups to be finished, of those left from the last step and new ones; keep the others."""
        partial, G, carry = self._partial, self._grpo.group_size, self._config.rollout.carry // len(self._groups.groups)
        if partial.rollouts is not None:
            problems, ids = partial.problems + problems, np.concatenate([partial.rollouts.rollout_id, ids])
        share = self._groups.share(self._grpo.prompts_per_step)
        groups = share.group.stop - share.group.start
        how = dataclasses.replace(how, enough=enough_groups(groups, G, carry))
        found = self._rollouts(problems, ids, policy, newer, how)
        learned, asked, self._partial = split_groups(found, problems, groups, group_size=G, carries=carry > 0)
        return self._scored(learned, asked, share)

    def _rollouts(
        self, problems: list[Problem], ids: np.ndarray, policy: Published, newer: Newer, how: Continuation[Weights]
    ) -> Rollouts:
        """Generate, under rollout.order=longest the longest first."""
        if self._config.rollout.order == "given":
            return self._in_order(problems, ids, policy, newer, how)
        order, G = self._lengths.longest_first(problems), self._grpo.group_size
        found = self._in_order([problems[i] for i in order], ids[group_rows(order, G)], policy, newer, how)
        found = found.take_groups(np.argsort(order), G)
        complete = np.flatnonzero(np.all(found.finished.reshape(-1, G), axis=1))
        self._lengths.observe([problems[i] for i in complete], found.response_length.reshape(-1, G)[complete])
        return found

    def _in_order(
        self, problems: list[Problem], ids: np.ndarray, policy: Published, newer: Newer, how: Continuation[Weights]
    ) -> Rollouts:
        """Generate, in one call for each policy where keys and values are computed anew."""
        call = self._calls(problems, ids, policy)
        if not self._config.pipeline.recompute_cache:

            def newest() -> tuple[Weights, WeightsVersion] | None:
                found = newer()
                return found and (found.weights, found.version)

            return call(policy, dataclasses.replace(how, newest=newest))
        while True:
            until = _UntilNewer(how.enough, newer)
            found = call(policy, dataclasses.replace(how, version=policy.version, enough=until))
            if until.policy is None:
                return found
            policy, how = until.policy, dataclasses.replace(how, partial=found)

    def _conversations(
        self, step: int, problems: list[Problem], ids: np.ndarray, policy: Published, share: Share
    ) -> ScoredRollouts:
        """Generate and score rollouts of several turns. Each process has a copy of the weights of its own."""
        asked, turns = begin_conversations(
            self._scorer,
            self._config,
            self._rollout.tokenizer,
            problems=problems,
            samples=self._grpo.group_size,
            step=step,
            waiting=lambda: self._on_progress(0, len(ids)),
        )
        found = self._calls(asked, ids, policy, turns)(policy, Continuation(policy.version))
        return self._scored(found, list(asked), share, turns)

    def _calls(
        self, problems: Sequence[Problem], ids: np.ndarray, began: Published, turns: Conversations | None = None
    ) -> Callable[[Published, Continuation[Weights]], Rollouts]:
        """Return what calls the engine for the rollouts of some problems, which began under a policy's drafts."""
        prompts = [self._rollout.tokenizer.encode_prompt(problem.prompt) for problem in problems]
        lengths, history = self._speculation.as_of(began.observed)

        def call(policy: Published, how: Continuation[Weights]) -> Rollouts:
            return self._rollout.engine.generate(
                policy.weights,
                prompts,
                self._grpo.group_size,
                seed=self._config.rollout.seed,
                options=CallOptions(first_id=ids, history=history, continuation=how, turns=turns),
                on_progress=self._on_progress,
                lengths=lengths,
            )

        return call

    def _scored(
        self, rollouts: Rollouts, problems: list[Problem], share: Share, turns: Conversations | None = None
    ) -> ScoredRollouts:
        """Score this process's share of its group's rollouts."""
        count = len(rollouts.length)

        def waiting() -> None:
            # Processes of one copy that generate beside the learner end in the engine, all at one place.
            if self._synchronous or len(self._groups.own) == 1:
                self._on_progress(count, count)

        own, asked = rollouts.of_prompts(share.within), problems[share.within]
        scores = score_rollouts(
            own, asked, self._rollout.tokenizer, scorer=self._scorer, while_waiting=waiting, turns=turns
        )
        return with_rewards(own, asked, scores, grpo=self._grpo, longest=self._config.rollout.max_response_tokens)
