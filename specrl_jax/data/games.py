"""Built-in tasks of several turns, for the environments that ship; a worked solution holds what they answer.

Most worked solutions are poor: a base model knows the right way, prefers another, and can improve by reinforcement.
"""

import numpy as np

from specrl_jax.data.problem import TURN_END, Problem

# Numbers of the guessing game.
LARGEST = 9


def calls(rng: np.random.Generator, error_rate: float) -> Problem:
    """Compute an expression, by a call of `tiny_calculator`: `3*4+5` -> `?3*4+5`, `[17]`, `#17`.

    With probability `error_rate` the answer is guessed instead, without a call.
    """
    a, b, c = (int(n) for n in rng.integers(2, 30, 3))
    sign = str(rng.choice(["+", "-"]))
    text, right = f"{a}*{b}{sign}{c}", a * b + c * (1 if sign == "+" else -1)
    guessed = int(right + rng.integers(-9, 10))
    solution = f"#{guessed}" if rng.random() < error_rate else f"?{text}{TURN_END}[{right}]#{right}"
    return Problem(f"{text}\n", str(right), solution)


def guess(rng: np.random.Generator, error_rate: float, guesses: int = 4) -> Problem:
    """Find a number from 0 to 9 in the game `guessing`: the middle of what is left, `4`, `[>]`, `7`, `[<]`, ...

    With probability `error_rate` a guess is any number, whatever was said before.
    """
    number, low, high, turns = int(rng.integers(LARGEST + 1)), 0, LARGEST, list[str]()
    for _ in range(guesses):
        number_guessed = int(rng.integers(LARGEST + 1)) if rng.random() < error_rate else (low + high) // 2
        turns.append(f"{number_guessed}")
        if number_guessed == number:
            break
        if number_guessed < number:
            low, answer = max(low, number_guessed + 1), ">"
        else:
            high, answer = min(high, number_guessed - 1), "<"
        turns[-1] += f"{TURN_END}[{answer}]"
    solution = "".join(turns).removesuffix(f"{TURN_END}[>]").removesuffix(f"{TURN_END}[<]")
    # A number of the game's own, which says nothing: a prompt decides whether it is for training.
    return Problem(f"{int(rng.integers(10**6)):06d}\n", str(number), solution)
