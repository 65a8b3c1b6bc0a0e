"""Whatever follows the metrics of a run may fail: it is reported once and left out, and metrics.jsonl goes on."""

import errno
import json
import os
import types

import numpy as np
import pytest
import tensorboardX

from specrl_jax.errors import InputError, system_line
from specrl_jax.io import wandb as wandb_file
from specrl_jax.io.metrics import MetricsWriter, read_metrics
from specrl_jax.io.prometheus import PrometheusPage
from specrl_jax.io.trackers import Tracker, Trackers
from specrl_jax.io.wandb import WandbRun

ROLLOUT = {"id": 1, "reward": 1.0, "prompt": "1+1", "response": "2", "tokens": [3]}
ERRORS = [
    ConnectionError("the server cannot be reached"),
    TimeoutError(),
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    ValueError("a\nlong\nstory"),
    AssertionError(),
]


def write_all(workdir, trackers, steps=3):
    """Write what a run writes; return the rows."""
    writer = MetricsWriter(str(workdir), [], trackers)
    for step in range(steps):
        writer.write({"step": step, "reward/mean": 0.5}, {"reward": np.array([0.0, 1.0])})
        writer.write_rollouts(step, [ROLLOUT])
    writer.close()
    assert sorted(os.listdir(workdir / "rollouts")) == [f"step_{step}.jsonl" for step in range(steps)]
    return read_metrics(str(workdir))


def said_by(trackers):
    lines = []
    trackers.say = lines.append
    return lines


class Fails(Tracker):
    """Raises `error` from the call `where` on; counts the calls."""

    name = "somebody's tracker"

    def __init__(self, where, error):
        self.calls = []
        for call in ("begin", "write", "write_rollouts", "close"):
            setattr(self, call, self._call(call, error if call == where else None))

    def _call(self, name, error):
        def call(*_):
            self.calls.append(name)
            if error is not None:
                raise error

        return call


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["begin", "write", "write_rollouts", "close"])
def test_a_tracker_that_fails_is_said_once_and_left_out(where, error, tmp_path):
    trackers, healthy, broken = Trackers(), Fails("", None), Fails(where, error)
    lines = said_by(trackers)
    for tracker in (broken, healthy):
        trackers.add(tracker)
    rows = write_all(tmp_path, trackers)
    assert [row["step"] for row in rows] == [0, 1, 2]
    (line,) = lines
    assert line.startswith("somebody's tracker fails and is left out") and type(error).__name__ in line
    assert "\n" not in line and "None" not in line
    assert broken.calls.count(where) == 1 and broken.calls[-1] == where
    assert healthy.calls == ["begin"] + 3 * ["write", "write_rollouts"] + ["close"]


@pytest.mark.parametrize("call", ["add_scalar", "add_histogram", "add_text", "flush", "close", "_get_file_writer"])
def test_tensorboard_that_fails_is_left_out(call, tmp_path, monkeypatch, capsys):
    def fails(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tensorboardX.SummaryWriter, call, fails)
    if call == "_get_file_writer":
        monkeypatch.setattr("specrl_jax.io.tensorboard._Board._get_file_writer", fails)
    assert len(write_all(tmp_path, None)) == 3
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("tensorboard fails") and "No space left on device" in line


def wandb_of(monkeypatch, **calls):
    """A package wandb whose calls are replaced."""
    run = {"id": "abc", **dict.fromkeys(("define_metric", "log", "finish"), lambda *_, **__: None)}
    package = {"Histogram": list, "Table": dict, "init": lambda **_: types.SimpleNamespace(**run)}
    (run if calls.keys() <= run.keys() else package).update(calls)
    monkeypatch.setattr(wandb_file.importlib, "import_module", lambda name: types.SimpleNamespace(**package))


def lost(*_, **__):
    raise ConnectionError("the server cannot be reached")


@pytest.mark.parametrize("call", ["define_metric", "log", "finish", "Histogram", "Table"])
def test_weights_and_biases_that_fails_is_left_out(call, tmp_path, monkeypatch):
    wandb_of(monkeypatch, **{call: lost})
    trackers = Trackers()
    lines = said_by(trackers)
    trackers.add(WandbRun("specrl", str(tmp_path), {}))
    assert len(write_all(tmp_path, trackers)) == 3
    assert len(lines) == 1 and lines[0].startswith("wandb fails") and "cannot be reached" in lines[0]


def test_a_run_that_weights_and_biases_does_not_open_is_refused(tmp_path, monkeypatch):
    wandb_of(monkeypatch, init=lost)
    with pytest.raises(InputError, match=r"^logging\.wandb_project=specrl: the server cannot be reached"):
        WandbRun("specrl", str(tmp_path), {})


def test_a_page_that_fails_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("specrl_jax.io.prometheus.prometheus_client.Gauge", lost)
    trackers = Trackers()
    lines = said_by(trackers)
    trackers.add(page := PrometheusPage(0))
    assert len(write_all(tmp_path, trackers)) == 3
    page.close()
    assert len(lines) == 1 and lines[0].startswith("prometheus fails")


# ---- the files of the run itself


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    """A write to an open file raises an error without a file name; closing it tries once more."""
    writer = MetricsWriter(str(tmp_path))
    writer._file = open("/dev/full", "a", buffering=1)  # noqa: SIM115
    with pytest.raises(OSError) as error:
        writer.write({"step": 0})
    assert system_line(error.value) == f"{tmp_path}/metrics.jsonl: No space left on device"
    writer.close()
    os.symlink("/dev/full", tmp_path / "rollouts/step_1.jsonl")
    with pytest.raises(OSError) as error:
        MetricsWriter(str(tmp_path)).write_rollouts(1, [ROLLOUT])
    assert system_line(error.value) == f"{tmp_path}/rollouts/step_1.jsonl: No space left on device"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConnectionError("gone\naway"), "ConnectionError: gone away"),
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), "a/b: No space left on device"),
        (OSError(errno.EMFILE, "Too many open files"), "OSError: Too many open files"),
    ],
)
def test_what_the_system_refuses_is_a_line_without_none(error, line):
    assert system_line(error) == line


def test_rows_are_json(tmp_path):
    write_all(tmp_path, None)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]
