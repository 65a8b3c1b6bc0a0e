"""Count the bytes that one execution of a compiled program reads from and writes to a device's memory.

Each instruction reads its operands and writes its result, once; what a fusion keeps inside is free. Of an array that is
only sliced or gathered, the parts count, and of one that is updated in place, the update. A kernel reads of a pool of
pages those that rows hold, which no program's text says: the caller gives their number. Nor does it say what a kernel
writes in place, which are new keys and values: only what they are made from counts. A kernel of experts
(`kernels_pallas.grouped`) reads of each matrix of E experts as many as it has tiles, if those are fewer: the most that
the rows can choose. That the cache answers the second tile of an expert is assumed. As in `count.py` a loop of known
turns counts with all of them, any other loop apart. Caches of the device are not known here.
"""

import dataclasses
import functools
import re
from typing import NamedTuple

from experiments.hlo.count import Instruction, dimensions, parse, type_bytes

# Instructions that move nothing: names, views, and the ends of what has been counted at its start.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "add-dependency", "domain", "iota"),
}
_VIEWS = ("bitcast", "reshape")  # inside a fusion
_IN_PLACE = re.compile(r"output_to_operand_aliasing=\{(.*?\))\}")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))")


class Pool(NamedTuple):
    """How much of the pages kernels read."""

    pages: int  # C, of an array of pages, axis 0
    live: int  # of them, those that rows hold


NO_PAGES = Pool(0, 0)
# The name of a kernel that multiplies each tile of its first operand by one of the matrices of the later ones.
_GROUPED = re.compile(r'op_name="[^"]*/grouped_matmul/')


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of one execution on one device."""

    bytes: int = 0
    kernels: int = 0  # instructions that do anything: on a GPU each is a launch
    loops: tuple["LoopTraffic", ...] = ()  # of unknown turns; not in the sum

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.bytes + other.bytes, self.kernels + other.kernels, (*self.loops, *other.loops))

    def times(self, n: int) -> "Traffic":
        return Traffic(n * self.bytes, n * self.kernels, self.loops * n)


class LoopTraffic(NamedTuple):
    name: str  # in the program, such as "jit(run)/while"
    turn: Traffic  # one iteration: body and condition


Computation = dict[str, Instruction]


def traffic(hlo: str, pool: Pool = NO_PAGES) -> Traffic:
    """Count the entry computation of the text that `jax.stages.Compiled.as_text()` returns."""
    computations, entry = parse(hlo)

    @functools.cache
    def total(name: str) -> Traffic:
        symbols = computations[name]
        return sum((one(i, symbols) for i in symbols.values()), Traffic())

    def one(i: Instruction, symbols: Computation) -> Traffic:
        if i.opcode in _FREE or i.opcode.endswith("-done"):
            return Traffic()
        if i.opcode == "while":
            return _loop(i, total)
        if i.opcode == "conditional":
            branches = [total(name) for found in _BRANCHES.findall(i.attributes) for name in _names("".join(found))]
            return max(branches, key=lambda branch: branch.bytes)
        if i.opcode in ("call", "async-start") and (found := _CALLED.search(i.attributes)):
            return total(found[1])
        if i.opcode == "fusion" and (found := _CALLED.search(i.attributes)):
            return Traffic(_fusion(computations[found[1]]), 1)
        return Traffic(_alone(i, symbols, pool), 1)

    return total(entry)


def _loop(i: Instruction, total: "functools._lru_cache_wrapper[Traffic]") -> Traffic:
    found = {key: re.search(rf"{key}=%?([\w.\-]+)", i.attributes) for key in ("body", "condition")}
    turn = sum((total(name[1]) for name in found.values() if name), Traffic())
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', i.attributes):
        return turn.times(int(known[1]))
    name = re.search(r'op_name="([^"]*)"', i.attributes)
    return Traffic(loops=(LoopTraffic(name[1] if name else "while", turn),))


def _names(text: str) -> list[str]:
    return [name.strip().lstrip("%") for name in text.split(",")]


def _alone(i: Instruction, symbols: Computation, pool: Pool) -> int:
    """Count an instruction that is no fusion."""
    if i.opcode.endswith("-start"):
        # The type of a start holds what it reads and what it writes.
        return type_bytes(i.type)
    in_place = _in_place(i)
    read = sum(_read_by(i, at, symbols, pool) for at in range(len(i.operands)) if at not in in_place)
    return read + _written(i, symbols) - sum(type_bytes(symbols[i.operands[at]].type) for at in in_place)


def _in_place(i: Instruction) -> list[int]:
    """Return the operands of a kernel that are its results too."""
    found = _IN_PLACE.search(i.attributes) if i.opcode == "custom-call" else None
    return [int(at) for at in re.findall(r"\((\d+),", found[1])] if found else []


def _fusion(symbols: Computation) -> int:
    """Count what a fusion reads of its parameters and writes."""
    users: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in symbols}
    for i in symbols.values():
        if i.opcode != "parameter":
            for at, name in enumerate(i.operands):
                users[name].append((i, at))
    names = {id(i): name for name, i in symbols.items()}

    def read(name: str) -> int:
        """Count the bytes of an array that its users read, at most all."""
        parts = 0
        for i, at in users[name]:
            parts += read(names[id(i)]) if i.opcode in _VIEWS else _read_by(i, at, symbols)
        return min(parts, type_bytes(symbols[name].type))

    def written(i: Instruction) -> int:
        if i.opcode == "tuple":
            return sum(written(symbols[name]) for name in i.operands)
        if i.opcode in _VIEWS:
            return written(symbols[i.operands[0]])
        return 0 if i.opcode == "parameter" else _written(i, symbols)

    parameters = [name for name, i in symbols.items() if i.opcode == "parameter"]
    (root,) = (i for i in symbols.values() if i.root)
    return sum(map(read, parameters)) + written(root)


def _read_by(i: Instruction, at: int, symbols: Computation, pool: Pool = NO_PAGES) -> int:
    """Count the bytes that an instruction reads of its operand `at`."""
    whole = type_bytes(symbols[i.operands[at]].type)
    if i.opcode == "tuple":
        return 0
    if at == 0 and i.opcode in ("dynamic-slice", "slice", "gather"):
        return min(whole, type_bytes(i.type))
    if at == 0 and i.opcode == "dynamic-update-slice":
        return 0
    if i.opcode == "scatter" and at < _arrays(i):
        return 0
    if i.opcode == "custom-call" and pool.pages and _is_pool(symbols[i.operands[at]].type, pool):
        return whole * pool.live // pool.pages
    if i.opcode == "custom-call" and at and _GROUPED.search(i.attributes):
        tiles, shape = (dimensions(symbols[name].type) for name in (i.operands[0], i.operands[at]))
        return whole * min(tiles[0], shape[0]) // shape[0] if len(shape) == 3 else whole
    return whole


def _written(i: Instruction, symbols: Computation) -> int:
    """Count the bytes that an instruction writes."""
    if i.opcode == "dynamic-update-slice":
        return type_bytes(symbols[i.operands[1]].type)
    if i.opcode == "scatter":
        return sum(type_bytes(symbols[name].type) for name in i.operands[_arrays(i) + 1 :])
    return type_bytes(i.type)


def _arrays(scatter: Instruction) -> int:
    """Return how many arrays a scatter updates; its operands are these, the indices, and an update for each."""
    return (len(scatter.operands) - 1) // 2


def _is_pool(text: str, pool: Pool) -> bool:
    return not text.startswith("(") and dimensions(text)[:1] == (pool.pages,)
