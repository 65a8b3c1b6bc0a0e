"""The launcher of sweeps, with a fast fake program instead of main.py, and once with main.py."""

import csv
import datetime
import functools
import json
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from experiments import launch, runs, sweeps
from tests.helpers.runs import ROOT, SMOKE, compile_cache

# Behaves as main.py does for a launcher; `do` selects what a run does. Times are seconds of the monotonic clock.
FAKE = """
import json, os, pathlib, signal, sys, time

flags = dict(flag[len("--config."):].split("=", 1) for flag in sys.argv if flag.startswith("--config."))
folder = pathlib.Path(sys.argv[sys.argv.index("--workdir") + 1])
do, seed = flags.get("do"), int(flags.get("seed", 0))
begin = time.monotonic()

def wait_for(condition):
    while not condition():
        assert time.monotonic() < begin + 60
        time.sleep(0.01)

def note(name):
    with open(folder / name, "a") as file:
        file.write("x")

def save(number, _):
    note(signal.Signals(number).name)
    if do != "stubborn":
        sys.exit(143)

note("starts")
if do in ("hold", "stubborn"):
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGINT, save)
    note("ready")
    wait_for(lambda: (folder.parent / "go").exists())
if do == "fail":
    print("step 1")
    print(f"error: seed {seed} is bad", file=sys.stderr)
    sys.exit(1)
if do == "leave":
    sys.exit(143)
if do == "meet":  # waits for a second run
    wait_for(lambda: len(list(folder.parent.glob("*/starts"))) >= 2)
if do == "sleep":
    time.sleep(0.4)
    (folder / "times").write_text(json.dumps([begin, time.monotonic()]))
if do == "evaluate":
    summary = {"eval/accuracy": 0.25, "problems": 16, "note": {"not": "a scalar"}}
    (folder / "evaluation.json").write_text(json.dumps(summary))
elif do == "damage":
    (folder / "metrics.jsonl").write_text("damaged" + chr(10))
elif do != "nothing":
    rows = [{"step": 0, "eval/accuracy": 0.5, "b": 1.0}, {"step": 1, "reward/mean": seed / 10, "b": None, "a": 2}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
print(os.getcwd())
print("cut", flags.get("steps"))
"""


