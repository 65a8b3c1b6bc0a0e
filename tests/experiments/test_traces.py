"""Traces of accepted drafts, and their replay against a loop over single iterations."""

import dataclasses
import itertools

import numpy as np
import pytest

from experiments.traces.counts import Trace, accepted_counts, read_traces, traces_of, write_traces
from experiments.traces.replay import Measured, ratio, resampled, seconds, tokens_per_second
from specrl_jax.decoding.rollouts import Rollouts


def trace(accepted, k=3, tokens=None):
    tokens = sum(accepted) + len(accepted) if tokens is None else tokens
    return Trace("w", 0, k, 0, tokens, tuple(accepted))


@pytest.mark.parametrize(
    "positions, counts",
    [
        ([0, 0, 0], (0, 0, 0)),
        ([1, 2, 3, 0, 0, 1, 0], (3, 0, 1)),
        ([0, 1, 2], (0, 2)),  # the end of the text was a draft
    ],
)
def test_counts_are_read_from_the_positions_of_drafts(positions, counts):
    assert accepted_counts(positions) == counts


def rollouts_with(positions, verifications):
    R, S = np.array(positions).shape
    values = {field.name: np.zeros(R, np.int32) for field in dataclasses.fields(Rollouts)}
    values |= {"draft_positions": np.array(positions, np.int8), "prompt_length": np.ones(R, np.int32)}
    values |= {"length": np.full(R, S, np.int32), "verifications": np.array(verifications, np.int32)}
    return Rollouts(**values | {"chunks": (), "features": {}})


def test_a_trace_that_disagrees_with_the_engine_is_refused():
    found = rollouts_with([[0, 1, 2, 0, 0]], [2])
    assert [t.accepted for t in traces_of(found, "w", 0, 3)] == [(2, 0)]
    with pytest.raises(ValueError, match="rollout 0: 2 verifications, the engine 3"):
        traces_of(rollouts_with([[0, 1, 2, 0, 0]], [3]), "w", 0, 3)


def test_a_file_holds_the_traces(tmp_path):
    traces = [trace((3, 0, 1)), trace((), k=0, tokens=9)]
    write_traces(tmp_path / "t.csv", traces)
    assert read_traces(tmp_path / "t.csv") == traces and traces[1].iterations == 9


def one_by_one(lengths, slots, cost):
    waiting, running, total = list(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        total += cost(len(running))
        running = [n - 1 for n in running if n > 1]
    return total


@pytest.mark.parametrize("slots", [1, 4, 64])
def test_a_replay_costs_what_its_iterations_cost(slots):
    rng = np.random.default_rng(0)
    traces = [trace(rng.integers(0, 4, size=rng.integers(40, 400))) for _ in range(48)]
    clock = Measured(np.array([1.0, 64.0]), {3: np.array([1.0, 64.0**0.5])})  # the square root of B
    wanted = one_by_one([t.iterations for t in traces], slots, lambda batch: batch**0.5)
    assert seconds(traces, slots, clock, prompt=10.0) == pytest.approx(wanted, rel=0.02)
    speed = sum(t.tokens for t in traces) / wanted
    assert tokens_per_second(traces, slots, clock, prompt=10.0) == pytest.approx(speed, rel=0.02)


def test_contexts_are_in_tokens():
    seen = []

    def clock(batch, k, context):
        seen.append(context)
        return np.ones_like(batch)

    seconds([trace((3,) * 100)], 1, clock, prompt=50.0)
    assert seen[0][0, 0] == pytest.approx(50, abs=5) and seen[0][0, -1] == pytest.approx(450, abs=5)


def test_stretched_responses_take_as_much_longer():
    clock, traces = Measured(np.array([1.0, 8.0]), {3: np.ones(2)}), [trace((1,) * 50), trace((1,) * 100)]
    assert seconds(traces, 1, clock, 10.0, np.array([2.0, 3.0])) == pytest.approx(400)


def test_a_bootstrap_of_equal_rollouts_has_no_width():
    clock = Measured(np.array([1.0, 8.0]), {k: np.full(2, 1.0 + k) for k in (0, 3)})
    by_k = {3: [trace((3,) * 25)] * 4, 0: [trace((), 0, 100)] * 4}
    found = resampled(by_k, 2, clock, 10.0, draws=5)
    assert ratio(found[3], found[0]) == pytest.approx((1.0, 1.0, 1.0))  # four tokens an iteration that costs four


def test_runs_of_drafts_and_counts_are_inverse():
    for counts in itertools.product(range(4), repeat=3):
        assert accepted_counts([p for n in counts for p in (*range(1, n + 1), 0)]) == counts
