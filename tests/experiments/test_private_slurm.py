"""A sweep on a real Slurm with two nodes on this machine: pre-empted, cancelled, and a node that crashes."""

import csv
import json
import os
import pathlib
import tempfile
import time

import pytest

from experiments import launch, slurm
from experiments.robustness import same_run
from experiments.robustness.private_slurm import missing, private_slurm
from specrl_jax.io.metrics import read_metrics
from tests.helpers.runs import ROOT, SMOKE, compile_cache

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"{missing()} is not installed (Debian: slurm-wlm, munge)"),
]

STEPS = 10
LIMIT = 300  # seconds of each wait
SWEEP = "def get_sweep():\n    return [{'seed': 0}, {'seed': 1}]\n"


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """A private Slurm that commands of this process find."""
    (tmp_path / "specrl_checksum.py").write_text(same_run.REWARD)
    environment = {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(compile_cache()),
        "XLA_FLAGS": "",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # The path of a socket has at most 108 characters.
    with tempfile.TemporaryDirectory(prefix="slurm_") as folder, private_slurm(pathlib.Path(folder)) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        yield cluster


def wait_for(what, condition):
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def rows(folder):
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def overrides():
    return same_run.OVERRIDES | {"draft.kind": "ngram", "steps": STEPS, "checkpoint.keep": 2}


def kept(folder):
    """Return metrics without times, and the arrays of the last checkpoint."""
    rows = [same_run.untimed(row) for row in read_metrics(str(folder))]
    assert all(row["policy/grad_norm"] > 0 for row in rows[1:])
    arrays = dict(same_run.read_arrays(folder / "checkpoints" / str(STEPS) / "state"))
    return same_run.Run(rows, [], arrays, {})


def test_a_sweep_survives_requeue_cancel_and_a_crashed_node(cluster, tmp_path, capfd):
    (tmp_path / "sweep.py").write_text(SWEEP)
    root = tmp_path / "root"
    argv = ["--config", SMOKE, "--sweep", str(tmp_path / "sweep.py"), "--workdir", str(root)]
    argv += ["--executor", "slurm", "--gpus", "0", "--hours", "1"]
    flags = [f"--config.{key}={value}" for key, value in overrides().items() if key != "seed"]
    first, second = root / "seed=0", root / "seed=1"

    def launched():
        capfd.readouterr()
        assert launch.main([*argv, "--", *flags]) == 0, capfd.readouterr().err
        return capfd.readouterr().out

    def job(folder):
        return json.loads((folder / "job.json").read_text())["id"]

    def queue(what, folder):
        return cluster.call("squeue", "--noheader", f"--format={what}", context=f"--jobs={job(folder)}")

    launched()
    wait_for("two rows of the first run", lambda: rows(first) >= 2)
    cluster.call("scontrol", "requeue", job(first))
    wait_for("two rows of the second run", lambda: rows(second) >= 2)
    cancelled = job(second)
    cluster.call("scancel", cancelled)
    wait_for(
        "the end of the cancelled job", lambda: cancelled not in cluster.call("squeue", "--noheader", "--format=%A")
    )
    assert f"queued    seed=0  job {job(first)}" in launched() and job(second) != cancelled
    done = rows(second)
    wait_for("the second run goes on", lambda: rows(second) > done)
    node = queue("%N", second)
    cluster.crash(node)
    cluster.start(node)
    wait_for("both runs", lambda: all((folder / "finished.json").exists() for folder in (first, second)))
    wait_for("an empty queue", lambda: not slurm.jobs_in_queue())

    out = launched()
    assert out == "finished  seed=0\nfinished  seed=1\n"
    assert cluster.processes(cluster.nodes) == [], "processes are left behind"
    # Each run was started again after it was interrupted, and only then.
    starts = [(folder / "output.log").read_text().count("$ ") for folder in (first, second)]
    assert starts == [2, 3]
    with open(root / "results.csv") as file:
        assert [(row["run"], row["step"]) for row in csv.DictReader(file)] == [("seed=0", "10"), ("seed=1", "10")]
    for seed, folder in enumerate((first, second)):
        alone = tmp_path / f"alone_{seed}"
        same_run.execute(ROOT, alone, overrides() | {"seed": seed}, os.environ["JAX_COMPILATION_CACHE_DIR"])
        assert same_run.differences(kept(alone), kept(folder)) == []
