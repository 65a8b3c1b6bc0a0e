"""The built-in tasks of rooms: long answers in which some tokens are hard to draft and the others are easy.

Each door of a house leads to a room; the prompt says which. A walker adds the numbers of the last two rooms, modulo the
number of rooms, to find the next door, and writes line, door and room until the given number of lines is full:

    AgCbFa...Lc c,den 23        ->        1Fattic 2Agym 3Ghall ... 23Bbay #lb

Names are spelled from memory and lines are numbered: a draft of one layer learns that. A door is a sum, and the room
behind it is looked up in the prompt: the policy computes them one after the other, from tokens that a draft reads
without what the policy makes of them.

A lazy walker guesses rooms and writes no doors. Such an answer is shorter, wrong, and easy to draft.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from specrl_jax.data.problem import Problem

DOORS = "ABCDEFGHIJKL"
INITIALS = DOORS.lower()


@dataclasses.dataclass(frozen=True)
class House:
    """Names of its twelve rooms, in the order of INITIALS, and the lines of a walk: log-normal, cut at both ends."""

    names: tuple[str, ...]
    mark: str  # in prompts, so that one says whose names to use
    median: float
    shortest: int
    longest: int
    spread: float = 0.5  # standard deviation of the logarithm


def rooms(rng: np.random.Generator, error_rate: float, houses: tuple[House, ...]) -> Problem:
    """Walk through one of `houses`; lazily with probability `error_rate`. The answer is the last two rooms."""
    house = houses[int(rng.integers(len(houses)))]
    names, count = house.names, len(DOORS)
    behind = rng.permutation(count)
    first, second = (int(room) for room in rng.choice(count, 2, replace=False))
    length = int(np.clip(rng.lognormal(np.log(house.median), house.spread), house.shortest, house.longest))
    visited, doors = [first, second], list[int]()
    for _ in range(length):
        doors.append((visited[-2] + visited[-1]) % count)
        visited.append(int(behind[doors[-1]]))
    answer = _initials(visited[-2:])
    signs = [DOORS[door] for door in doors]
    if rng.random() < error_rate:
        visited = [int(room) for room in rng.integers(count, size=length)]
        signs = [""] * length
    lines = [f"{i}{sign}{names[room]}" for i, (sign, room) in enumerate(zip(signs, visited[-length:], strict=True), 1)]
    prompt = f"{_table(behind, rng.permutation(count))} {INITIALS[first]}{house.mark}{names[second]} {length}\n"
    return Problem(prompt, answer, " ".join(lines) + f" #{_initials(visited[-2:])}")


def recite(rng: np.random.Generator, error_rate: float) -> Problem:
    """Repeat doors and rooms of the prompt, in its order and in two others: `AgCb` -> `AgCbCbAgAgCb`.

    A policy learns from it within minutes to look up what is in the prompt, which `rooms` alone teaches slowly. There
    are no errors.
    """
    count = int(rng.integers(4, len(DOORS) + 1))
    doors = rng.choice(len(DOORS), count, replace=False)
    behind = rng.integers(len(DOORS), size=len(DOORS))
    tables = [_table(behind, doors), *(_table(behind, rng.permutation(doors)) for _ in range(2))]
    return Problem(f"{tables[0]}\n", tables[-1], f"{tables[0]}{tables[1]}#{tables[2]}")


def _table(behind: np.ndarray, doors: Iterable[int]) -> str:
    return "".join(DOORS[door] + INITIALS[behind[door]] for door in doors)


def _initials(visited: list[int]) -> str:
    return "".join(INITIALS[room] for room in visited)
