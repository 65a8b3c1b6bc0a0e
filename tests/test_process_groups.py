"""A copy of the rollout weights in several processes: which ones, and the tokens of one process."""

import json
import signal
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from specrl_jax.errors import InputError
from specrl_jax.process_groups import ALONE, ProcessGroups, find_groups
from specrl_jax.sharding import MESH_AXES
from tests.helpers.cluster import (
    AHEAD,
    RUN,
    SMALL,
    assert_equal_but_for_rounding,
    compared,
    output,
    run,
    start,
    started_run,
)

# ---- which processes


def mesh_of(owners, **sizes):
    """Return what `find_groups` reads of a mesh whose devices belong to these processes."""
    shape = {axis: sizes.get(axis, 1) for axis in MESH_AXES}
    devices = np.array([SimpleNamespace(process_index=i) for i in owners]).reshape(list(shape.values()))
    return SimpleNamespace(devices=devices, axis_names=MESH_AXES, shape=shape)


@pytest.mark.parametrize(
    ("owners", "sizes", "groups"),
    [
        ([0, 0, 1, 1], {"fsdp": 2, "tensor": 2}, ((0,), (1,))),
        ([0, 0, 1, 1], {"tensor": 4}, ((0, 1),)),
        ([0, 0, 1, 1], {"expert": 2, "tensor": 2}, ((0, 1),)),
        ([0, 0, 1, 1], {"tensor": 2, "sequence": 2}, ((0, 1),)),
        ([0, 0, 1, 1], {"fsdp": 4}, ((0,), (1,))),
        ([0, 1, 2, 3], {"fsdp": 2, "tensor": 2}, ((0, 1), (2, 3))),
        ([0, 2, 1, 3], {"fsdp": 2, "tensor": 2}, ((0, 2), (1, 3))),
        (
            np.repeat(range(3), 4),
            {"fsdp": 4, "tensor": 3},
            ((0, 1, 2),),
        ),  # rows of three devices cross processes of four
        (
            np.repeat(range(128), 4),
            {"fsdp": 16, "expert": 8, "tensor": 4},
            tuple(map(tuple, np.arange(128).reshape(16, 8))),
        ),
    ],
)
def test_processes_whose_devices_hold_whole_copies_are_a_group(owners, sizes, groups, monkeypatch):
    """The last one is configs/rlzero_235b_a22b.py on 128 nodes of four GPUs."""
    monkeypatch.setattr(jax, "process_count", lambda: max(owners) + 1)
    assert find_groups(mesh_of(owners, **sizes)).groups == groups


def test_one_process_is_a_group(monkeypatch):
    assert find_groups(mesh_of([0, 0], tensor=2)) == ALONE and ALONE.share(7) == (slice(0, 7), slice(0, 7))


def test_devices_that_lie_in_no_groups_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    with pytest.raises(InputError, match=r"mesh\.data=2, mesh\.fsdp=2: no groups of processes hold whole copies"):
        find_groups(mesh_of([0, 1, 2, 0], data=2, fsdp=2))


@pytest.mark.parametrize("groups", [((0,), (1,), (2,)), ((0, 1, 2),), ((0, 2), (1,)), ((0, 3), (1, 2))])
def test_all_processes_cover_everything_once(groups, monkeypatch):
    found, of_groups, all_groups = [], [], ProcessGroups(groups)
    for i in all_groups.order:
        monkeypatch.setattr(jax, "process_index", lambda i=i: i)
        share = all_groups.share(10)
        found += range(10)[share.own]
        assert list(range(10)[share.group][share.within]) == list(range(10)[share.own])
        of_groups += range(10)[share.group] if all_groups.own[0] == i else ()
    assert found == of_groups == list(range(10))


# ---- the same tokens: one process with the same mesh, devices and slots

PARITY = ["--config.rollout.parity=True"]
# tensor is split over the processes, each of which has rows of its own over sequence: sums of two parts, whose order
# does not matter. Sums of four or more are added in another order by gloo than within a process.
SPLIT = ["--config.mesh.tensor=2", "--config.mesh.sequence=2"]
# Slots for half of a step's rollouts.
REFILLS, SOON = ["--config.rollout.num_slots=8"], "chunk=4"
# Twelve pages a shard, of which each of its four rows may need six.
PARKS = ["--config.rollout.cache_gb=0.000031"]


def texts(folder, *names):
    """Return the samples of every step and every evaluation: these names of them, or all but how they were drafted."""
    kept = names or ("id", "prompt", "response", "tokens", "logprobs", "reward", "correct")
    files = sorted((*folder.glob("rollouts/*.jsonl"), *folder.glob("evaluations/*.jsonl")))
    assert files
    return {
        (file.parent.name, file.name): [
            {key: value for key, value in json.loads(line).items() if key in kept} for line in file.open()
        ]
        for file in files
    }