class Sweep:
    """A sweep of the fake program in its own folder."""

    def __init__(self, folder, entries):
        self.root = folder / "root"
        self.program = [sys.executable, str(folder / "fake.py")]
        (folder / "fake.py").write_text(FAKE)
        (folder / "config.py").write_text("")
        self.sweep = folder / "sweep.py"
        self.write(f"def get_sweep():\n    return {entries!r}\n")
        self.argv = ["--config", f"{folder / 'config.py'}:variant", "--sweep", str(self.sweep)]
        self.argv += ["--workdir", str(self.root)]

    def write(self, text):
        self.sweep.write_text(text)

    def launch(self, *more):
        return launch.main([*self.argv, *more], self.program)

    def start(self, *more, **options):
        """Start the launcher as a process."""
        code = f"import sys; from experiments import launch; sys.exit(launch.main(sys.argv[1:], {self.program!r}))"
        command = [sys.executable, "-c", code, *self.argv, *more]
        # Under nohup SIGHUP is inherited as ignored, and the launcher would keep ignoring it.
        hangup = {"preexec_fn": functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | hangup | options
        return subprocess.Popen(command, cwd=ROOT, **options)

    def results(self):
        return list(csv.DictReader((self.root / "results.csv").read_text().splitlines()))

    def starts(self, name):
        path = self.root / name / "starts"
        return len(path.read_text()) if path.exists() else 0


@pytest.fixture
def make(tmp_path):
    return lambda *entries: Sweep(tmp_path, list(entries))


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---- results


def test_results_have_a_row_per_run_in_the_sweeps_order(make, capfd):
    sweep = make({"seed": 3, "do": "x"}, {"seed": 1}, {"do": "evaluate"}, {"do": "nothing"})
    assert sweep.launch("--jobs", "2") == 0
    names = ["seed=3,do=x", "seed=1", "do=evaluate", "do=nothing"]
    seconds = [json.loads((sweep.root / name / "finished.json").read_text())["seconds"] for name in names]
    assert (sweep.root / "results.csv").read_bytes().decode() == (
        "run,seed,do,seconds,a,b,eval/accuracy,problems,reward/mean,step\n"
        f'"seed=3,do=x",3,x,{seconds[0]},2,1.0,0.5,,0.3,1\n'
        f"seed=1,1,,{seconds[1]},2,1.0,0.5,,0.1,1\n"
        f"do=evaluate,,evaluate,{seconds[2]},,,0.25,16,,\n"
        f"do=nothing,,nothing,{seconds[3]},,,,,,\n"
    )
    out, err = capfd.readouterr()
    assert err == ""
    lines = [re.sub(r"\d+ s$", "N s", line) for line in out.splitlines() if "seed=1" in line]
    assert lines == ["running   seed=1", "finished  seed=1  N s"]


def test_a_run_starts_in_the_repository_with_its_flags(make):
    sweep = make({"seed": 1})
    assert sweep.launch("--", "--config.steps=7") == 0
    command, *output = (sweep.root / "seed=1/output.log").read_text().splitlines()
    config = sweep.argv[1]
    flags = ["--config", config, "--config.seed=1", "--config.steps=7"]
    assert command == "$ " + " ".join([*sweep.program, *flags, "--workdir", str(sweep.root / "seed=1")])
    assert output == [str(ROOT), "cut 7"]
    record = json.loads((sweep.root / "seed=1/finished.json").read_text())
    assert record.keys() == {"command", "seconds", "date"}
    assert record["command"] == flags
    assert 0 < record["seconds"] < 60
    assert datetime.datetime.fromisoformat(record["date"]).tzinfo
    assert not list(sweep.root.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("config", "sweep", "workdir"),
    [
        ("configs/rlzero_tiny.py", "experiments/seeds/sweep.py", "runs/sweeps/rlzero_tiny_seeds"),
        ("configs/rlzero_tiny.py:smoke", "experiments/seeds/sweep.py", "runs/sweeps/rlzero_tiny_smoke_seeds"),
        ("configs/rlzero_tiny.py", "experiments/seeds/wide.py", "runs/sweeps/rlzero_tiny_wide"),
    ],
)
def test_the_default_workdir_names_config_and_sweep(config, sweep, workdir):
    assert str(sweeps.default_workdir(config, pathlib.Path(sweep))) == workdir


def test_a_metric_does_not_hide_an_override_of_its_name(make):
    sweep = make({"a": 7})
    assert sweep.launch() == 0
    assert (sweep.root / "results.csv").read_text().splitlines()[0].split(",").count("a") == 1
    assert sweep.results()[0]["a"] == "7"


def test_a_damaged_metrics_file_is_named_after_all_runs(make, capfd):
    sweep = make({"seed": 0, "do": "damage"}, {"seed": 1})
    assert sweep.launch() == 1
    err = capfd.readouterr().err
    assert err.startswith("error: ") and "seed=0,do=damage/metrics.jsonl:1: not JSON" in err
    assert sweep.starts("seed=1") == 1
    assert not (sweep.root / "results.csv").exists()


# ---- resuming


def test_a_finished_run_is_not_run_twice(make, capfd):
    sweep = make({"seed": 0}, {"seed": 1})
    assert sweep.launch() == 0
    before = (sweep.root / "results.csv").read_bytes()
    capfd.readouterr()
    assert sweep.launch() == 0
    assert [sweep.starts(name) for name in ("seed=0", "seed=1")] == [1, 1]
    assert (sweep.root / "results.csv").read_bytes() == before
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()] == ["finished", "finished"]
    # A longer sweep keeps the finished runs.
    sweep.write("def get_sweep():\n    return [{'seed': s} for s in (2, 1, 0)]\n")
    assert sweep.launch() == 0
    assert [sweep.starts(f"seed={seed}") for seed in range(3)] == [1, 1, 1]
    assert [row["seed"] for row in sweep.results()] == ["2", "1", "0"]


def test_a_changed_command_is_run_again(make):
    sweep = make({"seed": 0})
    assert sweep.launch("--", "--config.steps=1") == 0
    assert sweep.launch("--", "--config.steps=2") == 0
    assert sweep.launch("--", "--config.steps=2") == 0
    assert sweep.starts("seed=0") == 2
    assert [line for line in (sweep.root / "seed=0/output.log").read_text().splitlines() if "cut" in line] == [
        "cut 1",
        "cut 2",
    ]


def test_a_run_that_fails_with_a_changed_command_is_no_longer_finished(make):
    sweep = make({"seed": 0})
    assert sweep.launch() == 0
    assert sweep.launch("--", "--config.do=fail") == 1
    assert sweep.results() == []
    assert sweep.launch() == 0
    assert sweep.starts("seed=0") == 3


