"""The conversations of one call of the engine: turns become texts, go to the environments' workers, and come back."""

import dataclasses
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specrl_jax.config import Config, EnvironmentConfig
from specrl_jax.data.problem import Problem
from specrl_jax.data.special import literal_spans
from specrl_jax.data.tokenizers import Tokenizer, token_texts
from specrl_jax.data.turns import TurnFormat
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.decoding.turns import Turn, TurnAnswer
from specrl_jax.errors import InputError
from specrl_jax.rewards.environments.workers import Conversation, EnvironmentWorkers
from specrl_jax.rewards.messages import Context, Outcome
from specrl_jax.rewards.pool import Replies, Reply, received
from specrl_jax.rewards.scorer import Scorer, Scores

# Around what an environment says, where the tokenizer has no chat template.
TEMPLATE = "[{message}]"


@dataclasses.dataclass
class _Log:
    """One rollout's conversation so far."""

    conversation: Conversation
    never_began: Outcome | None = None  # why its environment could not begin
    turns: list[str] = dataclasses.field(default_factory=list)
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    seconds: float = 0.0  # in the environment
    tokens: list[int] = dataclasses.field(default_factory=list)  # of the last turn, without its end-of-text
    cut: bool = False  # the last turn was, by a limit
    eos: bool = False  # the last turn ended with an end-of-text token

    @property
    def failed(self) -> Outcome | None:
        """Return the outcome of the step that failed."""
        return self.outcomes[-1] if self.outcomes and self.outcomes[-1].failure else None


class Opening(NamedTuple):
    """The beginning of the conversations about one problem."""

    problem: Problem
    seed: int
    prompt: str  # that the policy reads
    failed: Outcome | None = None  # why they could not begin: their rollouts end with their first turn


