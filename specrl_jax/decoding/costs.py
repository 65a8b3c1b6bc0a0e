"""Running estimate of the seconds of an iteration, by batch size, draft length and live tokens.

Lengths are compared with each other by chunks after a change of length, as a machine may be slower at one time than at
another: the cost of a length is a level common to all lengths and changing fast, times its own factor. An iteration
also reads the keys and values of all running rows, once for all tokens of a row: its cost grows with the live tokens by
a slope, which is measured of each length over all batch sizes.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Self

SAMPLES, RECENT = 49, 7  # chunks kept: for the cost of one length relative to the others; for the common level
PAIRED = 3  # chunks after a change of length that compare the two
NEAR = 1.5  # samples taken at up to so many times the live tokens, or 1 / NEAR of them, say a cost without the slope
LAG, SLOPES = 16, 64  # chunks between two that measure a slope, at most; slopes kept of each length
NEW_PAIRS = 8  # after which the medians over many slopes are computed again: where chunks are short, that takes time


@dataclasses.dataclass
class _SizeCosts:
    """Measurements of one batch size; `samples` is indexed like the lengths."""

    samples: list[list[list[float]]]  # [live tokens, log seconds per iteration less the level at that time]
    call: float = 0.0  # seconds of a chunk beyond its iterations
    recent: list[float] = dataclasses.field(default_factory=lambda: [0.0] * RECENT)  # the level, by recent chunks
    last: int | None = None  # index of the last chunk's length
    streak: int = PAIRED  # consecutive chunks of that length; the first of all is compared with its calibration
    trail: list[list[float]] = dataclasses.field(default_factory=list)  # [length, live tokens, seconds] of LAG chunks

    @property
    def level(self) -> float:
        """Log of the factor common to all lengths: a busy machine slows them alike."""
        return _typical(self.recent)


@dataclasses.dataclass
class CostEstimate:
    """Estimates what an iteration costs; lists are by draft length where nothing else is said."""

    lengths: list[int]  # ascending
    sizes: list[int]
    by_size: list[_SizeCosts]
    slopes: list[list[list[float]]]  # from two chunks of one size: [change of live tokens, seconds per live token]
    slope: list[float]  # seconds that a live token adds to an iteration
    new_pairs: int = 0  # of chunks, since `slope` was last computed

    @classmethod
    def of(cls, lengths: Sequence[int], sizes: Sequence[int]) -> Self:
        """Return an estimate without observations, of draft lengths and batch sizes."""
        by_size = [_SizeCosts([[] for _ in lengths]) for _ in sizes]
        return cls(list(lengths), list(sizes), by_size, slopes=[[] for _ in lengths], slope=[0.0] * len(lengths))

    def _of_size(self, size: int) -> _SizeCosts:
        return self.by_size[self.sizes.index(size)]

    def seconds(self, size: int, tokens: float) -> list[float]:
        """Return seconds per iteration of every length: linear between measured lengths, nan if none is measured.

        Args:
          tokens: live tokens of all running rows.
        """
        measures = self._of_size(size)
        measured = [i for i, samples in enumerate(measures.samples) if samples]
        costs = {self.lengths[i]: math.exp(measures.level + self._log_cost(measures, i, tokens)) for i in measured}
        return [costs[k] if k in costs else _between(costs, k) for k in self.lengths]

    def unmeasured(self, size: int) -> list[int]:
        """Return the lengths without a sample at a batch size."""
        return [k for k, samples in zip(self.lengths, self._of_size(size).samples) if not samples]

    def last(self, size: int) -> int | None:
        """Return the index of the length that the last chunk of a batch size had."""
        return self._of_size(size).last

    def calibrate(self, size: int, i: int, tokens: float, *, seconds: float) -> None:
        """Set the seconds per iteration of length i at so many live tokens; replaces its samples."""
        measures = self._of_size(size)
        measures.samples[i] = [[tokens, math.log(seconds) - measures.level]]

    def calibrate_calls(self, size: int, seconds: float) -> None:
        """Set the seconds that a chunk takes beyond its iterations."""
        self._of_size(size).call = seconds

    def observe(self, size: int, i: int, tokens: float, *, seconds: float, iterations: int) -> bool:
        """Add a chunk of length i: update slope, level while one length runs, and relative costs after a change.

        Args:
          tokens: live tokens of all running rows.
          seconds: of the chunk.
        Returns:
          whether its time was off by more than a tenth.
        """
        measures = self._of_size(size)
        # A call that took less than calibration found leaves at least half to the iterations.
        seconds = max(seconds - measures.call, seconds / 2) / iterations
        samples, log_seconds = measures.samples[i], math.log(seconds)
        off = log_seconds - self._log_cost(measures, i, tokens) if samples else 0.0
        surprised = bool(samples) and abs(off - measures.level) > 0.1
        if measures.last is not None:
            measures.streak = measures.streak + 1 if i == measures.last else 1
        if not samples or measures.streak <= PAIRED:
            measures.samples[i] = [*samples, [tokens, log_seconds - measures.level]][-SAMPLES:]
        else:
            measures.recent = [*measures.recent[1:], off]
        self._observe_slope(measures, i, tokens, seconds)
        measures.last = i
        return surprised

    def _observe_slope(self, measures: _SizeCosts, i: int, tokens: float, seconds: float) -> None:
        """Measure a slope from a pair of chunks, and update the estimates of all."""
        earlier = next((chunk for chunk in measures.trail if chunk[0] == i), None)
        measures.trail = [*measures.trail, [i, tokens, seconds]][-LAG:]
        if earlier is None or earlier[1] == tokens:
            return
        change = tokens - earlier[1]
        self.slopes[i] = [*self.slopes[i], [abs(change), (seconds - earlier[2]) / change]][-SLOPES:]
        self.new_pairs += 1
        if sum(map(len, self.slopes)) <= SLOPES or self.new_pairs >= NEW_PAIRS:
            self._update_slopes(tokens)

    def _update_slopes(self, tokens: float) -> None:
        """Set the slopes to medians over pairs of chunks, weighted by the change of live tokens."""
        # A prior of two pairs, as small changes measure noise: a length's slope is that of all, and that of all is 0.
        of_all = _weighted_median([[2 * tokens, 0.0], *(pair for pairs in self.slopes for pair in pairs)])
        self.slope = [max(0.0, _weighted_median([[2 * tokens, of_all], *pairs])) for pairs in self.slopes]
        self.new_pairs = 0

    def _log_cost(self, measures: _SizeCosts, i: int, tokens: float) -> float:
        """Return log seconds per iteration at level 0: from samples at about `tokens` live tokens, if there are enough.

        Each is moved to `tokens` by the slope, which then changes little.
        """
        samples = measures.samples[i]
        near = [s for s in samples if s[0] <= NEAR * tokens and tokens <= NEAR * s[0]]
        moved = []
        for then, log_seconds in near if len(near) >= PAIRED else samples:
            growth = self.slope[i] * (tokens - then)
            # A slope that is too steep may not make an iteration free.
            moved.append(
                log_seconds + math.log(max(1 + growth * math.exp(-log_seconds), 0.1)) if growth else log_seconds
            )
        return _typical(moved)


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


def _weighted_median(weighted: Sequence[Sequence[float]]) -> float:
    """Return the median of the values of [weight, value] pairs."""
    ordered = sorted((value, weight) for weight, value in weighted)
    middle, total = sum(weight for _, weight in ordered) / 2, 0.0
    for value, weight in ordered:
        total += weight
        if total >= middle:
            return value
    return ordered[-1][0]