# ---- parallel runs


@pytest.mark.parametrize("jobs", [1, 2])
def test_at_most_jobs_run_at_the_same_time(make, jobs):
    sweep = make(*[{"seed": seed, "do": "sleep"} for seed in range(4)])
    assert sweep.launch(f"--jobs={jobs}") == 0
    times = [json.loads(path.read_text()) for path in sweep.root.glob("*/times")]
    assert len(times) == 4
    assert max(sum(begin <= moment < end for begin, end in times) for moment, _ in times) <= jobs


def test_two_jobs_overlap(make):
    """Each run waits for the other to start."""
    sweep = make({"seed": 0, "do": "meet"}, {"seed": 1, "do": "meet"})
    assert sweep.launch("--jobs", "2") == 0
    assert len(sweep.results()) == 2


# ---- failures and signals


def test_a_failure_is_reported_and_the_others_go_on(make, capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    sweep = make({"seed": 0, "do": "fail"}, {"seed": 1}, {"seed": 2, "do": "fail"}, {"seed": 3})
    assert sweep.launch() == 1
    out, err = capfd.readouterr()
    assert err.splitlines() == [
        f"failed: seed={seed},do=fail: exit status 1: error: seed {seed} is bad "
        f"({sweep.root / f'seed={seed},do=fail'}/output.log)"
        for seed in (0, 2)
    ]
    assert "failed    seed=0,do=fail" in out
    assert [row["seed"] for row in sweep.results()] == ["1", "3"]
    assert sweep.launch() == 1
    assert [sweep.starts(name) for name in ("seed=0,do=fail", "seed=1", "seed=3")] == [2, 1, 1]


def test_a_run_stopped_from_outside_is_a_failure(make, capfd):
    assert make({"do": "leave"}).launch() == 1
    assert "failed: do=leave: exit status 143: " in capfd.readouterr().err


def test_a_silent_failure_does_not_show_the_output_of_an_earlier_start(make, capfd):
    sweep = make({"seed": 0})
    assert sweep.launch("--", "--config.do=fail") == 1
    sweep.program[:] = [sys.executable, "-c", "raise SystemExit(3)"]
    capfd.readouterr()
    assert sweep.launch() == 1
    assert "failed: seed=0: exit status 3: no output (" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.long),
    ],
)
def test_a_signal_stops_the_runs_with_sigterm_and_the_next_launch_resumes(make, capfd, number, status):
    sweep = make({"seed": 0}, {"seed": 1, "do": "hold"}, {"seed": 2})
    process = sweep.start(start_new_session=True)
    held = sweep.root / "seed=1,do=hold"
    wait_for((held / "ready").exists)
    # Sent to the whole process group, as a terminal does.
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert err == "stopped: the same command resumes from here\n"
    assert (held / "SIGTERM").read_text() == "x"
    assert not (held / "SIGINT").exists()
    assert not (held / "finished.json").exists()
    assert [row["seed"] for row in sweep.results()] == ["0"]
    assert sweep.starts("seed=2") == 0
    (sweep.root / "go").touch()
    assert sweep.launch() == 0
    assert [sweep.starts(name) for name in ("seed=0", held.name, "seed=2")] == [1, 2, 1]
    assert [row["seed"] for row in sweep.results()] == ["0", "1", "2"]
    assert (held / "output.log").read_text().count("$ ") == 2


@pytest.mark.slow
def test_a_second_signal_kills(make):
    sweep = make({"do": "stubborn"})
    process = sweep.start()
    wait_for((sweep.root / "do=stubborn/ready").exists)
    process.send_signal(signal.SIGTERM)
    wait_for((sweep.root / "do=stubborn/SIGTERM").exists)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (143, "stopped: the same command resumes from here\n")


def test_two_signals_at_once_kill(tmp_path):
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    program = [sys.executable, "-c", f"{ignores}; open({str(tmp_path / 'begun')!r}, 'w'); time.sleep(20)"]
    run = runs.Run("run", tmp_path / "run", {}, [])
    with runs.Signals() as signals:

        def report(run):
            if run.state == "running":
                wait_for((tmp_path / "begun").exists)
                signals.first, signals.count = signal.SIGTERM, 2

        start = time.monotonic()
        runs.run_all(program, [run], 1, signals, report)
        assert run.state == "stopped" and time.monotonic() - start < 15