def both(tmp_path, *more, processes=2, devices=2, sizes=""):
    """Run one copy in several processes and in one; return the folders and metrics of both."""
    found = []
    for count in (processes, 1):
        folder = tmp_path / str(count)
        folder.mkdir()
        found.append((folder, run(folder, count, processes * devices // count, "--config.steps=3", *more, sizes=sizes)))
    return found


@pytest.mark.slow
def test_two_processes_that_hold_one_copy_are_one_process_to_the_last_bit(tmp_path):
    """Refills, parked rows, an eagle3 draft that learns, two updates a step: tokens, log-probs and all metrics."""
    settings = ["--config.policy.preset=nano", "--config.draft.kind=eagle3", *PARITY, *SPLIT, *REFILLS, *PARKS]
    (folder, rows), (other, expected) = both(tmp_path, *settings, sizes=f"{SOON},page=4")
    assert texts(folder) == texts(other)
    assert not [found for found in compared(rows, expected) if found[2] != found[3]]
    assert max(row["rollout/parked"] for row in rows[1:]) > 0


@pytest.mark.long
def test_whatever_drafts_the_controllers_choose(tmp_path):
    """By their clocks; the same in all processes, or they would wait for ever. Tokens are those of one fixed length.

    Not beside one process: with four fake devices its calibration stood still in XLA's collectives, in two runs of two.
    """
    settings, found = [*SMALL, *PARITY, *SPLIT, *REFILLS, "--config.draft.length=3"], []
    for adaptive in (True, False):
        (tmp_path / str(adaptive)).mkdir()
        run(tmp_path / str(adaptive), 2, 2, *settings, f"--config.draft.adaptive={adaptive}", sizes=SOON)
        found.append(texts(tmp_path / str(adaptive)))
    assert found[0] == found[1]


@pytest.mark.long
def test_experts_in_two_processes_and_batches_that_thin_out(tmp_path):
    """Without parity, so that the batch is compacted; of four devices, so that metrics are equal to rounding."""
    mesh = ["--config.mesh.tensor=2", "--config.mesh.expert=2", "--config.policy.preset=nano_moe"]
    (folder, rows), (other, expected) = both(tmp_path, *mesh, "--config.draft.kind=eagle3", sizes=SOON)
    assert texts(folder, "tokens") == texts(other, "tokens")
    assert_equal_but_for_rounding(rows, expected)


@pytest.mark.long
def test_two_copies_of_two_processes_each(tmp_path):
    """Of four processes with a device each; beside one process with two copies."""
    mesh = ["--config.mesh.fsdp=2", "--config.mesh.tensor=2"]
    (_, rows), (_, expected) = both(tmp_path, *SMALL, *mesh, *PARITY, processes=4, devices=1)
    assert_equal_but_for_rounding(rows, expected)


@pytest.mark.long
def test_asynchronously_on_devices_that_only_generate(tmp_path):
    """Of each process one device learns; evaluations borrow the other ones in turn with two processes' rollouts."""
    one_each = ["--config.pipeline.rollout_devices=1", "--config.mesh.tensor=2"]
    shared = [*SMALL, *AHEAD, *PARITY, "--config.eval.every=2"]
    several, one = tmp_path / "several", tmp_path / "one"
    several.mkdir(), one.mkdir()
    rows = run(several, 2, 2, *shared, *one_each)
    assert [row["rollout/lag"] for row in rows[1:]] == [0, 1, 1, 1, 1]
    expected = run(one, 1, 4, *shared, *one_each, "--config.pipeline.rollout_devices=2")
    assert texts(several) == texts(one)
    assert not [found for found in compared(rows, expected) if found[2] != found[3]]


@pytest.mark.long
def test_rollouts_that_begin_early_in_two_processes(tmp_path):
    """When they begin, give way to evaluations and end, the first process decides; which tokens come of it, nobody."""
    early = ["--config.pipeline.schedule=exact", "--config.mesh.tensor=2"]
    shared = [*early, *SMALL, *PARITY, "--config.eval.every=2", "--config.steps=4"]
    several, one = tmp_path / "several", tmp_path / "one"
    several.mkdir(), one.mkdir()
    run(several, 2, 2, *shared, "--config.pipeline.rollout_devices=1", sizes=SOON)
    run(one, 1, 4, *shared, "--config.pipeline.rollout_devices=2", sizes=SOON)
    assert texts(several) == texts(one)


@pytest.mark.long
@pytest.mark.parametrize("pipeline", ["sync", "async"])
def test_a_signal_to_the_second_process_of_a_copy_ends_both(pipeline, tmp_path):
    settings = {"sync": SPLIT, "async": [*AHEAD, "--config.pipeline.rollout_devices=1", "--config.mesh.tensor=2"]}
    started = started_run(tmp_path, *SMALL, *settings[pipeline], devices=2)
    started[1].send_signal(signal.SIGTERM)
    assert [process.wait(timeout=120) for process in started] == [143, 143]
    assert "the same command" in output(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mesh.tensor=2 pipeline.rollout_devices=3", "pipeline.rollout_devices=3: it must divide by mesh.tensor=2"),
        ("mesh.tensor=3", "pipeline.rollout_devices=1: it must divide by mesh.tensor=3 x mesh.expert=1"),
    ],
)
def test_copies_that_no_processes_can_hold_are_refused_in_one_line(override, message, tmp_path):
    overrides = [f"--config.{one}" for one in ("pipeline.rollout_devices=1", *override.split())]
    started = start([*RUN, *AHEAD, "--workdir", str(tmp_path), *overrides], 2, 4, tmp_path)
    assert [process.wait(timeout=120) for process in started] == [1, 1]
    for i in range(2):
        assert f"error: {message}" in output(tmp_path, i) and "Traceback" not in output(tmp_path, i)
