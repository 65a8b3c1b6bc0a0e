"""Rollouts ahead of the learner: which policy draws them, how far ahead, and what becomes of failures."""

import json
import shutil
import threading
import time

import jax
import numpy as np
import pytest

from configs import rlzero_tiny
from specrl_jax.errors import InputError, Stopped
from specrl_jax.io.checkpoint_reader import HostState
from specrl_jax.io.metrics import read_metrics
from specrl_jax.rollout.async_pipeline import Async
from specrl_jax.rollout.devices import Devices
from specrl_jax.rollout.generate import PrefetchedRollouts, RolloutBatch
from specrl_jax.rollout.pipeline import PREFETCHED, Sync, rollouts_of, with_rollouts
from specrl_jax.rollout.speculation import Speculation
from specrl_jax.rollout.stale.partial import NO_PARTIAL_ROLLOUTS
from specrl_jax.sharding import learner_devices, make_mesh
from specrl_jax.training import loop
from specrl_jax.training.build import prepare
from specrl_jax.training.initial import initial_state
from tests.helpers.long import long_but
from tests.helpers.rewards import FunctionScorer
from tests.helpers.training import StopAfter, lower_case, make_run, saved, train, untimed, with_config

LAST = 6
STEPS_TAKEN = range(1, LAST + 1)


class Recorder:
    """Stands in for generation: remembers which weights each step got, and how far ahead of the learner it was."""

    def __init__(self, fails_at=0, begins_early=False):
        self.used, self.ahead, self.learning, self.fails_at = {}, [], 0, fails_at
        self.begun, self.begins_early = [], begins_early

    def draw(self):
        return []

    def gather(self, batch):
        return batch

    def begin(self, step, policy, until):
        self.begun.append((step, policy))
        while not until():
            time.sleep(0.001)
        return False

    def generate(self, step, problems, policy, *, newer):
        if step == self.fails_at:
            raise ValueError("the engine broke")
        self.used[step] = policy
        self.ahead.append(step - self.learning)
        return RolloutBatch([], {"next": step}, {"generate": 0.0}, left=[NO_PARTIAL_ROLLOUTS])


def learn(produce, lag, first=1, last=LAST, patience=0.02):
    """Take steps first .. last from a pipeline whose weights are numbered by their step."""
    if lag is None:
        pipeline = Sync(produce, [])
    else:
        pipeline = Async(produce, lag, steps=range(first, last + 1), devices=Devices())
    taken = []
    try:
        for step in range(first, last + 1):
            produce.learning = step
            pipeline.draw()
            pipeline.publish(step, step)
            taken.append(pipeline.take(step).position["next"])
            time.sleep(patience)  # learning, in which the other thread goes as far as it may
    finally:
        pipeline.close()
    return taken


@pytest.mark.parametrize(("lag", "first"), [(None, 1), (0, 1), (1, 1), (2, 1), (4, 1), (2, 4)])
def test_each_step_is_drawn_by_the_policy_so_many_versions_back(lag, first):
    produce = Recorder()
    assert learn(produce, lag, first) == list(range(first, LAST + 1))
    assert produce.used == {step: max(step - (lag or 0), first) for step in range(first, LAST + 1)}


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_it_runs_ahead_as_far_as_the_lag_and_no_further(lag):
    produce = Recorder()
    learn(produce, lag)
    assert max(produce.ahead) == lag


def test_a_failure_surfaces_in_the_learner():
    with pytest.raises(ValueError, match="the engine broke"):
        learn(Recorder(fails_at=3), 1)


def test_it_ends_when_nothing_is_taken_any_more():
    """Closed while it waits for weights, and while what it made waits to be taken."""
    for steps in (0, 1):
        produce = Recorder()
        pipeline = Async(produce, 1, steps=STEPS_TAKEN, devices=Devices())
        if steps:
            pipeline.publish(1, 1)
            time.sleep(0.05)
        pipeline.close()
        assert "rollouts" not in [thread.name for thread in threading.enumerate()]


