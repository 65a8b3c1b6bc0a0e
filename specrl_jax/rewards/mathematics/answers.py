"""Read a text as one answer: a value with its unit, a list in brackets, a set of numbers, a relation, based digits."""

import re
from dataclasses import dataclass, replace
from typing import Any

import sympy
from sympy import Expr, Rational

from specrl_jax.rewards.mathematics.parser import parse_expression, parse_set
from specrl_jax.rewards.mathematics.spelling import Unreadable, respell, split, to_closing_brace
from specrl_jax.rewards.mathematics.units import PLAIN, Quantity, split_unit
from specrl_jax.rewards.mathematics.zero import is_zero

_LETTER = r"(?:[A-DF-Za-df-hj-z]|\\(?!in\b|pi\b)[a-z]+(?![A-Za-z]))(?:_(?:\w|\{\w+\}))?"
_NAME = re.compile(
    rf"(\\text\{{[^{{}}]+\}}|[A-Z]{{2,4}}|m?\\angle\s*[A-Z]{{1,3}}|{_LETTER}(?:\s*\(\s*\w(?:\s*,\s*\w)*\s*\))?"
    rf"|\(\s*{_LETTER}(?:\s*,\s*{_LETTER})+\s*\))\s*(=|≈|\\in(?![A-Za-z])|(?<![A-Za-z\\])in(?=\s*[\[(\\]))\s*"
)
_BRACKETS = re.compile(r"(\(|\[|\\\{|\\langle|\{)(.*)(\)|\]|\\\}|\\rangle|(?<!\\)\})", re.DOTALL)
_KINDS = {"()": "()", "[]": "[]", "[)": "[)", "(]": "(]", "\\{\\}": "{}", "\\langle\\rangle": "<>"}
_BUILDER = re.compile(rf"\\\{{\s*{_LETTER}\s*(?:\\in\s*\\mathbb\{{R\}}\s*)?(?:\\mid|[:|])(.*)\\\}}", re.DOTALL)
_SET = re.compile(r".*(?:\\(?:cup|cap|setminus|emptyset)(?![A-Za-z])|\\mathbb)", re.DOTALL)
_BASES = {"two": 2, "three": 3, "five": 5, "eight": 8, "ten": 10, "sixteen": 16}
_BASED = re.compile(
    r"(\()?(?P<digits>[0-9A-Z]*[0-9][0-9A-Z]*)(?(1)\))(?:_(?:base-?)?|(\()?base-?)(?P<base>\d{1,2}|[a-z]+)(?(3)\))"
)
_MARKUP = re.compile(r"\\(?:text(?:rm|bf|it)?|mathrm|mbox|left|right)(?![A-Za-z])|\\[ ,;:!]|[{}\s$~]")
_ORDER = {"<": sympy.Lt, "≤": sympy.Le, ">": sympy.Gt, "≥": sympy.Ge, "≠": sympy.Ne}


@dataclass(frozen=True)
class ParsedAnswer:
    kind: str  # "value", "set", "base 8", a relation to 0 ("=", "<", "≤", "≠"), or a list's brackets: "()", "{}", ""
    value: Any = None  # an expression or matrix; a set of numbers; digits; the difference of the sides of a relation
    items: tuple["ParsedAnswer", ...] = ()
    name: str = ""  # "x", "f(x)", "(x,y)" of "x = ..."
    ulp: Rational = sympy.S.Zero  # one unit of the last place of a decimal; 0 for anything else
    quantity: Quantity = PLAIN

    def number(self) -> Expr:
        """Return the value, 0.18 for 18 %. Raises Unreadable if the answer is no number."""
        if self.kind != "value" or not self.quantity.known:
            raise Unreadable("no number")
        return self.value / 100 if self.quantity.percent else self.value

    def region(self) -> sympy.Set:
        """Return a set of numbers: "(1,2)" is an interval. Raises Unreadable for what is none."""
        ends = [item.number() for item in self.items]
        if self.kind == "set":
            return self.value
        if self.kind in ("{}", ""):
            return sympy.FiniteSet(*ends)
        if len(ends) != 2 or self.kind[0] not in "[(" or not all(end.is_extended_real for end in ends):
            raise Unreadable("no interval")
        interval = sympy.Interval(*ends, self.kind[0] == "(", self.kind[1] == ")")
        if interval.is_empty:
            raise Unreadable("the ends of an interval in the wrong order")
        return interval


def read_answer(text: str) -> ParsedAnswer:
    """Return the answer that `text` is. Raises Unreadable, or what the library raises, unless the whole text is one."""
    return _read_based(text) or _read_list(respell(text))


def _read_based(text: str) -> ParsedAnswer | None:
    """Return a number with its base, "52_8" or "1F (base 16)", or in base ten the number; None for anything else."""
    match = _BASED.fullmatch(_MARKUP.sub("", text))
    if not match or to_closing_brace(text + "}", 0)[1] <= len(text):
        return None
    digits, base = match["digits"].lstrip("0") or "0", int(_BASES.get(match["base"], match["base"]))
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits):
        raise Unreadable(f"digits of base {base}")
    return ParsedAnswer("value", sympy.Integer(digits)) if base == 10 else ParsedAnswer(f"base {base}", digits)


