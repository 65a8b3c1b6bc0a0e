"""The run at Weights & Biases: by the real package, offline, where it is installed."""

import sys
import time

import numpy as np
import pytest

from specrl_jax.errors import InputError
from specrl_jax.io.wandb import WandbRun


@pytest.fixture
def offline(monkeypatch):
    pytest.importorskip("wandb", reason="pip install wandb brings this test back")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def use(workdir, steps):
    run = WandbRun("specrl", str(workdir), {"steps": 2, "policy": {"preset": "nano"}})
    run.begin([])
    for step in steps:
        run.write({"step": step, "reward/mean": 0.5, "missing": None}, {"reward": np.array([0.0, 1.0])})
        run.write_rollouts(step, [{"id": 1, "reward": 1.0, "prompt": "1+1", "response": "2", "tokens": [3]}])
    run.close()


@pytest.mark.slow
def test_an_offline_run_is_kept_and_a_second_start_has_the_same_id(tmp_path, offline):
    use(tmp_path, [1, 2])
    first = (tmp_path / "wandb_id").read_text()
    time.sleep(1)  # a folder is named by its second; a second one of the same second would be named by a number too
    use(tmp_path, [2, 3])
    assert (tmp_path / "wandb_id").read_text() == first
    folders = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert folders and all(name.endswith(first) for name in folders)
    written = b"".join(path.read_bytes() for path in (tmp_path / "wandb").rglob("*.wandb"))
    assert b"reward/mean" in written and b"reward_histogram" in written and b"rollouts" in written


def test_without_the_package_the_key_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"logging\.wandb_project=specrl: needs `pip install wandb`"):
        WandbRun("specrl", str(tmp_path), {})