def test_it_waits_for_its_devices():
    devices, produce = Devices(), Recorder()
    with devices:
        pipeline = Async(produce, 1, steps=STEPS_TAKEN, devices=devices)
        pipeline.publish(1, 1)
        time.sleep(0.05)
        assert not produce.used
    pipeline.take(1)
    pipeline.close()


def test_what_begins_early_makes_way_for_an_evaluation_and_for_the_weights():
    """Under the policy before step 1 step 2 begins, pauses while others have the devices, and ends with its weights."""
    devices, produce = Devices(), Recorder(begins_early=True)
    pipeline = Async(produce, 0, steps=STEPS_TAKEN, devices=devices)
    pipeline.publish(1, 1)
    pipeline.take(1)
    time.sleep(0.05)
    with devices:
        assert produce.begun == [(2, 1)]
        time.sleep(0.05)
        assert produce.begun == [(2, 1)]
    time.sleep(0.05)
    assert produce.begun == [(2, 1)] * 2
    pipeline.publish(2, 2)
    pipeline.take(2)
    assert produce.used == {1: 1, 2: 2}
    pipeline.close()


def test_each_loan_of_the_devices_is_one_evaluation():
    """Two in a row take two loans, whoever wakes first: other processes count the loans too."""
    devices, had = Devices(), []

    def evaluate():
        for i in range(2):
            with devices:
                had.append(i)

    with devices:
        thread = threading.Thread(target=evaluate, daemon=True)
        thread.start()
        for loans in (1, 2):
            devices.lend()
            time.sleep(0.05)
            assert len(had) == loans
    thread.join(5)


class Turns:
    """Stands in for the agreement of two processes, of which the first decides."""

    def __init__(self):
        self.sent, self.read, self.changed = [], 0, threading.Condition()

    def first(self, *turn):
        with self.changed:
            self.sent.append(turn)
            self.changed.notify_all()
        return turn

    def second(self, *turn):
        self.read += 1
        number = self.read - 1
        with self.changed:
            self.changed.wait_for(lambda: len(self.sent) > number)
            return self.sent[number]


@pytest.mark.parametrize("lag", [0, 1])
def test_devices_of_two_processes_take_turns_in_one_order(lag):
    """Generation, early beginnings and evaluations, though each learner publishes and evaluates when it likes."""
    turns = Turns()
    logs = [], []

    class Logs(Recorder):
        def begin(self, step, policy, until):
            self.log.append(("begin", step, policy))
            return super().begin(step, policy, until)

        def generate(self, step, problems, policy, *, newer):
            self.log.append(("generate", step, policy))
            return super().generate(step, problems, policy, newer=newer)

    def learn(log, made, devices, pauses):
        for step in range(1, LAST + 1):
            time.sleep(next(pauses))
            made.publish(step, step)
            made.take(step)
            time.sleep(next(pauses))
            if step % 2 == 0:
                with devices:
                    log.append(("evaluate", step))
        made.close()

    threads = []
    for i, (log, agree) in enumerate(zip(logs, (turns.first, turns.second), strict=True)):
        devices, pauses = Devices(), iter(np.random.default_rng(i).uniform(0, 0.03, 2 * LAST))
        generation = Logs(begins_early=not lag)
        generation.log = log
        made = Async(generation, lag, steps=STEPS_TAKEN, devices=devices, agree=agree)
        threads.append(threading.Thread(target=learn, args=(log, made, devices, pauses), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), logs
    # After the last generation the devices are free.
    first, second = ([done for done in log if done[1:] != (LAST,)] for log in logs)
    assert first == second and ("evaluate", 2) in first and (lag or ("begin", 2, 1) in first)


ANEW = "start anew in another --workdir"


def test_a_checkpoint_keeps_prefetched_rollouts():
    prefetched = PrefetchedRollouts([RolloutBatch([], {}, {}, left=[])], [NO_PARTIAL_ROLLOUTS])
    host = with_rollouts(HostState({}, {}), prefetched)
    found = rollouts_of(host)
    assert found.batches == prefetched.batches and [left.problems for left in found.left] == [[]]
    del host.values[PREFETCHED]["batches"][0]["seconds"]
    with pytest.raises(InputError, match=f"another version .* wrote the host's state .*'seconds'.*{ANEW}"):
        rollouts_of(host)


# ---- interrupted runs: one learner and one rollout device, drafts copied from earlier answers to the same prompts

STEPS, EVERY = 5, 2
PROMPTS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(6)]  # a step takes four


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    config = rlzero_tiny.get_config("smoke")
    config.update({"steps": STEPS, "seed": 1})
    config.data.path = config.eval.path = str(file)
    config.policy.preset = "nano"
    config.draft.update({"kind": "ngram", "path": "", "history": 2, "compare_rounds": 0})
    config.grpo.correction = "token_truncate"
    config.rollout.update({"num_slots": 4, "temperature": 0.1})  # few programs; text that repeats
    config.optimizer.update({"learning_rate": 3e-3, "warmup": 0})
    config.checkpoint.update({"every": EVERY, "keep": 9})
    config.pipeline.update({"schedule": "async", "rollout_devices": 1})
    return make_run(config, make_mesh({}, jax.devices()[:1]), FunctionScorer(lower_case))


