"""Which checkpoints are kept, what a resume gets back, and what a disk that refuses leaves behind."""

import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.errors import InputError, RunFailed
from specrl_jax.io.checkpoints import Checkpoints, HostState

STATE = {"w": jnp.arange(6.0)}
ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), STATE)


def run(workdir, accuracies, **keep):
    """Steps 1, 2, ... saved one after the other; those with a number had it measured."""
    checkpoints = Checkpoints(str(workdir), **keep)
    for step, accuracy in enumerate(accuracies, start=1):
        checkpoints.save(step, STATE, HostState({"step": step}, {}), accuracy)
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
    checkpoints.save(3, STATE, HostState({}, {}), 0.5)
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


def test_a_disk_without_room_keeps_the_last(tmp_path):
    """Stood in for by the largest file that this process may write: 64 KiB, where a state has a MiB."""
    checkpoints = Checkpoints(str(tmp_path), 2)
    checkpoints.save(1, STATE, HostState({}, {}))
    checkpoints.close()
    checkpoints = Checkpoints(str(tmp_path), 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, before[1]))
    try:
        with pytest.raises(RunFailed, match=r"checkpoints/2: .*; the last good checkpoint is step 1"):
            checkpoints.save(2, {"w": jnp.asarray(np.random.default_rng(0).random(2**18))}, HostState({}, {}))
            checkpoints.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
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
