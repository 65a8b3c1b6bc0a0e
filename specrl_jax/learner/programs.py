"""The learner's jitted steps compile at their first call: announced, and refused if too large.

Then for all shapes of rows that the run has, so that nothing compiles in a later step.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import numpy as np

from specrl_jax.core import Jitted, compiler_options
from specrl_jax.data.rows import Rows
from specrl_jax.io.memory import check_fits
from specrl_jax.learner.microbatches import Metrics, PerRow, State, Update
from specrl_jax.learner.policy_step import Features
from specrl_jax.rl.objectives import LossInputs

P = ParamSpec("P")
R = TypeVar("R")


class Programs:
    """Announces each program that a learner compiles.

    Attributes:
      shapes: (rows, tokens) of the microbatches of the run, if it knows them.
      on_program: called with what was compiled and its seconds.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        self.shapes = shapes
        self.on_program: Callable[[str, float], None] = lambda program, seconds: None

    def announced(self, name: str, phase: str, step: Jitted[P, R]) -> "AnnouncedStep[P, R]":
        """Return the step, announced as `name`; it runs in `phase`."""
        return AnnouncedStep(self, name, phase, step=step)

    def announced_update(self, name: str, update: Update[State, PerRow, Metrics]) -> Update[State, PerRow, Metrics]:
        """Return the update of `name`, its programs announced."""
        add = self.announced(f"{name} sums", "train", update.add)
        apply = self.announced(f"{name} update", "train", update.apply)
        # A first update of one microbatch adds nothing up; a later one may.
        gradient = AnnouncedStep(
            self, f"{name} gradient", "train", step=update.gradient, then=lambda found: add.prepare(found[0], found[0])
        )
        return Update(gradient, add, apply)


class AnnouncedStep(Generic[P, R]):
    """A jitted step of the learner. Raises InputError where a program needs more of a host's memory than is free.

    Args:
      then: called with `result` once it is known.

    Attributes:
      result: of the first program, as shapes with shardings, once it is compiled.
    """

    def __init__(
        self,
        programs: Programs,
        name: str,
        phase: str,
        *,
        step: Jitted[P, R],
        then: Callable[[Any], object] = lambda result: None,
    ) -> None:
        self._programs, self._name, self._phase, self._step, self._then = programs, name, phase, step, then
        # By the shapes of the arguments.
        self._compiled: dict[tuple[tuple[int, ...], ...], Callable[..., R]] = {}
        self._lock = threading.Lock()  # another thread may compile beside the first rollouts
        self.result: Any = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        assert not kwargs, "a compiled program takes its arguments in order"
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))
        if traced or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self._step(*args, **kwargs)
        # The program itself: jit would compile anew for arguments that differ in more than their shapes.
        return self.prepare(*args)(*args)

    def prepare(self, *args: object) -> Callable[..., R]:
        """Return the program for arguments of these shapes; compile it unless that was done."""
        with self._lock:
            if (wanted := _shapes(args)) not in self._compiled:
                first = not self._compiled
                for alike in [args, *self._other_lengths(args)]:
                    self._compiled[_shapes(alike)] = self._compile(alike)
                if first:
                    self._then(self.result)
            return self._compiled[wanted]

    def _other_lengths(self, args: tuple[object, ...]) -> list[tuple[object, ...]]:
        """Return the arguments with microbatches of the other lengths of rows, as shapes; none of other rows."""
        shapes, of_args = self._programs.shapes, [x.tokens.shape for x in args if isinstance(x, Rows)]
        pairs = [(rows, other) for rows in shapes if rows in of_args for other in shapes if other != rows]
        return [tuple(_resized(x, rows, other) for x in args) for rows, other in pairs]

    def _compile(self, args: tuple[object, ...]) -> Callable[..., R]:
        start = time.perf_counter()
        lowered = self._step.lower(*args)
        compiled = lowered.compile(compiler_options(jax.default_backend()))
        if self.result is None:
            self.result = _placed(lowered.out_info, compiled.output_shardings)
        shapes = [f" {x.tokens.shape[0]} x {x.tokens.shape[1]} tokens" for x in args if isinstance(x, Rows)]
        self._programs.on_program(self._name + "".join(shapes), time.perf_counter() - start)
        check_fits(self._phase, compiled)
        return compiled

    def lower(self, *args: object) -> jax.stages.Lowered:
        return self._step.lower(*args)

    def eval_shape(self, *args: object) -> R:
        return self._step.eval_shape(*args)


def _shapes(args: tuple[object, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(np.shape(x) for x in jax.tree.leaves(args))


def _placed(shapes: Any, shardings: Any) -> Any:
    """Return shapes with shardings, two trees alike."""
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, shardings)


def _resized(x: Any, rows: tuple[int, int], other: tuple[int, int]) -> Any:
    """Return what is by row in microbatches of other (rows, tokens), as shapes."""
    if not isinstance(x, Rows | LossInputs | Features):
        return x

    def resized(x: Any) -> jax.ShapeDtypeStruct:
        # The room for the ids of sampling masks is a multiple of a row's tokens.
        shape = (other[0], x.shape[1] // rows[1] * other[1], *x.shape[2:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=getattr(x, "sharding", None))

    return jax.tree.map(resized, x)