@pytest.fixture(autouse=True)
def no_evaluation(request, monkeypatch):
    if "toy" in request.fixturenames:  # its programs take longer to compile than the run
        monkeypatch.setattr(loop, "evaluation_metrics", lambda *_, **__: {})


def same_run(setup, workdir, other):
    assert untimed(read_metrics(str(workdir))) == untimed(read_metrics(str(other)))
    (state, host), (expected, expected_host) = saved(setup, workdir, STEPS), saved(setup, other, STEPS)
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert host == expected_host
    for step in range(1, STEPS + 1):
        name = f"rollouts/step_{step}.jsonl"
        assert (workdir / name).read_text() == (other / name).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("lag", long_but([2], [1, 2]))
def test_a_killed_run_ends_like_the_whole_one(toy, lag, tmp_path, monkeypatch):
    setup, whole, known = with_config(toy, pipeline={"lag": lag}), tmp_path / "whole", []

    def as_of(speculation, observed, real=Speculation.as_of):
        if threading.current_thread().name == "rollouts":
            known.append(observed)
        return real(speculation, observed)

    monkeypatch.setattr(Speculation, "as_of", as_of)
    rows = train(setup, whole)[1:]
    assert known == [max(row["step"] - 1 - lag, 0) for row in rows]  # drafts know as much as the policy
    assert [row["rollout/lag"] for row in rows] == [min(row["step"] - 1, lag) for row in rows]
    assert all(row["policy/grad_norm"] > 0 for row in rows) and sum(row["spec/accepted"] for row in rows[2:]) > 0

    killed = tmp_path / "killed"
    shutil.copytree(whole, killed)
    for step in (4, 5):
        shutil.rmtree(killed / f"checkpoints/{step}")
    train(setup, killed)
    same_run(setup, killed, whole)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [1, 2])
def test_a_run_stopped_by_a_signal_saves_what_it_can_without_waiting(toy, lag, tmp_path):
    """Stopped in different phases, before its first checkpoint and after: it says what is kept."""
    setup, whole, stopped = with_config(toy, pipeline={"lag": lag}), tmp_path / "whole", tmp_path / "stopped"
    train(setup, whole)
    for looks in (9, 2, 7, 0):
        with pytest.raises(Stopped) as left:
            train(setup, stopped, StopAfter(looks))
        kept = max((int(path.name) for path in (stopped / "checkpoints").iterdir()), default=None)
        said = "starts anew" if kept is None else f"step {kept}"
        assert said in str(left.value)
    train(setup, stopped)
    same_run(setup, stopped, whole)


# ---- whole runs on six learner and two rollout devices


