"""Chooses the draft length of the next chunk: k* = argmax E[tokens](k) / c(size, k), k = 0 included.

E[tokens](k) = 1 + the sum of a_i over i <= k, where a_i is the share of verifications that accept draft i and all
before it. Acceptance does not depend on the load, the cost c does: one estimate of a for all batch sizes, one table of
c for each. All of it is host state between two chunks: no arrays, no randomness.
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

    samples: list[list[float]]  # log seconds per iteration, less the level at that time
    backoff: list[int]  # doubles after each probe without news
    probe_budget: list[float]  # seconds that probes of this length may lose
    recent: list[float] = dataclasses.field(default_factory=lambda: [0.0] * RECENT)  # the level, by recent chunks
    current: int | None = None  # index of the length in use
    last: int | None = None  # index of the last chunk's length, probes included
    streak: int = PAIRED  # consecutive chunks of that length; the first of all is compared with its calibration

    @property
    def level(self) -> float:
        """Log of the factor common to all lengths: longer contexts or a busy machine slow them alike."""
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
    ) -> None:
        if list(lengths) != sorted(set(lengths)) or lengths[0] != 0:
            raise ValueError(f"lengths={tuple(lengths)}: expected distinct draft lengths ascending from 0")
        self.lengths, self.sizes = tuple(lengths), tuple(sizes)
        self.hysteresis, self.probe_budget = hysteresis, probe_budget
        self.memory, self.initial_budget = memory, initial_budget
        self._estimate = AcceptanceEstimate(self.lengths[-1], memory)
        self._prediction_at_reset: list[float] = []  # the prediction that last reset the probes' backoff
        n = len(self.lengths)
        self._sizes = {size: _SizeState([[] for _ in range(n)], [1] * n, [0.0] * n) for size in self.sizes}

    # --- estimates

    def acceptance(self) -> list[float]:
        """Return the estimates of a_1, a_2, ... up to the longest draft."""
        return self._estimate.cumulative()

    def expected_tokens(self, k: int) -> float:
        """Return E[tokens](k) by the running estimates."""
        return float(expected_tokens(self.acceptance(), k))

    def cost(self, size: int, k: int) -> float:
        """Return seconds per iteration: linear in k between measured lengths, nan if none of this size is measured."""
        state = self._sizes[size]
        logs = {j: _typical(s) for j, s in zip(self.lengths, state.samples) if s}
        if k in logs:
            return math.exp(state.level + logs[k])
        if not logs:
            return math.nan
        known = sorted(logs)
        # The two measured lengths around k, or the last two below it. A single one costs the same at every k.
        right = next((j for j in known if j > k), known[-1])
        left = max((j for j in known if j < right), default=right)
        c_left, c_right = (math.exp(state.level + logs[j]) for j in (left, right))
        slope = max(0.0, c_right - c_left) / (right - left) if right > left else 0.0
        return c_right + slope * (k - right)

    def unmeasured(self, size: int) -> list[int]:
        """Return the lengths to calibrate before real work."""
        return [k for k, samples in zip(self.lengths, self._sizes[size].samples) if not samples]

    def drafts(self, size: int) -> bool | None:
        """Return whether batches of this size draft at present, probes aside; None before the first choice."""
        current = self._sizes[size].current
        return None if current is None else current > 0

    # --- the choice

    def choose(self, size: int, running: int, off: bool = False) -> Choice:
        """Choose the next chunk of `running` rows; `off`: draft in probes only (the acceptance alarm has tripped)."""
        state = self._sizes[size]
        accepted = self.acceptance()
        tokens = [float(expected_tokens(accepted, k)) for k in self.lengths]
        costs = [self.cost(size, k) for k in self.lengths]
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

    def calibrate(self, size: int, k: int, seconds: float) -> None:
        """Set the `seconds` per iteration of one program on dummy rows; replaces earlier samples."""
        state, i = self._sizes[size], self.lengths.index(k)
        state.samples[i] = [math.log(seconds) - state.level]
        state.probe_budget[i] = self.initial_budget * seconds * _probe_iterations(size)

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
        jumped = self._estimate.observe(k, chunk.verifications, accepted)
        surprised = self._observe_cost(state, i, math.log(chunk.seconds / chunk.iterations))
        if i == current:
            for j in range(len(self.lengths)):
                state.probe_budget[j] += self.probe_budget * chunk.seconds / max(len(self.lengths) - 1, 1)
        else:
            tokens = 1.0 + sum(accepted[:k]) / chunk.verifications
            in_use = self.lengths[current]
            costs = self.cost(size, k), self.cost(size, in_use)
            loss = _loss(chunk.iterations, costs[0], tokens, costs[1], self.expected_tokens(in_use))
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

    def _observe_cost(self, state: _SizeState, i: int, log_seconds: float) -> bool:
        """Update the level while one length runs, and the lengths' relative costs after a change of length.

        Returns whether the chunk's time was off by more than a tenth.
        """
        samples = state.samples[i]
        surprised = bool(samples) and abs(log_seconds - state.level - _typical(samples)) > 0.1
        if state.last is not None:
            state.streak = state.streak + 1 if i == state.last else 1
        if not samples or state.streak <= PAIRED:
            state.samples[i] = [*samples, log_seconds - state.level][-SAMPLES:]
        else:
            state.recent = [*state.recent[1:], log_seconds - _typical(samples)]
        return surprised

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
            },
            "acceptance": {
                "_tries": list(estimate.tries),
                "_hits": list(estimate.hits),
                "_predicted": list(estimate.predicted),
                "_heeded": list(self._prediction_at_reset),
            },
            "spread": estimate.spread,
            "per_size": [_renamed(dataclasses.asdict(self._sizes[size]), _SAVED) for size in self.sizes],
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Self:
        """Rebuild the controller of `state`; it continues identically."""
        controller = cls(**_renamed(state["arguments"], {"endowment": "initial_budget"}))
        estimate, saved = controller._estimate, state["acceptance"]
        estimate.tries, estimate.hits, estimate.spread = list(saved["_tries"]), list(saved["_hits"]), state["spread"]
        estimate.predicted, controller._prediction_at_reset = list(saved["_predicted"]), list(saved["_heeded"])
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
