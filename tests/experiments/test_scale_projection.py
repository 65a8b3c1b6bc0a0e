"""The performance model fitted to our measurements and to the paper's tables still gives the published predictions."""

import csv
import pathlib

import numpy as np
import pytest

from configs import rlzero_8b
from experiments.scale_projection import apart, effects, grid, large, ours, paper, validate
from experiments.scale_projection.calibrate import errors
from specrl_jax.simulator.command import MEAN_SHARE
from specrl_jax.simulator.hardware import ENGINES, HARDWARE

HERE = pathlib.Path(__file__).parents[2] / "experiments/scale_projection"


def committed(name):
    with (HERE / name).open() as file:
        return list(csv.DictReader(file))


def off(rows):
    return errors([float(r["predicted"]) for r in rows], [float(r["measured"]) for r in rows])


@pytest.fixture(scope="module")
def calibrated():
    return paper.calibrate(HARDWARE["gb200"])


def test_the_papers_rows_are_reproduced_from_its_tables(calibrated):
    found = {
        (r["table"], r["row"]): r["predicted"] for r in paper.fitted_rows(calibrated) + paper.predicted_rows(calibrated)
    }
    kept = [r for r in committed("validation.csv") if (r["set"], r["cell"]) in found]
    assert len(kept) == len(found) == 25
    for r in kept:
        assert found[r["set"], r["cell"]] == pytest.approx(float(r["predicted"]), rel=2e-3), r


def test_four_constants_are_fitted_to_table_1_alone(calibrated):
    assert len(calibrated.fit.values) == 4 and calibrated.fit.points == 7
    kept = {r["constant"]: float(r["value"]) for r in committed("constants.csv") if r["fitted_to"] == "paper"}
    assert calibrated.fit.values == pytest.approx(kept, rel=1e-2)
    assert pytest.approx(kept["mean_zero"] / paper.LIMIT, abs=0.01) == MEAN_SHARE


def test_the_simulators_vllm_is_the_fitted_one():
    kept = {r["constant"]: float(r["value"]) for r in committed("constants.csv") if r["fitted_to"] == "paper"}
    graphs = next(r for r in committed("effects.csv") if r["effect"].startswith("captured graphs"))
    assert ENGINES["vllm"].draft_seconds == pytest.approx(kept["draft_seconds"], rel=0.01)
    assert ENGINES["vllm"].uncaptured_seconds == pytest.approx(float(graphs["value"]), rel=0.01)
    assert ENGINES["vllm"].host_seconds == HARDWARE["gb200"].attained.host_seconds


def test_the_simulators_fused_engine_is_our_measured_one():
    """Seconds per host synchronisation, fitted to our rollouts, over the iterations of a chunk in the large configs."""
    kept = {r["constant"]: float(r["value"]) for r in committed("constants.csv") if r["fitted_to"] == "rollouts"}
    chunk = rlzero_8b.get_config().rollout.chunk
    assert ENGINES["fused"].host_seconds == pytest.approx(kept["chunk_seconds"] / chunk, rel=0.01)


def test_the_effect_of_captured_graphs_is_reproduced(calibrated):
    effect = effects.captured_graphs(calibrated)
    kept = {r["row"]: float(r["predicted"]) for r in committed("effects.csv") if r["effect"] == effect.name}
    assert {r["row"]: r["predicted"] for r in effect.rows} == pytest.approx(kept, rel=1e-2)
    assert all(abs(r["error"]) <= validate.PAPER_TARGET for r in effect.rows)


def test_the_simulated_rows_are_within_their_target_without_a_fitted_constant(calibrated):
    found = large.large_rows(large.assumed(calibrated), "zero", free=True)
    kept = [r for r in committed("large.csv") if (r["view"], r["lengths"]) == ("free verification", "zero")]
    assert [r["predicted"] for r in found] == pytest.approx([float(r["predicted"]) for r in kept], rel=1e-2)
    claimed = [r for r in found if r["use"] == "predicted"]
    assert len(claimed) == 6 and all(abs(r["error"]) <= validate.LARGE_TARGET for r in claimed)


def test_the_fit_to_iterations_is_reproduced():
    fit = ours.fit_iterations()
    kept = {r["constant"]: float(r["value"]) for r in committed("constants.csv") if r["fitted_to"] == "iterations"}
    assert fit.values == pytest.approx(kept, rel=1e-2) and fit.points == 5
    machine = ours.MACHINE.with_attained(**fit.values, kernel_seconds=0.0)
    held = [r for r in ours.check_iterations(machine) if (r["set"], r["use"]) == ("iteration c", "held out")]
    assert len(held) == 6 and off(held).worst < 0.12


def test_held_out_cells_are_not_fitted():
    assert {c["slots"] for c in ours.rollouts() if not c["fitted"]} == {2, 8, 32}
    assert {r["seed"] for r in ours.steps() if not r["fitted"]} == {1, 2}


def test_the_scale_grid_is_reproduced(calibrated):
    case = grid.CASES[0]
    again = grid.scale_rows(case.scenario(large.fused(calibrated)), case.all_devices, (0,), case.k, case.acceptance)
    assert all(0 < r["rollout_speedup"] <= case.acceptance for r in again)
    kept = [r for r in committed("scale.csv") if r["case"] == "8B, our loop" and r["lag"] == "0"]
    values = [[float(r[x]) for r in rows] for rows in (again, kept) for x in ("rollout_speedup", "end_to_end_speedup")]
    assert np.allclose(values[:2], values[2:], rtol=1e-2)


def test_asynchronous_steps_follow_from_the_phases_and_one_constant():
    """Generation 6 s, learner 4 s: a synchronous step takes 10 s, at contention 0.5 an asynchronous one 8 s."""
    phases = dict(zip(apart.PHASES, ([0.0, 0.0], [0.0, 0.0], [6.0, 6.6], [1.0, 1.0], [3.0, 3.0])))
    totals = {"sync": [10.0, 10.0], "lag 1": [8.0, 9.0], "lag 2": [8.0, 8.0]}
    found = apart.Measured(*({k: np.array(v) for k, v in x.items()} for x in (phases, totals)))
    contention = apart.solve_contention(found)
    assert contention == pytest.approx(0.5)
    rows = {(r["set"], r["cell"]): r for r in apart.check(found, contention)}
    assert rows["split total", "sync seed=1"]["predicted"] == 10
    assert [rows["split total", f"{name} seed=1"]["predicted"] for name in ("lag 1", "lag 2")] == [8, 8]
    assert rows["split generate", "sync seed=1"]["use"] == "held out"
    assert {key for key, r in rows.items() if r["use"] == "fitted" and "total" in key[0]} == {
        ("split total", "sync seed=0"),
        ("split total", "lag 1 seed=0"),
    }


def test_empirical_lengths_are_scaled_and_truncated():
    assert ours.EmpiricalLengths((10, 20, 30), 40.0, 55.0).quantile(np.array([0.0, 0.5, 1.0])) == pytest.approx(
        [20, 40, 55]
    )
