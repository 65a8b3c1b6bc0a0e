"""Chooses the draft length of the next chunk: k* = argmax E[tokens](k) / c(size, k, live), k = 0 included.

E[tokens](k) = 1 + the sum of a_i over i <= k, where a_i is the share of verifications that accept draft i and all
before it (`acceptance.py`). Acceptance does not depend on the load, the cost c does (`costs.py`): one estimate of a for
all batch sizes, one of c for each. c grows with the live tokens, by about as many seconds for every k, so the best k
grows with them. All of it is host state between two chunks: no arrays, no randomness.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from specrl_jax.decoding.acceptance import AcceptanceEstimate, expected_tokens
from specrl_jax.decoding.costs import CostTable
from specrl_jax.decoding.draft_lengths import Choice, DraftLengthPolicy
from specrl_jax.decoding.rollouts import DecodeChunk
from specrl_jax.serialize import Packed, pack, unpack

PROBE = 64  # verifications that a probe tries to observe
PROBE_ITERATIONS = (4, 32)  # fewest, most
HYSTERESIS = 0.03  # least relative gain in rate for which the length is switched; a third of it to plain decoding
PROBE_BUDGET = 0.01  # share of the time that probes may lose
# Share of a probe's time that a length may lose right after its calibration, which is a few iterations on dummy work:
# lengths that it puts near the best are tried once on real work.
INITIAL_BUDGET = 0.3
LENGTHS_KEPT = 256.0  # finished rows after which the weight of a row's length has fallen to 1/e
MAX_BACKOFF = 4  # times the interval between two probes that the budget allows


def best_length(tokens: np.ndarray | Sequence[float], costs: np.ndarray | Sequence[float]) -> np.ndarray:
    """Return [...] index of the draft length with the highest rate, the shorter of two equal ones.

    Args:
      tokens: [..., n] expected tokens per verification.
      costs: [..., n] seconds per iteration.
    """
    return np.argmax(np.asarray(tokens) / np.asarray(costs), axis=-1)


@dataclasses.dataclass
class _Probing:
    """The choice and its probes at one compiled batch size; lists are indexed like `Controller.lengths`."""

    backoff: list[int]  # doubles after each probe without news
    probe_budget: list[float]  # seconds that probes of this length may lose
    current: int | None = None  # index of the length in use


@dataclasses.dataclass
class _Estimates:
    """All that the controller learns; a checkpoint has it."""

    acceptance: AcceptanceEstimate
    under_budget: list[AcceptanceEstimate]  # by `Controller.partly_verified`
    costs: CostTable
    probing: list[_Probing]  # by batch size
    written: float = 0.0  # tokens committed; earlier ones fade, as do
    ended: float = 0.0  # texts ended
    prediction_at_reset: list[float] = dataclasses.field(default_factory=list)  # which last reset the probes' backoff


class Controller(DraftLengthPolicy):
    """Running estimates of acceptance and cost, and the choice that follows from them.

    Unused lengths share PROBE_BUDGET of the running time. A length is probed when its budget covers the probe's
    estimated loss: iterations x (c(k) - E(k) c(k*) / E(k*)) seconds.

    Args:
      lengths: draft lengths that have a program, ascending from 0.
      sizes: compiled batch sizes.
      budget: drafts that an iteration verifies at most (`admission.py`); 0: all. Acceptance of lengths that draft more
        is counted apart: that of other lengths does not tell which of the drafts are admitted.
      begins: the length used until all of a batch size can be calibrated.
      read: seconds that reading one live token takes, over those of a plain iteration without live tokens.
    """

    def __init__(
        self, lengths: Sequence[int], sizes: Sequence[int], *, budget: int = 0, begins: int = 0, read: float = 0.0
    ) -> None:
        if list(lengths) != sorted(set(lengths)) or lengths[0] != 0:
            raise ValueError(f"lengths={tuple(lengths)}: expected distinct draft lengths ascending from 0")
        self.lengths, self.sizes, self.budget, self.begins = tuple(lengths), tuple(sizes), budget, begins
        # (size, length) where not all drafts are verified.
        self.partly_verified = [(size, k) for size in sizes for k in lengths if 0 < budget < size * k]
        n = len(self.lengths)
        self._estimates = _Estimates(
            acceptance=AcceptanceEstimate.of(self.lengths[-1]),
            under_budget=[AcceptanceEstimate.of(k) for _, k in self.partly_verified],
            costs=CostTable.of(self.lengths, self.sizes, read),
            probing=[_Probing([1] * n, [0.0] * n) for _ in self.sizes],
        )

    # --- estimates

    def acceptance(self) -> list[float]:
        """Return the estimates of a_1, a_2, ... up to the longest draft."""
        return self._estimates.acceptance.cumulative()

    def _acceptance_of(self, size: int, k: int) -> AcceptanceEstimate:
        """Return the estimate that drafts of length k at a batch size share: all do, where every draft is verified."""
        if (case := (size, k)) not in self.partly_verified:
            return self._estimates.acceptance
        return self._estimates.under_budget[self.partly_verified.index(case)]

    def _probing(self, size: int) -> _Probing:
        return self._estimates.probing[self.sizes.index(size)]

    def tokens(self, size: int) -> list[float]:
        """Return E[tokens] of every length at a batch size, less what is cut off where a text ends.

        A text of L tokens takes L / E verifications and, as the last one goes beyond its end, half of one more for
        long drafts, none for E = 1.
        """
        estimates = self._estimates
        cut = estimates.ended / (2 * estimates.written) if estimates.ended else 0.0
        return [tokens / (1 + (tokens - 1) * cut) for tokens in self._uncut_tokens(size)]

    def _uncut_tokens(self, size: int) -> Iterator[float]:
        all_verified = list(itertools.accumulate(self.acceptance(), initial=1.0))  # by k
        for k in self.lengths:
            estimate = self._acceptance_of(size, k)
            if estimate is self._estimates.acceptance:
                yield all_verified[k]
            elif estimate.unknown:  # at most, so that it is tried
                yield min(all_verified[k], 1 + self.budget / size)
            else:
                yield float(expected_tokens(estimate.cumulative(), k))

    def cost(self, size: int, k: int, tokens: float) -> float:
        """Return seconds per iteration: linear in k between measured lengths, nan if none of this size is measured.

        Args:
          tokens: live tokens of all running rows.
        """
        return self._estimates.costs.seconds(size, tokens)[self.lengths.index(k)]

    def unmeasured(self, size: int) -> list[int]:
        """Return the lengths to calibrate before real work."""
        return self._estimates.costs.unmeasured(size)

    def drafts(self, size: int) -> bool | None:
        """Return whether batches of this size draft at present, probes aside; None before the first choice."""
        current = self._probing(size).current
        return None if current is None else current > 0

    # --- the choice

    def first(self, size: int) -> int:
        """Return the length in use at a batch size; before the first choice `begins`."""
        current = self._probing(size).current
        return self.begins if current is None else self.lengths[current]

    def choose(self, size: int, running: int, live: float, *, off: bool = False) -> Choice:
        """Choose the next chunk of `running` rows.

        Args:
          live: tokens that a running row holds, on average.
          off: draft in probes only (the acceptance alarm has tripped).
        """
        state = self._probing(size)
        tokens = self.tokens(size)
        costs = self._estimates.costs.seconds(size, running * live)
        if off or math.isnan(costs[0]):
            state.current = 0
        else:
            # Drafts that add almost no tokens: the gain is below the noise of the two measured costs.
            worth = [t if i == 0 or t > 1 + HYSTERESIS else 0.0 for i, t in enumerate(tokens)]
            rates = [t / c for t, c in zip(worth, costs)]
            best = int(best_length(worth, costs))
            margin = HYSTERESIS if best else HYSTERESIS / 3
            if state.current is None or rates[best] > (1 + margin) * rates[state.current]:
                state.current = best
        iterations = _probe_iterations(running)
        due = self._due(state, state.current, tokens, costs, iterations)
        if due is not None:
            return Choice(self.lengths[due], iterations)
        untried = state.current > 0 and self._estimates.acceptance.unknown
        return Choice(self.lengths[state.current], iterations if untried else None)

    def _due(
        self, state: _Probing, current: int, tokens: list[float], costs: list[float], iterations: int
    ) -> int | None:
        """Return the index of the length whose budget covers its probe by the largest factor, if any covers it."""
        best, index = 1.0, None
        for i in range(len(self.lengths)):
            if i == current or math.isnan(costs[i]):
                continue
            loss = _loss(iterations, costs[i], tokens[i], costs[current], tokens[current])
            # A shortened chunk has a cost, even if the length looks better than the one in use.
            covered = state.probe_budget[i] / (state.backoff[i] * max(loss, 0.25 * iterations * costs[current]))
            if covered >= best:
                best, index = covered, i
        return index

    # --- observations

    def calibrate(self, size: int, k: int, seconds: float, *, live: float) -> None:
        """Set the `seconds` per iteration of a program on dummy rows; replaces its samples.

        Args:
          live: tokens of the rows that ran, divided by `size`.
        """
        i = self.lengths.index(k)
        self._estimates.costs.calibrate(size, i, size * live, seconds=seconds)
        self._probing(size).probe_budget[i] = INITIAL_BUDGET * seconds * _probe_iterations(size)

    def calibrate_calls(self, size: int, seconds: float) -> None:
        """Set the seconds that a chunk of this size takes beyond its iterations, which no length is charged for."""
        self._estimates.costs.calibrate_calls(size, seconds)

    def predict(self, rates: Sequence[float]) -> None:
        """Set the learner's cumulative acceptance a_1, a_2, ... as a prior; resets the probes' backoff if it moved."""
        predicted = self._estimates.acceptance.predicted = [float(rate) for rate in rates[: self.lengths[-1]]]
        before = self._estimates.prediction_at_reset
        if len(before) != len(predicted) or any(abs(a - b) > 0.1 for a, b in zip(predicted, before)):
            self._estimates.prediction_at_reset = predicted
            self._reset_backoff()

    def observe(self, chunk: DecodeChunk, accepted: Sequence[int] | np.ndarray) -> None:
        """Add a chunk that `choose` asked for.

        Args:
          accepted: by position, verifications that accepted this draft and all before it.
        """
        k, size = chunk.k, chunk.size
        state, i = self._probing(size), self.lengths.index(k)
        current = i if state.current is None else state.current
        fade = math.exp(-chunk.finished / LENGTHS_KEPT)
        self._estimates.written = fade * self._estimates.written + chunk.tokens
        self._estimates.ended = fade * self._estimates.ended + chunk.finished
        jumped = self._acceptance_of(size, k).observe(k, chunk.verifications, accepted)
        last = self._estimates.costs.last(size)
        surprised = self._estimates.costs.observe(
            size, i, chunk.tokens_read, seconds=chunk.seconds, iterations=chunk.iterations
        )
        if i == current:
            for j in range(len(self.lengths)):
                state.probe_budget[j] += PROBE_BUDGET * chunk.seconds / max(len(self.lengths) - 1, 1)
        else:
            tokens = 1.0 + sum(accepted[:k]) / chunk.verifications
            in_use = self.lengths[current]
            costs = [self.cost(size, length, chunk.tokens_read) for length in (k, in_use)]
            loss = _loss(chunk.iterations, costs[0], tokens, costs[1], self.tokens(size)[current])
            state.probe_budget[i] = min(0.0, state.probe_budget[i] - max(loss, 0.0))
            state.backoff[i] = 1 if surprised else min(2 * state.backoff[i], MAX_BACKOFF)
        # Charge the cost of both switches of a probe to the probed length; a switch between batch sizes to none.
        probed = i if i != current else last
        if chunk.switch_seconds and probed is not None and probed != current:
            state.probe_budget[probed] -= chunk.switch_seconds
        if jumped:
            self._reset_backoff()

    def replay(self, verifications: int, accepted: Sequence[int] | np.ndarray) -> None:
        """Add acceptance that `replay` counted after a chunk without drafts; `accepted` as in `observe`."""
        if self._estimates.acceptance.observe(len(accepted), verifications, accepted):
            self._reset_backoff()

    def _reset_backoff(self) -> None:
        for state in self._estimates.probing:
            state.backoff = [1] * len(self.lengths)

    # --- checkpoints

    def state(self) -> dict[str, object]:
        """Return the state as JSON values."""
        arguments = {"lengths": self.lengths, "sizes": self.sizes, "budget": self.budget, "begins": self.begins}
        return pack({"arguments": arguments, "estimates": self._estimates}).values

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Self:
        """Rebuild the controller of `state`; it continues identically."""
        controller = cls(**state["arguments"])
        controller._estimates = unpack(_Estimates, Packed(state["estimates"], {}))
        return controller


def _probe_iterations(running: int) -> int:
    """Return iterations enough for PROBE verifications of `running` rows."""
    fewest, most = PROBE_ITERATIONS
    return min(max(fewest, math.ceil(PROBE / running)), most)


def _loss(iterations: int, cost: float, tokens: float, best_cost: float, best_tokens: float) -> float:
    """Return the seconds that a chunk takes longer than the length in use would take for its tokens."""
    return iterations * (cost - tokens * best_cost / best_tokens)