class Conversations:
    """Implements `decoding.features.turns.Turns` for G rollouts of each problem, and scores them in the end.

    Args:
      workers: of the environment.
      config: its limits.
      format: of what it says.
      openings: in the order of the engine's prompts.
      samples: rollouts of each problem in a call.
    """

    def __init__(
        self,
        workers: EnvironmentWorkers,
        config: EnvironmentConfig,
        tokenizer: Tokenizer,
        *,
        format: TurnFormat,
        openings: Sequence[Opening],
        samples: int,
    ) -> None:
        self._workers, self._config, self._tokenizer, self._format = workers, config, tokenizer, format
        self._openings = openings
        self._logs = [
            _Log(workers.open(row_of(one.problem), one.seed), one.failed) for one in openings for _ in range(samples)
        ]
        self._requests = {log.conversation.session: request for request, log in enumerate(self._logs)}
        self._replies = Replies()

    @property
    def turn_tokens(self) -> int:
        """Return the most tokens of a turn."""
        return self._config.turn_tokens or 2**30

    def ask(self, turn: Turn) -> None:
        """Hand a turn to the environment."""
        log = self._logs[turn.request]
        log.tokens = turn.tokens[: len(turn.tokens) - turn.eos].tolist()
        text = self._tokenizer.decode(log.tokens)
        log.cut, log.eos = not turn.ended, turn.eos
        if log.never_began:
            self._replies.put(Reply(log.conversation.session, log.never_began, 0.0))
        else:
            self._workers.submit(log.conversation, text, list(log.turns), replies=self._replies)
        log.turns.append(text)

    def answers(self, seconds: float) -> list[TurnAnswer]:
        """Return what environments said since the last call; wait up to `seconds` for the first."""
        return [self._answer(reply) for reply in received(self._replies, seconds)]

    def _answer(self, reply: Reply) -> TurnAnswer:
        request = self._requests[reply.number]
        log, outcome = self._logs[request], reply.outcome
        log.seconds += reply.seconds
        log.outcomes.append(outcome)
        if outcome.messages is None:
            return TurnAnswer(request, None)
        cut = log.cut or len(log.turns) >= self._config.turns
        if not cut:
            try:
                return TurnAnswer(request, self._format.tokens(outcome.messages, log.eos))
            except InputError as error:
                log.outcomes[-1] = Outcome((), failure="error", detail=str(error))
        return TurnAnswer(request, None, cut)

    def scores(self, rollouts: Rollouts, rows: np.ndarray, scorer: Scorer, *, waiting: Callable[[], None]) -> Scores:
        """Score rollouts `rows` of the call: what their environments gave, and the rewards of their last turns.

        One whose environment failed has no reward.
        """
        logs = [self._logs[row] for row in rows]
        alive = np.array([log.failed is None for log in logs])
        environment_rewards = np.array(
            [sum(one.rewards[0] for one in log.outcomes) if not log.failed else 0.0 for log in logs]
        )
        final = self._final_scores(logs, rollouts, np.flatnonzero(alive), scorer, waiting)
        # Without a reward the number that environments gave says what they do not say themselves.
        is_right = final.correct if scorer.names else environment_rewards >= scorer.correct_from
        failed = [log.failed for log in logs if log.failed]
        first = f"{failed[0].failure}: {failed[0].detail}" if failed else final.first_failure
        return final._replace(
            total=final.total + environment_rewards.astype(np.float32),
            rewards={**final.rewards, self._workers.label: environment_rewards.astype(np.float32)},
            correct=np.array([_is_correct(log, bool(scored)) for log, scored in zip(logs, is_right)], bool),
            failures=dict(Counter(final.failures) + Counter(one.failure for one in failed)),
            first_failure=first,
            environment=self._columns(logs, rollouts),
        )

    def _final_scores(
        self, logs: Sequence[_Log], rollouts: Rollouts, alive: np.ndarray, scorer: Scorer, waiting: Callable[[], None]
    ) -> Scores:
        """Score the last turns of rollouts `alive` by the rewards; the others have 0."""
        asked = [self._openings[rollouts.prompt_index[row]] for row in alive]
        contexts = [Context(one.prompt, one.problem.row, logs[row].tokens) for row, one in zip(alive, asked)]
        last, answers = [logs[row].turns[-1] for row in alive], [one.problem.answer for one in asked]
        scores = scorer(last, answers, contexts, waiting)

        def of_all(values: np.ndarray, empty: float) -> np.ndarray:
            found = np.full(len(logs), empty, values.dtype)
            found[alive] = values
            return found

        extracted: list[str | None] = [None] * len(logs)
        for row, answer in zip(alive, scores.extracted):
            extracted[row] = answer
        return scores._replace(
            total=of_all(scores.total, 0),
            rewards={name: of_all(values, 0) for name, values in scores.rewards.items()},
            correct=of_all(scores.correct, False),
            extracted=extracted,
            parts={name: of_all(values, np.nan) for name, values in scores.parts.items()},
        )

    def _columns(self, logs: Sequence[_Log], rollouts: Rollouts) -> dict[str, np.ndarray]:
        """Return what is counted of each rollout, by name, [R] float32 each."""
        names = sorted({name for log in logs for outcome in log.outcomes for name in outcome.parts})
        found: dict[str, Sequence[float] | np.ndarray] = {
            name: [sum(outcome.parts.get(name, 0.0) for outcome in log.outcomes) for log in logs] for name in names
        }
        found["turns"] = [len(log.turns) for log in logs]
        found["seconds"] = [log.seconds for log in logs]
        found["cut"] = ~rollouts.ended
        found["failed"] = [log.failed is not None for log in logs]
        calls = [self._in_calls(log, rollouts, row) for row, log in enumerate(logs)]
        found["call_tokens"], found["call_drafts"] = ([pair[i] for pair in calls] for i in range(2))
        return {name: np.array(values, np.float32) for name, values in found.items()}

    def _in_calls(self, log: _Log, rollouts: Rollouts, row: int) -> tuple[int, int]:
        """Return how many tokens of a rollout are of tool calls, and how many of these are accepted drafts."""
        tokens = drafts = 0
        part = rollouts.response_part(row)
        ids, written = rollouts.tokens[row, part].tolist(), rollouts.environment[row, part]
        drafted = rollouts.draft_positions[row, part] != 0
        runs = itertools.groupby(range(len(ids)), lambda i: bool(written[i]))
        policy_runs = [list(run) for by_environment, run in runs if not by_environment]
        for places, text, outcome in zip(policy_runs, log.turns, log.outcomes):
            if not outcome.extracted or (begin := text.find(outcome.extracted)) < 0:
                continue
            texts = token_texts(self._tokenizer, [ids[i] for i in places])
            ends = np.cumsum([len(one) for one in texts])
            starts = ends - [len(one) for one in texts]
            inside = (ends > begin) & (starts < begin + len(outcome.extracted))
            tokens, drafts = tokens + int(inside.sum()), drafts + int((inside & drafted[places]).sum())
        return tokens, drafts


