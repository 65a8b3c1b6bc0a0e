import json
import math

import numpy as np
import pytest

from specrl_jax.decoding.alarm import Alarm


def steps(seed, ratio, longest, verifications, count):
    """Realised accepted drafts per verification of `count` steps: each position kept with chance `ratio`."""
    rng = np.random.default_rng(seed)
    left = np.full(count, verifications)
    total = np.zeros(count)
    for _ in range(longest):
        left = rng.binomial(left, ratio)
        total += left
    return total / verifications


def expected(ratio, longest):
    return sum(ratio**i for i in range(1, longest + 1))


def test_trips_when_the_drafts_are_lost_and_recovers_when_they_are_back():
    alarm = Alarm(longest=3)
    assert not alarm.observe(1.9, 2.0, 1000)
    assert alarm.observe(0.0, 2.0, 1000) and alarm.tripped
    assert not alarm.observe(0.0, 2.0, 1000), "says so once"
    assert alarm.tripped
    alarm.observe(1.4, 2.0, 1000)
    assert alarm.tripped, "0.7 of the prediction is no recovery"
    assert not alarm.observe(1.6, 2.0, 1000) and not alarm.tripped


@pytest.mark.parametrize("predicted", [math.nan, math.inf])
def test_a_prediction_that_is_not_finite_trips_at_once_and_until_it_is_finite_again(predicted):
    alarm = Alarm(longest=3)
    assert not alarm.observe(1.9, 2.0, 1000)
    assert alarm.observe(0.0, predicted, 0) and alarm.tripped and "not finite" in alarm.message()
    assert not alarm.observe(0.0, predicted, 1000), "says so once"
    alarm = Alarm.restore(json.loads(json.dumps(alarm.state())))
    assert alarm.tripped and not alarm.is_finite
    assert not alarm.observe(0.0, 2.0, 1000) and alarm.tripped and "acceptance collapsed" in alarm.message()
    assert not alarm.observe(1.9, 2.0, 1000) and not alarm.tripped
    assert alarm.mean == pytest.approx(1.9), "what was not finite left nothing behind"


@pytest.mark.parametrize("realised, tripped", [(0.99, True), (1.01, False)])
def test_half_of_the_prediction_is_the_threshold(realised, tripped):
    assert Alarm(longest=3).observe(realised, 2.0, 1000) == tripped


def test_short_steps_add_up_until_they_decide():
    """Of `decisive` expected drafts: 270 at longest=3, that is 136 verifications that accept 2."""
    alarm = Alarm(longest=3)
    assert alarm.decisive == pytest.approx(3 * math.log(1e6) / 0.15343, rel=1e-4)
    assert [alarm.observe(0.0, 2.0, 40) for _ in range(4)] == [False, False, False, True]
    assert not Alarm(longest=3).observe(0.0, 2.0, 0), "no verification is no evidence"
    assert not Alarm(longest=3).observe(0.0, 0.0, 10**6), "nothing was expected"


def test_without_a_prediction_it_compares_with_earlier_steps():
    alarm = Alarm(longest=1)
    assert [alarm.observe(x, None, 1000) for x in (0.6, 0.7, 0.6)] == [False] * 3
    assert alarm.observe(0.25, None, 1000)
    for _ in range(100):
        alarm.observe(0.25, None, 1000)
    assert alarm.tripped and alarm.mean > 0.6, "the collapse does not become normal"
    alarm.observe(0.55, None, 1000)
    assert not alarm.tripped


@pytest.mark.parametrize("predict", [True, False])
@pytest.mark.parametrize("ratio, longest", [(0.8, 7), (0.5, 3), (0.05, 3)])
def test_false_alarms_are_as_rare_as_stated(ratio, longest, predict, monkeypatch):
    """At ERROR = 0.01 and no more evidence than it asks for: at most 1 % of decisions, by Chernoff's bound.

    More than 1.6 % of 4000 has chance below 1e-3 for a rate of 1 %; the true rate is lower. Where the reference is the
    alarm's own mean of such small steps, that mean's noise is part of the test.
    """
    monkeypatch.setattr("specrl_jax.decoding.alarm.ERROR", 0.01)
    alarm = Alarm(longest)
    mean = expected(ratio, longest)
    verifications = math.ceil(alarm.decisive / mean)
    false = 0
    for realised in steps(0, ratio, longest, verifications, 4000):
        alarm.observe(realised, mean if predict else None, verifications)
        false += alarm.tripped
        alarm.tripped = False
    assert false <= 64


def test_at_the_stated_error_a_healthy_drafter_never_trips_it_and_a_bad_one_does():
    mean = expected(0.7, 3)
    healthy, bad = Alarm(longest=3), Alarm(longest=3)
    for realised in steps(1, 0.7, 3, 200, 5000):
        assert not healthy.observe(realised, mean, 200)
    # A quarter of the prediction, one decision's evidence: missed with chance below 0.001.
    assert bad.observe(steps(2, 0.29, 3, 200, 1)[0], mean, 200)


def test_the_message_names_both_numbers_and_the_causes():
    alarm = Alarm(longest=3)
    alarm.observe(0.123, 2.345, 1000)
    for words in ("0.12", "2.35", "lost", "synchronised", "tokenizer", "layer ids"):
        assert words in alarm.message()
    assert "\n" not in alarm.message()


def test_restored_it_continues_identically():
    one = Alarm(longest=3)
    for x in (1.9, 1.7):
        one.observe(x, None, 500)
    one.observe(0.1, None, 3)
    two = Alarm.restore(json.loads(json.dumps(one.state())))
    assert two == one
    assert one.observe(0.1, None, 500) and two.observe(0.1, None, 500)
    assert two == one
