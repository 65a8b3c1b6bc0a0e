"""Few named constants fitted to measured seconds, each with an interval.

A constant is positive and fitted in its logarithm, as are the seconds: what is minimised is the sum of squares of
ln(predicted / measured). Intervals follow from the curvature there and the scatter that is left.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from specrl_jax.core import InputError

NINETY = 1.645  # standard errors each side of a 90 % interval


class Calibration(NamedTuple):
    """What a fit found."""

    values: dict[str, float]
    factors: dict[str, float]  # 90 % interval of each: value / factor to value x factor
    scatter: float  # standard deviation of ln(predicted / measured), over what is free
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
    """The constants for which `predict` comes closest to `measured` [n] seconds, n >= the number of constants.

    Args:
      start: name -> first guess.
      noise: least standard deviation of ln(measured) that is believed, where the fit leaves less or nothing is free.
    """
    names, measured = list(start), np.asarray(measured, float)
    first = np.array([start[name] for name in names])
    if len(names) > len(measured):
        raise InputError(f"{len(names)} constants cannot be fitted to {len(measured)} points")

    def values(logs: np.ndarray) -> np.ndarray:
        return first * np.exp(logs)

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.log(predict(dict(zip(names, values(logs)))) / measured)

    # From the first guess, at most a factor of e at a time at first: far from the answer a constant may not count at
    # all. Differences far above rounding, since predictions have kinks where a roofline turns.
    found = least_squares(residuals, np.zeros(len(names)), diff_step=1e-4)
    free = len(measured) - len(names)
    scatter = float(np.sqrt(2 * found.cost / free)) if free else 0.0
    factors = np.exp(NINETY * max(scatter, noise) * _deviations(found.jac))
    return Calibration(
        dict(zip(names, map(float, values(found.x)))), dict(zip(names, map(float, factors))), scatter, len(measured)
    )


def _deviations(jacobian: np.ndarray) -> np.ndarray:
    """Standard deviation of each constant for residuals of 1: inf where the points cannot tell it from others."""
    _, sizes, directions = np.linalg.svd(jacobian, full_matrices=False)
    seen = sizes > 1e-4 * sizes[0]  # the differences' own error
    unseen = (np.abs(directions[~seen]) > 1e-3).any(axis=0)
    known = np.sqrt(((directions[seen] / sizes[seen, None]) ** 2).sum(axis=0))
    return np.where(unseen, np.inf, known)


class Errors(NamedTuple):
    """Of predictions against measurements, as shares."""

    median: float
    worst: float
    count: int

    def __str__(self) -> str:
        return f"median {self.median:.1%}, worst {self.worst:.1%} of {self.count}"


def errors(predicted: np.ndarray, measured: np.ndarray) -> Errors:
    off = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
    return Errors(float(np.median(off)), float(off.max()), len(off))
