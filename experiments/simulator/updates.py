"""How rollouts and updates of the policy may follow each other, and what each way costs.

    synchronous   a step's rollouts start when its weights are there, and it learns from them when all have ended
    inflight      rollouts of the next steps run while the learner works; new weights take over under running ones
    exact         the same, and every begun rollout is verified under new weights: kept up to the first disagreement
    carry         at most a share of the rollouts is left unfinished for the next step, which draws on at them

`simulate` follows the events of some steps. `exact_seconds` is the formula that it can be compared with.

Assumed: an answer is as long under the new weights as under the old; every token that is verified disagrees with the
same chance, independently of all others; all texts are verified in large chunks, a forward pass with logits, during
which nothing is drawn; prompts are prefilled before decoding; devices for rollouts and for learning share nothing.
"""

import functools
from typing import NamedTuple

import numpy as np

from experiments.simulator.cost import DecoderCost
from experiments.simulator.events import Line, Pace, advance, new_line, verified
from experiments.simulator.learner import Workload
from specrl_jax.models.flops import Array

STEPS, FIRST = 8, 3  # simulated; the first of those that are averaged


class Update(NamedTuple):
    """How rollouts and updates follow each other."""

    ahead: int = 0  # steps whose rollouts may begin before their weights are there
    fills: bool = True  # they begin in slots that stand free while a step's own rollouts still run
    beside: bool = False  # they run while the learner works, which then has devices of its own
    exact: bool = False  # begun rollouts are verified under new weights, else they are learned from as they are
    carry: float = 0.0  # most unfinished rollouts that are left for the next step, as a share of a step's


SYNCHRONOUS = Update()


class Outside(NamedTuple):
    """Seconds of a step outside generation."""

    prepare: float  # weights move; nothing is drawn
    learn: float  # data, log-probs and training


class StepAverages(NamedTuple):
    """Averages over the steps that are counted."""

    seconds: float
    drawing: float  # seconds from the weights to the end of the last rollout that a step waits for
    verifying: float  # seconds of them, of the slowest replica
    kept: float  # share of the tokens of begun rollouts that the next weights draw too
    rest: float  # longest part of an answer that is drawn again, over the longest answer of a step
    stale: float  # share of the tokens learned from that older weights drew than the newest


def simulate(
    w: Workload,
    decoder: DecoderCost,
    pace: Pace,
    *,
    replicas: int,
    slots: int,
    update: Update,
    outside: Outside,
    disagreement: float,
    seed: int = 0,
) -> StepAverages:
    """Simulate STEPS steps.

    Args:
      slots: of a replica.
      disagreement: chance that new weights draw another token with the same noise, per token and version.
    """
    rng, now, found = np.random.default_rng(seed), 0.0, []
    spread = w.lengths.quantile((np.arange(w.rollouts) + 0.5) / w.rollouts)

    def starting(step: int) -> Line:
        return new_line(rng.permutation(spread), replicas, step, group=w.group)

    line = starting(0)
    for step in range(1, update.ahead + 1):
        line = line.then(starting(step))
    each = -(-w.rollouts // replicas)
    fresh = float(decoder.prefill(each / w.group * w.prompt, w.prompt))
    for step in range(STEPS):
        began, line = line, line._replace(stale=line.drawn)
        clock = np.full(replicas, now + outside.prepare + fresh)
        first = _first_disagreements(rng.random(line.length.shape), disagreement)
        verifying, kept = np.zeros(replicas), line.drawn
        if update.exact:
            verifying = _verifying(decoder, line, w)
            line, kept = verified(line, first)
            line = line._replace(stale=0.0 * line.stale)
        elif update.carry:
            # Keys and values of what is under way are computed again by the new weights.
            verifying = _verifying(decoder, line.only(line.unfinished), w)
        wanted, drawing = line.step <= step, functools.partial(advance, pace=pace, slots=slots, prompt=w.prompt)
        runs = None if update.fills else wanted
        line, clock = drawing(line, clock + verifying, wanted=wanted, runs=runs, left=update.carry * each)
        drawn = float(clock.max())
        line, _ = drawing(line, clock, until=drawn, runs=runs)  # others wait for the slowest
        if update.beside:
            line, _ = drawing(line, np.full(replicas, drawn), until=drawn + outside.learn)
        learned = _complete(line) & wanted
        begun, longest = began.drawn.sum(), line.length.max()
        found.append(
            StepAverages(
                drawn + outside.learn - now,
                drawn - now,
                float(verifying.max()),
                kept=float(kept.sum() / begun) if begun else 1.0,
                rest=float((began.drawn - kept).max() / longest),
                stale=float(line.stale[learned].sum() / max(line.length[learned].sum(), 1.0)),
            )
        )
        now = drawn + outside.learn
        line = line.only(~learned & (line.length > 0)).then(starting(step + update.ahead + 1))
    return StepAverages(*(float(np.mean(x)) for x in zip(*found[FIRST:])))


def _first_disagreements(uniforms: np.ndarray, disagreement: float) -> np.ndarray:
    """Return geometric places from 1, of the same uniforms later for fewer disagreements; without any, infinity."""
    if disagreement == 0:
        return np.full(uniforms.shape, np.inf)
    if disagreement == 1:
        return np.ones(uniforms.shape)
    return np.ceil(np.log1p(-uniforms) / np.log1p(-disagreement)).clip(1)


def _verifying(decoder: DecoderCost, line: Line, w: Workload) -> np.ndarray:
    """Return [R] seconds of a forward pass over what is drawn, with the prompts, each once for its siblings."""
    begun = (line.drawn > 0).sum(1)
    tokens = line.drawn.sum(1) + begun / w.group * w.prompt
    return np.asarray(decoder.verification(tokens, tokens / np.maximum(begun, 1)) * (begun > 0))


def _complete(line: Line) -> np.ndarray:
    """Return [R, M] bool: the rollout and all its siblings have ended."""
    key = line.step * (line.group.max() + 1) + line.group
    open_keys = np.where(line.unfinished, key, -1)
    return ~np.array([np.isin(own, other) for own, other in zip(key, open_keys)])


# ---- the formula


def exact_seconds(generate: Array, learn: Array, verifying: Array, *, rest: Array) -> np.ndarray:
    """Return the seconds of an `exact` step on separate devices: max(G, L) + (v + rho) min(G, L).

    Args:
      verifying: v, share of generation that it takes to verify its rollouts.
      rest: rho, the longest part of a rollout that is drawn again, over the longest rollout.
    """
    return np.asarray(np.maximum(generate, learn) + (verifying + rest) * np.minimum(generate, learn))


def expected_rest(lengths: np.ndarray, disagreement: float) -> float:
    """Return rho of responses of `lengths` [N]: E[max over i of (l_i - kept_i)] / max(l).

    A response loses more than x < l_i tokens unless its first l_i - x agree, which they do with the chance
    (1 - d)^(l_i - x). So E[max] is the integral over x of 1 - (1 - d)^S(x), with S(x) what all have beyond x.
    """
    if disagreement in (0, 1):
        return float(disagreement)
    ordered, rate = np.sort(lengths), np.log1p(-disagreement)
    widths = np.diff(ordered, prepend=0.0)  # between two lengths S is linear
    falls = widths * np.arange(len(ordered), 0, -1)
    after = falls[::-1].cumsum()[::-1] - falls  # S at the upper end of each
    change = np.minimum(rate * falls, -1e-12)
    missed = 1 - np.exp(rate * after) * np.expm1(change) / change
    return float((widths * missed).sum() / ordered[-1])
