"""Rollouts that outlive a step: limits, examples by hand, and the formula against the events."""

import dataclasses

import numpy as np
import pytest

from experiments.simulator.cost import DecoderCost
from experiments.simulator.events import Line, Pace, advance, make_pace, new_line, verified
from experiments.simulator.learner import Workload
from experiments.simulator.lengths import LogNormalLengths
from experiments.simulator.modes import (
    MODES,
    break_even,
    divided,
    simulate_update,
    split_parts,
)
from experiments.simulator.rollout import Drafting, choose
from experiments.simulator.scenario import points, predict
from experiments.simulator.updates import (
    SYNCHRONOUS,
    Outside,
    exact_seconds,
    expected_rest,
    simulate,
)
from tests.experiments.simulator.cases import NANO, ideal, scenario

FREE_DECODER = DecoderCost(NANO, None, ideal())  # prompts and verification take no time
SECOND = Pace(np.array([1.0, 2.0]), np.array([0.0, 1.0]), np.ones((2, 2)))  # a token a second, whatever runs
EXACT, INFLIGHT = MODES["exact, slots stay free"], MODES["inflight"]._replace(fills=False)


@dataclasses.dataclass(frozen=True)
class GivenLengths:
    """These lengths, evenly."""

    values: tuple[float, ...]

    @property
    def mean(self):
        return float(np.mean(self.values))

    @property
    def limit(self):
        return max(self.values)

    def quantile(self, share):
        return np.array(self.values)[(np.asarray(share) * len(self.values)).astype(int)]


def work(*values, group=1):
    return Workload(len(values), group, 0.0, longest_prompt=0.0, lengths=GivenLengths(values), slots=0)


EQUAL = work(100.0, 100.0, 100.0, 100.0)


def run(w, update, learn=0.0, disagreement=0.0, *, replicas=1, slots=999, decoder=FREE_DECODER, prepare=0.0, seed=0):
    return simulate(
        w,
        decoder,
        SECOND,
        replicas=replicas,
        slots=slots,
        update=update,
        outside=Outside(prepare, learn),
        disagreement=disagreement,
        seed=seed,
    )


# ---- events


def test_one_slot_draws_one_rollout_after_the_other():
    line = new_line(np.array([3.0, 5.0, 2.0]), 1, 0, group=1)
    half, clock = advance(line, np.zeros(1), SECOND, slots=1, prompt=0.0, until=4.0)
    assert half.drawn.tolist() == [[3, 1, 0]] and clock == 4
    assert advance(line, np.zeros(1), SECOND, slots=1, prompt=0.0)[1] == 10
    assert advance(line, np.zeros(1), SECOND, slots=2, prompt=0.0)[1] == 5  # 3 and 2 beside 5
    assert advance(line, np.zeros(1), SECOND, slots=3, prompt=0.0, left=1)[1] == 3
    wanted = np.array([[False, False, True]])
    assert advance(line, np.zeros(1), SECOND, slots=3, prompt=0.0, wanted=wanted)[1] == 2
    alone, _ = advance(line, np.zeros(1), SECOND, slots=1, prompt=0.0, wanted=wanted, runs=wanted)
    assert alone.drawn.tolist() == [[0, 0, 2]]


def test_replicas_have_clocks_of_their_own():
    line, clock = advance(
        new_line(np.array([3.0, 5.0, 2.0]), 2, 0, group=1), np.array([0.0, 7.0]), SECOND, slots=1, prompt=0.0
    )
    assert clock.tolist() == [8, 9] and not line.unfinished.any()


def test_a_line_forgets_some_and_others_stand_behind():
    line = new_line(np.array([3.0, 5.0, 2.0, 4.0]), 2, 0, group=2)
    kept = line.only(np.array([[False, True], [False, False]])).then(new_line(np.array([7.0, 8.0]), 2, 1, group=1))
    assert kept.length.tolist() == [[5, 7], [0, 8]] and kept.step.tolist() == [[0, 1], [0, 1]]


def test_verification_keeps_what_comes_before_the_first_disagreement():
    line = Line(*(np.array([[9.0, 9.0, 9.0, 9.0]]), np.array([[6.0, 6.0, 0.0, 3.0]]), *np.zeros((3, 1, 4))))
    found, kept = verified(line, np.array([[1.0, 4.0, 2.0, 5.0]]))
    assert kept.tolist() == [[0, 3, 0, 3]]
    assert found.drawn.tolist() == [[1, 4, 0, 3]]  # and the new weights' own token at the disagreement


