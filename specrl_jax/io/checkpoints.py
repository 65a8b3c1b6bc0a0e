"""Checkpoints of a run through orbax: asynchronous and atomic when written, verified by digests when read."""

import contextlib
import functools
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from specrl_jax import distributed
from specrl_jax.core import Tree, system_error
from specrl_jax.errors import InputError, RunFailed
from specrl_jax.io.checkpoint_reader import (
    CheckpointRecord,
    Damaged,
    HostState,
    first_line,
    has_items,
    read,
    read_part,
    read_record,
    read_values,
    record_json,
)
from specrl_jax.io.digests import array_digests, device_digests, json_digest

T = TypeVar("T")


class Checkpoints:
    """The folder `checkpoints/` of a workdir. Nothing is written before the first save.

    Args:
      keep: number of latest steps to keep.
      keep_best: also keep so many steps of the highest accuracy.
    """

    def __init__(self, workdir: str, keep: int, keep_best: int = 0) -> None:
        self.folder = os.path.abspath(os.path.join(workdir, "checkpoints"))
        self._keep, self._keep_best = keep, keep_best
        self._saved: int | None = None  # the newest step saved or restored here

    # ---- writing

    def save(self, step: int, state: object, host: HostState, *, accuracy: float | None = None) -> str:
        """Start saving; `state` may be donated as soon as this returns, since orbax copies it first.

        Returns:
          "", or the name of an array with a value that is not finite; then nothing is saved.
        Raises:
          RunFailed: this or the previous save cannot be written.
        """
        if self._saved == step:
            return ""
        digests, not_finite = device_digests(state)
        if not_finite:
            return not_finite[0]
        record = CheckpointRecord(
            step, digests, array_digests(host.arrays), values=json_digest(host.values), accuracy=accuracy
        )
        items = {"state": ocp.args.StandardSave(state), "values": ocp.args.JsonSave(host.values)}
        if host.arrays:
            items["arrays"] = ocp.args.StandardSave(dict(host.arrays))
        items["digests"] = ocp.args.JsonSave(record_json(record))
        self._wait()
        self._saved = step
        try:
            self._policy.accuracies[step] = accuracy
            if not self._manager.save(step, args=ocp.args.Composite(**items)):
                raise ValueError("orbax refuses to save it: the folder has a later step")
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from None
        return ""

    def kept(self) -> str:
        """Say what the same command goes on from, for error messages."""
        with contextlib.suppress(OSError, ValueError):  # which a save that fails has reported, or will
            self._settle()
        latest = self.latest()
        if latest is None:
            return "no checkpoint was saved; the same command starts anew"
        return f"the last good checkpoint is step {latest}; the same command goes on from there"

    def close(self) -> None:
        """Wait for a save in progress. Raises RunFailed if it cannot be written."""
        try:
            self._wait()
        finally:
            if "_manager" in self.__dict__:
                self._manager.close()

    @functools.cached_property
    def _policy(self) -> "_Kept":
        return _Kept(self._keep, self._keep_best, {step: self._accuracy(step) for step in self._steps()})

    @functools.cached_property
    def _manager(self) -> ocp.CheckpointManager:
        # Its threads log each error with tracebacks before `_wait` raises it.
        logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._policy,
            enable_async_checkpointing=True,
            lightweight_initialize=True,  # what it would read is in the records
        )
        return ocp.CheckpointManager(self.folder, options=options)

    def _accuracy(self, step: int) -> float | None:
        with contextlib.suppress(Damaged):
            return read_record(self._path(step)).accuracy
        return None

    def _settle(self) -> None:
        if "_manager" in self.__dict__:
            self._manager.wait_until_finished()

    def _wait(self) -> None:
        """Wait for the save in progress."""
        try:
            self._settle()
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: Exception) -> RunFailed:
        system = system_error(error, "")
        reason = (system and system.strerror) or first_line(error)
        return RunFailed(f"checkpoint {self.folder}/{self._saved}: {reason}; {self.kept()}")

    # ---- reading

    def latest(self) -> int | None:
        """Return the newest step whose record is whole, or None; its arrays are not read."""
        for step in reversed(self._steps()):
            with contextlib.suppress(Damaged):
                read_record(self._path(step))
                return step
        return None

    def host_values(self, step: int) -> dict[str, Any]:
        """Return the JSON values of one step, without the arrays; {} where they are damaged, as `restore` finds."""
        with contextlib.suppress(Damaged):
            return read_values(self._path(step), read_record(self._path(step)))
        return {}

    def restore(self, step: int, abstract_state: Tree) -> tuple[Tree, HostState]:
        """Return (state with the shardings of `abstract_state`, host part) of one step.

        Raises InputError where it does not fit, RunFailed where it is damaged.
        """
        try:
            return read(self._path(step), abstract_state)
        except Damaged as damage:
            raise RunFailed(f"checkpoint {self._path(step)} is damaged ({damage})") from None

    def restore_latest(self, abstract_state: Tree, say: Callable[[str], None]) -> tuple[int, Tree, HostState] | None:
        """Return (step, state, host part) of the newest whole checkpoint; None: there is none at all.

        Newer ones that are damaged are reported through `say` and renamed to N.damaged, so that their steps can be
        saved again. Raises InputError where a checkpoint does not fit, RunFailed where all are damaged.
        """
        newest, damaged = self._newest(lambda step: read(self._path(step), abstract_state))
        start = "the start" if newest is None else newest[0]
        for step, what in damaged.items():
            say(f"checkpoint {step} is damaged ({what}; kept as {self._path(step)}.damaged); going on from {start}")
        if distributed.is_first_process():
            for step in damaged:
                _set_aside(self._path(step))
        distributed.any_process(False)  # the others wait until the names are free
        if newest is None:
            return None
        self._saved = newest[0]
        return newest[0], *newest[1]

    def restore_part(self, step: int | None, abstract_part: Tree, say: Callable[[str], None]) -> tuple[int, Tree]:
        """Return (step, arrays of `abstract_part`, a subtree of the state); step None: of the newest whole checkpoint.

        Raises InputError where there is none or it does not fit, RunFailed where it is damaged, or all are.
        """
        if step is None:
            newest, damaged = self._newest(lambda step: read_part(self._path(step), abstract_part))
            if newest is None:
                raise InputError(f"{self.folder}: there is no checkpoint yet")
            for other, what in damaged.items():
                say(f"checkpoint {other} is damaged ({what}); going on from {newest[0]}")
            return newest
        if step not in self._steps():
            there = ", ".join(map(str, self._steps())) or "none"
            raise InputError(f"checkpoint {self._path(step)}: there is none; there are {there}")
        try:
            return step, read_part(self._path(step), abstract_part)
        except Damaged as damage:
            raise RunFailed(f"checkpoint {self._path(step)} is damaged ({damage})") from None

    def _newest(self, read: Callable[[int], T]) -> tuple[tuple[int, T] | None, dict[int, str]]:
        """Return (newest step that `read` finds whole, what it read), and what is wrong with the newer ones.

        None where no folder has anything of a checkpoint. Raises RunFailed where none is whole.
        """
        damaged: dict[int, str] = {}
        for step in reversed(distributed.all_gather_objects(list[int], self._steps())[0]):
            try:
                return (step, read(step)), damaged
            except Damaged as damage:
                damaged[step] = str(damage)
        if distributed.any_process(any(has_items(self._path(step)) for step in damaged)):
            each = "; ".join(f"{step}: {what}" for step, what in damaged.items())
            raise RunFailed(f"{self.folder}: no checkpoint is whole ({each}); without this folder the run starts anew")
        return None, damaged

    def _path(self, step: int) -> str:
        return os.path.join(self.folder, str(step))

    def _steps(self) -> list[int]:
        """Return the numbers of the folders in order, whatever is in them."""
        names = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


class _Kept(policies.PreservationPolicy):
    """Keeps the latest steps, and those of the highest accuracy; of equal ones the later."""

    def __init__(self, latest: int, best: int, accuracies: dict[int, float | None]) -> None:
        self._latest, self._best, self.accuracies = latest, best, accuracies

    def should_preserve(self, checkpoints: Sequence[Any], *, context: object) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        accuracies = ((self.accuracies.get(step), step) for step in steps)
        ranked = [step for _, step in sorted((accuracy, step) for accuracy, step in accuracies if accuracy is not None)]
        preserved = {*steps[-self._latest :], *(ranked[-self._best :] if self._best else ())}
        return [step in preserved for step in steps]


def _set_aside(path: str) -> None:
    """Rename a damaged checkpoint to N.damaged, in the place of an earlier one. Raises RunFailed."""
    try:
        if os.path.isdir(path + ".damaged"):
            shutil.rmtree(path + ".damaged")
        os.replace(path, path + ".damaged")
    except OSError as error:
        raise RunFailed(f"{path}: {error.strerror}; remove it by hand") from None
