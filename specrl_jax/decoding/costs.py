"""Running table of the seconds of an iteration, by batch size and draft length.

Lengths are compared with each other by chunks after a change of length, as a machine may be slower at one time than at
another: the cost of a length is a level common to all lengths and changing fast, times its own entry. An iteration also
reads the keys and values of all running rows, once for all tokens of a row: a live token adds as much to every length.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Self

SAMPLES, RECENT = 8, 8  # chunks kept: for the cost of one length relative to the others; for the common level
PAIRED = 3  # chunks after a change of length that compare the two


@dataclasses.dataclass
class _SizeCosts:
    """Measurements of one batch size; `samples` is indexed like the lengths."""

    samples: list[list[float]]  # log seconds per iteration without live tokens, less the level at that time
    call: float = 0.0  # seconds of a chunk beyond its iterations
    recent: list[float] = dataclasses.field(default_factory=lambda: [0.0] * RECENT)  # the level, by recent chunks
    last: int | None = None  # index of the last chunk's length
    streak: int = PAIRED  # consecutive chunks of that length; the first of all is compared with its calibration

    @property
    def level(self) -> float:
        """Log of the factor common to all lengths: a busy machine slows them alike."""
        return _typical(self.recent)


@dataclasses.dataclass
class CostTable:
    """Estimates what an iteration costs; lists are by draft length where nothing else is said."""

    lengths: list[int]  # ascending
    sizes: list[int]
    read: float  # seconds that reading one live token takes, over those of a plain iteration without live tokens
    by_size: list[_SizeCosts]

    @classmethod
    def of(cls, lengths: Sequence[int], sizes: Sequence[int], read: float) -> Self:
        """Return a table without observations, of draft lengths and batch sizes."""
        by_size = [_SizeCosts([[] for _ in lengths]) for _ in sizes]
        return cls(list(lengths), list(sizes), read, by_size=by_size)

    def _of_size(self, size: int) -> _SizeCosts:
        return self.by_size[self.sizes.index(size)]

    def seconds(self, size: int, tokens: float) -> list[float]:
        """Return seconds per iteration of every length: linear between measured lengths, nan if none is measured.

        Args:
          tokens: live tokens of all running rows.
        """
        costs = self._of_size(size)
        measured = [i for i, samples in enumerate(costs.samples) if samples]
        known = {self.lengths[i]: math.exp(costs.level) * self._seconds(costs, i, tokens) for i in measured}
        return [known[k] if k in known else _between(known, k) for k in self.lengths]

    def unmeasured(self, size: int) -> list[int]:
        """Return the lengths without a sample at a batch size."""
        return [k for k, samples in zip(self.lengths, self._of_size(size).samples) if not samples]

    def last(self, size: int) -> int | None:
        """Return the index of the length that the last chunk of a batch size had."""
        return self._of_size(size).last

    def calibrate(self, size: int, i: int, tokens: float, *, seconds: float) -> None:
        """Set the seconds per iteration of length i at so many live tokens; replaces its samples."""
        costs = self._of_size(size)
        costs.samples[i] = [self._sample(costs, i, tokens, seconds)]

    def calibrate_calls(self, size: int, seconds: float) -> None:
        """Set the seconds that a chunk takes beyond its iterations."""
        self._of_size(size).call = seconds

    def observe(self, size: int, i: int, tokens: float, *, seconds: float, iterations: int) -> bool:
        """Add a chunk of length i: update the level while one length runs, and relative costs after a change.

        Args:
          tokens: live tokens of all running rows.
          seconds: of the chunk.
        Returns:
          whether its time was off by more than a tenth.
        """
        costs = self._of_size(size)
        # A call that took less than calibration found leaves at least half to the iterations.
        seconds = max(seconds - costs.call, seconds / 2) / iterations
        samples = costs.samples[i]
        off = math.log(seconds / self._seconds(costs, i, tokens)) if samples else costs.level
        surprised = abs(off - costs.level) > 0.1
        if costs.last is not None:
            costs.streak = costs.streak + 1 if i == costs.last else 1
        if not samples or costs.streak <= PAIRED:
            costs.samples[i] = [*samples, self._sample(costs, i, tokens, seconds)][-SAMPLES:]
        else:
            costs.recent = [*costs.recent[1:], off]
        costs.last = i
        return surprised

    def _seconds(self, costs: _SizeCosts, i: int, tokens: float) -> float:
        """Return seconds per iteration at level 0, of a length with samples."""
        return math.exp(_typical(costs.samples[i])) + self._reading(costs, tokens)

    def _reading(self, costs: _SizeCosts, tokens: float) -> float:
        plain = costs.samples[0]
        return self.read * tokens * math.exp(_typical(plain)) if plain else 0.0

    def _sample(self, costs: _SizeCosts, i: int, tokens: float, seconds: float) -> float:
        """Return what `samples` keeps of an iteration of length i; plain ones take it and their own reading."""
        seconds /= math.exp(costs.level)
        if i == 0:
            return math.log(seconds / (1 + self.read * tokens))
        return math.log(max(seconds - self._reading(costs, tokens), seconds / 10))


def _typical(values: Sequence[float]) -> float:
    """Return the mean of the middle half, of the lower values if there are few: disturbances only add time."""
    n = len(values)
    middle = sorted(values)[n // 4 : n - math.ceil((n - 1) / 4)]
    return sum(middle) / len(middle)


def _between(measured: Mapping[int, float], k: int) -> float:
    """Return the cost of a length without samples, from the costs of others."""
    if not measured:
        return math.nan
    # The two measured lengths around k, or the last two below it. A single one costs the same at every k.
    longer = next((j for j in sorted(measured) if j > k), max(measured))
    shorter = max((j for j in measured if j < longer), default=longer)
    slope = max(0.0, measured[longer] - measured[shorter]) / (longer - shorter) if longer > shorter else 0.0
    return measured[longer] + slope * (k - longer)
