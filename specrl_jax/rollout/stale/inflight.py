"""In-flight weight updates: running rollouts take the newest weights between two chunks.

`pipeline.schedule=inflight`. When depends on timing. A run writes it down, and `pipeline.repeat` takes weights at
the same places again.
"""

import itertools
import os
from collections.abc import Callable

import jax

from specrl_jax.core import atomic_write, open_written
from specrl_jax.json_files import LINE_BYTES, Checked, check, parse_json, read_lines

FILE = "weight_updates_{}.jsonl"  # of each process


class WeightUpdate(Checked):
    """A line of the file."""

    step: int  # of the rollouts
    chunk: int  # before which they took other weights, counted from the step's first
    policy: int  # the step before which the weights were published


class WeightUpdates:
    """Chooses, chunk by chunk, the weights of the rollouts under way."""

    def __init__(self, workdir: str, repeat: str, first: int, *, agree: Callable[[int], tuple[int, ...]]) -> None:
        """
        Args:
          repeat: workdir of a run whose updates are repeated; "": the newest weights are taken.
          first: the first step that is generated: what an interrupted run wrote of it and of later ones goes.
          agree: the choice of the first process -> that choice, in all processes of a copy.
        """
        name = FILE.format(jax.process_index())
        self._path = os.path.join(workdir, name)
        self._repeated = _read(os.path.join(repeat, name)) if repeat else None
        self._agree = agree
        kept = [update for update in _read(self._path) if update.step < first] if os.path.exists(self._path) else []
        with atomic_write(self._path) as file:
            file.writelines(_line(update) for update in kept)

    def of(self, step: int, policy: int) -> Callable[[int], int]:
        """Return the choice for the rollouts of a step, which begin under `policy`: newest policy -> policy."""
        chunks, current = itertools.count(), policy
        repeated = None if self._repeated is None else {u.chunk: u.policy for u in self._repeated if u.step == step}

        def choose(newest: int) -> int:
            nonlocal current
            chunk = next(chunks)
            (chosen,) = self._agree(newest if repeated is None else repeated.get(chunk, current))
            if chosen != current:
                current = chosen
                with open_written(self._path, "a") as file:
                    file.write(_line(WeightUpdate(step=step, chunk=chunk, policy=chosen)))
            return chosen

        return choose


def _line(update: WeightUpdate) -> str:
    return update.model_dump_json() + "\n"


def _read(path: str) -> list[WeightUpdate]:
    """Return the updates of a file. Raises InputError where it is none."""
    lines = read_lines(path, LINE_BYTES)
    return [check(WeightUpdate, parse_json(text, path, line=number), f"{path}:{number}") for number, text in lines]
