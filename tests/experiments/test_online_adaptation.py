"""Statistics of the report of drafts that learn online."""

import numpy as np
import pytest

from experiments.online_adaptation.report import switched_on, window_mean
from experiments.online_adaptation.sweep import DRAFTS, get_sweep


@pytest.mark.parametrize(
    ("chosen", "step"), [([0, 0.1, 2, 3], 3), ([0, 2, 0, 3], 4), ([2, 2], 1), ([0, 3, 0.2], None), ([0, 0], None)]
)
def test_the_step_from_which_on_the_controller_drafts(chosen, step):
    rows = [{"step": i, "spec/draft_length_mean": x} for i, x in enumerate(chosen, 1)]
    # The evaluation before the first step has no such metric.
    assert switched_on([{"step": 0}, *rows]) == step


def test_a_window_ends_with_its_step():
    series = np.arange(1.0, 41.0)
    assert window_mean(series, 30) == 28.0 and window_mean(series, 2) == 1.5


def test_every_run_has_exactly_one_draft():
    for run in get_sweep():
        assert sum(overrides.items() <= run.items() for overrides in DRAFTS.values()) == 1
