"""Which checkpoints are kept, what a resume gets back, and what a full disk and damaged files leave behind."""

import os
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.errors import InputError, RunFailed
from specrl_jax.io.checkpoint_reader import HostState
from specrl_jax.io.checkpoints import Checkpoints

STATE = {"w": jnp.arange(6.0)}
ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), STATE)


def run(workdir, accuracies, **keep):
    """Steps 1, 2, ... saved one after the other; those with a number had it measured."""
    checkpoints = Checkpoints(str(workdir), **keep)
    for step, accuracy in enumerate(accuracies, start=1):
        checkpoints.save(step, STATE, HostState({"step": step}, {}), accuracy=accuracy)
    checkpoints.close()
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


SEEN = [None, 0.5, None, 0.9, 0.7, None, 0.3, None]


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({"keep": 2}, [7, 8]),
        ({"keep": 1, "keep_best": 2}, [4, 5, 8]),
        ({"keep": 2, "keep_best": 1}, [4, 7, 8]),
    ],
)
def test_the_last_and_the_best_are_kept(tmp_path, keep, left):
    assert run(tmp_path, SEEN, **keep) == left


def test_what_was_best_before_a_restart_stays(tmp_path):
    assert run(tmp_path, [0.9, 0.1], keep=1, keep_best=1) == [1, 2]
    checkpoints = Checkpoints(str(tmp_path), 1, keep_best=1)
    checkpoints.save(3, STATE, HostState({}, {}), accuracy=0.5)
    checkpoints.close()
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [1, 3]


@pytest.mark.parametrize("arrays", [{}, {"tokens": np.arange(3, dtype=np.int32), "rollouts": np.ones(1, np.int64)}])
def test_state_and_host_come_back(tmp_path, arrays):
    values = {"position": {"next": 3}, "alarms": {"on": ["entropy"], "mismatch": 1e-7}}
    checkpoints = Checkpoints(str(tmp_path), 1)
    checkpoints.save(4, STATE, HostState(values, arrays))
    checkpoints.close()
    checkpoints = Checkpoints(str(tmp_path), 1)
    state, host = checkpoints.restore(checkpoints.latest(), ABSTRACT)
    checkpoints.close()
    np.testing.assert_array_equal(state["w"], STATE["w"])
    assert host.values == values and host.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(host.arrays[name], array)
        assert host.arrays[name].dtype == array.dtype


def test_a_disk_without_room_keeps_the_last(tmp_path, caplog, capfd):
    """Stood in for by the largest file that this process may write: 64 KiB, where a state has a MiB. One line says so:
    nothing is logged by orbax's threads.
    """
    checkpoints = Checkpoints(str(tmp_path), 2)
    checkpoints.save(1, STATE, HostState({}, {}))
    checkpoints.close()
    checkpoints = Checkpoints(str(tmp_path), 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, before[1]))
    try:
        with pytest.raises(RunFailed, match=r"checkpoints/2: File too large; the last good checkpoint is step 1"):
            checkpoints.save(2, {"w": jnp.asarray(np.random.default_rng(0).random(2**18))}, HostState({}, {}))
            checkpoints.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [record for record in caplog.records if "orbax" in record.pathname] and capfd.readouterr().err == ""
    again = Checkpoints(str(tmp_path), 2)
    assert again.latest() == 1
    np.testing.assert_array_equal(again.restore(1, ABSTRACT)[0]["w"], STATE["w"])
    # What was half written is in nobody's way.
    again.save(2, STATE, HostState({}, {}))
    again.close()
    assert Checkpoints(str(tmp_path), 2).latest() == 2


def test_another_shape_does_not_fit(tmp_path):
    run(tmp_path, [None], keep=1)
    checkpoints = Checkpoints(str(tmp_path), 1)
    with pytest.raises(InputError, match=r"checkpoints/1 does not fit this config"):
        checkpoints.restore(1, {"other": ABSTRACT["w"]})
    checkpoints.close()


# ---- damage

ARRAYS = {"tokens": np.arange(50, dtype=np.int64)}
LARGE = {"w": jnp.arange(4000.0).reshape(40, 100), "m": {"v": jnp.ones(7)}}
LARGE_ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), LARGE)


def at(step):
    return jax.tree.map(lambda x: x + step, LARGE)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A workdir with the checkpoints 7 and 8. Copy it before touching it."""
    workdir = tmp_path_factory.mktemp("two_steps")
    checkpoints = Checkpoints(str(workdir), 2)
    for step in (7, 8):
        checkpoints.save(step, at(step), HostState({"step": step}, ARRAYS), accuracy=step / 10)
    checkpoints.close()
    return workdir


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


DAMAGES = {
    "flipped": flip,
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "zeroed": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "deleted": lambda file: file.unlink(),
}
# Without these nothing can be read; orbax's other files are not needed.
NEEDED = ("digests/metadata", "values/metadata", "state/manifest.ocdbt")


def restored(workdir):
    """Return (step, lines said) of a resume, after checking that what it got is that step's."""
    said = []
    step, state, host = Checkpoints(str(workdir), 2).restore_latest(LARGE_ABSTRACT, said.append)
    jax.tree.map(np.testing.assert_array_equal, state, at(step))
    assert host.values == {"step": step}
    np.testing.assert_array_equal(host.arrays["tokens"], ARRAYS["tokens"])
    return step, said


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_any_file_is_named_or_does_not_matter(two_steps, tmp_path, damage):
    """A file is either needed, so the run goes on from the step before, or the values are right without it."""
    files = [path.relative_to(two_steps) for path in (two_steps / "checkpoints/8").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: (two_steps / path).stat().st_size)
    for i, file in enumerate(files):
        workdir = tmp_path / str(i)
        shutil.copytree(two_steps, workdir)
        DAMAGES[damage](workdir / file)
        step, said = restored(workdir)
        assert step == (7 if said else 8)
        if said:
            (line,) = said
            assert line.startswith("checkpoint 8 is damaged (") and line.endswith("; going on from 7")
            assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["7", "8.damaged"]
        name = str(file.relative_to("checkpoints/8"))
        assert said or not (name in NEEDED or file == largest or name.startswith("state/d/")), name


