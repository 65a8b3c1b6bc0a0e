"""Invariants of a step: on plain numbers, then on whole scenarios."""

import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from experiments.simulator.communication import Parallelism
from experiments.simulator.hardware import HARDWARE
from experiments.simulator.lengths import LogNormalLengths
from experiments.simulator.rollout import Steady
from experiments.simulator.scenario import best_split, compare, points, predict
from experiments.simulator.step import PhaseSeconds, amdahl, asynchronous, synchronous
from tests.experiments.simulator.cases import ideal, scenario

SECONDS = st.floats(0.01, 1000.0)
LAGS = st.integers(0, 6)


def phases(*values):
    return PhaseSeconds(*(np.array([[x]]) for x in values))


def no_tail(seconds):
    """Generation whose batches gain nothing from following each other."""
    return Steady(np.array([[seconds]]), np.array([[seconds]]))


# ---- numbers


def test_the_papers_table_1():
    """arXiv 2604.26779: generation is 66.1 % of RL-Zero's plain step; its bound at 3.32 is 1.86."""
    zero = PhaseSeconds(0.2, 1.9, 100.0, logprob=17.8, train=31.3)
    assert zero.total == pytest.approx(151.2) and zero.share() == pytest.approx(0.661, abs=1e-3)
    assert amdahl(zero.share(), 3.32) == pytest.approx(1.86, abs=0.01)


def test_two_batches_under_way_by_hand():
    """Learner 10 s, a batch 30 s alone, 20 s without gaps: bound by generation; by a batch's delay; by the learner."""
    p = phases(0, 0, 30, 4, 6)
    steady = Steady(np.array([[20.0]]), np.array([[34.0]]))
    assert asynchronous(p, steady, [[1]]).total == 22  # (34 + 10) / 2
    assert asynchronous(p, steady, [[2]]).total == 20
    assert asynchronous(p, steady, [[1]], in_flight=True).total == 20
    assert asynchronous(phases(0, 0, 30, 40, 6), steady, [[2]]).exposed == 0
    # Without gaps it would take longer than one batch after the other.
    assert asynchronous(p, Steady(np.array([[20.0]]), np.array([[60.0]])), [[1]]).total == 30


def test_devices_that_share_everything_gain_nothing_from_a_lag():
    p = phases(1, 2, 30, 4, 6)
    totals = [asynchronous(p, no_tail(30.0), [[1]], contention=c).total[0, 0] for c in (0.0, 0.5, 1.0)]
    assert totals == [32, 37.5, 43] and synchronous(p).total == 43 and synchronous(p).exposed == 32


@hypothesis.given(st.tuples(*[SECONDS] * 5), SECONDS, SECONDS, LAGS, st.booleans(), st.floats(0.0, 1.0))
def test_lag_is_never_slower_on_the_same_split(values, steady, delay, lag, in_flight, contention):
    p, s = phases(*values), Steady(np.array([[steady]]), np.array([[delay]]))
    totals = [
        asynchronous(p, s, [[n]], in_flight=in_flight, contention=contention).total[0, 0] for n in (0, lag, lag + 1)
    ]
    assert totals[0] == p.total[0, 0] and totals[0] * (1 + 1e-12) >= totals[1] >= totals[2]
    assert totals[2] >= p.learner[0, 0] * (1 - 1e-12)


@hypothesis.given(SECONDS, SECONDS, st.floats(0.01, 0.99), LAGS)
def test_under_linear_scaling_separate_devices_are_no_faster(generate, learn, split, lag):
    """No tail and no loss: g / x and l / (1 - x) on shares of the devices that do g + l together."""
    apart = asynchronous(phases(0, 0, generate / split, 0, learn / (1 - split)), no_tail(generate / split), [[lag]])
    assert apart.total[0, 0] >= (generate + learn) * (1 - 1e-12)


@hypothesis.given(st.tuples(*[SECONDS] * 5), st.floats(1.0, 10.0))
def test_end_to_end_is_amdahls_bound_where_generation_alone_changes(values, speedup):
    slow = PhaseSeconds(*values)
    fast = slow._replace(generate=slow.generate / speedup)
    assert slow.total / fast.total == pytest.approx(amdahl(slow.share(), speedup))


# ---- scenarios

CONFIGURATION = {
    "devices": st.sampled_from([8, 16, 32, 64]),
    "lag": LAGS,
    "k": st.integers(1, 7),
    "kept": st.floats(0.0, 1.0),
    "machine": st.sampled_from(["gb200", "h100", "tpu_v5p"]),
    "spread": st.sampled_from([0.0, 0.8]),
}


