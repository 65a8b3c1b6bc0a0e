"""main.py, killed (`kill -9`) at a chosen moment of a chosen step.

    python -m experiments.robustness.killed MOMENT STEP DELAY --config configs/... --workdir ...

DELAY is in seconds after the moment (MOMENTS) began. The process sends itself the signal, so nothing is cleaned up.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from specrl_jax import cli
from specrl_jax.io.checkpoints import Checkpoints
from specrl_jax.io.progress import Display
from specrl_jax.rollout.generate import RolloutGenerator
from specrl_jax.training import step


class Moment(NamedTuple):
    """A part of a step: the function that it begins with, and how to read the step from a call's arguments."""

    owner: Any
    name: str
    step_of: Callable[..., int]


MOMENTS = {
    "generation": Moment(RolloutGenerator, "generate", lambda generator, step, *_, **options: step),
    "learning": Moment(step, "update", lambda learner, state, *_, **options: int(state.policy.step) + 1),
    "save": Moment(Checkpoints, "save", lambda checkpoints, step, *_, **options: step),
    "between": Moment(Display, "finish_step", lambda display, step, *_, **options: step),
}


def kill_in(moment: Moment, at: int, delay: float) -> None:
    """Replace the moment's function by one that is killed in step `at`."""
    real = getattr(moment.owner, moment.name)

    def killed(*arguments: Any, **options: Any) -> Any:
        if moment.step_of(*arguments, **options) == at:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return real(*arguments, **options)

    setattr(moment.owner, moment.name, killed)


if __name__ == "__main__":
    _, name, at, delay, *rest = sys.argv
    kill_in(MOMENTS[name], int(at), float(delay))
    sys.argv = ["main.py", *rest]
    sys.exit(cli.main(sys.argv))
