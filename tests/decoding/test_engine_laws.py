"""The whole engine returns the target's distribution: every drafter, rule and setting, over successive blocks.

Of 864 cells the suite runs a few that have all pairs of values among them; `make test-full` runs them all and writes
tests/results/engine_product.csv. All false alarms together have a chance below 1e-4, and so has missing a cell that is
0.047 off in total variation (ERROR and GROUPS in tests/helpers/cells.py).
"""

import itertools

import pytest

from tests.helpers.cells import FACTORS, PRODUCT, pairwise, run_cell


def name(cell):
    return "-".join(str(value).replace(" ", "_") for value in cell)


def assert_lawful(cell):
    outcome = run_cell(cell, seed=7)
    assert outcome.distance < outcome.threshold, outcome
    return outcome


def test_the_cells_that_run_have_every_pair_of_values():
    """Pairs of settings that only matter where tokens are drawn are had by cells that draw them."""
    cells = pairwise()
    for (first, firsts), (second, seconds) in itertools.combinations(FACTORS.items(), 2):
        for a, b in itertools.product(firsts, seconds):
            having = [cell for cell in cells if (getattr(cell, first), getattr(cell, second)) == (a, b)]
            assert having, (first, a, second, b)
            assert 0.0 in (a, b) and "temperature" in (first, second) or any(cell.temperature for cell in having)
    assert set(cells) < set(PRODUCT) and len(cells) < 30


@pytest.mark.parametrize("cell", pairwise(), ids=name)
def test_the_engine_returns_the_targets_distribution(cell):
    outcome = assert_lawful(cell)
    # Drafts of every place were kept, and were not.
    assert (outcome.accepted > 0).all() and (outcome.accepted < 1).all()
