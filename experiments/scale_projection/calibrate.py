"""Fit a few named constants to measured seconds, each with an interval.

Constants and seconds are positive and are fitted in their logarithms: the fit minimises the sum of squares of
ln(predicted / measured). Intervals follow from the curvature at the minimum and the remaining scatter.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from specrl_jax.errors import InputError

NINETY = 1.645  # standard errors each side of a 90 % interval


class Calibration(NamedTuple):
    """Fitted constants."""

    values: dict[str, float]
    factors: dict[str, float]  # 90 % interval of each: value / factor to value x factor
    scatter: float  # standard deviation of ln(predicted / measured), over the degrees of freedom
    points: int

    def lines(self) -> list[str]:
        shown = [f"  {name} = {v:.4g} (x/ {self.factors[name]:.2f})" for name, v in self.values.items()]
        return [f"{len(self.values)} constants fitted to {self.points} points, scatter {self.scatter:.3f}", *shown]


def fit(
    predict: Callable[[Mapping[str, float]], np.ndarray],
    measured: np.ndarray,
    start: Mapping[str, float],
    noise: float = 0.02,
) -> Calibration:
    """Fit the constants so that `predict` comes closest to `measured` [n] seconds.

    Args:
      start: name -> first guess.
      noise: lower bound on the standard deviation of ln(measured), used where the fit leaves less or is exact.
    Raises:
      InputError: for more constants than measurements.
    """
    names, measured = list(start), np.asarray(measured, float)
    first = np.array([start[name] for name in names])
    if len(names) > len(measured):
        raise InputError(f"{len(names)} constants cannot be fitted to {len(measured)} points")

    def values(logs: np.ndarray) -> np.ndarray:
        return first * np.exp(logs)

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.log(predict(dict(zip(names, values(logs)))) / measured)

    # The first steps change a constant by at most a factor of e: far from the minimum it may have no effect at all.
    # Finite differences far above rounding, since predictions have kinks where a roofline turns.
    found = least_squares(residuals, np.zeros(len(names)), diff_step=1e-4)
    free = len(measured) - len(names)
    scatter = float(np.sqrt(2 * found.cost / free)) if free else 0.0
    factors = np.exp(NINETY * max(scatter, noise) * _deviations(found.jac))
    fitted = dict(zip(names, map(float, values(found.x))))
    return Calibration(fitted, dict(zip(names, map(float, factors))), scatter, len(measured))


def _deviations(jacobian: np.ndarray) -> np.ndarray:
    """Return the standard deviation of each constant for unit residuals; inf for constants that are not identified."""
    _, sizes, directions = np.linalg.svd(jacobian, full_matrices=False)
    # Combinations of constants that change the residuals by more than the error of the finite differences.
    identified = sizes > 1e-4 * sizes[0]
    unidentified = (np.abs(directions[~identified]) > 1e-3).any(axis=0)
    deviations = np.sqrt(((directions[identified] / sizes[identified, None]) ** 2).sum(axis=0))
    return np.where(unidentified, np.inf, deviations)


class Errors(NamedTuple):
    """Relative errors of predictions."""

    median: float
    worst: float
    count: int  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"median {self.median:.1%}, worst {self.worst:.1%} of {self.count}"


def errors(predicted: np.ndarray, measured: np.ndarray) -> Errors:
    """Return the relative errors of `predicted`, in the units of `measured`, both [n]."""
    off = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
    return Errors(float(np.median(off)), float(off.max()), len(off))
