"""Reward functions: how one is found, what it may ask for, and what it may return."""

import importlib
import importlib.util
import inspect
import numbers
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsFloat

from specrl_jax.rewards.messages import LARGEST, MAX_PARTS, Context, are_parts

ASKABLE = Context._fields  # "prompt", "row", "tokens"


class Function(NamedTuple):
    call: Callable[..., object]
    asks: tuple[str, ...] = ()  # of ASKABLE, passed by keyword


class Returned(NamedTuple):
    reward: float
    correct: bool | None = None  # None: a number only
    parts: Mapping[str, float] = {}
    messages: Sequence[Mapping[str, str]] | None = None  # what an environment says
    extracted: str | None = None  # of an environment, the tool call in a turn


def find(path: str) -> Any:
    """Import what `package.module:name` or `FILE.py:name` names. Raises what the import raises."""
    module, _, name = path.rpartition(":")
    value: Any = _load_file(module) if module.endswith(".py") else importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def load(path: str) -> Function:
    """Import the function `package.module:function` or `FILE.py:function`. Raises what the import raises, or TypeError
    where it does not take (response, answer).
    """
    function, name = find(path), path.rpartition(":")[2]
    if not callable(function):
        raise TypeError(f"{name} is no function")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return Function(function)  # written in C, without a signature
    asks = _asked(signature)
    try:
        signature.bind("response", "answer", **dict.fromkeys(asks))
    except TypeError as error:
        needed = "(response, answer) and, by keyword, any of prompt, row, tokens"
        raise TypeError(f"{name}{signature} does not take {needed}: {error}") from None
    return Function(function, asks)


def file_of(path: str) -> str:
    """Return the file of a reward that is named by it, `FILE.py:function`; "" for others."""
    module, _, _ = path.rpartition(":")
    return module if module.endswith(".py") else ""


def source_of(path: str) -> str:
    """Return the file in which a reward or environment is, by whichever name it has; "" for built-in ones."""
    module, _, _ = path.rpartition(":")
    if module.endswith(".py") or not module:
        return module
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # reported where it is loaded
        return ""
    return (spec and spec.origin) or ""


def _load_file(path: str) -> types.ModuleType:
    """Import a file once, with its folder importable, as when Python runs it."""
    path = os.path.abspath(path)
    folder, file = os.path.split(path)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = file.removesuffix(".py")
    if (loaded := sys.modules.get(name)) and getattr(loaded, "__file__", None) == path:
        return loaded
    if loaded:  # a file may be called like a module that is in use
        name = f"_reward_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader  # as for every name that ends in .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _asked(signature: inspect.Signature) -> tuple[str, ...]:
    """Return which of ASKABLE a signature names beside its first two parameters; all others for **keywords."""
    parameters = list(signature.parameters.values())
    first = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:2]
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return tuple(n for n in ASKABLE if n not in first and (everything or n in signature.parameters))


def call(function: Function, response: str, answer: str, *, context: Context) -> Returned:
    """Call a reward. Raises what it raises, and TypeError or ValueError for what is no reward."""
    value = function.call(response, answer, **{name: getattr(context, name) for name in function.asks})
    return value if isinstance(value, Returned) else read(value)


def read(value: object) -> Returned:
    """Read what a reward returned: a number, (number, correct), or {"reward": number, "correct": ..., part: number}.

    True and False count 1 and 0. Raises TypeError or ValueError for anything else: text, None, what is not finite.
    """
    if isinstance(value, tuple):
        if len(value) != 2:
            raise TypeError(f"a reward returned a tuple of {len(value)}, not (reward, correct)")
        return Returned(_number(value[0], "a reward"), _correct(value[1]))
    if not isinstance(value, Mapping):
        return Returned(_number(value, "a reward"))
    if "reward" not in value:
        raise TypeError("a reward returned a dict without 'reward'")
    names = [name for name in value if name not in ("reward", "correct")]
    parts = {name: _number(value[name], f"part '{name}'") for name in names[: MAX_PARTS + 1]}
    if not are_parts(parts):
        raise ValueError(f"a reward's parts need names of letters, digits, '_', '-', '.', and are at most {MAX_PARTS}")
    return Returned(_number(value["reward"], "a reward"), _correct(value.get("correct")), parts)


def _number(value: object, what: str) -> float:
    is_complex = isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)
    if is_complex or not isinstance(value, SupportsFloat):
        raise TypeError(f"{what} must be a number, not {type(value).__name__}")
    number = float(value)
    if not abs(number) <= LARGEST:
        raise ValueError(f"{what} of {number}")
    return number


def _correct(value: object) -> bool | None:
    if value is None:
        return None
    if value not in (True, False):
        raise TypeError(f"'correct' must be True or False, not {value!r:.50}")
    return bool(value)
