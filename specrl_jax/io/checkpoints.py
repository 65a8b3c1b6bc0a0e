"""Checkpoints of a run through orbax: asynchronous and atomic."""

import operator
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from specrl_jax.core import Tree
from specrl_jax.errors import InputError, RunFailed


class HostState(NamedTuple):
    """A run's state beside its device arrays, as a checkpoint keeps it: speculation, alarms, data position."""

    values: dict[str, Any]  # as JSON
    arrays: Mapping[str, np.ndarray]  # by name, none of size 0


class Checkpoints:
    """The folder `checkpoints/` of a workdir.

    A save is written to a temporary folder and renamed, so a listed step is complete.

    Args:
      keep: number of latest steps to keep.
      keep_best: also keep so many steps of the highest accuracy.
    """

    def __init__(self, workdir: str, keep: int, keep_best: int = 0) -> None:
        kept = [policies.LatestN(keep)]
        if keep_best:
            best = policies.BestN(get_metric_fn=_accuracy, n=keep_best, keep_checkpoints_without_metrics=False)
            kept.append(best)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(kept),
            best_fn=_accuracy if keep_best else None,  # without it the accuracies of an earlier process are not read
            enable_async_checkpointing=True,
        )
        self._saving = 0
        self._manager = ocp.CheckpointManager(os.path.abspath(os.path.join(workdir, "checkpoints")), options=options)

    def latest(self) -> int | None:
        """Return the last complete step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: object, host: HostState, accuracy: float | None = None) -> None:
        """Start saving; `state` may be donated as soon as this returns, since orbax copies it first.

        Raises RunFailed if this or the previous save cannot be written.
        """
        if self._manager.latest_step() == step:
            return
        items = {"state": ocp.args.StandardSave(state), "values": ocp.args.JsonSave(host.values)}
        if host.arrays:
            items["arrays"] = ocp.args.StandardSave(dict(host.arrays))
        metrics = None if accuracy is None else {"accuracy": accuracy}
        self._wait()
        self._saving = step
        try:
            self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics)
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from None

    def _wait(self) -> None:
        """Wait for the save in progress."""
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from None

    def restore(self, step: int, abstract_state: Tree) -> tuple[Tree, HostState]:
        """Return (state with the shardings of `abstract_state`, host part). Raises InputError if it does not fit."""
        items = {"state": ocp.args.StandardRestore(abstract_state), "values": ocp.args.JsonRestore()}
        if (self._manager.directory / str(step) / "arrays").exists():
            items["arrays"] = ocp.args.StandardRestore()
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise self._misfit(step, error) from None
        arrays = {name: np.asarray(x) for name, x in restored["arrays"].items()} if "arrays" in items else {}
        return restored["state"], HostState(restored["values"], arrays)

    def restore_part(self, step: int, abstract_part: Tree) -> Tree:
        """Read only the arrays of `abstract_part`, a subtree of the state. Raises InputError if it does not fit."""
        if step not in self._manager.all_steps():
            there = ", ".join(map(str, self._manager.all_steps())) or "none"
            raise InputError(f"checkpoint {self._manager.directory}/{step}: there is none; there are {there}")
        shardings = jax.tree.map(lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, dtype=x.dtype), abstract_part)
        items = ocp.args.PyTreeRestore(abstract_part, restore_args=shardings, partial_restore=True)
        try:
            return self._manager.restore(step, args=ocp.args.Composite(state=items))["state"]
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise self._misfit(step, error) from None

    def _misfit(self, step: int, error: Exception) -> InputError:
        return InputError(f"checkpoint {self._manager.directory}/{step} does not fit this config: {_first_line(error)}")

    def _unwritable(self, error: Exception) -> RunFailed:
        return RunFailed(f"checkpoint {self._manager.directory}/{self._saving}: {_first_line(error)}; {self.kept()}")

    def kept(self) -> str:
        """Describe the last checkpoint, for error messages."""
        latest = self.latest()
        return "no checkpoint was saved" if latest is None else f"the last good checkpoint is step {latest}"

    def close(self) -> None:
        """Wait for a save in progress. Raises RunFailed if it cannot be written."""
        try:
            self._wait()
        finally:
            self._manager.close()


_accuracy = operator.itemgetter("accuracy")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
