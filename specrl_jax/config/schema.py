"""How a configuration key is declared and its value checked. Imports no jax: `--help` must answer at once."""

import dataclasses
import math
import typing
from collections.abc import Iterator
from typing import Any

from specrl_jax.errors import InputError

# What a value of a field's type is called in an error message.
_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}
# Types of the values that a field of each type takes.
_ACCEPTED = {int: int, float: (int, float), str: str, bool: bool}


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What values a key may have. For a list they hold for each entry."""

    low: float | None = None  # smallest value
    high: float | None = None  # largest value
    above: float | None = None  # value itself excluded
    below: float | None = None  # value itself excluded
    choices: tuple[str, ...] = ()  # () = any text

    def problem(self, value: object) -> str:
        """Return what would be right; "" where `value` is."""
        if self.choices:
            return "" if value in self.choices else f"it is one of {', '.join(map(_shown, self.choices))}"
        if not isinstance(value, int | float):
            return ""
        if not math.isfinite(value):
            return f"{self.text() or 'a finite number'} is needed"
        inside = (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )
        return "" if inside else f"{self.text()} is needed"

    def text(self) -> str:
        """Return the range in words; "" without bounds."""
        if self.low is not None and self.high is not None:
            return f"{self.low} to {self.high}"
        bounds = (("at least", self.low), ("above", self.above), ("at most", self.high), ("below", self.below))
        return " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)


@dataclasses.dataclass(frozen=True)
class Key:
    """One configuration key, as documentation and checks see it."""

    name: str  # "section.key", or "key" at the top
    type: type  # int, float, str or bool; of the entries where `is_list`
    is_list: bool
    default: object
    unit: str
    help: str
    bounds: Bounds

    def convert(self, value: object) -> Any:
        """Return `value` in the key's type. Raise InputError naming the key where its type or value is wrong."""
        if not self.is_list:
            return self._one(value, value)
        if not isinstance(value, list | tuple):
            self._refuse(value, f"needs {_PLURALS[self.type]}, like (a, b)")
        return tuple(self._one(entry, tuple(value)) for entry in value)

    def _one(self, value: object, shown: object) -> Any:
        right = isinstance(value, _ACCEPTED[self.type]) and (self.type is bool or not isinstance(value, bool))
        if not right:
            self._refuse(shown, f"needs {_PLURALS[self.type] if self.is_list else _NAMES[self.type]}")
        if problem := self.bounds.problem(value):
            self._refuse(shown, problem)
        return self.type(value)

    def _refuse(self, value: object, problem: str) -> typing.NoReturn:
        raise InputError(f"{self.name}={_shown(value)}: {problem}")


def key(
    default: Any,
    help: str,
    unit: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Return a dataclass field that declares one configuration key.

    Args:
      default: also what `base()` holds.
      help: one line of documentation; what 0 or '' stands for comes last.
      unit: of a number, like "tokens" or "s".
      low, high, above, below, choices: see `Bounds`.
    """
    metadata = {"help": help, "unit": unit, "bounds": Bounds(low, high, above, below, choices)}
    return dataclasses.field(default=default, metadata=metadata)


def keys(section: type, prefix: str = "") -> Iterator[Key]:
    """Yield the keys of a config dataclass and of its sections, in order of declaration."""
    types = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        kind = types[field.name]
        if dataclasses.is_dataclass(kind):
            yield from keys(kind, f"{prefix}{field.name}.")
            continue
        is_list = typing.get_origin(kind) is tuple
        entry = typing.get_args(kind)[0] if is_list else kind
        yield Key(prefix + field.name, entry, is_list, field.default, **field.metadata)


def _shown(value: object) -> str:
    return repr(value) if value == "" or value is None else str(value)