def test_a_pace_is_that_of_the_decoder():
    s = scenario()
    drafting = Drafting(np.array([[3.0]]), np.full((1, 1, 7), 0.5))
    pace = make_pace(s.decoder, drafting, 128, longest=8000.0)
    running, context = np.array([1.0, 17.0, 100.0, 128.0]), np.array([0.0, 300.0, 5000.0, 7999.0])
    _, tokens, cost = choose(s.decoder, running[None], context[None], drafting=drafting)
    assert pace(running, context) == pytest.approx((cost / tokens)[0], rel=0.01)


# ---- limits


def test_a_synchronous_step_is_generation_and_learning():
    found = run(EQUAL, SYNCHRONOUS, learn=30.0, prepare=2.0, disagreement=0.5)
    assert found.seconds == 132 and found.drawing == 102 and found.stale == 0
    # Without steps ahead all ways are this one.
    for name, update in MODES.items():
        if not update.carry:
            assert run(EQUAL, update._replace(ahead=0), 30.0, 0.5, prepare=2.0).seconds == 132, name


@pytest.mark.parametrize("learn, seconds", [(60.0, 100.0), (150.0, 150.0)])
def test_without_disagreement_and_cost_the_longer_side_counts(learn, seconds):
    for update in (EXACT, INFLIGHT, MODES["exact"]):
        assert run(EQUAL, update, learn, slots=4).seconds == pytest.approx(seconds)
    assert exact_seconds(100.0, learn, 0.0, rest=0.0) == seconds


@pytest.mark.parametrize("learn", [60.0, 150.0])
def test_where_every_token_disagrees_nothing_is_gained(learn):
    """But the first token, which verification draws."""
    found = run(EQUAL, EXACT, learn, disagreement=1.0)
    assert found.seconds == pytest.approx(99 + learn) and found.kept == 0
    assert found.rest == pytest.approx(min(learn, 100) / 100)
    assert exact_seconds(100.0, learn, 0.0, rest=expected_rest(np.full(4, 100.0), 1.0)) == pytest.approx(100 + learn)


def test_free_slots_hide_a_tail():
    """Three answers of 10 and one of 50 in turn with learning: the next step's short ones are drawn beside the long."""
    w = work(10.0, 10.0, 10.0, 50.0)
    assert run(w, SYNCHRONOUS, 5.0, slots=4).seconds == 55
    found = run(w, MODES["lookahead"], 5.0, slots=4)
    assert found.seconds < 30 and found.kept == 1 and found.stale == 0
    assert run(w, MODES["lookahead"], 5.0, disagreement=1.0, slots=8).seconds == pytest.approx(54)


def test_stale_tokens_are_those_of_older_weights():
    assert run(EQUAL, INFLIGHT, 150.0).stale == 1
    assert run(EQUAL, INFLIGHT, 60.0).stale == pytest.approx(0.6)
    assert run(EQUAL, EXACT, 60.0, 1e-3).stale == 0


def test_carried_rollouts_by_hand():
    """Steps of 10 s, in which a long answer begins, and of 90 s, in which one ends, take turns."""
    w = work(10.0, 10.0, 10.0, 100.0)
    found = run(w, MODES["carry a quarter"])
    assert found.seconds == pytest.approx((3 * 90 + 2 * 10) / 5) and run(w, SYNCHRONOUS).seconds == 100
    # Of 130 tokens those are stale that the long answer had before its last step began.
    assert found.stale == pytest.approx((3 * 10 + 2 * 90) / 5 / 130)
    # A group is learned from when its last answer has ended.
    whole = run(dataclasses.replace(w, group=4), MODES["carry a quarter"])
    assert whole.seconds == found.seconds and whole.stale > found.stale


# ---- the formula


def expected_kept(lengths, disagreement):
    """The expected share of the tokens before the first disagreement of each response, [N] tokens long."""
    if disagreement in (0, 1):
        return 1.0 - disagreement
    kept = (1 - disagreement) / disagreement * -np.expm1(lengths * np.log1p(-disagreement))
    return float(kept.sum() / lengths.sum())


def lengths(count=256):
    return LogNormalLengths(200.0, 1000.0, 1.0).quantile((np.arange(count) + 0.5) / count)


@pytest.mark.parametrize("disagreement", [1e-5, 1e-3, 0.05])
def test_the_expected_rest_and_the_kept_share_are_those_of_draws(disagreement):
    """2,000 draws: within four standard errors."""
    rng, given = np.random.default_rng(0), lengths()
    kept = np.minimum(rng.geometric(disagreement, (2000, len(given))) - 1, given)
    for found, drawn in (
        (expected_rest(given, disagreement), (given - kept).max(1) / given.max()),
        (expected_kept(given, disagreement), kept.sum(1) / given.sum()),
    ):
        assert found == pytest.approx(drawn.mean(), abs=4 * drawn.std() / 2000**0.5 + 1e-3)