def _read_list(text: str) -> ParsedAnswer:
    """Read "1, 2 and 3", where "\\pm 2" is two items; what is joined by "or" is a union, by "and" an intersection."""
    parts, joints = split(text, r"(?:,\s*)?(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|[,;]")
    items = [
        _read_item(part.replace("\\pm", plus).replace("\\mp", minus)) for part in parts for plus, minus in _signs(part)
    ]
    if len(items) > 1 and {*joints} in ({"or"}, {"and"}) and len({item.name for item in items}) == 1:
        if {item.kind for item in items} == {"set"} and joints[0] == "and":
            return replace(items[0], value=sympy.Intersection(*(item.value for item in items)))
        if joints[0] == "or" and any(map(_is_region, items)):
            return ParsedAnswer("set", sympy.Union(*(_part(item) for item in items)), name=items[0].name)
    return items[0] if len(items) == 1 else ParsedAnswer("", items=tuple(items))


def _is_region(item: ParsedAnswer) -> bool:
    """Return whether an answer is a set of numbers beyond doubt: "(1,2)" may be a point."""
    return item.kind in ("set", "[)", "(]") or (
        item.kind == "()" and any(part.value.is_infinite for part in item.items)
    )


def _part(item: ParsedAnswer) -> sympy.Set:
    return sympy.FiniteSet(item.number()) if item.kind == "value" else item.region()


def _signs(text: str) -> list[tuple[str, str]]:
    return [("+", "-"), ("-", "+")] if re.search(r"\\[pm][pm](?![A-Za-z])", text) else [("\\pm", "\\mp")]


def _read_item(text: str) -> ParsedAnswer:
    name, sign, text = "", "", text.removeprefix("≈").strip()
    while match := _NAME.match(text):
        name, sign, text = re.sub(r"[\s{}]", "", match[1]), match[2], text[match.end() :]
    sides, signs = split(text, "[<>=≤≥≠≈]")
    answer = _relate([_read_side(side) for side in sides], signs)
    if sign.endswith("in") and answer.kind == "value":
        raise Unreadable("a member of a number")
    return replace(answer, name=answer.name or name)


def _read_side(text: str) -> ParsedAnswer:
    if match := _BUILDER.fullmatch(text):
        return _read_list(match[1])
    if brackets := _read_brackets(text):
        return brackets
    return ParsedAnswer("set", parse_set(text)) if _SET.match(text) else _read_value(text)


def _read_brackets(text: str) -> ParsedAnswer | None:
    """Read a tuple, interval or set; None if the brackets belong to an expression."""
    if not (match := _BRACKETS.fullmatch(text)):
        return None
    try:
        commas = split(match[2], "[,;]")[1]
    except Unreadable:
        return None  # "(x+1)(x-1)": these brackets are no pair
    opening, inside, closing = match.groups()
    if opening + closing == "()" and not commas:
        return None
    if opening + closing == "{}":
        return _read_list(inside)
    kind, inner = _KINDS[opening + closing], _read_list(inside)
    return ParsedAnswer(kind, items=inner.items if inner.kind == "" and inner.items else (inner,))


def _read_value(text: str) -> ParsedAnswer:
    front, quantity = split_unit(text)
    plain = re.fullmatch(r"[-+ ]*\d*(?:\.(\d+))?\s*", front, re.ASCII)
    ulp = Rational(quantity.scale, 10 ** len(plain[1] or "")) if plain else Rational(0)
    return ParsedAnswer("value", parse_expression(front) * quantity.scale, ulp=ulp, quantity=quantity)


def _relate(sides: list[ParsedAnswer], signs: list[str]) -> ParsedAnswer:
    """Return what a chain of relations says: the value of equal sides, an equation, the solutions of inequalities."""
    if not signs:
        return sides[0]
    numbers = [side.number() for side in sides]
    if signs[-1] == "≈":
        if not 2 * abs(numbers[-2] - numbers[-1]) <= sides[-1].ulp:
            raise Unreadable("an approximation that is no rounding")
        return _relate(sides[:-1], signs[:-1])
    symbols = {symbol for number in numbers for symbol in number.free_symbols}
    if {*signs} == {"="} and all(is_zero(numbers[0] - number) for number in numbers[1:]):
        return sides[-1]
    if not symbols or not ({*signs} <= {"<", "≤"} or {*signs} <= {">", "≥"} or signs in (["="], ["≠"])):
        raise Unreadable("relations that do not hold, or of several directions")
    if signs == ["="] and numbers[1].is_Symbol and numbers[0].is_number:
        return replace(sides[0], name=str(numbers[1]))
    if signs != ["="] and len(symbols) == 1 and all(number.is_polynomial() for number in numbers):
        solved = [_ORDER[sign](*pair).as_set() for *pair, sign in zip(numbers, numbers[1:], signs) if _finite(pair)]
        return ParsedAnswer("set", sympy.Intersection(sympy.S.Reals, *solved), name=str(symbols.pop()))
    if len(signs) > 1 or any(side.quantity.unit for side in sides):
        raise Unreadable("a chain of inequalities, or units in an equation")
    greater = signs[0] in ">≥"
    return ParsedAnswer(
        "<≤"[">≥".index(signs[0])] if greater else signs[0], (numbers[0] - numbers[1]) * (-1) ** greater
    )


def _finite(pair: list[Expr]) -> bool:
    return not any(number.is_infinite for number in pair)
