"""In-flight weight updates: running rollouts take new weights, each token says whose it is, a record repeats a run."""

import itertools
import json
import threading
import time

import jax
import numpy as np
import pytest

from specrl_jax.errors import InputError
from specrl_jax.io.metrics import read_metrics
from specrl_jax.rollout.async_pipeline import Async
from specrl_jax.rollout.devices import Devices
from specrl_jax.rollout.stale.inflight import WeightUpdates
from tests.helpers.training import assert_refused, saved, train, untimed
from tests.rollout.stale.test_exact import STEPS, forget, no_evaluation, run_of
from tests.rollout.test_pipeline import Recorder

assert no_evaluation  # a fixture of every test
RECORD = "weight_updates_0.jsonl"


def alone(value):
    return (value,)


def lines(path):
    return [json.loads(line) for line in open(path)]


def test_the_newest_weights_are_taken_and_written_down_and_taken_there_again(tmp_path):
    once, again = tmp_path / "once", tmp_path / "again"
    once.mkdir(), again.mkdir()
    choose = WeightUpdates(str(once), "", 1, agree=alone).of(3, 1)
    assert [choose(newest) for newest in (1, 1, 2, 2, 3)] == [1, 1, 2, 2, 3]
    assert lines(once / RECORD) == [{"step": 3, "chunk": 2, "policy": 2}, {"step": 3, "chunk": 4, "policy": 3}]
    choose = WeightUpdates(str(again), str(once), 1, agree=alone).of(3, 1)
    assert [choose(newest) for newest in (3, 3, 3, 3, 3)] == [1, 1, 2, 2, 3]
    assert lines(again / RECORD) == lines(once / RECORD)
    # A resumed run writes anew what it generates anew.
    WeightUpdates(str(once), "", 3, agree=alone)
    assert lines(once / RECORD) == []


def test_a_damaged_record_is_refused_in_one_line(tmp_path):
    (tmp_path / RECORD).write_text('{"step": 1, "chunk": "x", "policy": 1}\n')
    with pytest.raises(InputError, match=RECORD + ":1: chunk="):
        WeightUpdates(str(tmp_path / "no"), str(tmp_path), 1, agree=alone)


def test_a_step_begins_though_the_one_before_has_released_its_oldest_policy(tmp_path):
    """Step 2 takes policy 2 in flight; step 3 might still have begun under policy 1, and no other comes before it."""
    begun = threading.Event()

    class InFlight(Recorder):
        def generate(self, step, problems, policy, *, newer):
            if step == 2:
                begun.set()
            while step == 2 and newer() is None:
                time.sleep(0.001)
            return super().generate(step, problems, policy, newer=newer)

    updates = WeightUpdates(str(tmp_path), "", 1, agree=alone)
    generation = InFlight()
    pipeline = Async(generation, 2, steps=range(1, 4), devices=Devices(), updates=updates)
    pipeline.publish(1, 1)
    assert begun.wait(10)
    pipeline.publish(2, 2)
    pipeline.take(2)
    ends = time.monotonic() + 10
    while not pipeline.ready(3) and time.monotonic() < ends:
        time.sleep(0.001)
    pipeline.close()
    assert generation.used == {1: 1, 2: 1, 3: 2}


def in_flight(folder, **pipeline):
    changes = {
        "pipeline": {"schedule": "inflight", "lag": 2} | pipeline,
        "grpo": {"correction": "token_truncate"},
        "rollout": {"num_slots": 4, "max_response_tokens": 48},
        "draft": {"adaptive": False},
    }
    return run_of(folder, "sync", changes=changes, chunk=1)


@pytest.fixture
def learning_is_fast(monkeypatch):
    """Rollouts of step 3 and later ones wait in their tenth chunk for newer weights: the learner compiles for long."""
    in_flight, own = Async._in_flight, Async._own

    def waiting(self, step):
        with self._changed:
            self.learner_waits_for = step
            self._changed.notify_all()
        return own(self, step)

    def patient(self, step, policy):
        current, newer = in_flight(self, step, policy)
        chunks = itertools.count(1)

        def wait():
            if next(chunks) == 10 and step > 2 and current < STEPS:
                with self._changed:
                    self._changed.wait_for(
                        lambda: max(self._published) > current or getattr(self, "learner_waits_for", 0) >= step, 60
                    )
            return newer()

        return current, wait

    monkeypatch.setattr(Async, "_own", waiting)
    monkeypatch.setattr(Async, "_in_flight", patient)


def texts_of(workdir):
    return [json.loads(x) for step in range(1, STEPS + 1) for x in open(workdir / f"rollouts/step_{step}.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_a_run_is_repeated_to_the_last_bit_from_its_record_and_over_a_kill(recompute, tmp_path, learning_is_fast):
    for name in ("once", "again"):
        (tmp_path / name).mkdir()
    run, workdir = in_flight(tmp_path / "once", recompute_cache=recompute), tmp_path / "once/run"
    rows = train(run, workdir)[1:]
    record = lines(workdir / RECORD)
    assert sum(update["chunk"] > 0 for update in record) >= 2
    assert 0 < max(row["rollout/token_lag"] for row in rows) <= 2
    assert all(row["rollout/lag"] <= 2 for row in rows)
    other = tmp_path / "again/run"
    repeated = in_flight(tmp_path / "again", recompute_cache=recompute, repeat=str(workdir))
    train(repeated, other)
    assert lines(other / RECORD) == record

    def assert_same():
        assert untimed(read_metrics(str(other))) == untimed(read_metrics(str(workdir)))
        assert texts_of(other) == texts_of(workdir)
        jax.tree.map(np.testing.assert_array_equal, saved(repeated, other, STEPS)[0], saved(run, workdir, STEPS)[0])

    assert_same()
    forget(other, 4, 5)
    train(repeated, other)
    assert_same()


WRONG = [
    ({"pipeline": {"schedule": "inflight"}}, r"pipeline\.schedule=inflight: either pipeline\.rollout_devices"),
    (
        {"pipeline": {"recompute_cache": True}},
        r"pipeline\.recompute_cache=True beside pipeline\.schedule=sync: it is for inflight",
    ),
    (
        {"pipeline": {"schedule": "inflight", "rollout_devices": 1}},
        r"grpo\.correction=none: other policies .*pipeline\.schedule=inflight",
    ),
    (
        {
            "pipeline": {"schedule": "inflight", "rollout_devices": 1, "repeat": "x"},
            "grpo": {"correction": "token_mask", "old_logprobs": "learner"},
            "draft": {"adaptive": True},
        },
        r"draft\.adaptive=True beside pipeline\.schedule=inflight: .*pipeline\.repeat",
    ),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_what_does_not_go_together_is_refused_in_one_line(changes, said):
    assert_refused(changes, said)
