"""Built-in tasks: endless problems from a seed with worked solutions; train and validation are disjoint.

A task is a function from a NumPy generator to a `Problem`. `error_rate` adds systematic errors to the worked solution:
the carry is dropped, the target is missed. A base model pretrained on such text knows the right and the wrong step,
prefers the wrong one, and can improve by reinforcement.
"""

import functools
import hashlib
import itertools
from collections.abc import Callable

import numpy as np

from specrl_jax.data.games import calls, guess
from specrl_jax.data.problem import Problem
from specrl_jax.data.rooms import OTHER, OURS, recite, rooms
from specrl_jax.errors import InputError


def arithmetic(rng: np.random.Generator, error_rate: float, shortest: int = 3, longest: int = 4) -> Problem:
    """Add, subtract, or multiply by a digit, worked digit by digit from the right: `384+257` ->
    `4+7=11 8+5+1=14 3+2+1=6 #641`.

    Each carry (or borrow) is dropped with probability `error_rate`. Numbers have
    `shortest` to `longest` digits.
    """
    digits = int(rng.integers(shortest, longest + 1))
    operation = str(rng.choice(["+", "-", "*"]))
    a = int(rng.integers(10 ** (digits - 1), 10**digits))
    b = int(rng.integers(2, 10)) if operation == "*" else int(rng.integers(10 ** (digits - 1), 10**digits))
    if operation == "-" and a < b:
        a, b = b, a
    work = _subtract if operation == "-" else functools.partial(_add_or_multiply, operation)
    steps, result = work(a, b, lambda place: bool(rng.random() < error_rate))
    answer = {"+": a + b, "-": a - b, "*": a * b}[operation]
    return Problem(f"{a}{operation}{b}\n", str(answer), " ".join(steps) + f" #{result}")


def _reversed_digits(number: int) -> list[int]:
    return [int(digit) for digit in reversed(str(number))]


def _add_or_multiply(operation: str, a: int, b: int, drop: Callable[[int], bool]) -> tuple[list[str], int]:
    """Work out a + b, a missing digit as 0, or a * b with a digit b; `drop(place)` forgets the carry out of a place."""
    steps, carry, result = [], 0, 0
    digits = _reversed_digits(a)
    others = [b] * len(digits) if operation == "*" else _reversed_digits(b)
    pairs = list(itertools.zip_longest(digits, others, fillvalue=0))
    for place, (x, y) in enumerate(pairs):
        total = (x * y if operation == "*" else x + y) + carry
        steps.append(f"{x}{operation}{y}" + (f"+{carry}" if carry else "") + f"={total}")
        last = place == len(pairs) - 1
        result += (total if last else total % 10) * 10**place
        carry = total // 10
        if carry and not last and drop(place):
            carry = 0
    return steps, result


def _subtract(a: int, b: int, drop: Callable[[int], bool]) -> tuple[list[str], int]:
    steps, borrow, result = [], 0, 0
    pairs = list(zip(_reversed_digits(a), _reversed_digits(b), strict=True))
    for place, (x, y) in enumerate(pairs):
        top = x + 10 if x - borrow < y else x
        steps.append(f"{top}-{y}" + ("-1" if borrow else "") + f"={top - y - borrow}")
        result += (top - y - borrow) * 10**place
        borrow = int(top > x)
        if borrow and drop(place):
            borrow = 0
    return steps, result


def countdown(rng: np.random.Generator, error_rate: float) -> Problem:
    """Reach a target with three or four given numbers, each used once: `3 5 7 -> 22` -> `5*3=15 15+7=22 #(5*3)+7`.

    With probability `error_rate` the solution misses the target.
    """
    numbers = [int(n) for n in rng.integers(2, 21, size=int(rng.integers(3, 5)))]
    steps, value, expression = _combine(rng, numbers)
    target = value
    if rng.random() < error_rate:
        while value == target:
            steps, value, expression = _combine(rng, numbers)
    shown = " ".join(str(n) for n in numbers)
    return Problem(f"{shown} -> {target}\n", f"{target}:{shown}", " ".join(steps) + f" #{expression}")


