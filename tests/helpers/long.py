"""Cases of a parametrised test that `make test` leaves out: it has others of the same test."""

import itertools

import pytest


def long_but(fast, *axes, slow=()):
    """Return every combination of the axes' values; those in `slow` are marked slow, others not in `fast` long."""
    cases = [case[0] if len(axes) == 1 else case for case in itertools.product(*axes)]
    fast, slow = list(fast), list(slow)
    assert all(case in cases for case in (*fast, *slow))
    return [case if case in fast else _marked(case, slow) for case in cases]


def _marked(case, slow):
    mark = pytest.mark.slow if case in slow else pytest.mark.long
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)


def slow_but(fast, *axes):
    """Return every combination of the axes' values; those not in `fast` are marked slow."""
    return long_but(fast, *axes, slow=axes[0] if len(axes) == 1 else itertools.product(*axes))
