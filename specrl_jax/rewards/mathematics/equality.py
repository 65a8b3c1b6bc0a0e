"""Decide whether two answers are equal, and write one in a canonical form."""

import re
from collections.abc import Sequence

import sympy
from sympy import Expr, ImmutableMatrix, Rational

from specrl_jax.rewards.mathematics.answers import ParsedAnswer, read_answer
from specrl_jax.rewards.mathematics.spelling import Unreadable
from specrl_jax.rewards.mathematics.zero import is_zero, point

MANY = 6  # decimal places and significant digits from which a decimal may stand for a number that it rounds
_RELATIONS = ("=", "<", "≤", "≠")
_INVISIBLE = re.compile(r"~|\\[,;:! ]|\\(?:left|right)(?![A-Za-z])|\\text(?=\s*\{)|[{}]")


def equal_texts(gold: str, given: str) -> bool:
    """Return whether two texts are equal answers; texts that are no answers are compared token by token."""
    gold_answer, given_answer = _read(gold), _read(given)
    if gold_answer is None or given_answer is None:
        return gold_answer is given_answer and _plain(gold) == _plain(given)
    try:
        return equal(gold_answer, given_answer)
    except Unreadable:
        return False


def canonical(text: str) -> str:
    """Return a text that most equal answers share; values are printed by sympy, not simplified."""
    answer = _read(text)
    return _plain(text) if answer is None else _print(answer)


def equal(gold: ParsedAnswer, given: ParsedAnswer) -> bool:
    """Return whether `given` is the answer `gold`, by the rules of docs/rewards.md."""
    turned = gold.name != given.name and all(side.name and _symbols(side) for side in (gold, given))
    if turned or gold.kind in _RELATIONS or given.kind in _RELATIONS:
        first, second = _relation(gold), _relation(given)
        return first is not None and second is not None and _equal_relations(first, second)
    if gold.name and given.name and gold.name != given.name:
        return False
    if gold.kind == given.kind == "value":
        return _equal_values(gold, given)
    if "base" in gold.kind + given.kind:
        return (gold.kind, gold.value) == (given.kind, given.value)
    if "set" in (gold.kind, given.kind):
        return sympy.SymmetricDifference(gold.region(), given.region()).doit() == sympy.S.EmptySet
    return _equal_lists(*(side if side.items else ParsedAnswer("", items=(side,)) for side in (gold, given)))


def _read(text: str) -> ParsedAnswer | None:
    try:
        return read_answer(text)
    except MemoryError:
        raise
    except Exception:  # Unreadable, or what the library and sympy raise on odd text: no answer, not an error
        return None


def _plain(text: str) -> str:
    """Return the text with single spaces between its words, numbers, commands and signs, without \\text{}."""
    return " ".join(re.findall(r"\\[A-Za-z]+|\\.|[A-Za-z]+|\d+|\S", _INVISIBLE.sub(" ", text)))


def _equal_values(gold: ParsedAnswer, given: ParsedAnswer) -> bool:
    if (
        (unit := given.quantity.unit)
        and unit != gold.quantity.unit
        and (gold.quantity.unit or not given.quantity.known)
    ):
        return False
    ulp = max(_tolerance(gold), _tolerance(given))
    if _same(gold.value, given.value, ulp):
        return True
    # "18%" is 18 and 0.18: data sets write it either way.
    first, second = (side.value / 100 if side.quantity.percent else side.value for side in (gold, given))
    return gold.quantity.percent != given.quantity.percent and _same(first, second, ulp)


def _tolerance(side: ParsedAnswer) -> Expr:
    """Return one unit of the last place of a decimal with many digits; 0 for anything else."""
    many = 0 < side.ulp <= Rational(1, 10**MANY) and abs(side.value) >= 10 ** (MANY - 1) * side.ulp
    return side.ulp if many else sympy.S.Zero


def _same(first: Expr, second: Expr, ulp: Expr) -> bool:
    if isinstance(first, ImmutableMatrix) or isinstance(second, ImmutableMatrix):
        shapes = [getattr(value, "shape", None) for value in (first, second)]
        return shapes[0] == shapes[1] and all(is_zero(entry) for entry in first - second)
    if any(value.has(sympy.oo, -sympy.oo) for value in (first, second)):
        return first == second
    difference = first - second
    if ulp and difference.is_number and difference.is_real:
        return bool(abs(difference) < ulp)
    return is_zero(difference)


def _equal_lists(gold: ParsedAnswer, given: ParsedAnswer) -> bool:
    if not {gold.kind, given.kind} <= {"", "{}"}:
        return gold.kind == given.kind and _pairwise(gold.items, given.items)
    first, second = _distinct(gold), _distinct(given)
    names = [{item.name for item in items} - {""} for items in (first, second)]
    if names[0] != names[1] and max(map(len, names)) > 1:
        return _pairwise(first, second)  # "x = 1, y = 2" and "1, 2"
    unmatched = list(second)
    for item in first:  # any order: equality is transitive, but for percent and rounded decimals
        if (partner := next((i for i, other in enumerate(unmatched) if equal(item, other)), None)) is None:
            return False
        del unmatched[partner]
    return not unmatched


def _pairwise(gold: Sequence[ParsedAnswer], given: Sequence[ParsedAnswer]) -> bool:
    return len(gold) == len(given) and all(equal(a, b) for a, b in zip(gold, given))


def _distinct(answer: ParsedAnswer) -> list[ParsedAnswer]:
    """Return the items, of a set in braces each once."""
    distinct: list[ParsedAnswer] = []
    for item in answer.items:
        if answer.kind != "{}" or not any(equal(item, other) for other in distinct):
            distinct.append(item)
    return distinct


def _symbols(answer: ParsedAnswer) -> set[sympy.Symbol]:
    return answer.value.free_symbols if answer.kind == "value" else set()


def _relation(answer: ParsedAnswer) -> ParsedAnswer | None:
    """Return an equation or inequality; "y = 2x + 3" is one, "x = 5" is a value."""
    if re.fullmatch(r"\\?[A-Za-z]+(?:_\w+)?", answer.name) and _symbols(answer):
        return ParsedAnswer("=", sympy.Symbol(answer.name.removeprefix("\\")) - answer.value)
    return answer if answer.kind in _RELATIONS else None


def _equal_relations(gold: ParsedAnswer, given: ParsedAnswer) -> bool:
    """Return whether one is the other times a constant, which for an inequality must be positive."""
    symbols = sorted(gold.value.free_symbols, key=str)
    if gold.kind != given.kind or set(symbols) != given.value.free_symbols:
        return False
    factor = (given.value / gold.value).subs(point(symbols, 0))
    if factor.is_zero is not False or not factor.is_finite or not is_zero(given.value - factor * gold.value):
        return False
    return gold.kind in ("=", "≠") or bool(factor.is_positive)


def _print(answer: ParsedAnswer) -> str:
    if answer.kind == "value":
        return str(answer.value / 100 if answer.quantity.percent else answer.value)
    texts = [_print(item) for item in answer.items]
    if answer.kind in ("", "{}"):
        return f"{{{', '.join(sorted(texts))}}}"
    return f"{answer.kind[0]}{', '.join(texts)}{answer.kind[1]}" if texts else f"{answer.value} {answer.kind}"
