"""The controller against a simulated machine: what it loses to the best fixed length, and how it follows changes.

The machine knows the true acceptance and costs, so what is compared are expected tokens and seconds without the noise
that the controller sees: 3 % on every chunk (log-normal), and one chunk in thirty takes three times as long.
"""

import json
import math

import numpy as np
import pytest

from specrl_jax.decoding import controller as module
from specrl_jax.decoding.controller import Choice, Controller

LENGTHS = (0, 1, 2, 3, 5, 7)
SIZE = 32
AR_SECONDS = 0.005

# Seconds of one iteration over those of plain decoding. The paper's c at k = 3, 5, 7 (arXiv 2604.26779, Table 4:
# acceptance length / speedup), straight below 3.
COSTS = {
    "paper, Zero": (1.0, 1.29, 1.59, 1.88, 3.02, 4.18),
    "paper, Think": (1.0, 1.27, 1.53, 1.80, 3.85, 4.90),
    "nearly free": (1.0, 1.01, 1.02, 1.03, 1.05, 1.07),
    "equal within 1 %": (1.0, 1.0, 1.001, 1.002, 1.005, 1.01),
    "dear": (1.0, 2.0, 3.0, 4.0, 6.0, 8.0),
    "a step, then flat": (1.0, 1.9, 1.91, 1.92, 1.95, 2.0),
}
# Of each position, given that all before it were kept. A lookup drafter often finds nothing, then is right at length.
ACCEPTANCE = {
    "paper, Zero": (0.87,) * 7,
    "paper, Think": (0.75,) * 7,
    "none": (0.0,) * 7,
    "weak": (0.3,) * 7,
    "perfect": (1.0,) * 7,
    "first only": (0.9, 0.6, 0.4, 0.2, 0.1, 0.1, 0.1),
    "lookup": (0.2,) + (0.9,) * 6,
}


class Machine:
    """Runs chunks of `rows` sequences; `speed` and `ratios` may be changed between them."""

    def __init__(self, costs, ratios, seed=0, rows=SIZE, chunk=32):
        self.costs, self.ratios, self.rows, self.chunk, self.speed = dict(zip(LENGTHS, costs)), ratios, rows, chunk, 1.0
        self.rng = np.random.default_rng(seed)

    def tokens(self, k):
        return 1 + np.cumprod(self.ratios)[:k].sum()

    def rate(self, k):
        return self.tokens(k) / self.costs[k]

    def best(self):
        return max(LENGTHS, key=self.rate)

    def seconds(self, k):
        """As measured, of one iteration."""
        pause = 3.0 if self.rng.random() < 1 / 30 else 1.0
        return AR_SECONDS * self.costs[k] / self.speed * pause * math.exp(0.03 * self.rng.normal())

    def run(self, choice):
        """(seconds, iterations, verifications, accepted) of one chunk."""
        iterations = min(choice.iterations or self.chunk, self.chunk)
        left = iterations * self.rows
        accepted = []
        for i in range(LENGTHS[-1]):
            left = int(self.rng.binomial(left, self.ratios[i])) if i < choice.k else 0
            accepted.append(left)
        return iterations * self.seconds(choice.k), iterations, iterations * self.rows, accepted


def calibrated(machine, **options):
    controller = Controller(LENGTHS, (SIZE,), **options)
    for k in controller.unmeasured(SIZE):
        controller.calibrate(SIZE, k, min(machine.seconds(k) for _ in range(3)))
    return controller


def drive(controller, machine, chunks, before=lambda t: None, **options):
    """(share of the best fixed length's tokens per second, choices)."""
    tokens = seconds = ideal = 0.0
    choices = []
    for t in range(chunks):
        before(t)
        choice = controller.choose(SIZE, machine.rows, **options)
        measured, iterations, verifications, accepted = machine.run(choice)
        controller.observe(SIZE, choice.k, measured, iterations, verifications, accepted)
        tokens += iterations * machine.tokens(choice.k)
        seconds += iterations * machine.costs[choice.k]
        ideal += iterations * machine.costs[choice.k] * machine.rate(machine.best())
        choices.append(choice)
    return tokens / ideal, choices


