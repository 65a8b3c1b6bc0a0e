"""The built-in tasks of rooms: long answers in which some tokens are hard to draft and the others are easy.

Each door of a house leads to a room; the prompt says which. A walker adds the numbers of the last two rooms, modulo the
number of rooms, to find the next door, and writes line, door and room until the given number of lines is full:

    AgCbFa...Lc c,d 23        ->        1Faa 2Agoh 3Hihal ... 23Bb #lb

Words are spelled from memory and lines are numbered: a draft of one layer learns that. The first letter of a door is a
sum, and that of the room behind it is looked up in the prompt: the policy computes them one after the other, from
tokens that a draft reads without what the policy makes of them. Words have one to five letters, so that the next hard
token may be any number of tokens away: a draft is about as hard after one hard token as after three.

A lazy walker guesses rooms and writes no doors. Such an answer is shorter, wrong, and easy to draft.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from specrl_jax.data.problem import Problem

DOORS = ["A", "B", "C", "D", "E", "Fa", "Go", "Hi", "Ivy", "Jet", "Kilo", "Lima"]
INITIALS = "abcdefghijkl"
# Lines of a walk: log-normal, cut at both ends.
MEDIAN, SPREAD, SHORTEST, LONGEST = 22, 0.5, 12, 60
# Tokens of an answer; a longer one is drawn anew.
ROOM = 460


class Dialect(NamedTuple):
    """Names of the twelve rooms, in the order of INITIALS, and the mark by which a prompt asks for them."""

    mark: str
    names: tuple[str, ...]


# Ten names of twelve are the same.
OURS = Dialect(",", ("a", "b", "c", "d", "el", "fo", "gu", "hal", "inn", "jail", "kiosk", "lobby"))
OTHER = Dialect(";", ("a", "b", "c", "d", "el", "fo", "gy", "hal", "inn", "jail", "kraal", "lobby"))


def rooms(rng: np.random.Generator, error_rate: float, dialects: tuple[Dialect, ...]) -> Problem:
    """Walk, and name the rooms in one of `dialects`; lazily with probability `error_rate`.

    The answer is the last two rooms.
    """
    dialect = dialects[int(rng.integers(len(dialects)))]
    while len((problem := _walk(rng, rng.random() < error_rate, dialect)).solution) > ROOM:
        pass
    return problem


def _walk(rng: np.random.Generator, lazy: bool, dialect: Dialect) -> Problem:
    count = len(DOORS)
    behind = rng.permutation(count)
    first, second = (int(room) for room in rng.choice(count, 2, replace=False))
    length = int(np.clip(rng.lognormal(np.log(MEDIAN), SPREAD), SHORTEST, LONGEST))
    visited, doors = [first, second], list[int]()
    for _ in range(length):
        doors.append((visited[-2] + visited[-1]) % count)
        visited.append(int(behind[doors[-1]]))
    answer, words = _initials(visited[-2:]), [DOORS[door] for door in doors]
    if lazy:
        visited = [int(room) for room in rng.integers(count, size=length)]
        words = [""] * length
    walk = zip(words, visited[-length:], strict=True)
    lines = [f"{i}{word}{dialect.names[room]}" for i, (word, room) in enumerate(walk, 1)]
    start = f"{INITIALS[first]}{dialect.mark}{dialect.names[second]}"
    prompt = f"{_table(behind, rng.permutation(count))} {start} {length}\n"
    return Problem(prompt, answer, " ".join(lines) + f" #{_initials(visited[-2:])}")


def recite(rng: np.random.Generator, error_rate: float, dialects: tuple[Dialect, ...]) -> Problem:
    """Spell doors and rooms of the prompt, in two other orders: `FaCb,` -> `Cb Faa #Faa Cb`.

    A policy learns from it within minutes to look up what is in the prompt, which `rooms` alone teaches slowly. There
    are no errors.
    """
    dialect = dialects[int(rng.integers(len(dialects)))]
    count = int(rng.integers(4, len(DOORS) + 1))
    doors = rng.choice(len(DOORS), count, replace=False)
    behind = rng.integers(len(DOORS), size=len(DOORS))
    text, answer = (
        " ".join(DOORS[door] + dialect.names[behind[door]] for door in rng.permutation(doors)) for _ in range(2)
    )
    return Problem(f"{_table(behind, doors)}{dialect.mark}\n", answer, f"{text} #{answer}")


def _table(behind: np.ndarray, doors: Iterable[int]) -> str:
    return "".join(DOORS[door][0] + INITIALS[behind[door]] for door in doors)


def _initials(visited: list[int]) -> str:
    return "".join(INITIALS[room] for room in visited)
