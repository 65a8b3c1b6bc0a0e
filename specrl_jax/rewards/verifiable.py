"""Rewards that a program can check. A reward takes (response, answer) and returns a number; it draws nothing and keeps
nothing.

The response's answer is what follows its last `#`, the convention of GSM8K and of the built-in tasks.
"""

import ast
from collections.abc import Callable
from fractions import Fraction

Reward = Callable[[str, str], float]


def exact(response: str, answer: str) -> float:
    """1 where the stated answer is the answer, as text without surrounding spaces; else 0."""
    return float(stated_answer(response) == answer.strip())


def countdown(response: str, answer: str) -> float:
    """1 where the stated expression has the target's value and uses each given number exactly once; else 0.

    `answer` is "target:numbers", for example "22:3 5 7".
    """
    try:
        target, numbers = answer.split(":")
        wanted = int(target), sorted(int(n) for n in numbers.split())
        value, used = evaluate_expression(stated_answer(response) or "")
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0  # a model writes anything; text that is no expression is a wrong answer, not an error
    return float((value, sorted(used)) == wanted)


def answer_line(response: str, answer: str) -> float:
    """1 where the last "Answer: X" of the response is the answer, `$` and \\boxed{} taken off; else 0.

    The form that DAPO-Math-17k's prompts ask for; its answers are integers.
    """
    return float(stated_line(response) == answer.strip())


def stated_answer(response: str) -> str | None:
    """Text after the last `#` up to the line's end, or None."""
    _, mark, tail = response.rpartition("#")
    return tail.split("\n", 1)[0].strip() if mark else None


def stated_line(response: str) -> str | None:
    """Text of the last "Answer:" line without `$` and \\boxed{}, or None."""
    _, mark, tail = response.rpartition("Answer:")
    stated = tail.strip().split("\n", 1)[0].strip().strip("$").strip()
    if stated.startswith("\\boxed{") and stated.endswith("}"):
        stated = stated[len("\\boxed{") : -1]
    return stated.strip() if mark else None


def stated_expression(response: str) -> str | None:
    """The stated answer without its spaces, or None."""
    stated = stated_answer(response)
    return None if stated is None else "".join(stated.split())


_OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def evaluate_expression(text: str) -> tuple[Fraction, list[int]]:
    """Value and numbers of an expression of integers, + - * / and brackets.

    Raises ValueError or SyntaxError for anything else: no names, calls or powers reach an evaluator.
    """
    if len(text) > 200 or not set(text) <= set("0123456789+-*/() "):
        raise ValueError("an expression of more than 200 characters, or of others than digits, + - * / and brackets")
    numbers: list[int] = []

    def walk(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            numbers.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](walk(node.left), walk(node.right))
        raise ValueError(f"{type(node).__name__} is not allowed")

    return walk(ast.parse(text, mode="eval").body), numbers
