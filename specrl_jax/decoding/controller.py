"""Chooses the draft length of the next chunk: k* = argmax E[tokens](k) / c(size, k), k = 0 included.

E[tokens](k) = 1 + sum of a_i over i <= k, where a_i is the share of verifications that keep draft i and all before it,
whether or not they drafted that far. Acceptance does not depend on the load, the cost c does: one estimate of a for
all batch sizes, one table of c for each. Everything here is host state between two chunks; no array, no randomness.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

# Verifications: the weight of a prior; below which old evidence does not fade; what a probe tries to see.
PRIOR, FLOOR, PROBE = 8.0, 64.0, 64
PROBE_ITERATIONS = (4, 32)  # fewest, most
SAMPLES, RECENT = 49, 7  # chunks that count: for the cost of one length against the others; for the level of all
PAIRED = 3  # chunks after a change of length that compare the two
SPREAD_CHUNKS = 16  # chunks that the spread of acceptance is a running mean of
SQUARED_ERRORS = 36.0  # most that one chunk counts in that mean: what is a jump must not hide the next one
MAX_BACKOFF = 4  # times the interval between two probes that the budget allows


def expected_tokens(accepted: np.ndarray, k: int) -> np.ndarray:
    """[...] tokens that one verification of k drafts commits, 1 to k + 1, from a_1, a_2, ... in accepted [..., K]."""
    return 1.0 + np.asarray(accepted, float)[..., :k].sum(axis=-1)


def best_length(tokens: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """[...] index of the draft length of the highest rate, tokens [..., n] over costs [..., n] in seconds; the shorter
    of two alike."""
    return np.argmax(np.asarray(tokens) / np.asarray(costs), axis=-1)


class Choice(NamedTuple):
    """What the next chunk does."""

    k: int  # tokens drafted per iteration
    iterations: int | None  # at most; None: a full chunk


@dataclasses.dataclass
class _Size:
    """What is known of one compiled batch size; lists go with `Controller.lengths`."""

    samples: list[list[float]]  # log seconds per iteration, less the level at that time
    backoff: list[int]  # each probe that finds nothing new doubles it
    purse: list[float]  # seconds that probing this length may lose
    recent: list[float] = dataclasses.field(default_factory=lambda: [0.0] * RECENT)  # the level, by each of some chunks
    current: int | None = None  # index of the length in use
    last: int | None = None  # index of the last chunk's length, a probe's too
    streak: int = PAIRED  # chunks of that length in a row; the first of all is compared with its calibration

    @property
    def level(self) -> float:
        """Log of the common factor: longer contexts or a busy machine slow every length, not only the one in use."""
        return _typical(self.recent)


class Controller:
    """Running estimates of acceptance and cost, and the choice that follows from them.

    A length that is not in use is probed when its purse, `probe_budget` of the time shared among those lengths, covers
    what the probe is estimated to lose: iterations x (c(k) - E(k) c(k*) / E(k*)) seconds.

    Args:
      lengths: draft lengths that have a program, ascending from 0.
      sizes: compiled batch sizes.
      hysteresis: the length in use is left only for one whose rate is better by more than this share; a third
        of it brings back plain decoding, which no estimate of acceptance can make slower.
      probe_budget: share of the time that probes may lose.
      endowment: share of a probe's time that a length may lose right after its calibration, which is a few iterations
        on dummy work: what that puts near the best is tried once on real work.
      memory: verifications after which the weight of an observation has fallen to 1/e.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        sizes: Sequence[int],
        hysteresis: float = 0.03,
        probe_budget: float = 0.01,
        memory: float = 2048.0,
        endowment: float = 0.3,
    ) -> None:
        if list(lengths) != sorted(set(lengths)) or lengths[0] != 0:
            raise ValueError(f"lengths={tuple(lengths)}: expected distinct draft lengths ascending from 0")
        self.lengths, self.sizes = tuple(lengths), tuple(sizes)
        self.hysteresis, self.probe_budget, self.memory, self.endowment = hysteresis, probe_budget, memory, endowment
        # Of position i: verifications that kept all drafts before it, and those of them that kept it too.
        self._tries, self._hits = [0.0] * self.lengths[-1], [0.0] * self.lengths[-1]
        self._spread = 1.0  # variance of a chunk's share of kept first drafts over that of independent verifications
        self._predicted: list[float] = []  # cumulative
        self._heeded: list[float] = []  # the prediction that last sent the probes out again
        n = len(self.lengths)
        self._sizes = {size: _Size([[] for _ in range(n)], [1] * n, [0.0] * n) for size in self.sizes}

    # --- estimates

    def acceptance(self) -> list[float]:
        """a_1, a_2, ... of the longest draft; 1 where nothing is known, so that drafting is tried once.

        Kept as ratios a_i / a_(i-1): a position that has not been reached has the ratio of the one before, and one that
        was reached long ago moves with those before it. A prediction stands in for the ratio before.
        """
        ratio = self._hits[0] / self._tries[0] if self._tries and self._tries[0] else 1.0
        cumulative, before = [], 1.0
        for i, (hits, tries) in enumerate(zip(self._hits, self._tries)):
            if i < len(self._predicted):
                above = self._predicted[i - 1] if i else 1.0
                ratio = self._predicted[i] / above if above else 0.0
            ratio = (hits + PRIOR * ratio) / (tries + PRIOR)
            before *= ratio
            cumulative.append(before)
        return cumulative

    def expected_tokens(self, k: int) -> float:
        """`expected_tokens` by the running estimates."""
        return float(expected_tokens(self.acceptance(), k))

    def cost(self, size: int, k: int) -> float:
        """Seconds per iteration; linear in k between lengths measured, nan where none of this size is."""
        state = self._sizes[size]
        logs = {j: _typical(s) for j, s in zip(self.lengths, state.samples) if s}
        if k in logs:
            return math.exp(state.level + logs[k])
        if not logs:
            return math.nan
        known = sorted(logs)
        # The two measured lengths around k, or the last two below it. One alone costs the same at every k: optimistic.
        right = next((j for j in known if j > k), known[-1])
        left = max((j for j in known if j < right), default=right)
        c_left, c_right = (math.exp(state.level + logs[j]) for j in (left, right))
        slope = max(0.0, c_right - c_left) / (right - left) if right > left else 0.0
        return c_right + slope * (k - right)

    def unmeasured(self, size: int) -> list[int]:
        """Lengths to calibrate before real work."""
        return [k for k, samples in zip(self.lengths, self._sizes[size].samples) if not samples]

    def table(self) -> list[dict[str, float]]:
        """For logs: one row per size and length that have a cost; the rate is tokens per second and running row."""
        rows = [(size, k, self.cost(size, k), self.expected_tokens(k)) for size in self.sizes for k in self.lengths]
        return [
            {"size": size, "k": k, "cost_ms": 1e3 * cost, "expected_tokens": tokens, "tokens_per_second": tokens / cost}
            for size, k, cost, tokens in rows
            if not math.isnan(cost)
        ]

    def drafts(self, size: int) -> bool | None:
        """Whether batches of this size draft at present, probes aside; None where nothing was chosen yet."""
        current = self._sizes[size].current
        return None if current is None else current > 0

    # --- the choice

    def choose(self, size: int, running: int, off: bool = False) -> Choice:
        """For the next chunk of `running` rows; `off`: draft in probes only (the acceptance alarm has tripped)."""
        state = self._sizes[size]
        accepted = self.acceptance()
        tokens = [float(expected_tokens(accepted, k)) for k in self.lengths]
        costs = [self.cost(size, k) for k in self.lengths]
        if off or math.isnan(costs[0]):
            state.current = 0
        else:
            # Drafts that add next to nothing are not worth a coin toss over two measured costs.
            worth = [t if i == 0 or t > 1 + self.hysteresis else 0.0 for i, t in enumerate(tokens)]
            rates = [t / c for t, c in zip(worth, costs)]
            best = int(best_length(worth, costs))
            margin = self.hysteresis if best else self.hysteresis / 3
            if state.current is None or rates[best] > (1 + margin) * rates[state.current]:
                state.current = best
        iterations = _probe_iterations(running)
        due = self._due(state, tokens, costs, iterations)
        if due is not None:
            return Choice(self.lengths[due], iterations)
        untried = state.current > 0 and not self._tries[0] and not self._predicted
        return Choice(self.lengths[state.current], iterations if untried else None)

    def _due(self, state: _Size, tokens: list[float], costs: list[float], iterations: int) -> int | None:
        """Index of the length whose purse covers its probe most easily, if one does."""
        best, found = 1.0, None
        for i in range(len(self.lengths)):
            if i == state.current or math.isnan(costs[i]):
                continue
            loss = _loss(iterations, costs[i], tokens[i], costs[state.current], tokens[state.current])
            # A chunk cut short is never free, however good its length looks.
            covered = state.purse[i] / (state.backoff[i] * max(loss, 0.25 * iterations * costs[state.current]))
            if covered >= best:
                best, found = covered, i
        return found

    # --- observations

    def calibrate(self, size: int, k: int, seconds: float) -> None:
        """`seconds` per iteration of one program on dummy rows; replaces what was known."""
        state, i = self._sizes[size], self.lengths.index(k)
        state.samples[i] = [math.log(seconds) - state.level]
        state.purse[i] = self.endowment * seconds * _probe_iterations(size)

    def predict(self, rates: Sequence[float]) -> None:
        """The learner's cumulative acceptance a_1, a_2, ...: a prior worth PRIOR verifications.

        Where it has moved, the probes start over: what they said was about another head.
        """
        self._predicted = [float(rate) for rate in rates[: self.lengths[-1]]]
        moved = len(self._heeded) != len(self._predicted)
        if moved or any(abs(a - b) > 0.1 for a, b in zip(self._predicted, self._heeded)):
            self._heeded = self._predicted
            self._start_probes_over()

    def observe(
        self,
        size: int,
        k: int,
        seconds: float,
        iterations: int,
        verifications: int,
        accepted: Sequence[int],
        switch_seconds: float = 0.0,
    ) -> None:
        """One chunk that `choose` asked for.

        Args:
          seconds: of the chunk alone.
          verifications: running rows summed over its iterations, also those that drafted nothing.
          accepted: of each position, verifications that kept this draft and all before it.
          switch_seconds: of bringing the drafter level before the chunk; no part of c(size, k), but of a probe's price.
        """
        state, i = self._sizes[size], self.lengths.index(k)
        here = i if state.current is None else state.current
        moved = self._observe_acceptance(k, verifications, accepted)
        surprised = self._observe_cost(state, i, math.log(seconds / iterations))
        if i == here:
            for j in range(len(self.lengths)):
                state.purse[j] += self.probe_budget * seconds / max(len(self.lengths) - 1, 1)
        else:
            tokens = 1.0 + sum(accepted[:k]) / verifications
            in_use = self.lengths[here]
            loss = _loss(iterations, self.cost(size, k), tokens, self.cost(size, in_use), self.expected_tokens(in_use))
            state.purse[i] = min(0.0, state.purse[i] - max(loss, 0.0))
            state.backoff[i] = 1 if surprised else min(2 * state.backoff[i], MAX_BACKOFF)
        # Both ways of an excursion are paid by the length that is not in use; what another batch size left behind, by
        # none.
        payer = i if i != here else state.last
        if switch_seconds and payer not in (None, here):
            state.purse[payer] -= switch_seconds
        state.last = i
        if moved:
            self._start_probes_over()

    def replay(self, verifications: int, accepted: Sequence[int]) -> None:
        """What drafts of as many positions would have had accepted in a chunk that drafted nothing; as in `observe`."""
        if self._observe_acceptance(len(accepted), verifications, accepted):
            self._start_probes_over()

    def _observe_acceptance(self, k: int, verifications: int, accepted: Sequence[int]) -> bool:
        """Adds a chunk's counts; whether the acceptance of a position has jumped."""
        moved = False
        reached = [verifications, *accepted]  # by position: verifications that kept all drafts before it
        errors = 4 * math.sqrt(max(1.0, self._spread))
        if k:
            # Copies come in bursts: of chunks that always differ by many errors none is a jump.
            square = _squared_errors(accepted[0], reached[0], self._hits[0], self._tries[0])
            self._spread += (min(square, SQUARED_ERRORS) - self._spread) / SPREAD_CHUNKS
        for i, (hits, tries) in enumerate(zip(self._hits, self._tries)):
            moved = moved or (i < k and _jumped(accepted[i], reached[i], hits, tries, errors))
            # After a jump the old counts are about another head, those of later positions as well.
            keep = max(math.exp(-verifications / self.memory), min(1.0, FLOOR / tries)) if tries and not moved else 0.0
            self._hits[i] = keep * hits + (accepted[i] if i < k else 0)
            self._tries[i] = keep * tries + (reached[i] if i < k else 0)
        return moved

    def _observe_cost(self, state: _Size, i: int, log_seconds: float) -> bool:
        """Moves the level while one length runs, and the lengths against each other where two meet.

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

    def _start_probes_over(self) -> None:
        for state in self._sizes.values():
            state.backoff = [1] * len(self.lengths)

    # --- checkpoints

    def state(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        arguments = {name: getattr(self, name) for name in ("hysteresis", "probe_budget", "memory", "endowment")}
        acceptance = {name: list(getattr(self, name)) for name in ("_tries", "_hits", "_predicted", "_heeded")}
        per_size = [dataclasses.asdict(self._sizes[size]) for size in self.sizes]
        shape = {"lengths": list(self.lengths), "sizes": list(self.sizes)}
        return {
            "arguments": shape | arguments,
            "acceptance": acceptance,
            "spread": self._spread,
            "per_size": per_size,
        }

    @classmethod
    def restore(cls, state: dict[str, Any]) -> "Controller":
        """The controller that `state` was taken from; it continues identically."""
        controller = cls(**state["arguments"])
        for name, values in state["acceptance"].items():
            setattr(controller, name, list(values))
        controller._spread = state["spread"]
        for size, values in zip(controller.sizes, state["per_size"]):
            controller._sizes[size] = _Size(**values)
        return controller


def _probe_iterations(running: int) -> int:
    """Enough for PROBE verifications of `running` rows."""
    fewest, most = PROBE_ITERATIONS
    return min(max(fewest, math.ceil(PROBE / running)), most)


def _loss(iterations: int, cost: float, tokens: float, best_cost: float, best_tokens: float) -> float:
    """Seconds that a chunk takes longer than its tokens would have taken at the length in use."""
    return iterations * (cost - tokens * best_cost / best_tokens)


def _jumped(accepted: float, reached: float, hits: float, tries: float, errors: float) -> bool:
    """Whether two shares differ by more than 0.1 and by so many standard errors (four: false alarm below 1e-4)."""
    if not reached or not tries or abs(accepted / reached - hits / tries) <= 0.1:
        return False
    return _squared_errors(accepted, reached, hits, tries) > errors**2


def _squared_errors(accepted: float, reached: float, hits: float, tries: float) -> float:
    """How far two shares are from each other, over the variance if all verifications were independent."""
    if not reached or not tries:
        return 1.0
    share = (accepted + hits) / (reached + tries)
    variance = share * (1 - share) * (1 / reached + 1 / tries)
    return (accepted / reached - hits / tries) ** 2 / variance if variance > 0 else 0.0


def _typical(values: Sequence[float]) -> float:
    """Mean of the middle half, of few values of the lower ones: a pause of the machine only ever adds time."""
    n = len(values)
    kept = sorted(values)[n // 4 : n - math.ceil((n - 1) / 4)]
    return sum(kept) / len(kept)
