"""Save a run's state at its due steps, and never one that is not good."""

from collections.abc import Callable

from specrl_jax.errors import RunFailed
from specrl_jax.io.checkpoint_reader import HostState
from specrl_jax.io.checkpoints import Checkpoints
from specrl_jax.learner.state import RunState


class DueSaves:
    """Saves the due steps of a run. A step that cannot be saved stays due: the next good one is saved in its place.

    Args:
      every: steps between checkpoints.
      last: the last step, which must be saved.
      say: shows a line.
    """

    def __init__(self, checkpoints: Checkpoints, every: int, last: int, *, say: Callable[[str], None]) -> None:
        self._checkpoints, self._every, self._last, self._say = checkpoints, every, last, say
        self._due = False

    def finish_step(self, step: int, save: Callable[[], str]) -> None:
        """Call `save`, which returns why it saves nothing, where a save is due. Raise RunFailed at the last step."""
        begins = step == self._last or step % self._every == 0
        if not (self._due or begins):
            return
        why = save()
        self._due = bool(why)
        if why and step == self._last:
            raise RunFailed(f"step {step}, the last, is not saved: {why}; {self._checkpoints.kept()}")
        if why and begins:
            self._say(f"step {step} is not saved: {why}")


def save_good(
    checkpoints: Checkpoints,
    step: int,
    state: RunState,
    *,
    host: HostState,
    skipping: bool,
    accuracy: float | None = None,
) -> str:
    """Start saving a step. Return "", or why it is not saved; raise RunFailed where its policy is not finite.

    A state with a value that is not finite, or one made while updates are skipped, would take the place of a good
    checkpoint and may fail again when it is resumed. No update makes a policy finite again; without a draft a run goes
    on.

    Args:
      state: what a checkpoint holds.
      skipping: the last update was skipped.
    """
    if skipping:
        return "its last update had no finite loss or gradient"
    name = checkpoints.save(step, state, host, accuracy=accuracy)
    why = f"{name} has a value that is not finite" if name else ""
    if name.startswith(("policy", "reference")):
        raise RunFailed(f"step {step}: {why}; {checkpoints.kept()}")
    return why
