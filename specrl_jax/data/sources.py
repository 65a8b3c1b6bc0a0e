"""Resumable batches of problems from built-in tasks and files, through grain."""

from collections.abc import Sequence

import grain

from specrl_jax.data.problem import Problem
from specrl_jax.data.tasks import TaskSource
from specrl_jax.errors import InputError

Source = TaskSource | Sequence[Problem]


class ProblemStream:
    """Endless batches of problems: built-in tasks in order, files reshuffled every epoch.

    Setting `position`, the start of the next batch, resumes the stream there.

    Args:
      weights: sampling proportions of the sources; () = their sizes. The schedule is deterministic, so the shares are
        exact in the long run.
    Raises:
      InputError: for weights that do not match the sources.
    """

    def __init__(self, sources: Sequence[Source], batch_size: int, seed: int, *, weights: Sequence[float] = ()) -> None:
        if weights and len(weights) != len(sources):
            raise InputError(f"data.weights: {len(weights)} weights for {len(sources)} files")
        if not weights and len(sources) > 1:
            sources = [[source[i] for source in sources for i in range(len(source))]]
        # One seed per source: files of equal length must not be shuffled alike.
        parts = [grain.MapDataset.source(source).seed(seed + 7919 * i) for i, source in enumerate(sources)]
        parts = [p if isinstance(source, TaskSource) else p.shuffle().repeat() for p, source in zip(parts, sources)]
        dataset = parts[0] if len(parts) == 1 else grain.MapDataset.mix(parts, list(weights))
        # One thread and little prefetch: a step takes seconds, a problem microseconds.
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=batch_size)
        batches = dataset.to_iter_dataset(options).batch(batch_size, batch_fn=list)
        self._iterator: grain.DatasetIterator[list[Problem]] = iter(batches)

    def __next__(self) -> list[Problem]:
        return next(self._iterator)

    @property
    def position(self) -> dict[str, object]:
        return self._iterator.get_state()

    @position.setter
    def position(self, state: dict[str, object]) -> None:
        self._iterator.set_state(state)
