"""Runs of several processes on this machine: the numbers of one process, checkpoints, and processes that die."""

import json
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from specrl_jax import coordinator, distributed
from specrl_jax.io.metrics import read_metrics
from specrl_jax.serialize import to_bytes
from specrl_jax.sharding import make_mesh
from specrl_jax.training.initial import abstract_run_state
from specrl_jax.training.resume import open_checkpoints
from tests.helpers.cluster import (
    AHEAD,
    ASYNC,
    RUN,
    SMALL,
    STEPS,
    assert_equal_but_for_rounding,
    compared,
    output,
    run,
    start,
    started_run,
)
from tests.helpers.runs import ROOT, process_environment
from tests.helpers.training import make_run


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return folder, run(folder, 2, 4, *SMALL)


@pytest.mark.slow
def test_two_processes_learn_what_one_does(two, tmp_path):
    assert [row["step"] for row in two[1]] == list(range(STEPS + 1))
    assert_equal_but_for_rounding(two[1], run(tmp_path, 1, 8, *SMALL))


@pytest.mark.long
def test_a_repeat_is_equal_to_the_last_bit(two, tmp_path):
    differing = [found for found in compared(two[1], run(tmp_path, 2, 4, *SMALL)) if found[2] != found[3]]
    assert not differing


@pytest.mark.long
def test_four_processes_learn_what_two_do(two, tmp_path):
    assert_equal_but_for_rounding(two[1], run(tmp_path, 4, 2, *SMALL))


@pytest.mark.long
def test_asynchronous_rollouts_of_two_processes_are_those_of_one(tmp_path):
    """Generate one version ahead: on 2 of 4 devices in each of two processes, and on 4 of 8 in one."""
    several, one = tmp_path / "several", tmp_path / "one"
    several.mkdir(), one.mkdir()
    rows = run(several, 2, 4, *AHEAD)
    assert [row["rollout/lag"] for row in rows[1:]] == [0, 1, 1, 1, 1]
    assert_equal_but_for_rounding(rows, run(one, 1, 8, *AHEAD, "--config.pipeline.rollout_devices=4"))


@pytest.mark.long
def test_an_asynchronous_run_goes_on_with_the_rollouts_of_its_checkpoint(tmp_path):
    """Two processes from step 4 on, as if killed in step 5: bit-equal; one process takes the rollouts of both."""
    whole = tmp_path / "whole"
    whole.mkdir()
    rows = run(whole, 2, 4, *AHEAD)
    for count in (2, 1):
        resumed = tmp_path / f"by_{count}"
        shutil.copytree(whole, resumed)
        shutil.rmtree(resumed / f"checkpoints/{STEPS}")
        again = run(resumed, count, 4, *AHEAD)
        assert [row["rollout/lag"] for row in again[1:]] == [0, 1, 1, 1, 1]
        if count == 2:
            assert not [found for found in compared(rows, again) if found[2] != found[3]]
        assert_equal_but_for_rounding(rows, again)


@pytest.mark.slow
def test_only_the_first_process_writes_and_prints(two):
    assert "time of a step" in output(two[0], 0) and "time of a step" not in output(two[0], 1)
    assert len((two[0] / "metrics.jsonl").read_text().splitlines()) == STEPS + 1
    assert len((two[0] / "rollouts" / "step_1.jsonl").read_text().splitlines()) == 16


def restored(folder, sizes):
    with open(folder / "config.json") as file:
        config = ConfigDict(json.load(file)["config"])
    sizes = {"data": 1, "expert": 1, "tensor": 1} | sizes
    setup = make_run(config, make_mesh(sizes, jax.devices()[: np.prod(list(sizes.values()))]))
    checkpoints = open_checkpoints(setup.config, str(folder))
    state, host = checkpoints.restore(checkpoints.latest(), abstract_run_state(setup.learner))
    checkpoints.close()
    return jax.device_get(state), host.values


@pytest.mark.slow
def test_its_checkpoint_is_restored_on_any_mesh(two):
    one, many = restored(two[0], {"fsdp": 1}), restored(two[0], {"fsdp": 4, "tensor": 2})
    jax.tree.map(np.testing.assert_array_equal, one[0], many[0])
    assert int(one[0].policy.step) == STEPS and one[1] == many[1]


@pytest.mark.slow
def test_one_process_goes_on_where_two_stopped(two, tmp_path):
    shutil.copytree(two[0], tmp_path, dirs_exist_ok=True)
    rows = run(tmp_path, 1, 8, *SMALL, f"--config.steps={STEPS + 1}")
    assert rows[:-1] == two[1] and rows[-1]["step"] == STEPS + 1


@pytest.mark.slow
def test_a_killed_process_ends_the_run_within_a_minute(tmp_path):
    """Also while a thread generates beside the learner."""
    first, second = started_run(tmp_path, *AHEAD)
    second.send_signal(signal.SIGKILL)
    before = time.monotonic()
    assert first.wait(timeout=120) != 0
    assert time.monotonic() - before < 60
    assert "process 1 left: " in output(tmp_path) and "Traceback" not in output(tmp_path)
    assert read_metrics(str(tmp_path))[-1]["step"] >= 1


