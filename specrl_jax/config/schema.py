"""Declare configuration keys and check their values. Imports no jax: `--help` must answer at once."""

import dataclasses
import math
import typing
from collections.abc import Iterator, Mapping

from specrl_jax.config.renamed import gone
from specrl_jax.errors import InputError, Mistakes

T = typing.TypeVar("T")
# Largest values: of the integers of most arrays, of seeds and ids of rollouts, and of a prompt or response in tokens.
INT32, UINT32, LONGEST = 2**31 - 1, 2**32 - 1, 2**20
# Lowest temperature above 0, so that logits divided by it stay finite and accurate.
COLDEST = 0.01
# Of the type of a field: its name in an error message, and in one about a list.
NAMES = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


@dataclasses.dataclass(frozen=True)
class Key:
    """One configuration key. The range and the choices of a list hold for each entry."""

    name: str  # "section.key", or "key" at the top
    type: type  # int, float, str or bool; of the entries where `is_list`
    is_list: bool
    default: object
    help: str
    unit: str
    low: float | None = None  # smallest value
    high: float | None = None  # largest value
    above: float | None = None  # the bound itself is excluded
    below: float | None = None  # the bound itself is excluded
    choices: tuple[str, ...] = ()  # () = any text
    also: tuple[float, ...] = ()  # values beside the range, each with a meaning of its own

    def convert(self, value: object) -> object:
        """Return `value` in the key's type. Raise InputError naming the key where its type or value is wrong."""
        if self.is_list != isinstance(value, list | tuple):
            needed = f"a list of {PLURALS[self.type]}" if self.is_list else NAMES[self.type]
            raise InputError(f"{self.name}={shown(value)}: needs {needed}")
        entries = tuple(value) if isinstance(value, list | tuple) else (value,)
        if problem := next(filter(None, map(self._problem, entries)), ""):
            raise InputError(f"{self.name}={shown(entries if self.is_list else value)}: {problem}")
        converted = tuple(map(self.type, entries))
        return converted if self.is_list else converted[0]

    def _problem(self, value: object) -> str:
        """Return what would be right; "" where `value` is."""
        accepted = (int, float) if self.type is float else (self.type,)
        if not isinstance(value, accepted) or (isinstance(value, bool) and self.type is not bool):
            return f"needs {(PLURALS if self.is_list else NAMES)[self.type]}"
        if self.choices:
            return "" if value in self.choices else f"it is one of {', '.join(map(shown, self.choices))}"
        if not isinstance(value, int | float) or value in self.also:
            return ""
        inside = (
            math.isfinite(value)
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )
        return "" if inside else f"{self.range() or 'a finite number'} is needed"

    def range(self) -> str:
        """Return the bounds in words; "" without any."""
        bounds = (("at least", self.low), ("above", self.above), ("at most", self.high), ("below", self.below))
        range = " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)
        if self.low is not None and self.high is not None:
            range = f"{self.low} to {self.high}"
        return " or ".join([", ".join(map(str, self.also)), range]) if self.also else range


def key(default: T, help: str, unit: str = "", **limits: float | tuple[str, ...] | tuple[float, ...]) -> T:
    """Return a dataclass field that declares a key; `limits` are bounds or choices of `Key`."""
    return dataclasses.field(default=default, metadata={"help": help, "unit": unit, **limits})


def members(section: type, prefix: str = "") -> Iterator[tuple[str, type | Key]]:
    """Yield (field, its section's class or its Key) of a config dataclass, in order of declaration."""
    types = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        kind = types[field.name]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            section_class: type = kind
            yield field.name, section_class
            continue
        is_list = typing.get_origin(kind) is tuple
        entry = typing.get_args(kind)[0] if is_list else kind
        yield field.name, Key(prefix + field.name, entry, is_list, default=field.default, **field.metadata)


def keys(section: type, prefix: str = "") -> Iterator[Key]:
    """Yield the keys of a config dataclass and of its sections."""
    for name, member in members(section, prefix):
        if isinstance(member, Key):
            yield member
        else:
            yield from keys(member, f"{prefix}{name}.")


def build(section: type[T], values: Mapping[str, typing.Any], prefix: str = "") -> T:
    """Return the dataclass of nested `values`. Raise InputError naming each key that is wrong or missing."""
    mistakes, declared = Mistakes(), dict(members(section, prefix))
    for name in sorted(values.keys() ^ declared.keys()):
        with mistakes.check():
            unknown = gone(f"{prefix}{name}") or "there is no such key"
            raise InputError(f"{prefix}{name}: {unknown if name in values else 'the key is missing'}")
    built: dict[str, typing.Any] = {}
    for name, member in declared.items():
        with mistakes.check():
            if name in values and isinstance(member, Key):
                built[name] = member.convert(values[name])
            elif name in values and isinstance(member, type):
                built[name] = build(member, values[name], f"{prefix}{name}.")
    mistakes.refuse()
    return section(**built)


def shown(value: object) -> str:
    """Return a value as in a command; '' for empty text."""
    return repr(value) if value in ("", None) else str(value)