def test_nothing_disagrees_or_everything():
    assert expected_rest(lengths(), 0.0) == 0 and expected_kept(lengths(), 0.0) == 1
    assert expected_rest(lengths(), 1.0) == 1 and expected_kept(lengths(), 1.0) == 0


@pytest.mark.slow
@pytest.mark.parametrize("disagreement", [0.0, 1e-5, 1e-4, 1e-2])
def test_the_formula_is_the_events_where_all_is_drawn_while_the_learner_works(disagreement):
    """Twenty seeds of five steps, a token a second in every slot: within 2 %."""
    decoder = DecoderCost(NANO, None, ideal(flops=5e7))
    w = dataclasses.replace(work(*lengths()), group=8)
    generate, learn = w.lengths.limit, 1500.0
    v = float(decoder.verification(256 * w.lengths.mean, w.lengths.mean)) / generate
    assert 0.1 < v < 2
    seeds = [run(w, EXACT, learn, disagreement, decoder=decoder, seed=i) for i in range(20)]
    expected = exact_seconds(generate, learn, v, rest=expected_rest(lengths(), disagreement))
    assert np.mean([x.seconds for x in seeds]) == pytest.approx(expected, rel=0.02)
    assert np.mean([x.kept for x in seeds]) == pytest.approx(expected_kept(lengths(), disagreement), abs=0.01)


@pytest.mark.parametrize("disagreement", [0.0, 1e-4, 1e-2])
def test_where_generation_is_longer_the_formula_is_a_bound(disagreement):
    """What was not begun is not drawn again."""
    w = work(*lengths())
    found = run(w, EXACT, 400.0, disagreement).seconds
    expected = exact_seconds(w.lengths.limit, 400.0, 0.0, rest=expected_rest(lengths(), disagreement))
    assert w.lengths.limit <= found * (1 + 1e-9) and found <= expected * 1.01


# ---- scenarios


def test_a_synchronous_step_is_the_rooflines():
    """Replicas of their own lengths, and segments of another size: within 3 %."""
    s = scenario()
    for p in (points(2), points(16, 3, 2.5)):
        assert simulate_update(s, p, SYNCHRONOUS).seconds == pytest.approx(predict(s, p).step.total[0], rel=0.03)


def test_exact_is_no_faster_than_inflight_and_its_tokens_are_fresh():
    s, p = scenario(), points(32)
    for disagreement in (0.0, 1e-4):
        on, off = (divided(s, p, MODES[name], disagreement=disagreement) for name in ("exact", "inflight"))
        assert 0 < on.rollout_devices[0] < 32 and on.rollout_devices[0] % 2 == 0
        found, bound = (
            simulate_update(s, off, MODES[name], disagreement=disagreement) for name in ("exact", "inflight")
        )
        assert found.seconds >= bound.seconds and found.stale == 0 < bound.stale
    assert divided(s, p, MODES["lookahead"]).rollout_devices[0] == 32


def test_parts_of_the_formula_are_the_phases():
    s, p = scenario(), points(32, rollout_devices=16)
    parts, phases = split_parts(s, p), predict(s, p).phases
    assert parts.generate == pytest.approx(float(phases.prepare[0] + phases.generate[0]))
    assert parts.learn == pytest.approx(float(phases.learner[0])) and 0 < parts.verifying < 1


def test_the_break_even_is_between_two_simulated_ones():
    d = np.array([0.0, 1e-6, 1e-4])
    assert break_even(d, np.array([8.0, 9.0, 12.0]), 10.5) == pytest.approx(1e-5)
    assert break_even(d, np.array([8.0, 12.0, 13.0]), 10.0) == pytest.approx(0.5e-6)
    assert break_even(d, np.array([8.0, 9.0, 9.5]), 10.0) == np.inf and break_even(d, np.full(3, 11.0), 10.0) == 0


def test_a_division_that_does_not_fit_is_not_chosen():
    """26 of 32 GPUs would generate, but six of 60 GB do not hold the learner."""
    s, p = scenario(), points(32)
    s = dataclasses.replace(s, workload=dataclasses.replace(s.workload, scored=0))
    best, small = divided(s, p, MODES["inflight"]), s.on(dataclasses.replace(s.hardware, memory_bytes=60e9))
    assert best.rollout_devices == 26 and predict(s, best).fits and not predict(small, best).fits
    assert predict(small, divided(small, p, MODES["inflight"])).fits
