"""Verifiable rewards: functions (response, answer) -> number without randomness or state.

The extracted answer follows the response's last `#`, the convention of GSM8K and of the built-in tasks.
"""

import ast
from collections.abc import Callable
from fractions import Fraction

Reward = Callable[[str, str], float]


def exact(response: str, answer: str) -> float:
    """Return 1 if the extracted answer equals `answer`, as text without surrounding spaces; else 0."""
    return float(extract_answer(response) == answer.strip())


def countdown(response: str, answer: str) -> float:
    """Return 1 if the extracted expression equals the target and uses each given number exactly once; else 0.

    `answer` is "target:numbers", for example "22:3 5 7".
    """
    try:
        target, numbers = answer.split(":")
        goal, given = int(target), sorted(int(n) for n in numbers.split())
        value, used = evaluate_expression(extract_answer(response) or "")
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0  # a model may write anything: text that is no expression is a wrong answer, not an error
    return float(value == goal and sorted(used) == given)


def answer_line(response: str, answer: str) -> float:
    """Return 1 if the last "Answer: X" of the response equals `answer`, without `$` and \\boxed{}; else 0.

    The format that DAPO-Math-17k's prompts ask for; its answers are integers.
    """
    return float(extract_answer_line(response) == answer.strip())


def extract_answer(response: str) -> str | None:
    """Return the text after the last `#` up to the end of the line, or None."""
    _, mark, tail = response.rpartition("#")
    return tail.split("\n", 1)[0].strip() if mark else None


def extract_answer_line(response: str) -> str | None:
    """Return the text of the last "Answer:" line without `$` and \\boxed{}, or None."""
    _, mark, tail = response.rpartition("Answer:")
    extracted = tail.strip().split("\n", 1)[0].strip().strip("$").strip()
    if extracted.startswith("\\boxed{") and extracted.endswith("}"):
        extracted = extracted[len("\\boxed{") : -1]
    return extracted.strip() if mark else None


def extract_expression(response: str) -> str | None:
    """Return the extracted answer without spaces, or None."""
    extracted = extract_answer(response)
    return None if extracted is None else "".join(extracted.split())


_OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def evaluate_expression(text: str) -> tuple[Fraction, list[int]]:
    """Return value and numbers of an expression of integers, + - * / and brackets.

    Raises ValueError or SyntaxError for anything else: names, calls and powers are never evaluated.
    """
    if len(text) > 200 or not set(text) <= set("0123456789+-*/() "):
        raise ValueError("only digits, + - * / and brackets are allowed, at most 200 characters")
    numbers: list[int] = []

    def walk(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            numbers.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](walk(node.left), walk(node.right))
        raise ValueError(f"{type(node).__name__} is not allowed")

    return walk(ast.parse(text, mode="eval").body), numbers
