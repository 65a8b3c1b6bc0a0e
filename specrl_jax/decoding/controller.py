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
from typing import Any, NamedTuple, Self

import numpy as np

from specrl_jax.decoding.acceptance import AcceptanceEstimate, expected_tokens
from specrl_jax.decoding.costs import CostEstimate
from specrl_jax.decoding.rollouts import DecodeChunk

PROBE = 64  # verifications that a probe tries to observe
PROBE_ITERATIONS = (4, 32)  # fewest, most
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
    """Draft length and iterations of the next chunk."""

    k: int  # tokens drafted per iteration
    iterations: int | None  # at most; None: a full chunk


@dataclasses.dataclass
class _Probing:
    """The choice and its probes at one compiled batch size; lists are indexed like `Controller.lengths`."""

    backoff: list[int]  # doubles after each probe without news
    probe_budget: list[float]  # seconds that probes of this length may lose
    current: int | None = None  # index of the length in use


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
      begins: the length used until all of a batch size can be calibrated.
      initial_budget: share of a probe's time that a length may lose right after its calibration, which is a few
        iterations on dummy work: lengths that it puts near the best are tried once on real work.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        sizes: Sequence[int],
        hysteresis: float = 0.03,
        *,
        probe_budget: float = 0.01,
        memory: float = 2048.0,
        initial_budget: float = 0.3,
        budget: int = 0,
        begins: int = 0,
    ) -> None:
        if list(lengths) != sorted(set(lengths)) or lengths[0] != 0:
            raise ValueError(f"lengths={tuple(lengths)}: expected distinct draft lengths ascending from 0")
        self.lengths, self.sizes = tuple(lengths), tuple(sizes)
        self.hysteresis, self.probe_budget = hysteresis, probe_budget
        self.memory, self.initial_budget = memory, initial_budget
        self.budget, self.begins = budget, begins
        self._estimate = AcceptanceEstimate(self.lengths[-1], memory)
        # By (size, length), where not all drafts are verified.
        over = [(size, k) for size in sizes for k in lengths if 0 < budget < size * k]
        self._under_budget = {case: AcceptanceEstimate(case[1], memory) for case in over}
        self._costs = CostEstimate(self.lengths, self.sizes)
        self._lengths = [0.0, 0.0]  # tokens committed, and texts ended; earlier ones fade
        self._prediction_at_reset: list[float] = []  # the prediction that last reset the probes' backoff
        n = len(self.lengths)
        self._probing = {size: _Probing([1] * n, [0.0] * n) for size in self.sizes}

    # --- estimates

    def acceptance(self) -> list[float]:
        """Return the estimates of a_1, a_2, ... up to the longest draft."""
        return self._estimate.cumulative()

    def _tokens(self, size: int) -> list[float]:
        """Return E[tokens] of every length at a batch size, less what is cut off where a text ends.

        A text of L tokens takes L / E verifications and, as the last one goes beyond its end, half of one more for
        long drafts, none for E = 1.
        """
        written, ended = self._lengths
        cut = ended / (2 * written) if ended else 0.0
        return [tokens / (1 + (tokens - 1) * cut) for tokens in self._uncut_tokens(size)]

    def _uncut_tokens(self, size: int) -> Iterator[float]:
        all_verified = list(itertools.accumulate(self.acceptance(), initial=1.0))  # by k
        for k in self.lengths:
            estimate = self._under_budget.get((size, k))
            if estimate is None:
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
        return self._costs.seconds(size, tokens)[self.lengths.index(k)]

    def unmeasured(self, size: int) -> list[int]:
        """Return the lengths to calibrate before real work."""
        return self._costs.unmeasured(size)

    def drafts(self, size: int) -> bool | None:
        """Return whether batches of this size draft at present, probes aside; None before the first choice."""
        current = self._probing[size].current
        return None if current is None else current > 0

    # --- the choice

    def first(self, size: int) -> int:
        """Return the length in use at a batch size; before the first choice `begins`."""
        current = self._probing[size].current
        return self.begins if current is None else self.lengths[current]

    def choose(self, size: int, running: int, live: float, *, off: bool = False) -> Choice:
        """Choose the next chunk of `running` rows.

        Args:
          live: tokens that a running row holds, on average.
          off: draft in probes only (the acceptance alarm has tripped).
        """
        state = self._probing[size]
        tokens = self._tokens(size)
        costs = self._costs.seconds(size, running * live)
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
        self, state: _Probing, current: int, tokens: list[float], costs: list[float], iterations: int
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

    def calibrate(self, size: int, k: int, seconds: float, *, live: float) -> None:
        """Set the `seconds` per iteration of a program on dummy rows; replaces its samples.

        Args:
          live: tokens of the rows that ran, divided by `size`.
        """
        i = self.lengths.index(k)
        self._costs.calibrate(size, i, size * live, seconds=seconds)
        self._probing[size].probe_budget[i] = self.initial_budget * seconds * _probe_iterations(size)

    def calibrate_calls(self, size: int, seconds: float) -> None:
        """Set the seconds that a chunk of this size takes beyond its iterations, which no length is charged for."""
        self._costs.calibrate_calls(size, seconds)

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
        state, i = self._probing[size], self.lengths.index(k)
        current = i if state.current is None else state.current
        fade = math.exp(-chunk.finished / LENGTHS_KEPT)
        self._lengths = [fade * old + new for old, new in zip(self._lengths, (chunk.tokens, chunk.finished))]
        jumped = self._under_budget.get((size, k), self._estimate).observe(k, chunk.verifications, accepted)
        last = self._costs.last(size)
        surprised = self._costs.observe(size, i, chunk.tokens_read, seconds=chunk.seconds, iterations=chunk.iterations)
        if i == current:
            for j in range(len(self.lengths)):
                state.probe_budget[j] += self.probe_budget * chunk.seconds / max(len(self.lengths) - 1, 1)
        else:
            tokens = 1.0 + sum(accepted[:k]) / chunk.verifications
            in_use = self.lengths[current]
            costs = [self.cost(size, length, chunk.tokens_read) for length in (k, in_use)]
            loss = _loss(chunk.iterations, costs[0], tokens, costs[1], self._tokens(size)[current])
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
        if self._estimate.observe(len(accepted), verifications, accepted):
            self._reset_backoff()

    def _reset_backoff(self) -> None:
        for state in self._probing.values():
            state.backoff = [1] * len(self.lengths)

    # --- checkpoints; saved names are those of the first version, so that old checkpoints stay readable

    def state(self) -> dict[str, object]:
        """Return the state as JSON values."""
        estimate, costs = self._estimate, self._costs.state()
        probings = [_renamed(dataclasses.asdict(self._probing[size]), _SAVED) for size in self.sizes]
        by_size = [dict(**probing, **measured) for probing, measured in zip(probings, costs["sizes"], strict=True)]
        return {
            "arguments": {
                "lengths": list(self.lengths),
                "sizes": list(self.sizes),
                "hysteresis": self.hysteresis,
                "probe_budget": self.probe_budget,
                "memory": self.memory,
                "endowment": self.initial_budget,
                "budget": self.budget,
                "begins": self.begins,
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
            "slopes": costs["slopes"],
            "slope": costs["slope"],
            "new_pairs": costs["new_pairs"],
            "per_size": by_size,
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
        controller._costs.restore(
            state["slopes"], state["slope"], state["per_size"], new_pairs=state.get("new_pairs", 0)
        )
        fields = {_SAVED.get(field.name, field.name): field.name for field in dataclasses.fields(_Probing)}
        for size, values in zip(controller.sizes, state["per_size"]):
            controller._probing[size] = _Probing(**{field: values[name] for name, field in fields.items()})
        return controller


_SAVED = {"probe_budget": "purse"}  # name in checkpoints, by field of _Probing


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items()}


def _probe_iterations(running: int) -> int:
    """Return iterations enough for PROBE verifications of `running` rows."""
    fewest, most = PROBE_ITERATIONS
    return min(max(fewest, math.ceil(PROBE / running)), most)


def _loss(iterations: int, cost: float, tokens: float, best_cost: float, best_tokens: float) -> float:
    """Return the seconds that a chunk takes longer than the length in use would take for its tokens."""
    return iterations * (cost - tokens * best_cost / best_tokens)
