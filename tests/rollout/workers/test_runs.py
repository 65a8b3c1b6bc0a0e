"""A run whose rollouts workers generate, in processes of their own, is the run that generates them itself."""

import itertools
import os
import signal
import time

import pytest

from specrl_jax.io.metrics import read_metrics
from tests.helpers.cluster import RUN, SMALL, assert_equal_but_for_rounding, compared, output, start

# One shape of a forward whatever is in the batch.
PARITY = [*RUN, *SMALL, "--config.rollout.parity=True"]
SHARED = [*PARITY, "--config.steps=40", "--config.checkpoint.every=10", "--config.pipeline.schedule=async"]
SHARED += ["--config.pipeline.lag=1", "--config.grpo.correction=token_truncate"]
WORKERS = ["--config.pipeline.workers=2"]
OF_WORKERS = ("rollout/worker", "time/weights")
EARLY = ["--config.pipeline.schedule=exact", "--config.pipeline.lag=1"]
# How rollouts came about that began early.
OF_EARLY = ("spec/", "rollout/reverified", "alarm/", "rollout/parked")


def fleet(folder, workers=2, more=(), processes=1, shared=SHARED):
    """Start a learner and its workers; output_I.log is the learner's, worker_I/output_0.log the others'."""
    arguments = [*shared, *WORKERS, *more, "--workdir", str(folder)]
    found = start(arguments, processes, 1, folder)
    for i in range(workers):
        (folder / f"worker_{i}").mkdir(exist_ok=True)
        found += start([*arguments, "--config.task=rollout"], 1, 1, folder / f"worker_{i}")
    return found


def wait_for(text, folder, processes):
    for _ in itertools.takewhile(lambda _: text not in output(folder), range(6000)):
        assert processes[0].poll() is None, output(folder)
        time.sleep(0.1)


def ended(folder, processes):
    """Wait for all; return the metrics rows and whether each process ended well."""
    try:
        codes = [process.wait(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return read_metrics(str(folder)), codes


def without(rows, names):
    return [{key: value for key, value in row.items() if not key.startswith(names)} for row in rows]


def assert_equal(rows, others):
    kept = without(rows, OF_WORKERS)
    for step, key, value, expected in compared(kept, others):
        assert value == expected, (step, key)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The rows of the run that generates on a device of its own."""
    folder = tmp_path_factory.mktemp("alone")
    rows, codes = ended(
        folder, start([*SHARED, "--config.pipeline.rollout_devices=1", "--workdir", str(folder)], 1, 2, folder)
    )
    assert codes == [0], output(folder)
    return rows


@pytest.mark.slow
def test_two_workers_draw_the_tokens_of_one_process(alone, tmp_path):
    rows, codes = ended(tmp_path, fleet(tmp_path))
    assert codes == [0, 0, 0], output(tmp_path)
    assert_equal(rows, alone)
    assert all(row["rollout/workers"] == 2 and row["time/weights"] > 0 for row in rows if row["step"])


@pytest.mark.slow
def test_workers_that_begin_rollouts_early_make_the_synchronous_run(tmp_path):
    """Under `exact`: two workers draw on while the learner learns, and verify what they have under its new weights."""
    early, one = tmp_path / "early", tmp_path / "one"
    early.mkdir(), one.mkdir()
    shared = [*PARITY, "--config.steps=12"]
    rows, codes = ended(early, fleet(early, more=EARLY, shared=shared))
    assert codes == [0, 0, 0], output(early)
    others, codes = ended(one, start([*shared, "--workdir", str(one)], 1, 1, one))
    assert codes == [0], output(one)
    assert_equal(without(rows, OF_EARLY), without(others, OF_EARLY))
    kept = [row["rollout/reverified"] for row in rows if row["step"]]
    assert kept[0] == 0 and 0 < min(kept[1:]) < 1


@pytest.mark.long
def test_a_learner_of_two_processes(tmp_path):
    """Each has half of every weight, and both halves reach the workers; against one process with a device more."""
    several, one = tmp_path / "several", tmp_path / "one"
    several.mkdir(), one.mkdir()
    split = ["--config.mesh.fsdp=2", "--config.steps=12"]
    rows, codes = ended(several, fleet(several, more=split, processes=2))
    assert codes == [0, 0, 0, 0], output(several) + output(several, 1)
    shared = [*SHARED, *split, "--config.pipeline.rollout_devices=1", "--workdir", str(one)]
    others, codes = ended(one, start(shared, 1, 3, one))
    assert codes == [0], output(one)
    kept = without(rows, OF_WORKERS)
    assert_equal_but_for_rounding(kept, others)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_run_is_the_same_where_workers_come_and_one_is_killed_or_hangs(alone, tmp_path, how):
    """It begins with the first of three, which is killed, or stopped for good: noticed after a minute."""
    processes = fleet(tmp_path, workers=3, more=["--config.pipeline.workers=1"])
    wait_for("step 1/", tmp_path, processes)
    first = output(tmp_path).split("rollout worker ")[1].split()[0]
    os.kill(int(first.split(":")[1]), how)
    processes[0].wait(timeout=600)
    os.kill(int(first.split(":")[1]), signal.SIGKILL)  # a zombie, unless it was stopped
    rows, codes = ended(tmp_path, processes)
    assert codes[0] == 0 and sorted(codes[1:]) == [-signal.SIGKILL, 0, 0], output(tmp_path)
    why = "left" if how == signal.SIGKILL else "has not answered within 60 s"
    assert f"rollout worker {first} {why}; others do its rollouts" in output(tmp_path)
    assert_equal(rows, alone)


@pytest.mark.long
def test_workers_wait_for_a_learner_that_was_killed(alone, tmp_path):
    """From the checkpoint after step 10 the same command makes the same run, with the same workers."""
    learner, *workers = fleet(tmp_path)
    wait_for("step 12/", tmp_path, [learner])
    learner.send_signal(signal.SIGKILL)
    learner.wait()
    arguments = [*SHARED, *WORKERS, "--workdir", str(tmp_path)]
    rows, codes = ended(tmp_path, [*start(arguments, 1, 1, tmp_path), *workers])
    assert codes == [0, 0, 0], output(tmp_path)
    assert_equal(rows, alone)


@pytest.mark.slow
def test_a_worker_of_another_config_ends_in_one_line(tmp_path):
    learner, worker = fleet(tmp_path, workers=1, more=["--config.pipeline.workers=1"])
    (tmp_path / "other").mkdir()
    wait_for("is there", tmp_path, [learner])
    arguments = [*SHARED, "--workdir", str(tmp_path), "--config.pipeline.workers=1", "--config.task=rollout"]
    (refused,) = start([*arguments, "--config.rollout.temperature=0.5"], 1, 1, tmp_path / "other")
    assert refused.wait(timeout=120) == 1
    said = output(tmp_path / "other")
    assert "refuses this worker: it differs in rollout.temperature: 0.5, and the learner has 1.0" in said
    assert ended(tmp_path, [learner, worker])[1] == [0, 0], output(tmp_path)
