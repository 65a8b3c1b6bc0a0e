"""Values that go between processes, as JSON: what Python can write as a literal, and references to anything else.

Runs inside a sandbox too, in Python 3.9 or later.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any


def encode(value: Any, refer: Callable[[Any], Any] | None = None, depth: int = 100) -> Any:
    """Return a plain value as JSON holds it. Raises TypeError for another, unless `refer` makes a reference of it.

    A value of a class that is derived from a plain one, as a Counter or a numpy.float64, becomes the plain one.
    """
    if value is None or isinstance(value, bool):
        return value
    if depth == 0:
        raise TypeError("a value that is too deep")
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    for many in (list, tuple, set, frozenset):
        if isinstance(value, many):
            return {many.__name__: [encode(item, refer, depth - 1) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(item, refer, depth - 1) for item in pair] for pair in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin1")}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if refer is None:
        raise TypeError(f"a value of type {type(value).__name__}")
    return refer(value)


def decode(value: Any, refer: Callable[[int], Any] | None = None) -> Any:
    """Return what `encode` was given. Raises ValueError for anything else."""
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("no value")
        return value
    if len(value) != 1:
        raise ValueError("no value")
    ((name, content),) = value.items()
    if name in ("list", "tuple", "set", "frozenset") and isinstance(content, list):
        return getattr(builtins, name)([decode(item, refer) for item in content])
    if name == "dict" and isinstance(content, list):
        return {decode(key, refer): decode(item, refer) for key, item in content}
    if name == "bytes" and isinstance(content, str):
        return content.encode("latin1")
    if name == "complex" and isinstance(content, list):
        return complex(*map(float, content))
    if name == "ref" and refer is not None and isinstance(content, int):
        return refer(content)
    raise ValueError("no value")