def _combine(rng: np.random.Generator, numbers: list[int]) -> tuple[list[str], int, str]:
    """Combine the numbers in random order with random operations whose results are positive integers."""
    order = [numbers[i] for i in rng.permutation(len(numbers))]
    steps, value, expression = [], order[0], str(order[0])
    for n in order[1:]:
        allowed = ["+", "*"] if value * n <= 200 else ["+"]
        allowed += ["-"] * (value > n) + ["/"] * (value % n == 0)
        operation = str(rng.choice(allowed))
        result = {"+": value + n, "-": value - n, "*": value * n, "/": value // n}[operation]
        steps.append(f"{value}{operation}{n}={result}")
        expression = f"({expression}){operation}{n}" if len(steps) > 1 else f"{expression}{operation}{n}"
        value = result
    return steps, value, expression


def walk(
    rng: np.random.Generator, error_rate: float, shortest: int = 2, longest: int = 2, tail: float = 0.0
) -> Problem:
    """Add until a number passes a limit: `47 e38 o25 >90` -> `47o+25 7+5=12 4+2+1=7 72e+38 2+8=10 7+3+1=11 #110`.

    An even number grows by the first addend, an odd one by the second, digit by digit from the right. Which addend
    comes next and whether another step does are known only once the sum before is: a draft has to compute them. After
    `shortest` steps another follows with probability `tail`, up to `longest`. Each carry out of the ones, in as many
    steps as the right walk has, is dropped with probability `error_rate`; the walk goes on from the wrong sum.
    """
    start, even, odd = int(rng.integers(10, 100)), int(rng.integers(20, 100)), int(rng.integers(20, 100))
    count = shortest
    while count < longest and rng.random() < tail:
        count += 1
    before = after = start
    for _ in range(count):
        before, after = after, after + (odd if after % 2 else even)
    limit = int(rng.integers(before, after))
    steps, value = list[str](), start
    while value <= limit:
        addend = odd if value % 2 else even
        # In so many steps only: this bounds how much longer a wrong walk is.
        places = {0} if len(steps) < count and rng.random() < error_rate else set[int]()
        columns, total = _add_or_multiply("+", value, addend, places.__contains__)
        steps.append(f"{value}{'o' if value % 2 else 'e'}+{addend} {' '.join(columns)}")
        value = total
    return Problem(f"{start} e{even} o{odd} >{limit}\n", str(after), " ".join(steps) + f" #{value}")


TASKS: dict[str, Callable[[np.random.Generator, float], Problem]] = {
    "arithmetic": arithmetic,
    "long_arithmetic": functools.partial(arithmetic, shortest=5, longest=6),
    "countdown": countdown,
    "walk": walk,
    "long_walk": functools.partial(walk, shortest=4, longest=16, tail=0.85),
    "calls": calls,
    "guess": guess,
    "recite": functools.partial(recite, dialects=(OURS, OTHER)),
    "rooms": functools.partial(rooms, dialects=(OURS,)),
    "other_rooms": functools.partial(rooms, dialects=(OTHER,)),
    "all_rooms": functools.partial(rooms, dialects=(OURS, OTHER)),
}


class TaskSource:
    """Random-access source of a built-in task for grain: item i depends on (seed, split, i) only.

    A hash of the prompt decides its split: one prompt in sixteen is validation for any seed. `key` is the config key of
    the task, for messages.
    """

    LENGTH = 2**40  # grain needs a finite length

    def __init__(self, task: str, split: str, seed: int, *, error_rate: float = 0.0, key: str = "data.task") -> None:
        if task not in TASKS:
            raise InputError(f"{key}: no built-in task '{task}'; there are {', '.join(TASKS)}")
        self._task, self._error_rate = TASKS[task], error_rate
        self._validation = {"train": False, "validation": True}[split]
        self._seed = (seed, int(self._validation))

    def __len__(self) -> int:
        return self.LENGTH

    def __getitem__(self, index: int) -> Problem:
        rng = np.random.default_rng((*self._seed, int(index)))
        while True:
            problem = self._task(rng, self._error_rate)
            if in_validation(problem.prompt) == self._validation:
                return problem


def in_validation(prompt: str) -> bool:
    return hashlib.sha256(prompt.encode()).digest()[0] < 16
