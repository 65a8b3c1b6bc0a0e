"""Cases of a parametrised test that `make test` leaves to `make test-all`."""

import itertools

import pytest


def slow_but(fast, *axes):
    """Return every combination of the axes' values; those not in `fast` are marked slow."""
    cases = [case[0] if len(axes) == 1 else case for case in itertools.product(*axes)]
    fast = list(fast)
    assert all(case in cases for case in fast)
    return [case if case in fast else _slow(case) for case in cases]


def _slow(case):
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
