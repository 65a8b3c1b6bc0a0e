"""The measurements on the policies of the rooms."""

import dataclasses

import numpy as np
import pytest

from experiments.claims import write_rows
from experiments.engine import bench
from experiments.rooms.acceptance import Position, chances, positions_of
from experiments.traces.predict import verdict
from experiments.verdicts import Interval
from specrl_jax.decoding.rollouts import Rollouts


def rollouts_of(drafted, accepted, lengths, verifications):
    values = {field.name: np.zeros(len(lengths), np.int32) for field in dataclasses.fields(Rollouts)}
    values |= {"drafted": np.array(drafted), "accepted": np.array(accepted), "length": np.array(lengths)}
    return Rollouts(**values | {"verifications": np.array(verifications), "chunks": (), "features": {}})


def test_a_position_is_reached_where_the_one_before_was_accepted():
    found = rollouts_of([[10, 10], [20, 20]], [[8, 4], [16, 8]], [20, 40], [10, 20])
    rows = list(positions_of(found, ("rooms", 0, "in-domain", "sampled", 2), np.array([0.2, 0.5])))
    assert [(row.position, row.reached, row.accepted) for row in rows] == [(1, 30, 24), (2, 24, 12)]
    assert [row.tokens_per_verification for row in rows] == [2, 2]
    np.testing.assert_allclose(chances(rows, head="in-domain", k=2), [[0.8, 0.5]])


def test_the_rows_survive_their_file(tmp_path):
    rows = [Position("careful", 2, "generic", "argmax", 3, 1, 40, 30, 2.5, 0.25)]
    write_rows(tmp_path / "rows.csv", [row._asdict() for row in rows])
    assert [Position(**row) for row in bench.read_rows(str(tmp_path / "rows.csv"))] == rows


@pytest.mark.parametrize(
    "predicted, found, says",
    [
        (1.10, Interval(1.12, 1.08, 1.16), "holds; one side of 1"),
        (1.10, Interval(1.12, 1.11, 1.13), "holds; one side of 1"),  # excluded, but by less than 5 %
        (1.10, Interval(0.95, 0.90, 1.20), "holds; other sides of 1"),  # not excluded
        (1.10, Interval(0.95, 0.90, 1.00), "contradicted; other sides of 1"),
    ],
)
def test_a_prediction_is_contradicted_by_an_interval_that_excludes_it_by_five_per_cent(predicted, found, says):
    assert verdict(predicted, found) == says
