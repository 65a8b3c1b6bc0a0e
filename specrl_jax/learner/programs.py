"""The learner's jitted steps compile at their first call with new shapes: announced, and refused if too large."""

import time
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import jax
import numpy as np

from specrl_jax.core import Jitted
from specrl_jax.data.rows import Rows
from specrl_jax.io.memory import check_fits

P = ParamSpec("P")
R = TypeVar("R")


class Programs:
    """What is told of each program of a learner.

    Attributes:
      on_program: called with what was compiled and its seconds.
    """

    def __init__(self) -> None:
        self.on_program: Callable[[str, float], None] = lambda program, seconds: None

    def announced(self, name: str, phase: str, step: Jitted[P, R]) -> "AnnouncedStep[P, R]":
        """Return the step, announced as `name`; it runs in `phase`."""
        return AnnouncedStep(self, name, phase, step)


class AnnouncedStep(Generic[P, R]):
    """A jitted step of the learner. Raises InputError where a program needs more of a host's memory than is free."""

    def __init__(self, programs: Programs, name: str, phase: str, step: Jitted[P, R]) -> None:
        self._programs, self._name, self._phase, self._step = programs, name, phase, step
        self._known: set[tuple[tuple[int, ...], ...]] = set()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        leaves = jax.tree.leaves(args)
        shapes = tuple(np.shape(x) for x in leaves)
        traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
        if shapes not in self._known and not traced and not jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            self._compile(args)
            self._known.add(shapes)
        return self._step(*args, **kwargs)

    def _compile(self, args: tuple[object, ...]) -> None:
        """Compile for these arguments; the call that follows finds the program in jax's cache."""
        start = time.perf_counter()
        compiled = self._step.lower(*args).compile()
        rows = next(x for x in args if isinstance(x, Rows)).tokens.shape
        self._programs.on_program(f"{self._name} {rows[0]} x {rows[1]} tokens", time.perf_counter() - start)
        check_fits(self._phase, compiled)

    def lower(self, *args: object) -> jax.stages.Lowered:
        return self._step.lower(*args)

    def eval_shape(self, *args: object) -> R:
        return self._step.eval_shape(*args)
