"""Cases of a parametrised test that only `make test-all` runs: `make test` has others of the same test."""

import itertools

import pytest


def long_but(fast, *axes):
    """Return every combination of the axes' values; those not in `fast` are marked long."""
    cases = [case[0] if len(axes) == 1 else case for case in itertools.product(*axes)]
    fast = list(fast)
    assert all(case in cases for case in fast)
    return [case if case in fast else _long(case) for case in cases]


def _long(case):
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
