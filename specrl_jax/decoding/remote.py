"""The interface of an engine to other processes that generate in its place."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from specrl_jax.decoding.requests import EngineCall
from specrl_jax.decoding.rollouts import Rollouts

if TYPE_CHECKING:
    from specrl_jax.decoding.engine import Engine


class RemoteEngines(Protocol):
    """Processes with engines like the one at hand, which is given for its limits and is never compiled."""

    def metrics(self) -> dict[str, int | float]:
        """Return metrics of the processes."""

    def compile_all(self, engine: "Engine[Any, Any]", params: Any, on_wait: Callable[[], None]) -> None:
        """Let the processes compile; what `on_wait` raises ends the call."""

    def generate(self, engine: "Engine[Any, Any]", call: EngineCall[Any]) -> Rollouts:
        """Generate as `Engine.generate` does."""

    def begin(self, engine: "Engine[Any, Any]", call: EngineCall[Any], until: Callable[[], bool]) -> bool:
        """Begin as `Engine.begin` does."""
