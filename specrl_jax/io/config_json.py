"""The config.json of a checkpoint, read by type."""

import dataclasses
from collections.abc import Mapping

from specrl_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class ConfigJson:
    """The object in a config.json. Its getters raise InputError where an entry is absent or of another type."""

    values: Mapping[str, object]
    folder: str
    key: str  # of our config, which names the folder, for messages

    def get(self, name: str) -> object:
        """Return the entry; None where it is absent or null."""
        return self.values.get(name)

    def integer(self, name: str) -> int:
        return int(self.number(name))

    def number(self, name: str) -> float:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.lacks(name)
        return float(value)

    def flag(self, name: str, default: bool | None = False) -> bool:
        """Return the truth of an entry, `default` where it is absent or null; default None requires it."""
        value = default if self.get(name) is None else self.get(name)
        if value is None:
            raise self.lacks(name)
        return bool(value)

    def section(self, name: str) -> "ConfigJson":
        """Return the object at `name`; an empty one where there is none."""
        value = self.get(name)
        return dataclasses.replace(self, values=value if isinstance(value, dict) else {})

    def lacks(self, name: str) -> InputError:
        """Return the error that says that an entry is missing."""
        return InputError(f"{self.key}: {self.folder}/config.json lacks '{name}'")

    def error(self, message: str) -> InputError:
        """Return the error that the checkpoint `message`, a sentence without its subject."""
        return InputError(f"{self.key}: {self.folder} {message}")