def test_an_error_of_the_launcher_leaves_no_run_behind(make, monkeypatch):
    sweep = make({"seed": 0, "do": "hold"}, {"seed": 1})
    processes = []

    def broken(run, stopping):
        wait_for((sweep.root / "seed=0,do=hold/ready").exists)
        raise OSError("disk full")

    start = runs.start
    monkeypatch.setattr(runs, "start", lambda program, run: (start(program, run), processes.append(run.process)))
    monkeypatch.setattr(runs, "end", broken)
    with pytest.raises(OSError, match="disk full"):
        sweep.launch("--jobs=2")
    assert processes[0].returncode == 143
    assert (sweep.root / "seed=0,do=hold/SIGTERM").exists()


# ---- bad input


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("get_swep = 3", ["does not define get_sweep()"]),
        ("def get_sweep(): return []", ["returned []"]),
        ("def get_sweep(): return {'seed': 1}", ["expected a list"]),
        ("def get_sweep(): pass", ["returned None"]),
        ("def get_sweep(): return [{'seed': 1}, 'seed=2']", ["entry 1", "seed=2", "dict"]),
        ("def get_sweep(): return [{1: 'seed'}]", ["entry 0", "dict"]),
        ("def get_sweep(): return [{'a': 1, 'b': 2}, {'a': 2}, {'b': 2, 'a': '1'}]", ["entries 0 and 2 are equal"]),
        ("def get_sweep(): return [1 / 0]", ["ZeroDivisionError: division by zero"]),
        ("def get_sweep(:", ["SyntaxError"]),
        ("import nothing_of_that_name", ["ModuleNotFoundError", "nothing_of_that_name"]),
    ],
)
def test_a_bad_sweep_is_named(make, capfd, text, words):
    sweep = make()
    sweep.write(text)
    assert_refused(sweep, capfd, [], [str(sweep.sweep), *words])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--jobs=0"], ["--jobs=0"]),
        (["--jobs=two"], ["--jobs", "two"]),
        (["--sweep=experiments/nothing.py"], ["--sweep: no file", "experiments/nothing.py"]),
        (["--config=configs/nothing.py:smoke"], ["--config: no file", "configs/nothing.py"]),
        (["--config=configs"], ["--config: no file", "configs"]),
        (["--config.steps=3"], ["--config.steps=3"]),
        (["--workdir=main.py/runs"], ["--workdir", "main.py/runs"]),
        (["--", "--config.seed=3"], ["--config.seed=3", "is set by the sweep"]),
        (["--", "--workdir", "x"], ["--workdir"]),
        (["--", "--config=x"], ["--config=x"]),
    ],
    ids=str,
)
def test_a_bad_argument_is_named(make, capfd, more, words):
    assert_refused(make({"seed": 0}), capfd, more, words)


def assert_refused(sweep, capfd, more, words):
    assert sweep.launch(*more) == 1
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    for word in words:
        assert word in err
    assert not sweep.root.exists()


def test_missing_arguments_are_named(capfd):
    assert launch.main([]) == 1
    err = capfd.readouterr().err
    assert err.startswith("error: ") and "--config, --sweep" in err and err.count("\n") == 1


def test_a_damaged_record_is_named(make, capfd):
    sweep = make({"seed": 0})
    assert sweep.launch() == 0
    (sweep.root / "seed=0/finished.json").write_text("")
    capfd.readouterr()
    assert sweep.launch() == 1
    assert "seed=0/finished.json:1: not JSON" in capfd.readouterr().err
    assert sweep.starts("seed=0") == 1


# ---- names


# Fixed: a changed name would run a finished sweep again.
NAMES = [
    ({"seed": 0, "rollout.seed": 0, "draft.kind": "none"}, "seed=0,rollout.seed=0,draft.kind=none"),
    ({"optimizer.learning_rate": 1e-06, "policy.remat": True}, "optimizer.learning_rate=1e-06,policy.remat=True"),
    ({"policy.path": ""}, "policy.path="),
    ({}, "base"),
    ({"a": 1, "b": 2}, "a=1,b=2"),
    ({"a": "1,b=2"}, "a=1_b_2-e46a2a6d"),
    ({"policy.path": "runs/base"}, "policy.path=runs_base-31d990f2"),
    ({"policy.path": "runs_base"}, "policy.path=runs_base"),
    ({"policy.path": "runs:base"}, "policy.path=runs_base-5ed62aeb"),
    ({"x": "é\n/../ *"}, "x=___..___-1ee48551"),
    ({"x": "y" * 98}, f"x={'y' * 98}"),
    ({"x": "y" * 99}, f"x={'y' * 89}-c72c5e4c"),
    ({"x": "y" * 299 + "z"}, f"x={'y' * 89}-8f4ab709"),
    ({"x": "y" * 299 + "w"}, f"x={'y' * 89}-5b9322ec"),
    ({"x": "y" * 98, "draft.kind": "mtp", "seed": 2}, "draft.kind=mtp,seed=2-69b1c0e3"),
    ({"x": "y" * 30, "z": "y" * 82, "seed": 2}, f"z={'y' * 82},seed=2-7a1c651d"),
    ({"x": "y" * 30, "z": "y" * 83, "seed": 2}, "seed=2-ac63ee6f"),
]