def _is_correct(log: _Log, scored: bool) -> bool:
    if log.failed:
        return False
    stated = log.outcomes[-1].correct
    return scored if stated is None else stated


def begin_conversations(
    scorer: Scorer,
    config: Config,
    tokenizer: Tokenizer,
    *,
    problems: Sequence[Problem],
    samples: int,
    step: int,
    waiting: Callable[[], None],
) -> tuple[Sequence[Problem], Conversations | None]:
    """Begin the conversations of some problems; return these with the prompts that the policy reads.

    None without an environment: the problems are as they were, and a response is one turn.

    An environment that cannot begin, or whose first messages cannot be a prompt, leaves the row's prompt as it is; all
    rollouts of the row have failed once they have ended their first turn.

    Args:
      step: a row met again in another step has other seeds.
      waiting: called every second; what it raises ends the call.
    """
    if not config.environment.name:
        return problems, None
    workers, longest = scorer.environment, config.rollout.max_prompt_tokens
    assert workers is not None, "the config names an environment"
    format = TurnFormat(tokenizer, TEMPLATE, config.data.thinking)
    replies = Replies()
    openings = dict[int, Opening]()  # by session
    for problem in problems:
        seed = zlib.crc32(f"{config.rollout.seed}:{step}:{problem.prompt}:{problem.answer}".encode())
        conversation = workers.open(row_of(problem), seed)
        openings[conversation.session] = Opening(problem, seed, problem.prompt)
        workers.submit(conversation, "", None, replies=replies)
    unopened = len(problems)
    while unopened:
        for reply in received(replies, 1.0):
            unopened -= 1
            opening = openings[reply.number]
            openings[reply.number] = _opened(opening, reply.outcome, tokenizer, format=format, longest=longest)
        waiting()
    opened = list(openings.values())
    turns = Conversations(workers, config.environment, tokenizer, format=format, openings=opened, samples=samples)
    return [one.problem._replace(prompt=one.prompt) for one in opened], turns


def _opened(opening: Opening, outcome: Outcome, tokenizer: Tokenizer, *, format: TurnFormat, longest: int) -> Opening:
    """Return an opening with the prompt that its environment's first messages make, or with why it failed.

    A prompt fails that has no tokens, more than `longest`, or a character or role that the tokenizer lacks.
    """
    if outcome.failure or not outcome.messages:
        return opening._replace(failed=outcome if outcome.failure else None)
    system = [message["content"] for message in opening.problem.messages if message["role"] == "system"]
    data = [text for text in system if literal_spans(text, tokenizer.special)]
    try:
        prompt = format.prompt(outcome.messages, data)
        if not 0 < (length := len(tokenizer.encode_prompt(prompt))) <= longest:
            raise InputError(f"they have {length} tokens; rollout.max_prompt_tokens={longest} allows 1 to {longest}")
    except InputError as error:
        row = f"the first messages of the row {opening.problem.prompt[:60]!r}"
        return opening._replace(failed=Outcome((), failure="error", detail=f"{row}: {error}"))
    return opening._replace(prompt=prompt)


def row_of(problem: Problem) -> dict[str, object]:
    """Return the row that an environment begins with: its prompt is text, or chat messages where the file has them."""
    messages = [{"role": message["role"], "content": str(message["content"])} for message in problem.messages]
    return {**problem.row, "prompt": messages or str(problem.prompt), "answer": problem.answer}
