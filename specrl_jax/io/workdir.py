"""The folder of a run: it belongs to one config, and to one process at a time."""

import errno
import fcntl
import json
import os
from collections.abc import Collection, Mapping
from typing import TextIO

import jax

import specrl_jax
from specrl_jax.core import atomic_write
from specrl_jax.errors import InputError
from specrl_jax.io.metrics import read_metrics
from specrl_jax.json_files import Checked, check, read_json
from specrl_jax.logs import say

# Keys and sections that may change when a run is resumed.
MAY_CHANGE = ("steps", "eval", "checkpoint", "logging", "export", "dry_run", "pipeline.workers", "pipeline.host")
# Those of `eval` that decide which problems of data.path are learned from, where some of them are held out.
HOLD_OUT = ("eval.holdout", "eval.problems", "eval.path", "eval.task")

# What tasks other than training leave.
RESULTS = ("evaluation.json", "generations.jsonl", "log.jsonl", "features", "export")

# Lock files of the workdirs in use; kept open, since the system releases a lock when its file is closed.
_held: dict[str, TextIO] = {}


def open_workdir(path: str, config: Mapping[str, object]) -> None:
    """Create `path` and its config.json, or check that it belongs to `config`; lock it until this process ends.

    Raises InputError for an unwritable path, another config, and a folder that another process uses.
    """
    try_workdir(path, config)
    try:
        os.makedirs(path, exist_ok=True)
        _hold(path)
        if os.path.exists(file := os.path.join(path, "config.json")) and (differs := _differs(path, config)):
            say(f"--workdir {path}: a run with {differs} ended there before its first step; taken over")
        with atomic_write(file) as f:
            json.dump({"config": config, "versions": versions()}, f, indent=2)
    except OSError as error:
        raise InputError(f"--workdir {path}: {error.strerror}") from None


def try_workdir(path: str, config: Mapping[str, object]) -> None:
    """Raise what `open_workdir` would, and write nothing."""
    try:
        there = path
        while not os.path.lexists(there):
            there = os.path.dirname(there) or "."
        if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
            raise OSError(code := errno.EACCES if os.path.isdir(there) else errno.ENOTDIR, os.strerror(code))
        if os.path.exists(os.path.join(path, "config.json")):
            if (differs := _differs(path, config)) and has_begun(path):
                raise InputError(f"--workdir {path} belongs to a run with {differs}; choose another --workdir")
            _check_steps(path, config["steps"])
        if os.path.exists(os.path.join(path, "lock")):
            _hold(path)
    except OSError as error:
        raise InputError(f"--workdir {path}: {error.strerror}") from None


def has_begun(path: str) -> bool:
    """Return whether the run in a workdir has done anything that the next one would go on from, or lose.

    That is a checkpoint, a step in metrics.jsonl, or a result of a task other than training. Raises InputError where
    metrics.jsonl is damaged.
    """
    if any(os.path.exists(os.path.join(path, name)) for name in RESULTS) or _saved_steps(path):
        return True
    return any(row["step"] for row in read_metrics(path))


class WorkdirRecord(Checked):
    """The config.json of a workdir."""

    config: dict[str, object]


def _recorded(path: str) -> WorkdirRecord:
    """Read the config.json of a workdir. Raises InputError where it is not one of ours."""
    file, prefix = os.path.join(path, "config.json"), f"--workdir {path}: choose another folder: "
    return check(WorkdirRecord, read_json(file, prefix=prefix), prefix + file)


def _hold(path: str) -> None:
    if (folder := os.path.realpath(path)) in _held:
        return
    lock = open(os.path.join(path, "lock"), "a")  # noqa: SIM115 (stays open)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise InputError(f"--workdir {path}: another process is at work in it") from None
    _held[folder] = lock


def check_workdir(path: str, config: Mapping[str, object]) -> None:
    """Raise InputError unless `path` is the folder of a run of `config` with any task; write nothing."""
    file = os.path.join(path, "config.json")
    if not os.path.exists(file):
        raise InputError(f"--workdir {path}: there is no run (it has no config.json)")
    before = _recorded(path).config
    if differs := _difference(before, {**config, "task": before.get("task")}):
        raise InputError(f"--workdir {path} belongs to a run with {differs}; choose another --workdir")


def recorded_config(path: str) -> dict[str, object]:
    """Return the config of the run in `path` by `section.key`; nothing where there is none that can be read."""
    try:
        return flatten(_recorded(path).config)
    except InputError:  # the folder is new, or `open_workdir` refuses it
        return {}


def open_output(key: str, folder: str) -> None:
    """Create `folder`, which the config's `key` names. Raise InputError where it cannot be written."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise InputError(f"{key}={folder}: {error.strerror}") from None


def versions() -> dict[str, str]:
    return {"specrl_jax": specrl_jax.__version__, "jax": jax.__version__}


def may_change(key: str) -> bool:
    return key in MAY_CHANGE or key.split(".")[0] in MAY_CHANGE


def _differs(path: str, config: Mapping[str, object]) -> str:
    """Return how the config of a workdir differs from `config`; "" where a run of this one may go on there."""
    before = _recorded(path).config
    return _difference(before, config, HOLD_OUT if _holds_out(before) or _holds_out(config) else ())


def _difference(before: Mapping[str, object], now: Mapping[str, object], fixed: Collection[str] = ()) -> str:
    """Return the first key that differs and may not change or is one of `fixed`, and its values; "" for none."""
    old, new = flatten(before), flatten(json.loads(json.dumps(now)))
    if others := sorted(old.keys() - new.keys()):
        return f"keys of another version, as {others[0]}"
    for key in sorted(old.keys() | new.keys()):
        if (key in fixed or not may_change(key)) and old.get(key) != new.get(key):
            return f"{key}={old.get(key)!r}, not {new.get(key)!r}"
    return ""


def _holds_out(config: Mapping[str, object]) -> bool:
    """Return whether a run learns from what is left of data.path without the problems that it validates on."""
    values = flatten(config)
    given = values.get("eval.path") or values.get("eval.task")
    return bool(values.get("task") == "train" and values.get("data.path") and values.get("eval.holdout") and not given)


def _check_steps(path: str, steps: object) -> None:
    # A folder without a record is no checkpoint: the run goes on without it.
    records = (os.path.join(path, "checkpoints", name, "digests") for name in _saved_steps(path))
    done = max((int(record.split(os.sep)[-2]) for record in records if os.path.isdir(record)), default=0)
    if isinstance(steps, int) and done > steps:
        raise InputError(f"steps={steps}, but the run in --workdir {path} has already done {done}")


def _saved_steps(path: str) -> list[str]:
    """Return the names of the folders of checkpoints, whole or not."""
    folder = os.path.join(path, "checkpoints")
    return [name for name in os.listdir(folder) if name.isdecimal()] if os.path.isdir(folder) else []


def flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