@pytest.mark.parametrize(("overrides", "name"), NAMES, ids=lambda value: str(value)[:30])
def test_a_name_is_stable_and_safe(overrides, name):
    assert sweeps.make_name(overrides) == name
    assert re.fullmatch(r"[A-Za-z0-9_.,=+-]{1,100}", name)
    assert [sweeps.make_name(other) for other, _ in NAMES].count(name) == 1


# ---- a terminal


def test_the_table_shows_running_runs_first(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "reward/mean": 0.25, "eval/accuracy": null}\n')
    table = [runs.Run(state, tmp_path, {}, [], state) for state in ("finished", "waiting", "running", "failed")]
    table[0].values, table[0].seconds = {"step": 9, "eval/accuracy": 0.5}, 12.4
    table[2].began = time.monotonic() - 5
    columns = [list(column.cells) for column in launch.make_table(table).columns]
    assert list(zip(*columns)) == [
        ("running", "running", "3", "5", "0.250", ""),
        ("finished", "finished", "9", "12", "", "0.500"),
        ("waiting", "waiting", "", "0", "", ""),
        ("failed", "failed", "", "0", "", ""),
    ]


@pytest.mark.slow
def test_a_terminal_shows_a_table(make):
    sweep = make({"seed": 4}, {"seed": 5, "do": "fail"}, {"seed": 6, "do": "hold"})
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    process = sweep.start("--jobs=3", stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    screen = read_until(ours, "seed=6,do=hold │ running")
    (sweep.root / "go").touch()
    screen += read_until(ours, "seed=6,do=hold │ finished")
    screen += read_until(ours, None)
    assert process.wait(timeout=60) == 1
    os.close(ours)
    last = screen[screen.rindex("accuracy") :]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in last.splitlines() if "seed=" in line]
    assert [(row[:3], row[4:]) for row in rows] == [
        (["seed=4", "finished", "1"], ["0.400", "0.500"]),
        (["seed=5,do=fail", "failed", ""], ["", ""]),
        (["seed=6,do=hold", "finished", "1"], ["0.600", "0.500"]),
    ]


def read_until(terminal, text):
    """Read a terminal up to `text`, or to its end for None; return the text without control sequences."""
    screen = b""
    while text is None or text.encode() not in screen:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the process closed the terminal
            part = b""
        if not part:
            assert text is None, screen.decode()
            break
        screen += part
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.decode(errors="replace"))


# ---- main.py


@pytest.mark.slow
def test_two_seeds_of_the_smoke_config(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compile_cache()))
    sweep = tmp_path / "sweep.py"
    sweep.write_text("def get_sweep():\n    return [{'seed': s, 'rollout.seed': s} for s in range(2)]\n")
    argv = ["--config", SMOKE, "--sweep", str(sweep), "--workdir", str(tmp_path / "root"), "--", "--config.steps=1"]
    assert launch.main(argv) == 0, capfd.readouterr().err
    rows = list(csv.DictReader((tmp_path / "root/results.csv").read_text().splitlines()))
    assert list(rows[0])[:4] == ["run", "seed", "rollout.seed", "seconds"]
    assert [(row["run"], row["seed"], row["step"]) for row in rows] == [
        ("seed=0,rollout.seed=0", "0", "1"),
        ("seed=1,rollout.seed=1", "1", "1"),
    ]
    for row in rows:
        before, last = map(json.loads, (tmp_path / "root" / row["run"] / "metrics.jsonl").read_text().splitlines())
        assert (before["step"], last["step"]) == (0, 1)
        expected = {key: str(value) for key, value in (before | last).items() if value is not None}
        assert {key: row[key] for key in list(row)[4:]} == dict(sorted(expected.items()))
    stamps = [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("root/*/finished.json"))]
    assert launch.main(argv) == 0
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("root/*/finished.json"))] == stamps
