"""Values through JSON and arrays: what comes back has the types and bits of what went in."""

import dataclasses
import json
from typing import NamedTuple

import numpy as np
import pytest

from specrl_jax.serialize import Packed, from_bytes, pack, to_bytes, unpack


class Part(NamedTuple):
    numbers: np.ndarray
    names: list[str | None]


@dataclasses.dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    by_name: dict[str, np.ndarray]
    pair: tuple[int, str]
    seconds: float
    position: dict[str, object]


NUMBERS = Part(np.arange(6, dtype=np.uint32).reshape(2, 3), ["a", None, "\ud800\0"])
NONE = Part(np.zeros((3, 0), bool), [])
WHOLE = Whole(
    parts=(
        Part(np.arange(6, dtype=np.uint32).reshape(2, 3), ["a", None, "\ud800\0"]),
        Part(np.zeros((3, 0), bool), []),
    ),
    by_name={"x.y/z": np.array([np.nan, -0.0, 1e-45], np.float32)},
    pair=(np.int64(2**60), "é"),
    seconds=float("inf"),
    position={"nested": [1, {"deep": None}]},
)


def same_bits(one, other):
    assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def test_everything_comes_back_to_the_last_bit():
    packed = pack(WHOLE, "w")
    got = unpack(Whole, Packed(json.loads(json.dumps(packed.values)), packed.arrays))
    assert set(packed.arrays) == {"w.parts.0.numbers", "w.by_name.x.y/z"}
    for one, other in zip(got.parts, WHOLE.parts, strict=True):
        assert (one.names, one.numbers.dtype, one.numbers.shape) == (
            other.names,
            other.numbers.dtype,
            other.numbers.shape,
        )
        assert one.numbers.tobytes() == other.numbers.tobytes()
    same_bits(got.by_name["x.y/z"], WHOLE.by_name["x.y/z"])
    assert (got.pair, got.seconds, got.position) == (WHOLE.pair, WHOLE.seconds, WHOLE.position)


def test_what_has_no_type_of_its_own_in_json_is_refused():
    with pytest.raises(TypeError, match=r"w\.1: cannot pack a set"):
        pack([1, {2}], "w")


def test_a_value_of_another_class_is_refused():
    with pytest.raises(KeyError):
        unpack(Part, Packed({"numbers": "n"}, {"n": np.zeros(1)}))


class Message(NamedTuple):
    arrays: dict[str, np.ndarray]
    texts: list[str | None]


def test_what_processes_exchange_arrives_bit_for_bit():
    payload = np.array([0x7FC00001, 0xFF800001, 0x80000000], np.uint32).view(np.float32)  # NaNs of two kinds, and -0.0
    arrays = {"a": payload, "module:function/b": np.array([[2**63 - 1]]), "none": np.zeros((3, 0), bool)}
    got = from_bytes(Message, to_bytes(Message(arrays, [None, "\ud800 ü"])))
    assert got.texts == [None, "\ud800 ü"] and list(got.arrays) == list(arrays)
    for one, other in zip(got.arrays.values(), arrays.values()):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
        assert one.flags.writeable


@pytest.mark.parametrize("value", [np.array([object()]), {1, 2}, print], ids=["objects", "set", "function"])
def test_what_could_run_code_is_not_exchanged(value):
    with pytest.raises((TypeError, ValueError), match=r"cannot pack|Object arrays cannot be saved"):
        to_bytes(value)
