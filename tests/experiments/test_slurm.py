"""Slurm jobs: submission with a fake sbatch, and execution with submitit's local executors."""

import json
import os
import pathlib
import pickle
import signal
import sys
import time

import pytest

pytest.importorskip("submitit", reason="pip install -r requirements-common.txt")

import submitit

from experiments import launch, slurm
from tests.helpers.runs import ROOT, arguments, run_process

# Instead of main.py: the first start waits for SIGTERM, saves and exits; the second one finishes.
FAKE = """
import os, pathlib, signal, sys, time

folder = pathlib.Path(sys.argv[sys.argv.index("--workdir") + 1])
if "--config.do=fail" in sys.argv:
    print("error: no such thing")
    sys.exit(1)

def save(*_):
    (folder / "saved").touch()
    sys.exit(143)

if not (folder / "saved").exists():
    signal.signal(signal.SIGTERM, save)
    (folder / "parent.tmp").write_text(str(os.getppid()))
    (folder / "parent.tmp").rename(folder / "parent")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.01)
(folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}' + chr(10))
"""
PROGRAMS = {
    "sbatch": 'n=$(ls {folder} | grep -c script_); cp "$1" {folder}/script_$n; echo Submitted batch job $((101 + n))',
    "srun": "exit 1",
    "squeue": "cat {folder}/queue",
}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A folder with the scripts given to a fake sbatch, and the file `queue` that a fake squeue prints."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    (folder / "queue").touch()
    for name, text in PROGRAMS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/bash\n" + text.format(folder=folder) + "\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def argv(tmp_path):
    (tmp_path / "config.py").write_text("")
    (tmp_path / "sweep.py").write_text("def get_sweep():\n    return [{'seed': 0}, {'seed': 1}]\n")
    paths = ["--config", tmp_path / "config.py", "--sweep", tmp_path / "sweep.py", "--workdir", tmp_path / "root"]
    return [str(part) for part in paths]


SLURM = ["--executor", "slurm", "--nodes", "8", "--gpus", "4", "--hours", "1.5", "--partition", "long"]


def scripts(cluster):
    return [path.read_text() for path in sorted(cluster.glob("script_*"))]


# ---- submitting


def test_every_run_is_a_job_with_its_nodes_gpus_time_and_requeue(cluster, argv, tmp_path, capfd):
    assert launch.main([*argv, *SLURM]) == 0, capfd.readouterr().err
    first, second = scripts(cluster)
    for line in (
        "--nodes=8",
        "--ntasks-per-node=1",
        "--gpus-per-node=4",
        "--time=90",
        "--partition=long",
        "--requeue",
        f"--signal=USR2@{slurm.GRACE}",
        f"--chdir={ROOT}",
        "--job-name=specrl_root",
    ):
        assert f"#SBATCH {line}\n" in first and f"#SBATCH {line}\n" in second
    assert "--account" not in first and "submitit.core._submit" in first
    jobs = [json.loads((tmp_path / f"root/seed={seed}/job.json").read_text())["id"] for seed in (0, 1)]
    assert jobs == ["101", "102"]
    out = capfd.readouterr().out
    assert out == "queued    seed=0  job 101\nqueued    seed=1  job 102\n"
    job = pickle.loads((tmp_path / "root/slurm/101_submitted.pkl").read_bytes()).function
    assert list(job.program) == list(launch.PROGRAM)
    assert list(job.flags) == ["--config", argv[1], "--config.seed=0"] and job.folder == str(tmp_path / "root/seed=0")


def test_the_same_launch_submits_only_what_is_neither_finished_nor_queued(cluster, argv, tmp_path, capfd):
    assert launch.main([*argv, *SLURM]) == 0
    (cluster / "queue").write_text("101\n")
    assert launch.main([*argv, *SLURM]) == 0
    assert len(scripts(cluster)) == 3
    (cluster / "queue").write_text("101\n103\n")
    folder = tmp_path / "root/seed=1"
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "finished.json").write_text(
        json.dumps({"command": ["--config", argv[1], "--config.seed=1"], "seconds": 7.0})
    )
    capfd.readouterr()
    assert launch.main([*argv, *SLURM]) == 0
    assert len(scripts(cluster)) == 3
    assert capfd.readouterr().out == "queued    seed=0  job 101\nfinished  seed=1\n"
    assert (tmp_path / "root/results.csv").read_text() == "run,seed,seconds,step\nseed=1,1,7.0,1\n"