def usual(choices):
    """The length of most chunks that were no probes."""
    lengths = [choice.k for choice in choices if choice.iterations is None]
    return max(set(lengths), key=lengths.count)


# --- against the best fixed length


@pytest.mark.parametrize("rows", [4, 32, 256])
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("acceptance", ACCEPTANCE)
def test_as_fast_as_the_best_fixed_length(acceptance, costs, rows):
    for seed in (0, 1):
        machine = Machine(COSTS[costs], ACCEPTANCE[acceptance], seed, rows)
        share, _ = drive(calibrated(machine), machine, chunks=500)
        assert share >= (0.985 if machine.best() == 0 else 0.97)


def test_the_grid_holds_every_kind_of_answer():
    best = {Machine(c, a).best() for c in COSTS.values() for a in ACCEPTANCE.values()}
    assert {0, 1, 2, 3, 7} <= best


def test_the_papers_longer_drafts_lose_as_in_its_table():
    machine = Machine(COSTS["paper, Zero"], ACCEPTANCE["paper, Zero"])
    _, choices = drive(calibrated(machine), machine, chunks=200)
    assert usual(choices) == 3
    assert machine.rate(3) / machine.rate(0) == pytest.approx(1.77, abs=0.02)


# --- following changes


@pytest.mark.parametrize("costs", ["paper, Zero", "a step, then flat", "nearly free"])
@pytest.mark.parametrize("chunks", [400, 3000])
def test_follows_a_head_that_improves_from_nothing(costs, chunks):
    """Plain decoding for long, probes rare; then acceptance rises to 0.8 over `chunks` chunks, as a head learns."""
    machine = Machine(COSTS[costs], (0.0,) * 7, seed=3)
    controller = calibrated(machine)
    _, idle = drive(controller, machine, chunks=1500)
    assert usual(idle) == 0

    def learn(t):
        machine.ratios = (0.8 * t / chunks,) * 7

    drive(controller, machine, chunks, before=learn)
    share, choices = drive(controller, machine, chunks=300)
    assert machine.best() > 0 and share >= 0.97
    assert machine.rate(usual(choices)) >= 0.97 * machine.rate(machine.best())


@pytest.mark.parametrize("costs", ["paper, Zero", "a step, then flat"])
def test_finds_a_head_that_became_useful_at_once(costs):
    """From plain decoding with probes at their rarest: the new length is in use within 2500 chunks."""
    machine = Machine(COSTS[costs], (0.0,) * 7, seed=4)
    controller = calibrated(machine)
    drive(controller, machine, chunks=4000)
    machine.ratios = (0.8,) * 7
    drive(controller, machine, chunks=2500)
    share, _ = drive(controller, machine, chunks=100)
    assert share >= 0.97


@pytest.mark.parametrize("costs", COSTS)
def test_leaves_a_head_that_was_lost_after_one_chunk(costs):
    machine = Machine(COSTS[costs], (0.9,) * 7, seed=5)
    controller = calibrated(machine)
    drive(controller, machine, chunks=200)
    machine.ratios = (0.0,) * 7
    controller.observe(SIZE, 7, *machine.run(Choice(7, None)))
    assert max(controller.acceptance()) == 0
    assert controller.choose(SIZE, SIZE).k == 0 or controller.choose(SIZE, SIZE).iterations


def test_a_prediction_that_moves_sends_probes_out_sooner():
    def chunks_until_used(predicted):
        machine = Machine(COSTS["paper, Zero"], (0.0,) * 7, seed=6)
        controller = calibrated(machine)
        controller.predict([0.0] * 7)
        drive(controller, machine, chunks=4000)
        machine.ratios = (0.8,) * 7
        controller.predict(predicted)
        for t in range(5000):
            if usual(drive(controller, machine, chunks=1)[1] or [Choice(0, None)]) if False else False:
                return t
            if drive(controller, machine, chunks=1)[1] == [Choice(3, None)]:
                return t
        return 5000

    assert chunks_until_used(list(np.cumprod([0.8] * 7))) < 0.5 * chunks_until_used([0.0] * 7)
