"""Decide whether an expression is zero, without sympy's simplification, which draws random points and may not end."""

import sympy
from sympy import Expr, Rational

DIGITS = 300  # a number whose first 300 digits vanish is zero
POINTS = 8  # at which an expression with symbols must vanish; half of them are negative
ENOUGH = 3  # points at which it must be defined
_PRIMES = (101, 211, 307, 401, 503, 601, 701, 809)


def is_zero(expr: Expr) -> bool:
    """Return whether `expr` is zero: exactly for rational numbers, else by 300 digits; with symbols at 8 fixed points.

    A difference is always found where it exceeds the precision at one of the points; the points are the same in each
    process, so a verdict depends on the expression alone.
    """
    if expr.is_Rational:
        return expr == 0
    if expr.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):
        return False
    symbols = sorted(expr.free_symbols, key=str)
    if not symbols:
        return _vanishes(expr) is True
    found = [_vanishes(expr, point(symbols, i)) for i in range(POINTS)]
    return False not in found and found.count(True) >= ENOUGH


def point(symbols: list[sympy.Symbol], index: int) -> dict[sympy.Symbol, Rational]:
    """Return fixed rational values of the symbols, about 1 in size; at odd indices they are negative."""
    sign = -1 if index % 2 else 1
    return {
        x: sign * Rational(73 + 53 * k + 17 * index, _PRIMES[(k + index) % len(_PRIMES)]) for k, x in enumerate(symbols)
    }


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