def test_without_an_answer_of_the_queue_nothing_is_submitted(cluster, argv, tmp_path, capfd):
    assert launch.main([*argv, *SLURM]) == 0
    (tmp_path / "bin" / "squeue").write_text("#!/bin/bash\necho 'slurm_load_jobs error: no controller' >&2; exit 1\n")
    capfd.readouterr()
    assert launch.main([*argv, *SLURM]) == 1
    assert capfd.readouterr().err == "error: --executor slurm: squeue: slurm_load_jobs error: no controller\n"
    assert len(scripts(cluster)) == 2


def test_a_node_without_gpus_is_asked_for_none(cluster, argv):
    assert launch.main([*argv, "--executor", "slurm", "--gpus", "0", "--cpus", "16"]) == 0
    assert "--gpus" not in scripts(cluster)[0] and "#SBATCH --cpus-per-task=16\n" in scripts(cluster)[0]


@pytest.mark.parametrize("more", [[], SLURM], ids=["local", "slurm"])
def test_a_dry_run_prints_commands_and_starts_nothing(cluster, argv, tmp_path, capfd, more):
    assert launch.main([*argv, *more, "--dry_run", "--", "--config.steps=7"]) == 0
    lines = capfd.readouterr().out.splitlines()
    command = [*launch.PROGRAM, "--config", argv[1], "--config.seed=0", "--config.steps=7"]
    assert len(lines) == 2 and lines[0].endswith(" ".join([*command, "--workdir", str(tmp_path / "root/seed=0")]))
    assert lines[0].startswith("sbatch --partition=long" if more else sys.executable)
    assert not (tmp_path / "root").exists() and not scripts(cluster)


def test_a_machine_without_slurm_is_refused(argv, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch.main([*argv, "--executor", "slurm"]) == 1
    err = capfd.readouterr().err
    assert err.startswith("error: --executor slurm: sbatch is not installed") and err.count("\n") == 1
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--nodes=2"], ["--nodes", "--executor local"]),
        (["--hours=2"], ["--hours", "--executor local"]),
        (["--executor=slurm", "--jobs=2"], ["--jobs", "--executor slurm"]),
        (["--executor=slurm", "--nodes=0"], ["--nodes=0"]),
        (["--executor=slurm", "--gpus=-1"], ["--gpus=-1", "at least 0"]),
        (["--executor=slurm", "--hours=0"], ["--hours=0.0"]),
        (["--executor=slurm", "--hours=nan"], ["--hours=nan"]),
        (["--executor=gke"], ["--executor", "gke"]),
    ],
)
def test_incompatible_flags_are_refused(cluster, argv, tmp_path, capfd, more, words):
    assert launch.main([*argv, *more]) == 1
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    for word in words:
        assert word in err
    assert not (tmp_path / "root").exists()


@pytest.mark.slow
def test_processes_that_cannot_join_end_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    status, out, err = run_process(arguments(workdir=tmp_path / "run"))
    assert (status, out) == (1, "") and err.startswith("error: several processes (") and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


# ---- inside a job


@pytest.fixture
def job(tmp_path):
    (tmp_path / "fake.py").write_text(FAKE)
    (tmp_path / "run").mkdir()

    def make(*flags):
        return slurm.Job((sys.executable, str(tmp_path / "fake.py")), "run", str(tmp_path / "run"), flags)

    return make


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_preempted_job_saves_and_finishes_when_queued_again(job, tmp_path):
    submitted = submitit.LocalExecutor(tmp_path / "log").submit(job())
    wait_for((tmp_path / "run/parent").exists)
    os.kill(int((tmp_path / "run/parent").read_text()), signal.SIGUSR2)
    # submitit's local executor queues it again immediately.
    assert submitted.result() == "finished"
    assert (tmp_path / "run/saved").exists() and "Requeued job" in submitted.stderr() + submitted.stdout()
    assert json.loads((tmp_path / "run/finished.json").read_text())["command"] == []
    assert (tmp_path / "run/output.log").read_text().count("$ ") == 2


@pytest.mark.slow
def test_a_failed_job_reports_its_last_line(job, tmp_path):
    submitted = submitit.LocalExecutor(tmp_path / "log").submit(job("--config.do=fail"))
    with pytest.raises(submitit.core.utils.FailedJobError, match="failed: exit status 1: error: no such thing"):
        submitted.result()
    assert not (tmp_path / "run/finished.json").exists()


def test_a_job_in_this_process_finishes(job, tmp_path):
    """submitit's debug executor, on a run that saved before."""
    (tmp_path / "run/saved").touch()
    before = signal.getsignal(signal.SIGUSR2)
    assert submitit.DebugExecutor(tmp_path / "log").submit(job()).result() == "finished"
    assert signal.getsignal(signal.SIGUSR2) == before
    assert pathlib.Path(tmp_path / "run/finished.json").exists()