@pytest.mark.slow
def test_a_signal_to_one_saves_and_ends_all(tmp_path):
    started = started_run(tmp_path)
    started[1].send_signal(signal.SIGTERM)
    assert [process.wait(timeout=120) for process in started] == [143, 143]
    assert "is saved; the same command resumes" in output(tmp_path)
    assert [name for name in (tmp_path / "checkpoints").iterdir() if name.name.isdigit()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "override, message",
    [
        ("rollout.num_slots=15", "rollout.num_slots=15: it must divide by the 2 copies of several processes"),
        ("pipeline.rollout_devices=4", "pipeline.rollout_devices=4: of the 4 devices present one must learn"),
        (
            " ".join((*ASYNC, "pipeline.lag=0", "grpo.sampling_rounds=2")),
            "grpo.sampling_rounds=2: several processes would",
        ),
        ("task=evaluate", "task=evaluate is for one process, and there are 2"),
    ],
)
def test_several_processes_refuse_in_one_line(override, message, tmp_path):
    overrides = [f"--config.{one}" for one in override.split()]
    started = start([*RUN, "--workdir", str(tmp_path), *overrides], 2, 4, tmp_path)
    assert [process.wait(timeout=120) for process in started] == [1, 1]
    for i in range(2):
        assert f"error: {message}" in output(tmp_path, i) and "Traceback" not in output(tmp_path, i)


@pytest.mark.parametrize(
    "differing, message",
    [
        (
            "optimizer.learning_rate=0.5",
            "the processes of this run differ in optimizer.learning_rate: 0.001 in process 0; 0.5",
        ),
        pytest.param("steps=-1", "steps=-1: ", marks=pytest.mark.long),
        pytest.param("policy.path=checkpoints/nowhere", "differ in policy.path", marks=pytest.mark.long),
    ],
)
def test_what_is_wrong_in_one_process_ends_all_in_one_line(differing, message, tmp_path):
    """Before they touch a device: 0.5 in the second process trained one policy with the first's 1e-3."""
    own = ([], [f"--config.{differing}"])
    started = start([*RUN, "--workdir", str(tmp_path / "run")], 2, 1, tmp_path, own)
    assert [process.wait(timeout=120) for process in started] == [1, 1]
    for i in range(2):
        lines = output(tmp_path, i).splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], lines
    assert not (tmp_path / "run").exists()


def test_a_process_that_finds_no_other_ends_in_one_line():
    """jax would abort with a stack trace of C++."""
    code = "from specrl_jax import coordinator as d; d.JOIN_SECONDS = 1; d.initialize(False)"
    environment = process_environment() | dict(zip(coordinator.VARIABLES, ("localhost:1", "2", "1")))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: several processes") and done.stderr.count("\n") == 1, done.stderr
    assert "not all of 2 processes joined at localhost:1 within 1 s" in done.stderr


@pytest.mark.parametrize(
    "environment, listens",
    [
        (
            {"JAX_COORDINATOR_ADDRESS": "10.0.0.7:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
            "10.0.0.7:1234",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "10.0.0.7:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
            | {"JAX_COORDINATOR_BIND_ADDRESS": "[::]:1234"},
            "[::]:1234",
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[001-002]", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
            | {"SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"},
            "node001:61447",
        ),
    ],
    ids=["variables", "bind", "slurm"],
)
def test_the_coordinator_listens_on_its_address_alone(environment, listens, monkeypatch):
    """jax alone listens on every interface."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    given = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **known: given.update(known))
    coordinator.initialize(False)
    assert given["coordinator_bind_address"] == listens
    assert (given["num_processes"], given["process_id"]) == (2, 0)
    assert given["coordinator_address"] == (listens if listens != "[::]:1234" else "10.0.0.7:1234")


def test_a_missing_number_of_processes_is_said_in_one_line(monkeypatch):
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    with pytest.raises(coordinator.InputError, match=r"several processes \(JAX_COORDINATOR_ADDRESS"):
        coordinator.initialize(False)


def test_a_single_process_has_everything():
    assert distributed.all_gather_objects(str, "x") == ["x"]
    assert distributed.is_first_process()
    assert distributed.any_process(True) and not distributed.any_process(False)


def test_what_is_large_is_gathered_in_pieces(monkeypatch):
    """Two processes, of which the other one sends a longer text, through numpy in place of devices."""
    own, other = "a" * 100, "b" * 1000
    sent = []
    monkeypatch.setattr(distributed, "PIECE", 64)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    data = [np.frombuffer(to_bytes(text), np.uint8) for text in (own, other)]

    def gather(x):
        sent.append(x)
        if len(sent) == 1:
            return np.stack([x, divmod(len(data[1]), 64)])
        start = sum(map(len, sent[1:-1]))
        assert len(x) <= 64
        return np.stack([x, np.resize(data[1][start : start + len(x)], len(x))])

    monkeypatch.setattr(distributed, "_all_gather", gather)
    assert distributed.all_gather_objects(str, own) == [own, other]
    assert len(sent) == 1 + -(-len(data[1]) // 64)
