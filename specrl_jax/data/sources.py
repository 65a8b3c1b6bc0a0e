"""Batches of problems, from built-in tasks and files, resumable through grain."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import grain

from specrl_jax.core import InputError
from specrl_jax.data.tasks import Problem, TaskSource


class Source(Protocol):
    """Random access to problems; a TaskSource, or a list of a file's."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Problem: ...


class ProblemStream:
    """Endless batches of problems: built-in tasks in order, files shuffled anew every epoch by the seed.

    Args:
      sources: several are mixed.
      weights: how often each is drawn from, in proportion; () = by their numbers of problems. Drawing is a fixed
        schedule, so the shares are exact over any long stretch.
    Raises:
      InputError: for weights that do not fit.

    `position` is where the next batch starts; setting it resumes there.
    """

    def __init__(self, sources: Sequence[Source], batch_size: int, seed: int, weights: Sequence[float] = ()) -> None:
        if weights and len(weights) != len(sources):
            raise InputError(f"data.weights: {len(weights)} weights for {len(sources)} files")
        if any(not weight > 0 for weight in weights):
            raise InputError("data.weights: every weight must be positive")
        if not weights and len(sources) > 1:
            sources = [[problem for source in sources for problem in source]]
        # Each its own seed: files of one length would else be shuffled alike.
        parts = [_shuffled(source, seed + 7919 * i) for i, source in enumerate(sources)]
        dataset = parts[0] if len(parts) == 1 else grain.MapDataset.mix(parts, list(weights))
        # One thread, little read-ahead: a step takes seconds, a problem microseconds.
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=batch_size)
        batches = dataset.to_iter_dataset(options).batch(batch_size, batch_fn=list)
        self._iterator: Iterator[list[Problem]] = iter(batches)

    def __next__(self) -> list[Problem]:
        return next(self._iterator)

    @property
    def position(self) -> dict[str, Any]:
        return self._iterator.get_state()

    @position.setter
    def position(self, state: dict[str, Any]) -> None:
        self._iterator.set_state(state)


def _shuffled(source: Source, seed: int) -> grain.MapDataset:
    dataset = grain.MapDataset.source(source).seed(seed)
    return dataset if isinstance(source, TaskSource) else dataset.shuffle().repeat()
