"""One rule about a key of a config: the form of every message that refuses a value beside others."""

from specrl_jax.config import Config
from specrl_jax.config.automatic import value_of
from specrl_jax.config.schema import shown
from specrl_jax.errors import InputError


class Requirement:
    """Raises InputError "KEY=VALUE: reason" for a key of `config` unless a rule holds; `beside` follows the value."""

    def __init__(self, config: Config, beside: str = "") -> None:
        self._config, self._beside = config, beside

    def __call__(self, key: str, holds: object, reason: str) -> None:
        if not holds:
            raise InputError(f"{key}={shown(value_of(self._config, key))}{self._beside}: {reason}")
