"""Chooses the draft length of the next chunk: k* = argmax E[tokens](k) / c(size, k, live), k = 0 included.

E[tokens](k) = 1 + the sum of a_i over i <= k, where a_i is the share of verifications that accept draft i and all
before it. Acceptance does not depend on the load, the cost c does: one estimate of a for all batch sizes, one table of
c for each. An iteration also reads the keys and values of all running rows, once for all k + 1 tokens of a row: c grows
with the live tokens, by about as many seconds for every k, and the best k grows with them. All of it is host state
between two chunks: no arrays, no randomness.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from specrl_jax.decoding.acceptance import AcceptanceEstimate, expected_tokens
from specrl_jax.decoding.rollouts import DecodeChunk

PROBE = 64  # verifications that a probe tries to observe
PROBE_ITERATIONS = (4, 32)  # fewest, most
SAMPLES, RECENT = 49, 7  # chunks kept: for the cost of one length relative to the others; for the common level
PAIRED = 3  # chunks after a change of length that compare the two
NEAR = 1.5  # samples taken at up to so many times the live tokens, or 1 / NEAR of them, say a cost without the slope
LAG, SLOPES = 16, 64  # chunks between two that measure a slope, at most; slopes kept of each length
LENGTHS_KEPT = 256.0  # finished rows after which the weight of a row's length has fallen to 1/e
MAX_BACKOFF = 4  # times the interval between two probes that the budget allows


def best_length(tokens: np.ndarray | Sequence[float], costs: np.ndarray | Sequence[float]) -> np.ndarray:
    """Return [...] index of the draft length with the highest rate, the shorter of two equal ones.

    Args:
      tokens: [..., n] expected tokens per verification.
      costs: [..., n] seconds per iteration.
    """
    return np.argmax(np.asarray(tokens) / np.asarray(costs), axis=-1)


class Choice(NamedTuple):
    """What the next chunk does."""

    k: int  # tokens drafted per iteration
    iterations: int | None  # at most; None: a full chunk


@dataclasses.dataclass
class _SizeState:
    """Estimates for one compiled batch size; lists are indexed like `Controller.lengths`."""

    samples: list[list[list[float]]]  # [live tokens, log seconds per iteration less the level at that time]
    backoff: list[int]  # doubles after each probe without news
    probe_budget: list[float]  # seconds that probes of this length may lose
    call: float = 0.0  # seconds of a chunk beyond its iterations
    recent: list[float] = dataclasses.field(default_factory=lambda: [0.0] * RECENT)  # the level, by recent chunks
    current: int | None = None  # index of the length in use
    last: int | None = None  # index of the last chunk's length, probes included
    streak: int = PAIRED  # consecutive chunks of that length; the first of all is compared with its calibration
    trail: list[list[float]] = dataclasses.field(default_factory=list)  # [length, live tokens, seconds] of LAG chunks

    @property
    def level(self) -> float:
        """Log of the factor common to all lengths: a busy machine slows them alike."""
        return _typical(self.recent)


class Controller:
    """Running estimates of acceptance and cost, and the choice that follows from them.

    Unused lengths share `probe_budget` of the running time. A length is probed when its budget covers the probe's
    estimated loss: iterations x (c(k) - E(k) c(k*) / E(k*)) seconds.

    Args:
      lengths: draft lengths that have a program, ascending from 0.
      sizes: compiled batch sizes.
      hysteresis: switch lengths only for a rate that is better by more than this share; a third of it switches back to
        plain decoding, whose cost does not depend on an estimate of acceptance.
      probe_budget: share of the time that probes may lose.
      memory: verifications after which the weight of an observation has fallen to 1/e.
      budget: drafts that an iteration verifies at most (`admission.py`); 0: all. Acceptance of lengths that draft more
        is counted apart: that of other lengths does not tell which of the drafts are admitted.
      initial_budget: share of a probe's time that a length may lose right after its calibration, which is a few
        iterations on dummy work: lengths that it puts near the best are tried once on real work.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        sizes: Sequence[int],
        hysteresis: float = 0.03,
        probe_budget: float = 0.01,
        memory: float = 2048.0,
        initial_budget: float = 0.3,
        budget: int = 0,
    ) -> None:
        if list(lengths) != sorted(set(lengths)) or lengths[0] != 0:
            raise ValueError(f"lengths={tuple(lengths)}: expected distinct draft lengths ascending from 0")
        self.lengths, self.sizes = tuple(lengths), tuple(sizes)
        self.hysteresis, self.probe_budget = hysteresis, probe_budget
        self.memory, self.initial_budget = memory, initial_budget
        self.budget = budget
        self._estimate = AcceptanceEstimate(self.lengths[-1], memory)
        # By (size, length), where not all drafts are verified.
        over = [(size, k) for size in sizes for k in lengths if 0 < budget < size * k]
        self._under_budget = {case: AcceptanceEstimate(case[1], memory) for case in over}
        # By length, from two chunks of one size: [change of live tokens, seconds per iteration and live token].
        self._slopes: list[list[list[float]]] = [[] for _ in self.lengths]
        self._slope = [0.0] * len(self.lengths)  # what a live token adds to an iteration, seconds
        self._lengths = [0.0, 0.0]  # tokens committed, and texts ended; earlier ones fade
        self._prediction_at_reset: list[float] = []  # the prediction that last reset the probes' backoff
        n = len(self.lengths)
        self._sizes = {size: _SizeState([[] for _ in range(n)], [1] * n, [0.0] * n) for size in self.sizes}

    # --- estimates

    def acceptance(self) -> list[float]:
        """Return the estimates of a_1, a_2, ... up to the longest draft."""
        return self._estimate.cumulative()

    def expected_tokens(self, k: int) -> float:
        """Return E[tokens](k) by the running estimates, all drafts verified."""
        return float(expected_tokens(self.acceptance(), k))

    def _tokens(self, size: int, k: int) -> float:
        """Return E[tokens](k) at a batch size, less what is cut off where a text ends.

        A text of L tokens takes L / E verifications and, as the last one goes beyond its end, half of one more for
        long drafts, none for E = 1.
        """
        estimate = self._under_budget.get((size, k))
        if estimate is None:
            tokens = self.expected_tokens(k)
        elif estimate.unknown:  # at most, so that it is tried
            tokens = min(self.expected_tokens(k), 1 + self.budget / size)
        else:
            tokens = float(expected_tokens(estimate.cumulative(), k))
        written, ended = self._lengths
        return tokens / (1 + (tokens - 1) * ended / (2 * written)) if ended else tokens

    def cost(self, size: int, k: int, tokens: float) -> float:
        """Return seconds per iteration: linear in k between measured lengths, nan if none of this size is measured.

        Args:
          tokens: live tokens of all running rows.
        """
        return self._costs(size, tokens)[self.lengths.index(k)]

    def _costs(self, size: int, tokens: float) -> list[float]:
        """Return the cost of every length."""
        state = self._sizes[size]
        measured = [i for i, samples in enumerate(state.samples) if samples]
        known = {self.lengths[i]: math.exp(state.level + self._log_cost(state, i, tokens)) for i in measured}
        return [known[k] if k in known else _between(known, k) for k in self.lengths]

    def _log_cost(self, state: _SizeState, i: int, tokens: float) -> float:
        """Return log seconds per iteration at level 0: from samples at about `tokens` live tokens, if there are enough.

        Each is moved to `tokens` by the slope, which then changes little.
        """
        samples = state.samples[i]
        near = [s for s in samples if s[0] <= NEAR * tokens and tokens <= NEAR * s[0]]
        moved = []
        for then, log_seconds in near if len(near) >= PAIRED else samples:
            growth = self._slope[i] * (tokens - then)
            # A slope that is too steep may not make an iteration free.
            moved.append(
                log_seconds + math.log(max(1 + growth * math.exp(-log_seconds), 0.1)) if growth else log_seconds
            )
        return _typical(moved)

    def unmeasured(self, size: int) -> list[int]:
        """Return the lengths to calibrate before real work."""
        return [k for k, samples in zip(self.lengths, self._sizes[size].samples) if not samples]

    def drafts(self, size: int) -> bool | None:
        """Return whether batches of this size draft at present, probes aside; None before the first choice."""
        current = self._sizes[size].current
        return None if current is None else current > 0

    # --- the choice

    def choose(self, size: int, running: int, live: float, off: bool = False) -> Choice:
        """Choose the next chunk of `running` rows.

        Args:
          live: tokens that a running row holds, on average.
          off: draft in probes only (the acceptance alarm has tripped).
        """
        state = self._sizes[size]
        tokens = [self._tokens(size, k) for k in self.lengths]
        costs = self._costs(size, running * live)
        if off or math.isnan(costs[0]):
            state.current = 0
        else:
            # Drafts that add almost no tokens: the gain is below the noise of the two measured costs.
            worth = [t if i == 0 or t > 1 + self.hysteresis else 0.0 for i, t in enumerate(tokens)]
            rates = [t / c for t, c in zip(worth, costs)]
            best = int(best_length(worth, costs))
            margin = self.hysteresis if best else self.hysteresis / 3
            if state.current is None or rates[best] > (1 + margin) * rates[state.current]:
                state.current = best
        iterations = _probe_iterations(running)
        due = self._due(state, state.current, tokens, costs, iterations)
        if due is not None:
            return Choice(self.lengths[due], iterations)
        untried = state.current > 0 and self._estimate.unknown
        return Choice(self.lengths[state.current], iterations if untried else None)

    def _due(
        self, state: _SizeState, current: int, tokens: list[float], costs: list[float], iterations: int
    ) -> int | None:
        """Return the index of the length whose budget covers its probe by the largest factor, if any covers it."""
        best, found = 1.0, None
        for i in range(len(self.lengths)):
            if i == current or math.isnan(costs[i]):
                continue
            loss = _loss(iterations, costs[i], tokens[i], costs[current], tokens[current])
            # A shortened chunk has a cost, even if the length looks better than the one in use.
            covered = state.probe_budget[i] / (state.backoff[i] * max(loss, 0.25 * iterations * costs[current]))
            if covered >= best:
                best, found = covered, i
        return found

    # --- observations

    def calibrate(self, size: int, k: int, seconds: float, live: float) -> None:
        """Set the `seconds` per iteration of a program on `size` dummy rows of `live` tokens; replaces its samples."""
        state, i = self._sizes[size], self.lengths.index(k)
        state.samples[i] = [[size * live, math.log(seconds) - state.level]]
        state.probe_budget[i] = self.initial_budget * seconds * _probe_iterations(size)

    def calibrate_calls(self, size: int, seconds: float) -> None:
        """Set the seconds that a chunk of this size takes beyond its iterations, which no length is charged for."""
        self._sizes[size].call = seconds

    def predict(self, rates: Sequence[float]) -> None:
        """Set the learner's cumulative acceptance a_1, a_2, ... as a prior; resets the probes' backoff if it moved."""
        predicted = self._estimate.predicted = [float(rate) for rate in rates[: self.lengths[-1]]]
        before = self._prediction_at_reset
        if len(before) != len(predicted) or any(abs(a - b) > 0.1 for a, b in zip(predicted, before)):
            self._prediction_at_reset = predicted
            self._reset_backoff()

    def observe(self, chunk: DecodeChunk, accepted: Sequence[int] | np.ndarray) -> None:
        """Add a chunk that `choose` asked for.

        Args:
          accepted: by position, verifications that accepted this draft and all before it.
        """
        k, size = chunk.k, chunk.size
        state, i = self._sizes[size], self.lengths.index(k)
        current = i if state.current is None else state.current
        fade = math.exp(-chunk.finished / LENGTHS_KEPT)
        self._lengths = [fade * old + new for old, new in zip(self._lengths, (chunk.tokens, chunk.finished))]
        jumped = self._under_budget.get((size, k), self._estimate).observe(k, chunk.verifications, accepted)
        tokens_read = chunk.live * chunk.verifications / chunk.iterations
        # A call that took less than calibration found leaves at least half to the iterations.
        seconds = max(chunk.seconds - state.call, chunk.seconds / 2) / chunk.iterations
        surprised = self._observe_cost(state, i, tokens_read, seconds)
        if i == current:
            for j in range(len(self.lengths)):
                state.probe_budget[j] += self.probe_budget * chunk.seconds / max(len(self.lengths) - 1, 1)
        else:
            tokens = 1.0 + sum(accepted[:k]) / chunk.verifications
            in_use = self.lengths[current]
            costs = self.cost(size, k, tokens_read), self.cost(size, in_use, tokens_read)
            loss = _loss(chunk.iterations, costs[0], tokens, costs[1], self._tokens(size, in_use))
            state.probe_budget[i] = min(0.0, state.probe_budget[i] - max(loss, 0.0))
            state.backoff[i] = 1 if surprised else min(2 * state.backoff[i], MAX_BACKOFF)
        # Charge the cost of both switches of a probe to the probed length; a switch between batch sizes to none.
        probed = i if i != current else state.last
        if chunk.switch_seconds and probed is not None and probed != current:
            state.probe_budget[probed] -= chunk.switch_seconds
        state.last = i
        if jumped:
            self._reset_backoff()

    def replay(self, verifications: int, accepted: Sequence[int] | np.ndarray) -> None:
        """Add acceptance that `replay` counted after a chunk without drafts; `accepted` as in `observe`."""
        if self._estimate.observe(len(accepted), verifications, accepted):
            self._reset_backoff()

    def _observe_cost(self, state: _SizeState, i: int, tokens: float, seconds: float) -> bool:
        """Update slope, level while one length runs, and the lengths' relative costs after a change of length.

        Returns whether the chunk's time was off by more than a tenth.
        """
        samples, log_seconds = state.samples[i], math.log(seconds)
        off = log_seconds - self._log_cost(state, i, tokens) if samples else 0.0
        surprised = bool(samples) and abs(off - state.level) > 0.1
        if state.last is not None:
            state.streak = state.streak + 1 if i == state.last else 1
        if not samples or state.streak <= PAIRED:
            state.samples[i] = [*samples, [tokens, log_seconds - state.level]][-SAMPLES:]
        else:
            state.recent = [*state.recent[1:], off]
        self._observe_slope(state, i, tokens, seconds)
        return surprised

    def _observe_slope(self, state: _SizeState, i: int, tokens: float, seconds: float) -> None:
        """Update the slopes: medians over pairs of chunks, weighted by the change of live tokens."""
        earlier = next((chunk for chunk in state.trail if chunk[0] == i), None)
        state.trail = [*state.trail, [i, tokens, seconds]][-LAG:]
        if earlier is None or earlier[1] == tokens:
            return
        change = tokens - earlier[1]
        self._slopes[i] = [*self._slopes[i], [abs(change), (seconds - earlier[2]) / change]][-SLOPES:]
        # A prior of two pairs, as small changes measure noise: a length's slope is that of all, and that of all is 0.
        of_all = _weighted_median([[2 * tokens, 0.0], *(pair for pairs in self._slopes for pair in pairs)])
        self._slope = [max(0.0, _weighted_median([[2 * tokens, of_all], *pairs])) for pairs in self._slopes]

    def _reset_backoff(self) -> None:
        for state in self._sizes.values():
            state.backoff = [1] * len(self.lengths)

    # --- checkpoints; saved names are those of the first version, so that old checkpoints stay readable

    def state(self) -> dict[str, object]:
        """Return the state as JSON values."""
        estimate = self._estimate
        return {
            "arguments": {
                "lengths": list(self.lengths),
                "sizes": list(self.sizes),
                "hysteresis": self.hysteresis,
                "probe_budget": self.probe_budget,
                "memory": self.memory,
                "endowment": self.initial_budget,
                "budget": self.budget,
            },
            "acceptance": {
                "_tries": list(estimate.tries),
                "_hits": list(estimate.hits),
                "_predicted": list(estimate.predicted),
                "_heeded": list(self._prediction_at_reset),
            },
            "spread": estimate.spread,
            "lengths": list(self._lengths),
            "under_budget": [[list(e.tries), list(e.hits), e.spread] for e in self._under_budget.values()],
            "slopes": [list(pairs) for pairs in self._slopes],
            "slope": list(self._slope),
            "per_size": [_renamed(dataclasses.asdict(self._sizes[size]), _SAVED) for size in self.sizes],
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Self:
        """Rebuild the controller of `state`; it continues identically.

        States of versions before `slopes` have costs without live tokens: those are measured anew.
        """
        controller = cls(**_renamed(state["arguments"], {"endowment": "initial_budget"}))
        estimate, saved = controller._estimate, state["acceptance"]
        estimate.tries, estimate.hits, estimate.spread = list(saved["_tries"]), list(saved["_hits"]), state["spread"]
        estimate.predicted, controller._prediction_at_reset = list(saved["_predicted"]), list(saved["_heeded"])
        if "slopes" not in state:
            return controller
        for e, (tries, hits, spread) in zip(controller._under_budget.values(), state.get("under_budget", ())):
            e.tries, e.hits, e.spread = list(tries), list(hits), spread
        controller._lengths = list(state.get("lengths", controller._lengths))
        controller._slopes, controller._slope = list(state["slopes"]), list(state["slope"])
        names = {name: field for field, name in _SAVED.items()}
        for size, values in zip(controller.sizes, state["per_size"]):
            controller._sizes[size] = _SizeState(**_renamed(values, names))
        return controller


_SAVED = {"probe_budget": "purse"}  # name in checkpoints, by field of _SizeState


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items()}


def _probe_iterations(running: int) -> int:
    """Return iterations enough for PROBE verifications of `running` rows."""
    fewest, most = PROBE_ITERATIONS
    return min(max(fewest, math.ceil(PROBE / running)), most)


def _loss(iterations: int, cost: float, tokens: float, best_cost: float, best_tokens: float) -> float:
    """Return the seconds that a chunk takes longer than the length in use would take for its tokens."""
    return iterations * (cost - tokens * best_cost / best_tokens)


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
