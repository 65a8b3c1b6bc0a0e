"""One run of several processes on this machine: the numbers of one process, checkpoints, and processes that die."""

import itertools
import json
import shutil
import signal
import time

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from specrl_jax import distributed
from specrl_jax.config import from_config_dict
from specrl_jax.io.metrics import read_metrics
from specrl_jax.sharding import make_mesh
from specrl_jax.training.build import build
from tests.helpers.cluster import output, start

RUN = ["--config", "configs/rlzero_tiny.py:smoke", "--config.draft.adaptive=False", "--config.draft.compare_rounds=0"]
RUN += ["--config.reward.name=tests.helpers.rewards:length", "--config.optimizer.learning_rate=1e-3"]
# Tokens that do not hang on rounding, two updates a step, a head that learns.
RUN += ["--config.rollout.rule=coupled", "--config.grpo.minibatches=2", "--config.checkpoint.every=2"]
# As little to compile as there can be.
RUN += ["--config.draft.length=1", "--config.draft.ttt_steps=1", "--config.eval.problems=4"]
STEPS = 5
ASYNC = ("pipeline.mode=async", "pipeline.rollout_devices=2")
AHEAD = [f"--config.{setting}" for setting in (*ASYNC, "pipeline.lag=1", "grpo.correction=token_truncate")]
# What the clock and the memory say, and differences of numbers that are equal but for rounding.
NOT_EQUAL = ("time/", "perf/", "rollout/tokens_per_second", "draft/seconds", "mismatch/")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("JAX_PLATFORMS", "cpu")
        yield


def run(folder, count, devices, *more):
    """Rows of a run of `count` processes."""
    started = start([*RUN, "--workdir", str(folder), f"--config.steps={STEPS}", *more], count, devices, folder)
    assert [process.wait(timeout=300) for process in started] == [0] * count, output(folder)
    return read_metrics(str(folder))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return folder, run(folder, 2, 4)


def compared(rows, others):
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        yield from ((row["step"], key, row[key], other[key]) for key in row if not key.startswith(NOT_EQUAL))


def test_two_processes_learn_what_one_does(two, tmp_path):
    """To 1e-6 of their size, or of 1: losses are differences of terms of that size."""
    assert [row["step"] for row in two[1]] == list(range(STEPS + 1))
    for step, key, value, expected in compared(two[1], run(tmp_path, 1, 8)):
        allowed = 1e-6 * max(abs(expected), 1)
        assert value == pytest.approx(expected, rel=0, abs=allowed), (step, key)


def test_a_repeat_is_equal_to_the_last_bit(two, tmp_path):
    differing = [found for found in compared(two[1], run(tmp_path, 2, 4)) if found[2] != found[3]]
    assert not differing


def test_four_processes_are_two(two, tmp_path):
    for step, key, value, expected in compared(two[1], run(tmp_path, 4, 2)):
        allowed = 1e-6 * max(abs(expected), 1)
        assert value == pytest.approx(expected, rel=0, abs=allowed), (step, key)


def test_rollouts_beside_the_learner_are_those_of_one_process(tmp_path):
    """One version ahead, on as many devices of their own, and the learner on four: 2 x (2 + 2) against 1 x (4 + 4)."""
    several, one = tmp_path / "several", tmp_path / "one"
    several.mkdir(), one.mkdir()
    rows = run(several, 2, 4, *AHEAD)
    assert [row["rollout/lag"] for row in rows[1:]] == [0, 1, 1, 1, 1]
    others = run(one, 1, 8, *AHEAD, "--config.pipeline.rollout_devices=4")
    for step, key, value, expected in compared(rows, others):
        allowed = 1e-6 * max(abs(expected), 1)
        assert value == pytest.approx(expected, rel=0, abs=allowed), (step, key)


def test_only_the_first_process_writes_and_prints(two):
    assert "median step" in output(two[0], 0) and "median step" not in output(two[0], 1)
    assert len((two[0] / "metrics.jsonl").read_text().splitlines()) == STEPS + 1
    assert len((two[0] / "rollouts" / "step_1.jsonl").read_text().splitlines()) == 16