def asked(devices, lag, k, kept, rollout_devices=None):
    return points(devices, k, 1 + kept * k, lag=lag, rollout_devices=rollout_devices or devices // 2)


@hypothesis.given(**CONFIGURATION)
def test_lag_is_never_slower_in_a_scenario(devices, lag, k, kept, machine, spread):
    s = scenario(HARDWARE[machine], spread)
    waiting, running, further = (predict(s, asked(devices, n, k, kept)).step.total[0] for n in (0, lag, lag + 1))
    assert waiting >= running >= further


@pytest.mark.slow
@hypothesis.given(**CONFIGURATION)
def test_no_speedup_above_acceptance_nor_above_amdahl(devices, lag, k, kept, machine, spread):
    s = scenario(HARDWARE[machine], spread)
    apart = compare(s, asked(devices, lag, k, kept), optimize_split=False)
    together = compare(s, points(devices, k, 1 + kept * k))
    for found in (apart, together):
        assert found.rollout[0] <= 1 + kept * k + 1e-9
    bound = amdahl(together.plain.phases.share()[0], together.rollout[0])
    assert together.end_to_end[0] <= bound * (1 + 1e-9)


@hypothesis.given(
    field=st.sampled_from(["matmul", "memory", "link"]), factor=st.sampled_from([1.1, 3.0]), **CONFIGURATION
)
def test_more_of_a_resource_is_never_a_slower_step(field, factor, devices, lag, k, kept, machine, spread):
    slow = scenario(HARDWARE[machine], spread)
    a = slow.hardware.attained
    fast = slow.on(slow.hardware.with_attained(**{field: getattr(a, field) * factor}))
    p = asked(devices, lag, k, kept)
    assert predict(fast, p).step.total[0] <= predict(slow, p).step.total[0] * (1 + 1e-12)


def every_split(s, devices, lag):
    unit = s.rollout_split.devices
    splits = np.arange(unit, devices, unit)
    return predict(s, points(devices, lag=lag, rollout_devices=splits)).step.total


def test_without_tail_and_scaling_loss_separate_devices_gain_nothing():
    """Bound by arithmetic alone, equal lengths, as many responses as any number of replicas divides: linear scaling."""
    s = scenario(ideal(flops=1e15), spread=0.0, rollout_split=Parallelism(), learner_split=Parallelism())
    w = dataclasses.replace(s.workload, rollouts=1680, lengths=LogNormalLengths(500.0, 500.0, 0.0), microbatch_tokens=1)
    s = dataclasses.replace(s, workload=w)
    together = predict(s, points(8)).step.total[0]
    assert predict(s, points(16)).step.total[0] == pytest.approx(together / 2)
    assert (every_split(s, 8, 1) >= together * (1 - 1e-9)).all()


@pytest.mark.parametrize("spread, devices", [(0.8, 64), (0.0, 256)], ids=["long tail", "sublinear scaling"])
def test_a_long_tail_or_sublinear_scaling_alone_can_make_separate_devices_faster(spread, devices):
    """Without a tail: small batches read the same weights, so half the devices generate nearly as fast."""
    s = scenario(spread=spread)
    assert every_split(s, devices, 3).min() < predict(s, points(devices)).step.total[0]


@pytest.mark.parametrize("model", ["qwen3_8b", "qwen3_235b_a22b"])
def test_a_point_does_not_depend_on_its_neighbours(model):
    s = scenario(model=model)
    k = np.array([0, 1, 3, -1, 5, 7])
    many = points(64, k, np.where(k > 0, 1 + 0.6 * k, np.where(k, 4.0, 1.0)), lag=np.array([0, 1, 2, 3, 0, 1]))
    many = many._replace(rollout_devices=np.where(many.lag > 0, 32, 64))
    together = predict(s, many).step.total
    alone = [predict(s, type(many)(*(x[i : i + 1] for x in many))).step.total[0] for i in range(len(k))]
    assert together == pytest.approx(alone, rel=1e-12) and np.isfinite(together).all() and (together > 0).all()


def test_a_grid_larger_than_a_chunk_is_concatenated(monkeypatch):
    s, p = scenario(), points(64, np.arange(8) % 4, 1 + 0.5 * (np.arange(8) % 4))
    whole = predict(s, p)
    monkeypatch.setattr("experiments.simulator.scenario.CHUNK", 3)
    pieces = predict(s, p)
    assert pieces.step.total.tolist() == whole.step.total.tolist()
    assert pieces.steady.seconds.shape == whole.steady.seconds.shape


def test_the_best_split_is_the_best_of_all():
    s = scenario()
    totals = every_split(s, 32, 2)
    found = best_split(s, points(32, lag=2))
    assert predict(s, points(32, lag=2, rollout_devices=found)).step.total[0] == totals.min()
    assert best_split(s, points(32)) == 32, "without a lag all devices do both"