def run_of(**pipeline):
    config = rlzero_tiny.get_config("smoke")
    config.update({"steps": 4, "seed": 1})
    config.grpo.update({"prompts_per_step": 3, "group_size": 4, "correction": "token_truncate"})
    config.draft.update({"compare_rounds": 0, "history": 0})
    config.eval.update({"problems": 4, "every": 2})
    config.optimizer.update({"learning_rate": 3e-3, "warmup": 0})
    config.checkpoint.update({"every": 2, "keep": 9})
    config.pipeline.update({"rollout_devices": 2} | pipeline)
    config.mesh.update({"fsdp": 2, "data": 3})
    mesh = make_mesh(config.mesh.to_dict(), learner_devices(2))
    return make_run(config, mesh, FunctionScorer(lower_case))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return (run, workdir, rows) of each mode; one run's compiled functions serve all."""
    found, first = {}, None
    for name, settings in {
        "sync": {"schedule": "sync"},
        "lag 0": {"schedule": "async", "lag": 0},
        "lag 1": {"schedule": "async", "lag": 1},
    }.items():
        run = with_config(first, pipeline=settings) if first else run_of(**settings)
        first, workdir = first or run, tmp_path_factory.mktemp("pipeline")
        found[name] = run, workdir, train(run, workdir)
    return found


@pytest.mark.slow
def test_generation_has_its_own_devices(runs):
    setup = runs["sync"][0]
    weights, _ = prepare(setup.learner, setup.rollout, initial_state(setup.learner))
    assert {d for leaf in jax.tree.leaves(weights) for d in leaf.devices()} == set(jax.devices()[-2:])
    learner = {d for leaf in jax.tree.leaves(initial_state(setup.learner).policy) for d in leaf.devices()}
    assert learner == set(jax.devices()[:6])


@pytest.mark.slow
def test_without_lag_it_is_the_synchronous_run_to_the_last_bit(runs):
    setup, workdir, rows = runs["lag 0"]
    assert untimed(rows) == untimed(runs["sync"][2])
    for got, expected in zip(saved(setup, workdir, 4), saved(setup, runs["sync"][1], 4)):
        jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.slow
def test_rollouts_are_as_old_as_the_lag_and_no_older(runs):
    rows, lag = runs["lag 1"][2][1:], 1
    assert [row["rollout/lag"] for row in rows] == [min(row["step"] - 1, lag) for row in rows]
    # The first step is everybody's; then older policies draw, and the correction sees it.
    assert rows[0]["reward/mean"] == runs["sync"][2][1]["reward/mean"]
    assert rows[0]["rollout_vs_learner/logprob_abs_max"] < 1e-4 < rows[-1]["rollout_vs_learner/logprob_abs_max"]
    assert rows[0]["policy/correction"] == pytest.approx(1, abs=1e-5)
    for row in rows:
        assert row["time/exposed_generation"] >= 0 and row["time/idle_rollout"] >= 0


@pytest.mark.slow
def test_the_draft_learns_again_while_the_learner_waits_for_rollouts(runs, tmp_path):
    """How often depends on the clock; every update is counted, none is beyond the bound, and no step is lost."""
    replay = {"replay_updates": 2}
    rows = train(with_config(runs["lag 0"][0], draft=replay), tmp_path)[1:]
    further = [row["draft/replay_updates"] for row in rows]
    # With no lag the learner waits in every step; before the first there are no texts.
    assert further[0] == 0 and max(further) <= 2 and sum(further) > 0
    assert [row["draft/version"] for row in rows] == [step + sum(further[:step]) for step in range(1, 5)]
    assert all(np.isfinite(row["draft/loss"]) for row in rows)


@pytest.mark.slow
def test_a_run_resumes_with_the_data_that_was_not_learnt_from(runs, tmp_path):
    """Stopped in step 3, whose prompts and those of step 4 had been drawn: both are drawn again."""
    setup = runs["lag 1"][0]
    with pytest.raises(Stopped):
        train(setup, tmp_path, StopAfter(9))
    train(setup, tmp_path)
    assert [row["step"] for row in read_metrics(str(tmp_path))] == [0, 1, 2, 3, 4]

    def prompts(workdir):
        return [
            {line.split('"prompt": ')[1].split(",")[0] for line in (workdir / f"rollouts/step_{i}.jsonl").open()}
            for i in (1, 2, 3, 4)
        ]

    assert prompts(tmp_path) == prompts(runs["lag 1"][1])


def test_a_device_must_be_left_to_learn():
    with pytest.raises(InputError, match=r"pipeline\.rollout_devices=8"):
        learner_devices(8)
