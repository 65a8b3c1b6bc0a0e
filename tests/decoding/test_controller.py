"""The controller against a simulated machine: what it loses to the best fixed length, and how it follows changes.

The machine knows the true acceptance and costs, so what is compared are expected tokens and seconds without the noise
that the controller sees: 3 % on every chunk (log-normal), and one chunk in thirty takes three times as long.
"""

import json
import math

import numpy as np
import pytest

from specrl_jax.decoding.acceptance import AcceptanceEstimate, expected_tokens
from specrl_jax.decoding.controller import Controller, best_length
from specrl_jax.decoding.draft_lengths import Choice
from specrl_jax.decoding.rollouts import DecodeChunk
from tests.helpers.long import long_but, slow_but

LENGTHS = (0, 1, 2, 3, 5, 7)
SIZE = 32
AR_SECONDS = 0.005
LIVE = 100.0  # tokens a row, where costs do not depend on them

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
# Of each position, given that all before it were kept; the paper's give its acceptance lengths at k = 3, 5, 7. A lookup
# drafter often finds nothing, then is right at length.
ACCEPTANCE = {
    "paper, Zero": (0.8764,) * 3 + (0.8338,) * 2 + (0.829,) * 2,
    "paper, Think": (0.7585,) * 3 + (0.642,) * 2 + (0.781,) * 2,
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
        return iterations * self.seconds(choice.k), iterations, iterations * self.rows, np.asarray(accepted, np.int32)


def observe(controller, size, k, seconds, iterations, verifications, accepted, switch_seconds=0.0, live=LIVE):
    controller.observe(
        DecodeChunk(
            size,
            k,
            seconds,
            iterations=iterations,
            verifications=verifications,
            switch_seconds=switch_seconds,
            live=live,
        ),
        accepted,
    )


@pytest.fixture
def no_initial_budget(monkeypatch):
    monkeypatch.setattr("specrl_jax.decoding.controller.INITIAL_BUDGET", 0.0)


def calibrated(machine, lengths=LENGTHS):
    controller = Controller(lengths, (SIZE,))
    for k in controller.unmeasured(SIZE):
        controller.calibrate(SIZE, k, min(machine.seconds(k) for _ in range(3)), live=LIVE)
    return controller


def drive(controller, machine, chunks, before=lambda t: None, **options):
    """(share of the best fixed length's tokens per second, choices)."""
    tokens = seconds = ideal = 0.0
    choices = []
    for t in range(chunks):
        before(t)
        choice = controller.choose(SIZE, machine.rows, LIVE, **options)
        measured, iterations, verifications, accepted = machine.run(choice)
        observe(controller, SIZE, choice.k, measured, iterations, verifications, accepted)
        tokens += iterations * machine.tokens(choice.k)
        seconds += iterations * machine.costs[choice.k]
        ideal += iterations * machine.costs[choice.k] * machine.rate(machine.best())
        choices.append(choice)
    return tokens / ideal, choices


def usual(choices):
    """Return the length of most chunks that were not probes."""
    lengths = [choice.k for choice in choices if choice.iterations is None]
    return max(set(lengths), key=lengths.count)


class Bursts(Machine):
    """Alternates runs of chunks that accept almost nothing and almost all, as lookup drafts do."""

    def __init__(self, costs, share, chunks, **options):
        super().__init__(costs, (0.9,) * 7, **options)
        self.share, self.chunks, self.t = share, chunks, 0
        self.burst = False

    def tokens(self, k):
        return 1 + self.share * np.cumprod((0.9,) * 7)[:k].sum()

    def run(self, choice):
        if self.t % self.chunks == 0:
            self.burst = self.rng.random() < self.share
        self.t += 1
        self.ratios = (0.9,) * 7 if self.burst else (0.02,) + (0.5,) * 6
        return super().run(choice)


# --- the two formulas, which the simulator shares


def test_expected_tokens_count_the_bonus_token():
    accepted = np.array([[0.9, 0.8, 0.5], [0.0, 0.0, 0.0]])
    assert expected_tokens(accepted, 0).tolist() == [1, 1]
    assert expected_tokens(accepted, 2) == pytest.approx([2.7, 1.0])
    assert expected_tokens([1.0] * 7, 7) == 8


def test_the_best_length_has_the_highest_rate_and_is_the_shorter_of_two_alike():
    assert best_length([1.0, 1.9, 3.0], [1.0, 2.0, 2.5]) == 2
    assert best_length([1.0, 2.0, 4.0], [1.0, 2.0, 4.0]) == 0
    many = best_length(np.array([[1.0, 2.0], [1.0, 2.0]]), np.array([[1.0, 1.5], [1.0, 3.0]]))
    assert many.tolist() == [1, 0]


# --- against the best fixed length


@pytest.mark.parametrize("rows", long_but([32], [4, 32, 256]))
@pytest.mark.parametrize("costs", slow_but(["paper, Zero", "a step, then flat"], COSTS))
@pytest.mark.parametrize("acceptance", ACCEPTANCE)
def test_as_fast_as_the_best_fixed_length(acceptance, costs, rows):
    for seed in (0, 1):
        machine = Machine(COSTS[costs], ACCEPTANCE[acceptance], seed, rows)
        share, _ = drive(calibrated(machine), machine, chunks=500)
        assert share >= (0.985 if machine.best() == 0 else 0.97)


@pytest.mark.slow
@pytest.mark.parametrize("rows, costs", [(1, "nearly free"), (4, "paper, Zero"), (8, "dear")])
def test_bursts_do_not_count_as_jumps(rows, costs):
    """Lookup acceptance is overdispersed: a run of accepted chunks says little about the next, the mean decides."""
    for seed in range(5):
        machine = Bursts(COSTS[costs], share=0.35, chunks=4, seed=seed, rows=rows, chunk=16)
        controller = calibrated(machine)
        drive(controller, machine, 400)
        share, _ = drive(controller, machine, 2000)
        assert share > 0.96


def test_the_grid_holds_every_kind_of_answer():
    best = {Machine(c, a).best() for c in COSTS.values() for a in ACCEPTANCE.values()}
    assert {0, 1, 2, 3, 7} <= best


@pytest.mark.parametrize("name, speedups", [("paper, Zero", (1.77, 1.44, 1.21)), ("paper, Think", (1.53, 0.84, 0.71))])
def test_the_papers_table_is_reproduced_and_its_best_length_found(name, speedups):
    """arXiv 2604.26779, Table 4, to the digits printed; of the lengths that it has."""
    machine = Machine(COSTS[name], ACCEPTANCE[name])
    assert [machine.rate(k) for k in (3, 5, 7)] == pytest.approx(speedups, abs=0.01)
    _, choices = drive(calibrated(machine, lengths=(0, 3, 5, 7)), machine, chunks=200)
    assert usual(choices) == 3


# --- following changes


@pytest.mark.parametrize("costs", ["paper, Zero", "a step, then flat", "nearly free"])
@pytest.mark.parametrize("chunks", long_but([400], [400, 3000]))
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


@pytest.mark.slow
@pytest.mark.parametrize("costs", ["paper, Zero", "a step, then flat"])
def test_finds_a_head_that_became_useful_at_once(costs):
    """From plain decoding with probes at their rarest: the new length is in use within 500 chunks."""
    machine = Machine(COSTS[costs], (0.0,) * 7, seed=4)
    controller = calibrated(machine)
    drive(controller, machine, chunks=4000)
    machine.ratios = (0.8,) * 7
    drive(controller, machine, chunks=500)
    share, _ = drive(controller, machine, chunks=100)
    assert share >= 0.97


@pytest.mark.parametrize("costs", COSTS)
def test_leaves_a_head_that_was_lost_after_one_chunk(costs):
    machine = Machine(COSTS[costs], (0.9,) * 7, seed=5)
    controller = calibrated(machine)
    drive(controller, machine, chunks=200)
    machine.ratios = (0.0,) * 7
    observe(controller, SIZE, 7, *machine.run(Choice(7, None)))
    assert max(controller.acceptance()) == 0
    _, choices = drive(controller, machine, chunks=20)
    assert all(choice.k == 0 for choice in choices if choice.iterations is None)


@pytest.mark.parametrize("acceptance", ["none", "paper, Zero", "lookup"])
def test_a_busy_machine_does_not_trigger_probes_of_all_lengths(acceptance):
    """Every length is twice as slow for 50 of every 100 chunks, so none becomes better."""
    machine = Machine(COSTS["paper, Zero"], ACCEPTANCE[acceptance], seed=7)

    def load(t):
        machine.speed = 0.5 if t % 100 >= 50 else 1.0

    share, _ = drive(calibrated(machine), machine, chunks=1000, before=load)
    assert share >= 0.97


@pytest.mark.parametrize("wrong", slow_but([0, 3], LENGTHS))
@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_recovers_from_a_calibration_that_was_wrong(wrong, factor):
    """Of any one length, by any factor: probes and use put it right."""
    machine = Machine(COSTS["paper, Think"], ACCEPTANCE["paper, Think"], seed=8)
    controller = calibrated(machine)
    controller.calibrate(SIZE, wrong, factor * AR_SECONDS * machine.costs[wrong], live=LIVE)
    drive(controller, machine, chunks=2000)
    share, _ = drive(controller, machine, chunks=300)
    assert share >= 0.97


@pytest.mark.parametrize("seed", range(3))
def test_lengths_near_the_best_are_tried_once_on_the_initial_budget(seed, request):
    """k = 7 looks best by a calibration that was wrong: a step of 20 chunks puts it right, not four of them."""

    def share():
        machine = Machine(COSTS["paper, Think"], ACCEPTANCE["paper, Think"], seed=seed, rows=16, chunk=16)
        controller = calibrated(machine)
        controller.calibrate(SIZE, 7, 0.4 * AR_SECONDS * machine.costs[7], live=LIVE)
        drive(controller, machine, chunks=20)
        return drive(controller, machine, chunks=40)[0]

    assert share() >= 0.95
    request.getfixturevalue("no_initial_budget")
    assert share() < 0.8


def test_a_few_refused_drafts_of_a_good_head_are_no_jump():
    """Of 0.97, 7 of 10 are kept once in 300 times: a jump would throw away what thousands of verifications found."""
    estimate = AcceptanceEstimate.of(1)
    estimate.observe(1, 2000, [1940])
    assert not estimate.observe(1, 10, [7]) and estimate.cumulative()[0] > 0.95
    assert estimate.observe(1, 40, [24]) and estimate.cumulative()[0] < 0.7


# --- what a chunk takes and gives beside its iterations and drafts


def test_the_last_draft_of_a_short_text_goes_beyond_its_end(no_initial_budget, monkeypatch):
    """Of perfect drafts 7 give 8 tokens per verification, 3 give 4; texts of ten tokens take 1.7 and 2.9 of them."""

    monkeypatch.setattr("specrl_jax.decoding.controller.PROBE_BUDGET", 0.0)

    def chosen(tokens, finished):
        controller = Controller((0, 3, 7), (SIZE,))
        for k, seconds in ((0, 1.0), (3, 1.0), (7, 1.8)):
            controller.calibrate(SIZE, k, seconds, live=LIVE)
        controller.observe(
            DecodeChunk(
                SIZE,
                7,
                1800.0,
                iterations=1000,
                verifications=10_000,
                switch_seconds=0.0,
                live=LIVE,
                tokens=tokens,
                finished=finished,
            ),
            [10_000] * 7,
        )
        return controller.choose(SIZE, SIZE, LIVE).k

    assert chosen(tokens=80_000, finished=80) == 7
    assert chosen(tokens=59_000, finished=5_900) == 3


def test_no_length_is_charged_for_the_seconds_of_a_call():
    """Chunks of one iteration and of 30 are the same evidence."""
    found = []
    for iterations in (1, 30):
        controller = Controller((0, 1), (SIZE,))
        controller.calibrate(SIZE, 0, 0.010, live=LIVE)
        controller.calibrate(SIZE, 1, 0.012, live=LIVE)
        controller.calibrate_calls(SIZE, 0.008)
        for k, seconds in ((1, 0.016), (0, 0.010)) * 9:
            observe(controller, SIZE, k, 0.008 + iterations * seconds, iterations, 32 * iterations, [16 * iterations])
        found.append([controller.cost(SIZE, k, SIZE * LIVE) for k in (0, 1)])
    np.testing.assert_allclose(found, [[0.010, 0.016]] * 2, rtol=0.1)
    np.testing.assert_allclose(found[0], found[1])


def test_lengths_that_not_all_are_verified_of_are_counted_apart():
    """Six drafts in all of two rows: of 7 a row, 3 are kept, far fewer than short drafts promise; then again none."""
    controller = Controller((0, 2, 7), (8, 2), budget=6)
    for size in (8, 2):
        for k, seconds in ((0, 0.010), (2, 0.012), (7, 0.014)):
            controller.calibrate(size, k, seconds, live=LIVE)
    assert controller.tokens(2) == [1, 3, 4], "at most, while nothing is known"
    for _ in range(20):
        observe(controller, 2, 2, 0.12, 10, 2000, [1900, 1800, 0, 0, 0, 0, 0])
    assert controller.tokens(2)[2] == 4
    observe(controller, 2, 7, 0.14, 10, 2000, [1500, 1000, 500, 0, 0, 0, 0])
    assert controller.tokens(2)[2] == pytest.approx(2.5, rel=0.02) and controller.tokens(2)[1] > 2.8
    assert controller.tokens(8)[2] == 1.75, "of its own size"
    restored = Controller.restore(json.loads(json.dumps(controller.state())))
    assert restored.tokens(2) == controller.tokens(2) and restored.state() == controller.state()


# --- live tokens

# What a live token adds to an iteration, over what plain decoding takes without any: 8,000 a row add three times that.
READ = 3 / 8000 / SIZE


class LongMachine(Machine):
    """Steps in which all rows grow from 50 tokens to 8,000."""

    def __init__(self, ratio, seed):
        super().__init__([1 + 0.25 * k for k in LENGTHS], (ratio,) * LENGTHS[-1], seed)
        self.plain, self.live = dict(self.costs), 50.0
        self.grow(0.0)

    def grow(self, tokens):
        """Add tokens to every row; costs are those at the new length."""
        self.live += tokens
        self.costs = {k: self.plain[k] + READ * SIZE * self.live for k in LENGTHS}

    def step(self, controller):
        """(share of the tokens per second of the best length at every moment, lengths chosen)."""
        self.grow(50 - self.live)
        seconds = ideal = 0.0
        chosen = []
        while self.live < 8000:
            choice = controller.choose(SIZE, self.rows, self.live)
            grown = min(choice.iterations or self.chunk, self.chunk) * self.tokens(choice.k)
            self.grow(grown / 2)
            measured, iterations, verifications, accepted = self.run(choice)
            observe(controller, SIZE, choice.k, measured, iterations, verifications, accepted, live=self.live)
            seconds += iterations * self.costs[choice.k]
            ideal += grown / self.rate(self.best())
            chosen.append(choice.k)
            self.grow(grown / 2)
        return ideal / seconds, chosen


def long_steps(ratio, seed, steps, read=READ):
    machine = LongMachine(ratio, seed)
    controller = Controller(LENGTHS, (SIZE,), read=read)
    for k in LENGTHS:
        controller.calibrate(SIZE, k, min(machine.seconds(k) for _ in range(3)), live=50.0)
    return [machine.step(controller) for _ in range(steps)]


def test_as_fast_as_the_best_length_while_sequences_grow():
    """Mean share in the third to the sixth step, over three acceptances; without `read` it is below."""

    def mean(read):
        return np.mean([share for ratio in (0.4, 0.6, 0.8) for share, _ in long_steps(ratio, 13, 6, read)[2:]])

    assert mean(READ) >= 0.982 > mean(0.0)


def test_drafts_grow_with_the_live_tokens_in_every_step():
    """Best are k = 3 at 50 tokens and 7 at 8,000: what was chosen at the end of a step is not used in the next."""
    for _, chosen in long_steps(0.8, seed=14, steps=4)[1:]:
        assert np.mean(chosen[:8]) < 4.5 < np.mean(chosen[-8:])


def test_a_live_token_adds_the_same_to_every_length():
    """1 us each: plain decoding takes 6.8 ms without any, the 3,200 of the calibration 3.2 ms."""
    controller = Controller((0, 3), (SIZE,), read=1e-6 / 0.0068)
    controller.calibrate(SIZE, 0, 0.010, live=100.0)
    controller.calibrate(SIZE, 3, 0.030, live=100.0)
    costs = [[controller.cost(SIZE, k, SIZE * live) for k in (0, 3)] for live in (100, 1600)]
    np.testing.assert_allclose(costs, [[0.010, 0.030], [0.058, 0.078]])
    for live in range(100, 1700, 100):
        observe(controller, SIZE, 0, 32 * (0.010 + 1e-6 * SIZE * (live - 100)), 32, 32 * SIZE, [0, 0, 0], live=live)
    after = [[controller.cost(SIZE, k, SIZE * live) for k in (0, 3)] for live in (100, 1600)]
    np.testing.assert_allclose(after, costs)


# --- probes


@pytest.mark.parametrize("costs", COSTS)
def test_probes_lose_no_more_than_their_budget(costs):
    """Where drafting is worth nothing, everything lost is the first try and the probes."""
    machine = Machine(COSTS[costs], ACCEPTANCE["none"], seed=9)
    controller = calibrated(machine)
    drive(controller, machine, chunks=50)
    share, choices = drive(controller, machine, chunks=2000)
    assert share >= 0.99
    assert {choice.k for choice in choices if choice.iterations} == set(LENGTHS[1:])


@pytest.fixture
def two_lengths(no_initial_budget):
    """Drafting one token takes half as long again; there is no initial probe budget."""
    controller = Controller((0, 1), (SIZE,))
    controller.calibrate(SIZE, 0, 0.010, live=LIVE)
    controller.calibrate(SIZE, 1, 0.015, live=LIVE)
    return controller


def gaps(controller, accepted, probes):
    """Chunks of plain decoding before each of the next probes; every probe finds `accepted` of 128."""
    found = []
    while len(found) < probes:
        gap = 0
        while controller.choose(SIZE, SIZE, LIVE) == Choice(0, None):
            observe(controller, SIZE, 0, 0.32, 32, 1024, [0])
            gap += 1
        observe(controller, SIZE, 1, 0.06, 4, 128, [accepted])
        found.append(gap)
    return found


def test_probes_that_say_the_same_come_less_often(two_lengths):
    controller = two_lengths
    first, once, *waits = gaps(controller, accepted=0, probes=5)
    assert first == 0, "tried at once"
    assert [wait / once for wait in waits] == pytest.approx([2, 4, 4], rel=0.2)
    # A jump that still does not pay: the probe that finds it comes late, the next one, which loses half as much, early.
    assert [wait / once for wait in gaps(controller, 50, probes=2)] == pytest.approx([4, 0.5], rel=0.2)


def test_a_prediction_that_moves_resets_the_backoff_of_probes(two_lengths):
    controller = two_lengths
    controller.predict([0.0])
    once, *_ = gaps(controller, accepted=0, probes=5)
    controller.predict([0.05])
    assert gaps(controller, accepted=0, probes=1)[0] > 3 * once, "it has hardly moved"
    controller.predict([0.4])
    assert gaps(controller, accepted=0, probes=1)[0] < 1.2 * once


def test_a_probe_that_loses_more_than_its_budget_leaves_a_debt(two_lengths):
    """1 % of 320 ms is saved a chunk, 4.8 ms at first; a probe counts as 10 ms at acceptance 0.45 and loses 20 at 0."""
    controller = two_lengths
    observe(controller, SIZE, 1, 0.48, 32, 10_000, [4500])
    assert gaps(controller, accepted=0, probes=2) == [math.ceil((10 - 4.8) / 3.2), math.ceil((20 + 20 - 11.2) / 3.2)]


def test_a_probe_is_short_and_longer_where_few_rows_run():
    """Enough iterations for 64 verifications, at least 4, at most 32."""
    controller = Controller(LENGTHS, (SIZE,))
    for k in LENGTHS:
        controller.calibrate(SIZE, k, 0.005, live=LIVE)
    assert [controller.choose(SIZE, running, LIVE).iterations for running in (128, 16, 8, 1)] == [4, 4, 8, 32]


def test_the_switching_cost_is_charged_to_the_probes():
    def probes(switch_seconds):
        machine = Machine(COSTS["paper, Zero"], ACCEPTANCE["none"], seed=10)
        controller = calibrated(machine)
        last = count = 0
        for _ in range(2000):
            choice = controller.choose(SIZE, SIZE, LIVE)
            paid = switch_seconds if choice.k not in (0, last) else 0.0
            observe(controller, SIZE, choice.k, *machine.run(choice), switch_seconds=paid)
            count, last = count + bool(choice.iterations), choice.k
        return count

    assert probes(switch_seconds=2.0) < 0.8 * probes(switch_seconds=0.0)


def test_the_length_in_use_is_not_charged_for_a_switch_between_batch_sizes():
    controller = Controller((0, 3), (128, 32))
    for size in (128, 32):
        for k, seconds in ((0, 0.010), (3, 0.012)):
            controller.calibrate(size, k, seconds, live=LIVE)

    def budget():
        return controller.state()["estimates"]["probing"][1]["probe_budget"][1]

    for _ in range(3):  # plain at 128, where nothing is gained; at 32 the drafter has to be brought level each time
        observe(controller, 128, 0, 0.32, 32, 128 * 32, [0])
        assert controller.choose(32, 32, LIVE).k == 3
        before = budget()
        observe(controller, 32, 3, 0.384, 32, 32 * 32, [1000, 950, 900], switch_seconds=5.0)
        assert budget() >= before


def test_off_means_probes_only_and_they_go_on():
    machine = Machine(COSTS["paper, Zero"], ACCEPTANCE["paper, Zero"], seed=11)
    _, choices = drive(calibrated(machine), machine, chunks=500, off=True)
    assert all(choice.k == 0 or choice.iterations for choice in choices)
    assert any(choice.k > 0 for choice in choices)


# --- estimates


def test_acceptance_is_counted_per_verification():
    controller = Controller(LENGTHS, (SIZE,))
    assert controller.tokens(SIZE)[-1] == 8, "nothing known: worth a try"
    observe(controller, SIZE, 3, 1.0, 100, 10_000, [6000, 3000, 1500, 0, 0, 0, 0])
    # Half of the rest at each position; the prior of a position is the ratio of the one before.
    assert controller.acceptance() == pytest.approx([0.6 * 0.5**i for i in range(7)], rel=0.01)
    assert controller.tokens(SIZE)[LENGTHS.index(2)] == pytest.approx(1.9, rel=0.01)
    observe(controller, SIZE, 1, 1.0, 100, 10_000, [3000, 0, 0, 0, 0, 0, 0])
    assert controller.acceptance()[0] == pytest.approx(0.3, rel=0.01)


def test_positions_out_of_reach_move_with_those_in_reach():
    controller = Controller(LENGTHS, (SIZE,))
    observe(controller, SIZE, 7, 1.0, 100, 10_000, [5000, 2500, 1250, 0, 0, 0, 0])
    before = controller.acceptance()
    for _ in range(10):
        observe(controller, SIZE, 1, 1.0, 10, 2048, [1126, 0, 0, 0, 0, 0, 0])
    after = controller.acceptance()
    assert after[0] == pytest.approx(0.55, rel=0.01)
    np.testing.assert_allclose(np.divide(after[:3], before[:3]), 1.1, rtol=0.03)


def test_old_counts_fade_with_the_verifications_since(monkeypatch):
    monkeypatch.setattr("specrl_jax.decoding.acceptance.MEMORY", 1000.0)
    controller = Controller((0, 1), (SIZE,))
    observe(controller, SIZE, 1, 1.0, 10, 1000, [500])
    observe(controller, SIZE, 1, 1.0, 10, 1000, [540])
    expected = (500 / math.e + 540) / (1000 / math.e + 1000)
    assert controller.acceptance() == pytest.approx([expected])


def test_a_jump_of_acceptance_replaces_what_was_known():
    controller = Controller(LENGTHS, (SIZE,))
    observe(controller, SIZE, 3, 1.0, 100, 10_000, [1000, 100, 10, 0, 0, 0, 0])
    observe(controller, SIZE, 1, 1.0, 100, 128, [100, 0, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(controller.acceptance(), np.cumprod([100 / 128] * 7))


def test_a_prediction_is_a_prior_that_observations_replace():
    controller = Controller(LENGTHS, (SIZE,))
    controller.predict([0.5, 0.4, 0.1])
    np.testing.assert_allclose(controller.acceptance()[:4], [0.5, 0.4, 0.1, 0.025])
    observe(controller, SIZE, 3, 1.0, 100, 10_000, [8000, 6400, 5120, 0, 0, 0, 0])
    np.testing.assert_allclose(controller.acceptance()[:3], [0.8, 0.64, 0.512], rtol=0.02)


def test_costs_not_measured_are_interpolated():
    controller = Controller(LENGTHS, (8, SIZE))
    assert math.isnan(controller.cost(8, 3, LIVE)) and controller.choose(8, 8, LIVE) == Choice(0, None)
    assert controller.unmeasured(8) == list(LENGTHS)
    controller.calibrate(8, 0, 0.010, live=LIVE)
    assert controller.cost(8, 7, LIVE) == pytest.approx(0.010), "one alone: optimistic, so that it is tried"
    controller.calibrate(8, 5, 0.020, live=LIVE)
    assert [controller.cost(8, k, LIVE) for k in (0, 1, 5, 7)] == pytest.approx([0.010, 0.012, 0.020, 0.024])
    assert controller.unmeasured(8) == [1, 2, 3, 7] and controller.unmeasured(SIZE) == list(LENGTHS)


def test_costs_follow_and_shrug_off_pauses():
    controller = Controller((0, 3), (SIZE,))
    controller.calibrate(SIZE, 0, 0.010, live=LIVE)
    controller.calibrate(SIZE, 3, 0.030, live=LIVE)
    for t in range(30):
        observe(controller, SIZE, 0, 0.32 * (3 if t % 5 == 0 else 1), 32, 1024, [0, 0, 0])
    assert [controller.cost(SIZE, k, LIVE) for k in (0, 3)] == pytest.approx([0.010, 0.030])
    for _ in range(10):
        observe(controller, SIZE, 0, 0.64, 32, 1024, [0, 0, 0])
    assert [controller.cost(SIZE, k, LIVE) for k in (0, 3)] == pytest.approx([0.020, 0.060])


def test_the_length_in_use_is_left_only_for_a_better_one(no_initial_budget):
    def choice(current, gain):
        """Of lengths 0 and 2, from `current`, where the other is `gain` times as fast; every draft is kept."""
        controller = Controller((0, 2), (SIZE,))
        for ratio in (0.5, 1.0) if current == 2 else (2.0, 1.0):
            c_2 = 0.030 * ratio * (gain if current == 2 else 1 / gain) ** (ratio == 1.0)
            controller.calibrate(SIZE, 0, 0.010, live=LIVE)
            controller.calibrate(SIZE, 2, c_2, live=LIVE)
            k = controller.choose(SIZE, SIZE, LIVE).k
        return k

    assert [choice(0, gain) for gain in (0.9, 1.02, 1.04)] == [0, 0, 2]
    assert [choice(2, gain) for gain in (0.9, 1.005, 1.02)] == [2, 2, 0], "back to plain decoding sooner"


def test_drafts_that_add_nothing_are_not_chosen_for_a_cost_that_looks_lower(no_initial_budget):
    controller = Controller((0, 1), (SIZE,))
    controller.calibrate(SIZE, 0, 0.010, live=LIVE)
    controller.calibrate(SIZE, 1, 0.009, live=LIVE)
    observe(controller, SIZE, 1, 0.009, 1, 10_000, [100])
    assert controller.choose(SIZE, SIZE, LIVE) == Choice(0, None)


# --- checkpoints


def test_restored_it_continues_identically():
    machine, twin = (Machine(COSTS["paper, Zero"], ACCEPTANCE["lookup"], seed=12) for _ in range(2))
    one, two = calibrated(machine), calibrated(twin)
    for controller in (one, two):
        controller.predict([0.3, 0.2])
    drive(one, machine, chunks=100)
    drive(two, twin, chunks=100)
    for controller in (one, two):  # texts end, as the machine's never do
        chunk = DecodeChunk(
            SIZE,
            LENGTHS[-1],
            1.0,
            iterations=32,
            verifications=32 * SIZE,
            switch_seconds=0.0,
            live=LIVE,
            tokens=60 * SIZE,
            finished=SIZE,
        )
        controller.observe(chunk, [SIZE] * LENGTHS[-1])
    two = Controller.restore(json.loads(json.dumps(two.state())))
    assert two.state() == one.state()
    # Faster drafting and a better head, so that every part of the state comes to matter.
    machine.ratios = twin.ratios = (0.8,) * 7
    for controller in (one, two):
        controller.predict([0.35, 0.2])
    assert drive(one, machine, chunks=300) == drive(two, twin, chunks=300)
    assert two.state() == one.state()


def test_restored_while_sequences_grow():
    machines = [LongMachine(0.6, seed=15) for _ in range(2)]
    one, two = (Controller(LENGTHS, (SIZE,), read=READ) for _ in range(2))
    for _ in range(2):
        assert machines[0].step(one) == machines[1].step(two)
        two = Controller.restore(json.loads(json.dumps(two.state())))
    assert two.state() == one.state()


@pytest.mark.parametrize("lengths", [(1, 2), (0, 2, 1), (0, 1, 1)])
def test_lengths_ascend_from_plain_decoding(lengths):
    with pytest.raises(ValueError, match="ascending from 0"):
        Controller(lengths, (SIZE,))


def test_without_a_drafter_there_is_one_length():
    controller = Controller((0,), (SIZE,))
    controller.calibrate(SIZE, 0, 0.010, live=LIVE)
    observe(controller, SIZE, 0, 0.32, 32, 1024, [])
    assert controller.choose(SIZE, SIZE, LIVE) == Choice(0, None) and controller.tokens(SIZE) == [1]
