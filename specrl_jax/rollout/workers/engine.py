"""An engine whose rollouts the workers generate."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from specrl_jax.decoding.draft_lengths import DraftLengthPolicy, FixedLength
from specrl_jax.decoding.engine import Engine, check_prompts
from specrl_jax.decoding.history import History
from specrl_jax.decoding.lookahead import Lookahead
from specrl_jax.decoding.programs import Program
from specrl_jax.decoding.requests import CallOptions
from specrl_jax.decoding.rollouts import Rollouts, concatenate, group_rows
from specrl_jax.drafts.weights import Weights
from specrl_jax.errors import InputError
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


@dataclasses.dataclass(frozen=True)
class RemoteEngine(Engine):
    """Has the limits of the learner's own engine, whose programs are never compiled here."""

    _: dataclasses.KW_ONLY
    process: First | Other  # this one, of the learner
    name: str  # among the worker's

    def worker_metrics(self) -> dict[str, int | float]:
        """Return how many workers there are, with how many devices, and the seconds until they had the weights; of the
        learner's first process.
        """
        return self.process.metrics()

    def compile_all(
        self,
        params: Weights,
        on_program: Callable[[Program, float], None] = lambda program, seconds: None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for the first workers, and let them compile; `on_program` is not called."""
        on_progress = self.agreed(lambda done, total: on_wait())
        self.process.together(
            params,
            lambda pool, on_wait, others: pool.compile(params, on_wait, others),
            self.agree,
            on_progress=on_progress,
        )

    def generate(
        self,
        params: Weights,
        prompts: Sequence[Sequence[int]],
        samples: int,
        *,
        seed: int,
        lengths: DraftLengthPolicy | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        options: CallOptions[Weights] | None = None,
    ) -> Rollouts:
        """Generate as `Engine.generate` does; each worker that is there takes an equal share of the prompts. All
        processes of the learner call it alike.

        With a controller in `lengths` each worker has one of its own. A history is not sent; turns, and of a
        continuation partial rollouts and newer weights, belong to runs without workers.

        Raises WorkersFailed besides.
        """
        options = options or CallOptions()
        assert options.turns is None
        check_prompts(prompts, self.config.max_prompt_tokens)
        each, count = samples + self.greedy, len(prompts)
        if not count * samples:
            raise InputError(f"no prompts to answer: {count} prompts, {samples} samples of each")
        ids = rollout_ids(options.first_id, count, samples, each=each)
        how, responses = options.continuation, options.responses
        lookahead = how.lookahead or Lookahead([], np.zeros(0, np.int64))
        common = self._ask(samples, seed, lengths)._replace(version=how.version)

        def ask(part: np.ndarray, later: Later) -> Ask:
            rows, asked = group_rows(part, each), tuple(chosen(prompts, part))
            longest = () if responses is None else tuple(int(responses[row]) for row in rows)
            earlier = pack_texts(how.earlier, ids[rows], later.ids)
            return common._replace(prompts=asked, ids=ids[rows], responses=longest, earlier=earlier, later=later)

        def generate(pool: WorkerPool, on_wait: OnProgress, others: Others) -> Rollouts:
            dealt = deal(count, min(pool.count, count))
            later = later_of(lookahead, samples, len(dealt))
            asks = [ask(part, beside) for part, beside in zip(dealt, later, strict=True)]
            answers = pool.run(params, asks, count * each, on_wait=on_wait, others=others)
            take_texts(answers, lookahead)
            found = concatenate([answer.rollouts for answer in answers if answer.rollouts is not None])
            return found.take_groups(np.argsort(np.concatenate(dealt)), each)

        on_progress = self.agreed(on_progress)
        on_progress(0, count * each)
        return self.process.rollouts(params, generate, self.agree, on_progress=on_progress)

    def begin(
        self,
        params: Weights,
        lookahead: Lookahead,
        samples: int,
        *,
        seed: int,
        until: Callable[[], bool],
        lengths: DraftLengthPolicy | None = None,
        history: History | None = None,
    ) -> bool:
        """Begin as `Engine.begin` does; each worker that is there takes an equal share of the prompts.

        Args:
          lookahead: its texts are those of the first process, which are set there.
          until: asked in the first process.
        Raises:
          WorkersFailed: as `generate`.
        """
        common = self._ask(samples, seed, lengths)

        def begin(pool: WorkerPool, on_wait: OnProgress, others: Others) -> bool:
            later = later_of(lookahead, samples, min(pool.count, len(lookahead.prompts)))
            asks = [common._replace(later=part, earlier=pack_texts(lookahead.texts, part.ids)) for part in later]
            answers = pool.run(params, asks, 0, on_wait=on_wait, others=others, until=until)
            take_texts(answers, lookahead)
            return all(answer.finished for answer in answers)

        finished = self.process.together(params, begin, self.agree, on_progress=lambda done, total: None)
        return bool(self.agree(int(finished or 0))[0])

    def _ask(self, samples: int, seed: int, lengths: DraftLengthPolicy | None) -> Ask:
        """Return what is asked of all workers alike."""
        drafts = drafts_of(lengths or FixedLength(self.draft_length))
        return Ask(self.name, samples=samples, seed=seed, drafts=drafts)


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

    def remote(name: str) -> RemoteEngine:
        engine = getattr(rollout, name)
        values = {field.name: getattr(engine, field.name) for field in dataclasses.fields(Engine)}
        return RemoteEngine(**values, process=process, name=name)

    return dataclasses.replace(
        rollout,
        engine=remote("engine"),
        eval_engine=remote("eval_engine"),
        greedy_engine=remote("greedy_engine"),
        plain_engine=remote("plain_engine"),
    )
