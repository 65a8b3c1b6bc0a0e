"""Running estimate of the seconds of an iteration, by batch size, draft length and live tokens.

Lengths are compared with each other by chunks after a change of length, as a machine may be slower at one time than at
another: the cost of a length is a level common to all lengths and changing fast, times its own factor. An iteration
also reads the keys and values of all running rows, once for all tokens of a row: its cost grows with the live tokens by
a slope, which is measured of each length over all batch sizes.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

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


class CostEstimate:
    """Estimates what an iteration costs.

    Args:
      lengths: draft lengths, ascending.
      sizes: batch sizes.
    """

    def __init__(self, lengths: Sequence[int], sizes: Sequence[int]) -> None:
        self._lengths = tuple(lengths)
        self._sizes = {size: _SizeCosts([[] for _ in lengths]) for size in sizes}
        # By length, from two chunks of one size: [change of live tokens, seconds per iteration and live token].
        self._slopes: list[list[list[float]]] = [[] for _ in lengths]
        self._slope = [0.0] * len(lengths)  # what a live token adds to an iteration, seconds
        self._new_pairs = 0  # measured since then

    def seconds(self, size: int, tokens: float) -> list[float]:
        """Return seconds per iteration of every length: linear between measured lengths, nan if none is measured.

        Args:
          tokens: live tokens of all running rows.
        """
        measures = self._sizes[size]
        measured = [i for i, samples in enumerate(measures.samples) if samples]
        known = {self._lengths[i]: math.exp(measures.level + self._log_cost(measures, i, tokens)) for i in measured}
        return [known[k] if k in known else _between(known, k) for k in self._lengths]

    def unmeasured(self, size: int) -> list[int]:
        """Return the lengths without a sample at a batch size."""
        return [k for k, samples in zip(self._lengths, self._sizes[size].samples) if not samples]

    def last(self, size: int) -> int | None:
        """Return the index of the length that the last chunk of a batch size had."""
        return self._sizes[size].last

    def calibrate(self, size: int, i: int, tokens: float, *, seconds: float) -> None:
        """Set the seconds per iteration of length i at so many live tokens; replaces its samples."""
        measures = self._sizes[size]
        measures.samples[i] = [[tokens, math.log(seconds) - measures.level]]

    def calibrate_calls(self, size: int, seconds: float) -> None:
        """Set the seconds that a chunk takes beyond its iterations."""
        self._sizes[size].call = seconds

    def observe(self, size: int, i: int, tokens: float, *, seconds: float, iterations: int) -> bool:
        """Add a chunk of length i: update slope, level while one length runs, and relative costs after a change.

        Args:
          tokens: live tokens of all running rows.
          seconds: of the chunk.
        Returns:
          whether its time was off by more than a tenth.
        """
        measures = self._sizes[size]
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
        self._slopes[i] = [*self._slopes[i], [abs(change), (seconds - earlier[2]) / change]][-SLOPES:]
        self._new_pairs += 1
        if sum(map(len, self._slopes)) <= SLOPES or self._new_pairs >= NEW_PAIRS:
            self._update_slopes(tokens)

    def _update_slopes(self, tokens: float) -> None:
        """Set the slopes to medians over pairs of chunks, weighted by the change of live tokens."""
        # A prior of two pairs, as small changes measure noise: a length's slope is that of all, and that of all is 0.
        of_all = _weighted_median([[2 * tokens, 0.0], *(pair for pairs in self._slopes for pair in pairs)])
        self._slope = [max(0.0, _weighted_median([[2 * tokens, of_all], *pairs])) for pairs in self._slopes]
        self._new_pairs = 0

    def _log_cost(self, measures: _SizeCosts, i: int, tokens: float) -> float:
        """Return log seconds per iteration at level 0: from samples at about `tokens` live tokens, if there are enough.

        Each is moved to `tokens` by the slope, which then changes little.
        """
        samples = measures.samples[i]
        near = [s for s in samples if s[0] <= NEAR * tokens and tokens <= NEAR * s[0]]
        moved = []
        for then, log_seconds in near if len(near) >= PAIRED else samples:
            growth = self._slope[i] * (tokens - then)
            # A slope that is too steep may not make an iteration free.
            moved.append(
                log_seconds + math.log(max(1 + growth * math.exp(-log_seconds), 0.1)) if growth else log_seconds
            )
        return _typical(moved)

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "slopes": [list(pairs) for pairs in self._slopes],
            "slope": list(self._slope),
            "new_pairs": self._new_pairs,
            "sizes": [dataclasses.asdict(measures) for measures in self._sizes.values()],
        }

    def restore(
        self,
        slopes: Sequence[list[list[float]]],
        slope: Sequence[float],
        sizes: Sequence[Mapping[str, Any]],
        *,
        new_pairs: int,
    ) -> None:
        """Set what `state` returned; each of `sizes` may have further names."""
        self._slopes, self._slope, self._new_pairs = list(slopes), list(slope), new_pairs
        names = [field.name for field in dataclasses.fields(_SizeCosts)]
        for size, values in zip(self._sizes, sizes):
            self._sizes[size] = _SizeCosts(**{name: values[name] for name in names if name in values})


def _typical(values: Sequence[float]) -> float:
    """Return the mean of the middle half, of the lower values if there are few: disturbances only add time."""
    n = len(values)
    kept = sorted(values)[n // 4 : n - math.ceil((n - 1) / 4)]
    return sum(kept) / len(kept)


def _between(known: Mapping[int, float], k: int) -> float:
    """Return the cost of a length without samples, from the costs of others."""
    if not known:
        return math.nan
    # The two measured lengths around k, or the last two below it. A single one costs the same at every k.
    right = next((j for j in sorted(known) if j > k), max(known))
    left = max((j for j in known if j < right), default=right)
    slope = max(0.0, known[right] - known[left]) / (right - left) if right > left else 0.0
    return known[right] + slope * (k - right)


def _weighted_median(weighted: Sequence[Sequence[float]]) -> float:
    """Return the median of the values of [weight, value] pairs."""
    ordered = sorted((value, weight) for weight, value in weighted)
    middle, total = sum(weight for _, weight in ordered) / 2, 0.0
    for value, weight in ordered:
        total += weight
        if total >= middle:
            return value
    return ordered[-1][0]