def restored(folder, sizes):
    with open(folder / "config.json") as file:
        config = ConfigDict(json.load(file)["config"])
    sizes = {"data": 1, "expert": 1, "tensor": 1} | sizes
    setup = build(from_config_dict(config), make_mesh(sizes, jax.devices()[: np.prod(list(sizes.values()))]))
    checkpoints = setup.open_checkpoints(str(folder))
    state, host = checkpoints.restore(checkpoints.latest(), setup.abstract_state())
    checkpoints.close()
    return jax.device_get(state), host.values


def test_its_checkpoint_is_restored_on_any_mesh(two):
    one, many = restored(two[0], {"fsdp": 1}), restored(two[0], {"fsdp": 4, "tensor": 2})
    jax.tree.map(np.testing.assert_array_equal, one[0], many[0])
    assert int(one[0].policy.step) == STEPS and one[1] == many[1]


def test_one_process_goes_on_where_two_stopped(two, tmp_path):
    shutil.copytree(two[0], tmp_path, dirs_exist_ok=True)
    rows = run(tmp_path, 1, 8, f"--config.steps={STEPS + 1}")
    assert rows[:-1] == two[1] and rows[-1]["step"] == STEPS + 1


def started_run(folder, *more):
    """Two processes that have done a step of very many."""
    endless = ["--config.steps=100000", "--config.eval.every=0"]
    found = start([*RUN, "--workdir", str(folder), *endless, *more], 2, 4, folder)
    for _ in itertools.takewhile(lambda _: "step 1 " not in output(folder), range(6000)):
        assert all(process.poll() is None for process in found), output(folder)
        time.sleep(0.1)
    return found


def test_a_killed_process_ends_the_run_within_a_minute(tmp_path):
    """One that generates in a thread beside the learner, as it would in the learner's turn."""
    first, second = started_run(tmp_path, *AHEAD)
    second.send_signal(signal.SIGKILL)
    before = time.monotonic()
    assert first.wait(timeout=120) != 0
    assert time.monotonic() - before < 60
    assert read_metrics(str(tmp_path))[-1]["step"] >= 1


def test_a_signal_to_one_saves_and_ends_all(tmp_path):
    started = started_run(tmp_path)
    started[1].send_signal(signal.SIGTERM)
    assert [process.wait(timeout=120) for process in started] == [143, 143]
    assert "is saved; the same command resumes" in output(tmp_path)
    assert [name for name in (tmp_path / "checkpoints").iterdir() if name.name.isdigit()]


@pytest.mark.parametrize(
    "override, message",
    [
        ("rollout.num_slots=15", "rollout.num_slots=15 must divide by the 2 processes"),
        ("mesh.tensor=8", "mesh.tensor=8: rollouts read it within a process, which has 4 devices"),
        ("pipeline.rollout_devices=4", "pipeline.rollout_devices=4: of the 4 devices present one must learn"),
        (
            " ".join((*ASYNC, "pipeline.lag=0", "grpo.sampling_rounds=2")),
            "grpo.sampling_rounds=2: several processes would",
        ),
        ("task=evaluate", "task=evaluate is for one process, and there are 2"),
    ],
)
def test_what_several_cannot_do_is_said_in_one_line(override, message, tmp_path):
    overrides = [f"--config.{one}" for one in override.split()]
    started = start([*RUN, "--workdir", str(tmp_path), *overrides], 2, 4, tmp_path)
    assert [process.wait(timeout=120) for process in started] == [1, 1]
    for i in range(2):
        assert f"error: {message}" in output(tmp_path, i) and "Traceback" not in output(tmp_path, i)


def test_a_missing_number_of_processes_is_said_in_one_line(monkeypatch):
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    with pytest.raises(distributed.InputError, match=r"several processes \(JAX_COORDINATOR_ADDRESS"):
        distributed.initialize(False)


def test_a_single_process_has_everything():
    assert (
        distributed.process_slice(7) == slice(0, 7)
        and distributed.all_gather_objects("x") == ["x"]
        and distributed.is_first_process()
    )
    assert distributed.any_process(True) and not distributed.any_process(False)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_shares_are_parts_of_the_whole(count, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: count)
    found = []
    for i in range(count):
        monkeypatch.setattr(jax, "process_index", lambda i=i: i)
        found += list(range(10))[distributed.process_slice(10)]
    assert found == list(range(10))
