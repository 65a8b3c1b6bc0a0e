"""Decide whether an expression is zero, without sympy's simplification, which draws random points and may not end."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import sympy
from sympy import Expr, Rational

DIGITS = 300  # a number whose first 300 digits vanish is zero
POINTS = 8  # at which an expression with symbols must vanish; half of them are negative
ENOUGH = 3  # points at which it must be defined
_PRIMES = (101, 211, 307, 401, 503, 601, 701, 809)
_STEPS = (sympy.floor, sympy.ceiling)
# Functions that are not one power series: two may agree near 0 and nowhere else.
_PIECEWISE = (sympy.Abs, *_STEPS, sympy.log, sympy.asin, sympy.acos, sympy.atan, sympy.acot, sympy.asec, sympy.acsc)
_SIZES = (
    *(1, -1, 2, -2, 3, -4, 5, 7, -7, 10, -10, 12, 50, 100, -100, 1000, -1000),
    *(Rational(a, b) for a, b in ((31, 2), (-31, 3), (1013, 3), (-721, 7), (5, 2), (-5, 2))),
)  # 23, a prime: strides of the symbols meet in different places
_SMALL = 12  # the largest size where an exponent has symbols


def is_zero(expr: Expr) -> bool:
    """Return whether `expr` is zero: exactly for rational numbers, else by 300 digits; with symbols at 8 fixed points.

    Where it has absolute values, floors, roots, logarithms or arc functions of symbols it must also vanish at points of
    several sizes, and around each place where one of them bends. A difference is always found where it exceeds the
    precision at one of the points; the points are the same in each process, so a verdict depends on the expression
    alone.
    """
    if expr.is_Rational:
        return expr == 0
    if expr.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):
        return False
    symbols = sorted(expr.free_symbols, key=str)
    if not symbols:
        return _vanishes(expr) is True
    verdicts = [_vanishes(expr, point(symbols, i)) for i in range(POINTS)]
    if False in verdicts or verdicts.count(True) < ENOUGH:
        return False
    pieces = _pieces(expr)
    return not pieces or all(_vanishes(expr, values) is not False for values in _wide_points(expr, symbols, pieces))


def point(symbols: list[sympy.Symbol], index: int) -> dict[sympy.Symbol, Rational]:
    """Return fixed rational values of the symbols, about 1 in size; at odd indices they are negative."""
    sign = -1 if index % 2 else 1
    return {
        x: sign * Rational(73 + 53 * k + 17 * index, _PRIMES[(k + index) % len(_PRIMES)]) for k, x in enumerate(symbols)
    }


def _pieces(expr: Expr) -> list[Any]:
    """Return the functions in `expr` that are not one power series in its symbols."""
    roots = [power for power in expr.atoms(sympy.Pow) if power.exp.is_Rational and not power.exp.is_Integer]
    return [piece for piece in sorted([*expr.atoms(*_PIECEWISE), *roots], key=str) if piece.free_symbols]


def _wide_points(expr: Expr, symbols: list[sympy.Symbol], pieces: list[Any]) -> Iterator[dict[sympy.Symbol, Rational]]:
    steep = expr.has(sympy.factorial) or any(power.exp.free_symbols for power in expr.atoms(sympy.Pow))
    for i in range(len(_SIZES)):
        values = {x: sympy.sympify(_SIZES[((k + 1) * i + 7 * k) % len(_SIZES)]) for k, x in enumerate(symbols)}
        if not steep or max(map(abs, values.values())) <= _SMALL:
            yield values
    for x in symbols:
        others = point(symbols, 0)
        del others[x]
        yield from ({**others, x: value} for value in _around(sorted(_bends(x, others, pieces))))


def _bends(x: sympy.Symbol, others: dict[sympy.Symbol, Rational], pieces: list[Any]) -> set[Rational]:
    """Return where the argument of a piece is 0, or for floor and ceiling one of the integers around it."""
    bends: set[Rational] = set()
    for piece in pieces:
        argument = piece.args[0].xreplace(others)
        for level in range(-3, 4) if isinstance(piece, _STEPS) else (0,):
            polynomial = sympy.Poly(argument - level, x) if argument.is_polynomial(x) else None
            if polynomial is None or not 1 <= polynomial.degree() <= 4:
                continue
            exact = all(coefficient.is_Rational for coefficient in polynomial.all_coeffs())
            roots = (exact and list(polynomial.ground_roots())) or polynomial.nroots(n=15)
            bends |= {Rational(str(root)) if root.is_Float else root for root in roots if root.is_real}
    return bends


def _around(places: list[Rational]) -> list[Rational]:
    """Return the places, the middles between them and a point beyond either end."""
    if not places:
        return []
    middles = [(low + high) / 2 for low, high in pairwise(places)]
    return [places[0] - 1, *places, *middles, places[-1] + 1]


def _vanishes(expr: Expr, values: dict | None = None) -> bool | None:
    """Return whether the value is zero; None where it is not defined."""
    value = expr.xreplace(values or {})  # rational functions become rational numbers
    if value.is_Rational:
        return value == 0
    value = value.evalf(5, maxn=DIGITS)
    if not value.is_number or value.has(sympy.oo, sympy.zoo, sympy.nan) or value.free_symbols:
        return None
    # sympy gives a precision of 1 to what it cannot tell from zero.
    return all(part == 0 or part._prec == 1 for part in value.as_real_imag())