def test_the_step_of_a_damaged_checkpoint_is_saved_again(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    flip(tmp_path / "checkpoints/8/digests/metadata")
    checkpoints = Checkpoints(str(tmp_path), 1, keep_best=1)
    assert checkpoints.restore_latest(LARGE_ABSTRACT, lambda line: None)[0] == 7
    checkpoints.save(8, at(8), HostState({"step": 8}, ARRAYS), accuracy=0.1)
    checkpoints.close()
    # 7 is kept as the best: the accuracy of the damaged 8 does not count.
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["7", "8", "8.damaged"]
    assert restored(tmp_path) == (8, [])


def test_a_later_folder_without_a_checkpoint_is_skipped(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoints/9").mkdir()
    (tmp_path / "checkpoints/10/state").mkdir(parents=True)
    (tmp_path / "checkpoints/11").write_text("a file")
    (tmp_path / "checkpoints/notes").mkdir()
    step, said = restored(tmp_path)
    assert step == 8 and [line.split()[1] for line in said] == ["11", "10", "9"]
    assert restored(tmp_path) == (8, [])


def test_a_checkpoint_under_another_number_is_not_that_steps(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / "checkpoints/7", tmp_path / "checkpoints/9")
    step, said = restored(tmp_path)
    assert step == 8 and said[0].startswith("checkpoint 9 is damaged (digests: it is of step 7; kept as ")


def test_without_any_checkpoint_the_run_starts_anew(tmp_path):
    (tmp_path / "checkpoints/9").mkdir(parents=True)
    checkpoints, said = Checkpoints(str(tmp_path), 2), []
    assert checkpoints.restore_latest(LARGE_ABSTRACT, said.append) is None
    assert len(said) == 1 and said[0].endswith("going on from the start")
    checkpoints.save(9, STATE, HostState({}, {}))
    checkpoints.close()
    assert checkpoints.latest() == 9


def test_none_is_whole_only_where_none_is(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    for step in (7, 8):
        flip(tmp_path / f"checkpoints/{step}/values/metadata")
    checkpoints = Checkpoints(str(tmp_path), 2)
    with pytest.raises(RunFailed, match=r"no checkpoint is whole \(8: values: .*; 7: values: .*starts anew"):
        checkpoints.restore_latest(LARGE_ABSTRACT, print)
    with pytest.raises(RunFailed, match=r"checkpoints/8 is damaged \(values: "):
        checkpoints.restore(8, LARGE_ABSTRACT)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["7", "8"]


def test_a_part_is_verified_too(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    files = (path for path in (tmp_path / "checkpoints/8/state").rglob("*") if path.is_file())
    flip(max(files, key=lambda path: path.stat().st_size))
    said, part = [], {"w": LARGE_ABSTRACT["w"]}
    step, found = Checkpoints(str(tmp_path), 2).restore_part(None, part, said.append)
    np.testing.assert_array_equal(found["w"], LARGE["w"] + 7)
    assert step == 7 and said[0].startswith("checkpoint 8 is damaged (")
    with pytest.raises(RunFailed, match=r"checkpoints/8 is damaged"):
        Checkpoints(str(tmp_path), 2).restore_part(8, part, print)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda a: a | {"more": a["w"]}, "it has no more"),
        (lambda a: {"w": a["w"]}, "this config has no m/v"),
        (lambda a: a | {"w": jax.ShapeDtypeStruct((40, 99), a["w"].dtype)}, r"w is float32\[40, 100\] in it, float32"),
        (lambda a: a | {"w": jax.ShapeDtypeStruct((40, 100), np.int32)}, r"w is float32.* in it, int32\[40, 100\]"),
    ],
)
def test_another_model_is_no_damage(two_steps, change, named):
    with pytest.raises(InputError, match=rf"checkpoints/8 does not fit this config: {named}"):
        Checkpoints(str(two_steps), 2).restore_latest(change(LARGE_ABSTRACT), print)
    assert sorted(path.name for path in (two_steps / "checkpoints").iterdir()) == ["7", "8"]


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), 1)
    assert checkpoints.save(1, STATE, HostState({}, {})) == ""
    assert checkpoints.save(2, {"w": STATE["w"].at[3].set(jnp.nan)}, HostState({}, {})) == "w"
    assert checkpoints.kept() == "the last good checkpoint is step 1; the same command goes on from there"
    checkpoints.close()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]
