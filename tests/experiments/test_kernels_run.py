"""The script for accelerators, without one: its checks against float64 and its byte counts."""

import pytest

from experiments.kernels import run
from tests.helpers.interpreted import KERNELS


def test_the_bytes_are_those_of_the_docstring():
    """`tiled.verify` at Qwen3-8B, k = 3, B = 64 moves 0.30 GB, block 0.35 GB; coupled reads only target logits."""
    sizes = 64, 3, 151_936, 32_000
    counted = {rule: run.bytes_of(rule, *sizes) for rule in ("rejection", "block", "coupled")}
    assert round(counted["rejection"] / 1e9, 2) == 0.30
    assert round(counted["block"] / 1e9, 2) == 0.35
    assert counted["coupled"] == 4 * 64 * 4 * 151_936


@pytest.mark.slow
def test_every_rule_is_checked_against_float64():
    rows = list(run.check(run.SMALL, KERNELS["tpu"], seeds=1))
    assert [row["rule"] for row in rows] == list(run.CHECKED)
    assert all(row["rows_that_differ"] == 0 and row["logprob_error"] < 1e-5 for row in rows), rows
