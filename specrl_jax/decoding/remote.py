"""The interface of an engine to other processes that generate in its place."""

from collections.abc import Callable
from typing import Any, Protocol

from specrl_jax.decoding.broadcast import Broadcast
from specrl_jax.decoding.requests import EngineCall
from specrl_jax.decoding.rollouts import Rollouts


class RemoteEngines(Protocol):
    """Processes with engines like one at hand, which is never compiled; `agree` is of its processes."""

    def metrics(self) -> dict[str, int | float]:
        """Return metrics of the processes."""

    def compile_all(self, params: Any, agree: Broadcast, on_progress: Callable[[int, int], None]) -> None:
        """Let the processes compile; what `on_progress` raises ends the call."""

    def generate(self, call: EngineCall[Any], agree: Broadcast) -> Rollouts:
        """Generate as `Engine.generate` does."""

    def begin(self, call: EngineCall[Any], agree: Broadcast, until: Callable[[], bool]) -> bool:
        """Begin as `Engine.begin` does."""
