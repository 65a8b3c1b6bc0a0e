"""Count FLOPs and collective bytes of one compiled program from its HLO text, with every loop iteration.

XLA's own cost analysis counts the body of a loop once. Here a `while` multiplies its body and condition by XLA's
annotation `known_trip_count`, also inside other loops. A loop whose trip count is known only at run time (the chunk of
an engine, a refill) is reported separately, with the cost of one iteration.

FLOPs are those of matmuls and convolutions, two per multiply-add, on one device. Bytes of a collective are those of its
larger side on one device: the result of an all-gather, the operand of everything else. Those of a collective that the
program waits for without a matmul meanwhile are `exposed`, as XLA has ordered its instructions. Custom calls are listed
by name; the FLOPs of cuBLAS matmuls and cuDNN attention are counted.
"""

import collections
import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Custom calls that are matmuls, with dimensions in their backend_config.
MATMULS = ("__cublas$gemm", "__cublas$lt$matmul")
# cuDNN's attention, with or without a bias: matmuls of [T, S] for each head, two forward, five backward; a causal mask
# halves them.
ATTENTION = re.compile(r"__cudnn\$fmha(?:ScaleBias)?Softmax(Backward)?")
_HEADER = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r" +(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r" ([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
# Attributes that name computations executed once per instruction. Reducers and comparators hold no matmul.
_CALLED = re.compile(r"(?:calls|to_apply|called_computations)=(?:\{([^}]*)\}|%?([\w.\-]+))")
_BRANCHES = re.compile(r"(?:branch_computations|true_computation|false_computation)=(?:\{([^}]*)\}|%?([\w.\-]+))")
_CALLS = ("fusion", "call", "async-start", "custom-call")


@dataclasses.dataclass(frozen=True)
class Count:
    """Work of one execution of a computation on one device."""

    flops: int = 0
    collectives: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # bytes
    custom_calls: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # calls
    exposed: int = 0  # bytes of collectives that no matmul runs beside
    loops: tuple["Loop", ...] = ()  # of unknown trip count; not in the sums

    def __add__(self, other: "Count") -> "Count":
        return Count(
            self.flops + other.flops,
            self.collectives + other.collectives,
            self.custom_calls + other.custom_calls,
            exposed=self.exposed + other.exposed,
            loops=_merge_loops((*self.loops, *other.loops)),
        )

    def times(self, n: int) -> "Count":
        def scaled(counter: collections.Counter[str]) -> collections.Counter[str]:
            return collections.Counter({key: n * value for key, value in counter.items()})

        loops = tuple(loop._replace(entered=n * loop.entered) for loop in self.loops)
        calls = scaled(self.custom_calls)
        return Count(
            n * self.flops, scaled(self.collectives), calls, exposed=n * self.exposed, loops=loops if n else ()
        )


class Loop(NamedTuple):
    """A loop of unknown trip count."""

    name: str  # in the program, such as "jit(run)/while"
    entered: int  # times per program execution, or per iteration of the enclosing loop
    turn: Count  # one iteration: body and condition


def _merge_loops(loops: tuple[Loop, ...]) -> tuple[Loop, ...]:
    """Merge equal loops, such as those of equal layers, into one that is entered more often."""
    found: list[Loop] = []
    for loop in loops:
        for i, other in enumerate(found):
            if (other.name, other.turn) == (loop.name, loop.turn):
                found[i] = other._replace(entered=other.entered + loop.entered)
                break
        else:
            found.append(loop)
    return tuple(found)


class Instruction(NamedTuple):
    opcode: str
    type: str
    operands: tuple[str, ...]  # names; of a parameter its number
    attributes: str
    root: bool  # its value is the computation's


def count(hlo: str) -> Count:
    """Count the entry computation of the text that `jax.stages.Compiled.as_text()` returns."""
    computations, entry = parse(hlo)

    @functools.cache
    def total(name: str) -> Count:
        symbols = computations[name]
        counts = {name: _count_one(i, symbols, total) for name, i in symbols.items()}
        found = sum(counts.values(), Count())
        return dataclasses.replace(found, exposed=found.exposed - _covered(symbols, counts))

    return total(entry)


def _covered(symbols: dict[str, Instruction], counts: dict[str, Count]) -> int:
    """Return the bytes of asynchronous collectives with a matmul between their start and their end."""
    places = {name: place for place, name in enumerate(symbols)}
    # Matmuls before each place, and loops, whose turns are not known.
    work = [0, *itertools.accumulate(count.flops + len(count.loops) for count in counts.values())]
    covered = 0
    for name, i in symbols.items():
        if i.opcode.endswith("-done"):
            start = i.operands[0]
            covered += counts[start].exposed if work[places[name]] > work[places[start] + 1] else 0
    return covered


def parse(hlo: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Return ({computation: {name: instruction}}, name of the entry computation)."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in hlo.splitlines():
        if current is None or not line.startswith(" "):
            header = _HEADER.match(line)
            current = computations.setdefault(header[1], {}) if header else None
            entry = header[1] if header and line.startswith("ENTRY") else entry
        elif found := _INSTRUCTION.match(line):
            current[found[2]] = _parse_instruction(found[3], bool(found[1]))
    return computations, entry


def _parse_instruction(text: str, root: bool) -> Instruction:
    opcode = _found(_OPCODE.search(text))
    end = _closing(text, opcode.end() - 1)
    given = text[opcode.end() : end]
    operands = [given] if opcode[1] == "parameter" else re.findall(r"%([\w.\-]+)", given)
    return Instruction(opcode[1], text[: opcode.start()], tuple(operands), attributes=text[end + 1 :], root=root)


def _closing(text: str, begin: int) -> int:
    """Return the position where the parenthesis at `begin` closes."""
    depth = 0
    for found in re.finditer(r"[()]", text[begin:]):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return begin + found.start()
    raise ValueError(f"HLO with an open parenthesis: {text[:200]}")


def _count_one(i: Instruction, symbols: dict[str, Instruction], total: Callable[[str], Count]) -> Count:
    if i.opcode == "while":
        return _count_loop(i, total)
    if i.opcode == "conditional":
        return _largest([total(name) for name in _names(_BRANCHES, i.attributes)])
    if i.opcode == "dot":
        return Count(flops=_dot_flops(i, symbols, r"lhs_contracting_dims=\{([\d,]*)\}"))
    if i.opcode == "convolution":
        return Count(flops=_convolution_flops(i, symbols))
    own = Count()
    kind = i.opcode.removesuffix("-start")
    if kind in COLLECTIVES:
        size = _collective_bytes(i, kind, symbols)
        return Count(collectives=collections.Counter({kind: size}), exposed=size)
    if i.opcode == "custom-call":
        target = _attribute(r'custom_call_target="([^"]*)"', i)
        if target in MATMULS:
            return Count(flops=_dot_flops(i, symbols, r'"lhs_contracting_dimensions":\[([\d",]*)\]'))
        own = Count(_attention_flops(i, symbols, target), custom_calls=collections.Counter([target]))
    if i.opcode in _CALLS:
        return sum((total(name) for name in _names(_CALLED, i.attributes)), own)
    return own


def _count_loop(i: Instruction, total: Callable[[str], Count]) -> Count:
    body, condition = (total(_attribute(rf"{key}=%?([\w.\-]+)", i)) for key in ("body", "condition"))
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', i.attributes):
        return body.times(int(known[1])) + condition.times(int(known[1]) + 1)
    name = re.search(r'op_name="([^"]*)"', i.attributes)
    return Count(loops=(Loop(name[1] if name else "while", 1, body + condition),))


def _largest(branches: list[Count]) -> Count:
    """Return an upper bound on branches of which one runs: the maximum of each field."""
    return Count(
        max(b.flops for b in branches),
        functools.reduce(lambda a, b: a | b, (b.collectives for b in branches)),
        functools.reduce(lambda a, b: a | b, (b.custom_calls for b in branches)),
        exposed=max(b.exposed for b in branches),
        loops=_merge_loops(sum((b.loops for b in branches), ())),
    )


def _found(match: re.Match[str] | None) -> re.Match[str]:
    assert match is not None, "HLO of an unknown form"
    return match


def _attribute(pattern: str, i: Instruction) -> str:
    return _found(re.search(pattern, i.attributes))[1]


def _names(pattern: re.Pattern[str], attributes: str) -> Iterator[str]:
    for found in pattern.finditer(attributes):
        yield from (name.strip().lstrip("%") for name in (found[1] or found[2] or "").split(",") if name.strip())


# ---- sizes


def dimensions(text: str) -> tuple[int, ...]:
    """Return the dimensions of the first array in a type such as "f32[8,16]{1,0}"."""
    return tuple(int(n) for n in _found(_ARRAY.search(text))[2].split(",") if n)


def type_bytes(text: str) -> int:
    """Return the bytes of all arrays in a type, including tuples; token[] and opaque[] have none."""
    arrays = [(dtype, sizes) for dtype, sizes in _ARRAY.findall(text) if dtype not in ("token", "opaque")]
    return sum(math.prod(int(n) for n in sizes.split(",") if n) * _bits(dtype) // 8 for dtype, sizes in arrays)


def _bits(dtype: str) -> int:
    """Return the bits of a dtype: s32 -> 32, bf16 -> 16, f8e4m3fn -> 8, c64 -> 64; pred is a byte."""
    return 8 if dtype == "pred" else int(_found(re.match(r"[a-z]+(\d+)", dtype))[1])


def _collective_bytes(i: Instruction, kind: str, symbols: dict[str, Instruction]) -> int:
    given = sum(type_bytes(symbols[name].type) for name in i.operands)
    if kind != "all-gather":
        return given
    # The type of an asynchronous start includes the operands.
    return type_bytes(i.type) - (given if i.opcode.endswith("-start") else 0)


def _dot_flops(i: Instruction, symbols: dict[str, Instruction], contracted: str) -> int:
    left = dimensions(symbols[i.operands[0]].type)
    axes = [int(n) for n in json.loads(f"[{_attribute(contracted, i)}]")]
    return 2 * math.prod(dimensions(i.type)) * math.prod(left[axis] for axis in axes)


def _attention_flops(i: Instruction, symbols: dict[str, Instruction], target: str) -> int:
    if not (found := ATTENTION.fullmatch(target)):
        return 0
    (B, T, N, H), (_, S, *_) = (dimensions(symbols[name].type) for name in i.operands[:2])
    causal = '"mask_type": "CAUSAL"' in i.attributes or '"mask_type":"CAUSAL"' in i.attributes
    return (5 if found[1] else 2) * 2 * B * N * T * S * H // (2 if causal else 1)


def _convolution_flops(i: Instruction, symbols: dict[str, Instruction]) -> int:
    """Count multiply-adds with real elements: a TPU writes batched matmuls as convolutions that are mostly padding."""
    left, kernel, result = (dimensions(t) for t in (*(symbols[name].type for name in i.operands), i.type))
    labels = _found(re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes))
    window = re.search(r"window=\{([^}]*)\}", i.attributes)
    settings = dict(part.split("=") for part in window[1].split()) if window else {}
    groups = re.search(r"batch_group_count=(\d+)", i.attributes)
    products = kernel[labels[2].index("i")] * result[labels[3].index("f")] * result[labels[3].index("b")]
    for axis in range(len(labels[1]) - 2):
        name = str(axis)
        sizes = left[labels[1].index(name)], kernel[labels[2].index(name)], result[labels[3].index(name)]
        products *= _pairs(*sizes, {key: value.split("x")[axis] for key, value in settings.items()})
    return 2 * products // (int(groups[1]) if groups else 1)


def _pairs(size: int, window: int, results: int, settings: dict[str, str]) -> int:
    """Count the (result, window element) pairs along one dimension that read an input element."""
    stride, spread, dilation = (int(settings.get(key, 1)) for key in ("stride", "lhs_dilate", "rhs_dilate"))
    low, last = int(settings.get("pad", "0_0").split("_")[0]), (size - 1) * spread
    return sum(
        (at := result * stride - low + element * dilation) % spread == 0 and 0 <= at <= last
        for result in range(results)
        for element in range(window)
    )
