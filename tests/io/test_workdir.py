"""A workdir belongs to one process at a time."""

import os
import signal
import subprocess
import sys

import pytest

from specrl_jax.errors import InputError
from specrl_jax.io.workdir import check_workdir, open_workdir

CONFIG = {"steps": 1}
HOLD = "import sys, time; from specrl_jax.io.workdir import open_workdir; open_workdir(sys.argv[1], {'steps': 1}); "
HOLD += "print('held', flush=True); time.sleep(600)"


def test_another_process_is_refused_until_the_first_is_gone(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(InputError, match="another process is at work in it"):
            open_workdir(str(tmp_path), CONFIG)
        # However it ends.
        other.send_signal(signal.SIGKILL)
    open_workdir(str(tmp_path), CONFIG)


def test_one_process_may_open_it_again(tmp_path):
    for _ in range(2):
        open_workdir(str(tmp_path), CONFIG)


@pytest.mark.parametrize("key", ["holdout", "problems", "path", "task"])
@pytest.mark.parametrize("holds_out", [True, False])
def test_what_is_held_out_of_the_data_stays_so(key, holds_out, tmp_path):
    """Else a resumed run would learn from problems that it was validated on."""
    validation = {"holdout": 0.1 if holds_out else 0.0, "problems": 8, "path": "", "task": "", "every": 5}
    before = CONFIG | {"task": "train", "data": {"path": "a.jsonl"}, "eval": validation}
    open_workdir(str(tmp_path), before)
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
