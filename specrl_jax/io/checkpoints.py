"""Checkpoints of a run through orbax: asynchronous, and either whole or absent."""

import os
from typing import Any

import jax
import orbax.checkpoint as ocp

from specrl_jax.core import BadInput


class Checkpoints:
    """`checkpoints/` of a workdir. Arrays by orbax, the data position as JSON beside them.

    A save is written to a temporary folder and renamed, so a step that is listed is complete.
    """

    def __init__(self, workdir: str, keep: int) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(os.path.abspath(os.path.join(workdir, "checkpoints")), options=options)

    def latest(self) -> int | None:
        """The last complete step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Starts saving; `state` may be donated as soon as this returns (orbax copies first)."""
        if self._manager.latest_step() == step:
            return
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(position))
        self._manager.save(step, args=items)

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
        """(state laid out as `abstract_state`, data position). Raises BadInput where it does not fit."""
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state), position=ocp.args.JsonRestore())
        try:
            restored = self._manager.restore(step, args=items)
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise self._misfit(step, error) from None
        return restored["state"], restored["position"]

    def restore_part(self, step: int, abstract_part: Any) -> Any:
        """Some of a step's arrays, those of `abstract_part`, whose tree is a part of the state's; the others are not
        read. Raises BadInput where there is no such step, or it does not fit.
        """
        if step not in self._manager.all_steps():
            there = ", ".join(map(str, self._manager.all_steps())) or "none"
            raise BadInput(f"checkpoint {self._manager.directory}/{step}: there is none; there are {there}")
        shardings = jax.tree.map(lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, dtype=x.dtype), abstract_part)
        items = ocp.args.PyTreeRestore(abstract_part, restore_args=shardings, partial_restore=True)
        try:
            return self._manager.restore(step, args=ocp.args.Composite(state=items))["state"]
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise self._misfit(step, error) from None

    def _misfit(self, step: int, error: Exception) -> BadInput:
        reason = str(error).strip().splitlines()[0]
        return BadInput(f"checkpoint {self._manager.directory}/{step} does not fit this config: {reason}")

    def close(self) -> None:
        """Waits for a save under way."""
        self._manager.wait_until_finished()
        self._manager.close()
