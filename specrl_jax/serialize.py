"""Typed values as JSON and named arrays, and back: for checkpoints and for messages between processes, without pickle.

A NamedTuple or dataclass becomes an object by field, a list or tuple a list, an array a name. The type hints of the
class say what to make of it again, so nothing in the data chooses what is built.
"""

import dataclasses
import io
import json
import math
import types
import typing
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

T = TypeVar("T")
_SCALARS = {bool: (bool,), int: (int,), float: (float, int), str: (str,)}  # what JSON makes of each


class Packed(NamedTuple):
    """A value as JSON, and its arrays by name."""

    values: Any
    arrays: dict[str, np.ndarray]  # none of size 0, which orbax cannot save: dtype and shape of such are in `values`


def pack(value: object, name: str = "") -> Packed:
    """Return `value` as JSON and arrays; names of arrays are paths that begin with `name`.

    Raises TypeError for anything but NamedTuples, dataclasses, lists, tuples, dicts with text keys, arrays, numbers,
    text and None.
    """
    arrays: dict[str, np.ndarray] = {}

    def packed(value: Any, path: str) -> Any:
        if isinstance(value, np.ndarray):
            if not value.size:
                return [value.dtype.str, list(value.shape)]
            arrays[path] = value
            return path
        if isinstance(value, np.generic):
            return value.item()
        if fields := _fields(value):
            return {field: packed(getattr(value, field), f"{path}.{field}") for field in fields}
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {key: packed(one, f"{path}.{key}") for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [packed(one, f"{path}.{i}") for i, one in enumerate(value)]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"{path}: cannot pack a {type(value).__name__}")

    return Packed(packed(value, name), arrays)


def unpack(kind: type[T], packed: Packed) -> T:
    """Return the value of type `kind` that was packed. Raises TypeError, KeyError or ValueError where it is another."""
    return typing.cast(T, _unpacked(kind, packed.values, packed.arrays))


def to_bytes(value: object) -> bytes:
    """Return a value as npz without pickle: its arrays, and the rest as JSON under the name "json"."""
    packed, file = pack(value, "value"), io.BytesIO()
    text = np.frombuffer(json.dumps(packed.values).encode(), np.uint8)
    np.savez(file, allow_pickle=False, json=text, **packed.arrays)
    return file.getvalue()


def from_bytes(kind: type[T], data: bytes) -> T:
    """Return what `to_bytes` wrote; nothing in `data` chooses what is built, or takes more memory than it does.

    Raises ValueError where `data` is anything else.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            parts = file.infolist()
        if any(part.compress_type for part in parts) or sum(part.file_size for part in parts) > len(data):
            raise ValueError("compressed arrays")
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return unpack(kind, Packed(json.loads(arrays.pop("json").tobytes()), arrays))
    except Exception as error:  # zipfile, numpy and json raise a dozen kinds
        raise ValueError(f"not a {kind.__name__}: {type(error).__name__}: {error}") from error


def _fields(kind: object) -> list[str]:
    """Return the fields of a NamedTuple or dataclass, or of its instance; else none."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(getattr(kind, "_fields", ()))


def _unpacked(kind: Any, value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (origin,) = (one for one in inner if one is not types.NoneType)  # only optional values
        return _unpacked(origin, value, arrays)
    if origin in (np.ndarray, jax.Array):  # the latter where a host array stands in for one
        return arrays[value] if isinstance(value, str) else _empty(value[0], value[1])
    if fields := _fields(origin):
        hints = typing.get_type_hints(origin)
        return origin(**{field: _unpacked(hints[field], value[field], arrays) for field in fields})
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: _unpacked(inner[1] if inner else object, one, arrays) for key, one in value.items()}
    if origin is list:
        return [_unpacked(inner[0], one, arrays) for one in value]
    if origin is tuple:
        kinds = [inner[0]] * len(value) if inner[1:] == (...,) else inner
        return tuple(_unpacked(one, part, arrays) for one, part in zip(kinds, value, strict=True))
    if origin in _SCALARS and type(value) not in _SCALARS[origin]:
        raise TypeError(f"{value!r}, expected {origin.__name__}")
    return value


def _empty(dtype: str, shape: list[int]) -> np.ndarray:
    if math.prod(shape):
        raise ValueError(f"an array of shape {shape} without numbers")
    return np.zeros(shape, np.dtype(dtype))
