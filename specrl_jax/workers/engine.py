"""An engine whose rollouts the workers generate."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from specrl_jax.decoding.compiled import Program
from specrl_jax.decoding.continuation import Continuation
from specrl_jax.decoding.engine import DraftLengthPolicy, Engine, FixedLength, check_prompts
from specrl_jax.decoding.history import History
from specrl_jax.decoding.rollouts import Rollouts, concatenate
from specrl_jax.decoding.turns import Turns
from specrl_jax.drafts.weights import Weights
from specrl_jax.training.build import Rollout
from specrl_jax.workers.messages import CHOOSES, Ask
from specrl_jax.workers.pool import WorkerPool


@dataclasses.dataclass(frozen=True)
class RemoteEngine(Engine):
    """Has the limits of the learner's own engine, whose programs are never compiled here."""

    pool: WorkerPool | None = None
    name: str = ""  # among the worker's

    def worker_metrics(self) -> dict[str, int | float]:
        """Return how many workers there are, with how many devices, and the seconds until they had the weights."""
        assert self.pool is not None
        return self.pool.metrics()

    def compile_all(
        self,
        params: Weights,
        on_program: Callable[[Program, float], None] = lambda program, seconds: None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for the workers, and let them compile; each says for itself what it compiled."""
        assert self.pool is not None
        self.pool.compile(params, lambda done, total: on_wait())

    def generate(
        self,
        params: Weights,
        prompts: Sequence[Sequence[int]],
        samples: int,
        seed: int,
        first_id: int | np.ndarray = 0,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        lengths: DraftLengthPolicy | None = None,
        history: History | None = None,
        responses: Sequence[int] | None = None,
        continuation: Continuation[Weights] | None = None,
        turns: Turns | None = None,
    ) -> Rollouts:
        """Generate as `Engine.generate` does; each worker that is there takes an equal part of the prompts.

        With a controller in `lengths` each worker has one of its own. A history is not sent, and turns and all of a
        continuation but its version belong to runs without workers.
        """
        assert self.pool is not None and turns is None
        check_prompts(prompts, self.config.max_prompt_tokens)
        version = (continuation or Continuation()).version
        lengths = lengths or FixedLength(self.draft_length)
        drafts = lengths.k if isinstance(lengths, FixedLength) else CHOOSES
        each = samples + self.config.greedy
        bounds = np.linspace(0, len(prompts), 1 + min(self.pool.count, len(prompts))).astype(int)
        asks = []
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            if np.ndim(first_id):
                ids = np.asarray(first_id)[start * samples : stop * samples]
            else:
                ids = np.array([int(first_id) + start * samples])
            asked = [list(map(int, prompt)) for prompt in prompts[start:stop]]
            longest = [] if responses is None else list(responses[start * each : stop * each])
            asks.append(Ask(self.name, None, version, asked, samples, seed, ids, drafts, longest))
        total = len(prompts) * each
        on_progress(0, total)
        answers = self.pool.run(params, asks, total, on_progress)
        return concatenate([answer.rollouts for answer in answers if answer.rollouts is not None])


def with_workers(rollout: Rollout, pool: WorkerPool) -> Rollout:
    """Return the engines of a run, generating on the workers of a pool."""

    def remote(name: str) -> RemoteEngine:
        engine = getattr(rollout, name)
        values = {field.name: getattr(engine, field.name) for field in dataclasses.fields(Engine)}
        return RemoteEngine(**values, pool=pool, name=name)

    engine = remote("engine")
    return dataclasses.replace(
        rollout,
        engine=engine,
        # Where evaluation has the training engine it is the same one here.
        eval_engine=engine if rollout.eval_engine is rollout.engine else remote("eval_engine"),
        greedy_engine=remote("greedy_engine"),
        plain_engine=remote("plain_engine"),
    )
