"""A workdir belongs to one process at a time."""

import os
import signal
import subprocess
import sys

import pytest

from specrl_jax.errors import InputError
from specrl_jax.io.workdir import check_workdir, has_begun, open_workdir, try_workdir
from tests.helpers.runs import snapshot

CONFIG = {"steps": 1}
HOLD = "import sys, time; from specrl_jax.io.workdir import open_workdir; open_workdir(sys.argv[1], {'steps': 1}); "
HOLD += "print('held', flush=True); time.sleep(600)"


def test_another_process_is_refused_until_the_first_is_gone(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(InputError, match="another process is at work in it"):
            open_workdir(str(tmp_path), CONFIG)
        with pytest.raises(InputError, match="another process is at work in it"):  # nor is it taken over
            try_workdir(str(tmp_path), CONFIG | {"seed": 1})
        # However it ends.
        other.send_signal(signal.SIGKILL)
    open_workdir(str(tmp_path), CONFIG)


def test_the_run_of_a_version_with_other_keys_is_refused_in_one_line(tmp_path):
    open_workdir(str(tmp_path), CONFIG | {"pipeline": {"mode": "async"}})
    (tmp_path / "evaluation.json").write_text("{}")
    for attempt in (try_workdir, open_workdir, check_workdir):
        with pytest.raises(InputError) as refused:
            attempt(str(tmp_path), CONFIG | {"pipeline": {"schedule": "async"}})
        said = f"--workdir {tmp_path} belongs to a run with keys of another version, as pipeline.mode; choose another"
        assert str(refused.value).startswith(said)


def test_one_process_may_open_it_again(tmp_path):
    for _ in range(2):
        open_workdir(str(tmp_path), CONFIG)


LEFT = {  # what a run may leave, and whether the next one would go on from it, or lose it
    "lock": ("", False),
    "metrics.jsonl": ('{"step": 0, "eval/accuracy": 0.5}\n', False),
    "evaluations/step_0.jsonl": ("{}\n", False),
    "tensorboard/events.out": ("", False),
    "checkpoints/1.orbax-checkpoint-tmp/state": ("", False),
    "metrics.jsonl ": ('{"step": 0}\n{"step": 1}\n', True),
    "checkpoints/1/digests/default": ("", True),
    "checkpoints/2/state": ("", True),
    "evaluation.json": ("{}", True),
    "generations.jsonl": ("{}\n", True),
    "log.jsonl": ("", True),
    "features/features.json": ("{}", True),
}


@pytest.mark.parametrize(("name", "content", "begun"), [(name, *left) for name, left in LEFT.items()])
def test_a_run_that_ended_before_its_first_step_leaves_its_folder_to_the_next(name, content, begun, tmp_path, capsys):
    before, corrected = ({"steps": 2, "task": "train", "optimizer": {"learning_rate": x}} for x in (1.0, 1e-6))
    open_workdir(str(tmp_path), before)
    path = tmp_path / name.strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    files = snapshot(tmp_path)
    assert has_begun(str(tmp_path)) == begun
    for attempt in (try_workdir, open_workdir) if begun else ():
        with pytest.raises(InputError, match=r"belongs to a run with optimizer\.learning_rate=1\.0, not 1e-06"):
            attempt(str(tmp_path), corrected)
    if begun:
        assert snapshot(tmp_path) == files and capsys.readouterr().out == ""
        return
    try_workdir(str(tmp_path), corrected)
    assert snapshot(tmp_path) == files and capsys.readouterr().out == ""
    open_workdir(str(tmp_path), corrected)
    (line,) = capsys.readouterr().out.splitlines()
    assert "optimizer.learning_rate=1.0, not 1e-06" in line and line.endswith("taken over")
    open_workdir(str(tmp_path), corrected)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("place", ["file/run", "file", "file/a/b/run"])
def test_a_workdir_that_cannot_be_is_named_and_none_is_made(place, tmp_path):
    (tmp_path / "file").write_text("")
    for attempt in (try_workdir, open_workdir):
        with pytest.raises(InputError, match=f"--workdir {tmp_path}/{place}: Not a directory"):
            attempt(f"{tmp_path}/{place}", CONFIG)
    try_workdir(f"{tmp_path}/a/b", CONFIG)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("key", ["holdout", "problems", "path", "task"])
@pytest.mark.parametrize("holds_out", [True, False])
def test_what_is_held_out_of_the_data_stays_so(key, holds_out, tmp_path):
    """Else a resumed run would learn from problems that it was validated on."""
    validation = {"holdout": 0.1 if holds_out else 0.0, "problems": 8, "path": "", "task": "", "every": 5}
    before = CONFIG | {"task": "train", "data": {"path": "a.jsonl"}, "eval": validation}
    open_workdir(str(tmp_path), before)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    other = {"holdout": 0.2 if holds_out else 0.0, "problems": 9, "path": "b.jsonl", "task": "recite"}[key]
    changed = before | {"eval": validation | {key: other, "every": 7}}
    if holds_out:
        with pytest.raises(InputError, match=rf"eval\.{key}="):
            open_workdir(str(tmp_path), changed)
        changed = before | {"eval": validation | {"every": 7}}
    open_workdir(str(tmp_path), changed)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "config.json:1: not JSON"),
        (b"[]", "expected a JSON object"),
        (b"{}", "lacks 'config'"),
        (b'{"config": null}', "lacks 'config'"),
        (b'{"config": [1]}', "config=[1]"),
        (b'{"config": "x"}', 'config="x"'),
        (b'{"config": {"steps": "1"}}', None),
        (b'{"config": ' * 100_000, "nested too deeply"),
        (b'{"config": {"a": "\xff"}}', "not UTF-8"),
        (b"\0" * 4096, "not JSON"),
    ],
)
@pytest.mark.parametrize("reader", [open_workdir, check_workdir])
def test_a_damaged_config_is_named(content, named, reader, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    if named is None:  # a step count may change, and it is written anew
        return reader(str(tmp_path), CONFIG)
    with pytest.raises(InputError) as error:
        reader(str(tmp_path), CONFIG)
    assert named in str(error.value) and str(error.value).startswith(f"--workdir {tmp_path}")
    assert (tmp_path / "config.json").read_bytes() == content


@pytest.mark.parametrize("reader", [open_workdir, check_workdir])
def test_a_pipe_or_folder_for_the_config_is_refused(reader, tmp_path):
    for make in (os.mkfifo, os.mkdir):
        folder = tmp_path / make.__name__
        folder.mkdir()
        make(folder / "config.json")
        with pytest.raises(InputError, match="not a regular file"):
            reader(str(folder), CONFIG)
