"""Parse one expression or set with latex2sympy2_extended: the whole text, exactly, or not at all."""

import re
from typing import Any

import sympy
from antlr4 import Token
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from sympy import Expr, ImmutableMatrix

from specrl_jax.rewards.mathematics.spelling import Unreadable

_END = r"(?![A-Za-z])"
_TRIG = rf"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?{_END}"
_GREEK = (
    r"\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|chi"
    rf"|upsilon|(?:var)?phi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega|ell|hbar|logbase){_END}"
)
_MATRIX = r"\\(?:begin|end)\{(?:[bpv]?matrix|array)\}(?:\{[lcr|]+\})?"
_REALS = r"\\mathbb\{R\}"
_NAMES = re.compile(
    rf"{_MATRIX}|{_REALS}|(?P<name>{_GREEK}|(?<!\\)[A-Za-z]+)(?:_(?:\{{(\w+)\}}|(\w)))?|\\[A-Za-z]+", re.ASCII
)
_VARIABLE = r"\\variable\{\w+\}"
# All that may reach the library's parser: it skips, or takes for something else, much that is not here.
_KNOWN = (
    rf"[\s0-9+\-/^!|(){{}}]|(?<=\d)\.(?=\d)|(?<!\d)\.(?=\d)|{_VARIABLE}|{_TRIG}"
    rf"|\\(?:cdot|div|frac|binom|exp|ln|pi|infty|[lr](?:floor|ceil|vert)){_END}|\\log\s*_"
    rf"|\\(?:sum|prod)\s*_\s*\{{\s*{_VARIABLE}\s*=|\\sqrt\s*(?:\[\s*(?:\d+|{_VARIABLE})\s*\])?"
)
_EXPRESSION = re.compile(rf"(?:{_KNOWN})++", re.ASCII)
_DEGREES = re.compile(rf"(?:\^\s*(?:\\circ|\{{\s*\\circ\s*\}})|{_KNOWN})++", re.ASCII)
_WITH_MATRIX = re.compile(rf"(?:{_KNOWN}|{_MATRIX}|&|\\\\)++", re.ASCII)
_SETS = re.compile(rf"(?:{_KNOWN}|[\[\],]|\\[{{}}]|\\(?:cup|cap|setminus|emptyset){_END}|{_REALS})++", re.ASCII)


class _Parser(_Latex2Sympy):
    """The library's parser, with exact decimals, and with factors side by side as a product."""

    def create_parser(self, latex_str: str) -> Any:
        self.parser = super().create_parser(latex_str)
        return self.parser

    def parse_number(self, text: str) -> sympy.Rational:
        return sympy.Rational(text)  # the library makes it a float

    def create_symbol(self, text: str, enforce_case: bool = False) -> Expr:
        return {"e": sympy.E, "i": sympy.I}.get(text) or sympy.Symbol(text)

    def convert_postfix_list(self, arr: list[Any], i: int = 0) -> Any:
        """Multiply factors that stand side by side. The library adds "2(3)" and "12 34", as if they were mixed."""
        factors = [self.convert_postfix(factor) for factor in arr]
        if any(re.fullmatch(r"\{*\.?\d[^^]*", factor.getText()) for factor in arr[1:]):
            raise Unreadable("a number after a factor")  # a power may stand there: 2^{3} 5^{2}
        if len(arr) > 1 and re.fullmatch(r"\d+\\frac\s*\{\d+\}\{\d+\}", arr[0].getText() + arr[1].getText()):
            if not 0 < factors[1] < 1 or len(arr) > 2:
                raise Unreadable("an improper fraction after a number")
            return factors[0] + factors[1]
        if any(getattr(factor, "is_Matrix", False) for factor in factors):
            return sympy.MatMul(*factors, evaluate=False)
        return sympy.Mul(*factors, evaluate=False) if len(factors) > 1 else factors[0]


def parse_expression(text: str) -> Expr | ImmutableMatrix:
    """Return an expression or matrix. Raises Unreadable, or what the library raises, if the text is not one."""
    allowed = _WITH_MATRIX if "\\begin" in text else _DEGREES if re.search(_TRIG, text) else _EXPRESSION
    parsed = _parse(text, allowed)
    parsed = ImmutableMatrix(parsed) if isinstance(parsed, sympy.MatrixBase) else parsed
    if not isinstance(parsed, Expr | ImmutableMatrix) or parsed.has(sympy.zoo, sympy.nan):
        raise Unreadable("no expression")
    return parsed


def parse_set(text: str) -> sympy.Set:
    """Return a union, intersection or difference of intervals and finite sets."""
    parsed = _parse(text, _SETS)
    if not isinstance(parsed, sympy.Set) or parsed.free_symbols:
        raise Unreadable("no set")
    return parsed


def _variable(match: re.Match[str]) -> str:
    """Write letters as the library's \\variable{}: by a letter it knows derivatives, functions and constants."""
    name, subscript = match["name"], match[2] or match[3]
    if not name:
        return match[0]
    if name[0] != "\\" and len(name) > 3:
        raise Unreadable("a word")
    letters = [name[1:]] if name[0] == "\\" else [*name]
    letters[-1] += f"_{subscript}" if subscript else ""
    return "".join(f"\\variable{{{letter}}}" for letter in letters)


def _parse(text: str, allowed: re.Pattern[str]) -> Any:
    text = _NAMES.sub(_variable, text)
    if not allowed.fullmatch(text):
        raise Unreadable("not made of known signs")
    parser = _Parser(convert_degrees=True, config=ConversionConfig(lowercase_symbols=False))
    parsed = parser.parse(text)
    if parser.parser.getTokenStream().LA(1) != Token.EOF:
        raise Unreadable("more than one expression")
    return parsed.doit()
