"""Engines in the processes of workers, which generate in place of the learner's own."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specrl_jax.decoding.draft_lengths import DraftLengthPolicy, FixedLength
from specrl_jax.decoding.engine import Engine
from specrl_jax.decoding.lookahead import Lookahead
from specrl_jax.decoding.requests import EngineCall
from specrl_jax.decoding.rollouts import Rollouts, concatenate, group_rows
from specrl_jax.drafts.weights import Weights
from specrl_jax.rollout.build import RolloutEngines
from specrl_jax.rollout.speculation import Guarded
from specrl_jax.rollout.workers.messages import (
    CHOOSES,
    CHOOSES_ALARMED,
    Ask,
    Later,
    WorkerAnswer,
    pack_texts,
    unpack_texts,
)
from specrl_jax.rollout.workers.pool import OnProgress, Others, WorkerPool
from specrl_jax.rollout.workers.processes import First, Other


class _Part(NamedTuple):
    """One worker's share of a call."""

    prompts: np.ndarray  # their places in the call
    later: Later


@dataclasses.dataclass(frozen=True)
class WorkerEngines:
    """The engines of one name in the processes of the workers; all processes of the learner call them alike."""

    process: First | Other  # this one, of the learner
    name: str  # among the worker's engines

    def metrics(self) -> dict[str, int | float]:
        """Return how many workers there are, with how many devices, and the seconds until they had the weights; of the
        learner's first process.
        """
        return self.process.metrics()

    def compile_all(self, engine: Engine, params: Weights, on_wait: Callable[[], None]) -> None:
        """Wait for the first workers, and let them compile."""
        self.process.together(
            params,
            lambda pool, on_wait, others: pool.compile(params, on_wait, others),
            engine.agree,
            on_progress=engine.agreed(lambda done, total: on_wait()),
        )

    def generate(self, engine: Engine, call: EngineCall[Weights]) -> Rollouts:
        """Generate as `Engine.generate` does; each worker that is there takes an equal share of the prompts.

        With a controller in `lengths` each worker has one of its own. A history is not sent; turns, and of a
        continuation partial rollouts and newer weights, belong to runs without workers.

        Raises WorkersFailed besides.
        """
        assert call.options.turns is None
        each, count = call.samples + engine.greedy, len(call.prompts)
        lookahead = call.options.continuation.lookahead or Lookahead([], np.zeros(0, np.int64))
        ids = rollout_ids(call.options.first_id, count, call.samples, each=each)

        def generate(pool: WorkerPool, on_wait: OnProgress, others: Others) -> Rollouts:
            dealt = deal(count, min(pool.count, count))
            later = later_of(lookahead, call.samples, len(dealt))
            asks = [
                self._ask(call, ids, each, part=_Part(prompts, beside))
                for prompts, beside in zip(dealt, later, strict=True)
            ]
            answers = pool.run(call.params, asks, count * each, on_wait=on_wait, others=others)
            take_texts(answers, lookahead)
            found = concatenate([answer.rollouts for answer in answers if answer.rollouts is not None])
            return found.take_groups(np.argsort(np.concatenate(dealt)), each)

        call.on_progress(0, count * each)
        return self.process.rollouts(call.params, generate, engine.agree, on_progress=call.on_progress)

    def begin(self, engine: Engine, call: EngineCall[Weights], until: Callable[[], bool]) -> bool:
        """Begin as `Engine.begin` does; each worker that is there takes an equal share of the prompts.

        The texts of the call's lookahead are those of the first process, which are set there, and `until` is asked
        there.

        Raises:
          WorkersFailed: as `generate`.
        """
        lookahead = call.options.continuation.lookahead
        assert lookahead is not None

        def begin(pool: WorkerPool, on_wait: OnProgress, others: Others) -> bool:
            later = later_of(lookahead, call.samples, min(pool.count, len(lookahead.prompts)))
            asks = [
                self._common(call)._replace(later=part, earlier=pack_texts(lookahead.texts, part.ids)) for part in later
            ]
            answers = pool.run(call.params, asks, 0, on_wait=on_wait, others=others, until=until)
            take_texts(answers, lookahead)
            return all(answer.finished for answer in answers)

        finished = self.process.together(call.params, begin, engine.agree, on_progress=call.on_progress)
        return bool(engine.agree(int(finished or 0))[0])

    def _ask(self, call: EngineCall[Weights], ids: np.ndarray, each: int, *, part: _Part) -> Ask:
        """Return what a worker is asked for; `ids` [prompts x each] are those of the whole call."""
        rows, how, longest = group_rows(part.prompts, each), call.options.continuation, call.options.responses
        return self._common(call)._replace(
            version=how.version,
            prompts=tuple(chosen(call.prompts, part.prompts)),
            ids=ids[rows],
            responses=() if longest is None else tuple(int(longest[row]) for row in rows),
            earlier=pack_texts(how.earlier, ids[rows], part.later.ids),
            later=part.later,
        )

    def _common(self, call: EngineCall[Weights]) -> Ask:
        """Return what is asked of all workers alike."""
        return Ask(self.name, samples=call.samples, seed=call.seed, drafts=drafts_of(call.lengths))


def deal(count: int, parts: int) -> list[np.ndarray]:
    """Deal out `count` prompts in turn: where they are ordered by length each part gets as many long ones."""
    return [np.arange(i, count, parts) for i in range(parts)]


def chosen(prompts: Sequence[Sequence[int]], part: np.ndarray) -> list[list[int]]:
    """Return the prompts of a part as messages have them."""
    return [list(map(int, prompts[i])) for i in part.tolist()]


def later_of(lookahead: Lookahead, samples: int, parts: int) -> list[Later]:
    """Deal out the rollouts of later calls; a part may have none."""
    dealt = deal(len(lookahead.prompts), parts)
    return [Later(chosen(lookahead.prompts, part), lookahead.ids[group_rows(part, samples)]) for part in dealt]


def take_texts(answers: Sequence[WorkerAnswer], lookahead: Lookahead) -> None:
    """Note what the workers have drawn of later calls."""
    for answer in answers:
        lookahead.texts |= unpack_texts(answer.texts)


def rollout_ids(first_id: int | np.ndarray, prompts: int, samples: int, *, each: int) -> np.ndarray:
    """Return [prompts x each] uint32 ids as `Engine.generate` numbers them: greedy rollouts after all samples."""
    if np.ndim(first_id):
        return np.asarray(first_id, np.uint32)
    sampled = np.arange(prompts * samples).reshape(prompts, samples)
    greedy = prompts * samples + np.arange(prompts * (each - samples)).reshape(prompts, each - samples)
    return (int(first_id) + np.concatenate([sampled, greedy], axis=1)).reshape(-1).astype(np.uint32)


def drafts_of(lengths: DraftLengthPolicy) -> int:
    """Return how a worker chooses its draft lengths: `Ask.drafts`."""
    if isinstance(lengths, FixedLength):
        return lengths.k
    return CHOOSES_ALARMED if isinstance(lengths, Guarded) and lengths.tripped else CHOOSES


def with_workers(rollout: RolloutEngines, process: First | Other) -> RolloutEngines:
    """Return the engines of a run, generating on the workers of the first process's pool."""
    names = ("engine", "eval_engine", "greedy_engine", "plain_engine")
    engines = {
        name: dataclasses.replace(getattr(rollout, name), remote=WorkerEngines(process, name=name)) for name in names
    }
    return dataclasses.replace(rollout, **engines)
