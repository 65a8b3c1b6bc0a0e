"""task=benchmark: every side answers the same prompts, and its numbers are those of its rollouts."""

import threading

import numpy as np
import pytest

from configs import rlzero_tiny
from specrl_jax.errors import Stopped
from specrl_jax.io.metrics import read_metrics
from specrl_jax.rollout.build import make_rollout
from specrl_jax.tasks.benchmark import benchmark, compiled_lengths, make_sides, print_benchmark, round_metrics
from specrl_jax.training.speedup import timed
from tests.helpers.training import NEVER, make_run

SIDES = ("plain", "k_0", "k_2", "adaptive")


def config(**changes):
    c = rlzero_tiny.get_config("smoke")
    c.task, c.draft.length, c.draft.adaptive = "benchmark", 2, True
    c.rollout.rule, c.rollout.parity, c.rollout.num_slots = "coupled", True, 4
    c.benchmark.update(rounds=2, lengths=(0, 2))
    c.update_from_flattened_dict(changes)
    return c


def setup_of(**changes):
    c = config(**changes)
    run = make_run(c)
    return run.learner, make_rollout(run.plan, compiled_lengths(run.config)), run.problems


def run_benchmark(setup, workdir, stop=NEVER):
    learner, rollout, problems = setup
    return benchmark(learner, rollout, problems, workdir=str(workdir), stop=stop)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    workdir = str(tmp_path_factory.mktemp("benchmark"))
    return run_benchmark(setup_of(), workdir), workdir


@pytest.mark.slow
def test_a_row_a_round_with_every_side(measured):
    rows, workdir = measured
    assert [row["step"] for row in rows] == [1, 2]
    assert read_metrics(workdir) == rows
    for row in rows:
        for side in SIDES:
            assert row[f"benchmark/{side}"] > 0
        for side in SIDES[1:]:
            ratio = row[f"benchmark/{side}"] / row["benchmark/plain"]
            assert row[f"benchmark/{side}_over_plain"] == pytest.approx(ratio)
        assert row["benchmark/k_0_acceptance_length"] == 1 <= row["benchmark/k_2_acceptance_length"] <= 3


@pytest.mark.slow
def test_the_table_has_a_line_a_side(measured, capsys):
    print_benchmark(measured[0])
    shown = capsys.readouterr().out
    assert all(side in shown for side in SIDES) and "2 rounds" in shown


@pytest.mark.slow
def test_sides_of_a_round_answer_the_same_prompts(monkeypatch, tmp_path):
    """Under `coupled` in parity mode they even give the same tokens; other rounds have other ones."""
    from specrl_jax.tasks import benchmark as module

    seen = []
    monkeypatch.setattr(module, "round_metrics", lambda found: seen.append(found) or round_metrics(found))
    run_benchmark(setup_of(), tmp_path)
    for found in seen:
        for side in SIDES[1:]:
            np.testing.assert_array_equal(found[side][0].tokens, found["plain"][0].tokens)
    assert not np.array_equal(*(found["plain"][0].tokens for found in seen))


@pytest.mark.slow
@pytest.mark.parametrize(("adaptive", "extra"), [(True, ["adaptive", "adaptive"]), (False, [])])
def test_further_warm_up_is_the_controllers_alone(adaptive, extra, monkeypatch, tmp_path):
    """Three rounds of warm-up and two that count: the others' programs are warm after the first."""
    from specrl_jax.tasks import benchmark as module

    made, setup = [], setup_of(**{"benchmark.rounds": 2, "draft.adaptive": adaptive})
    sides = make_sides(setup[1])
    names = {(id(engine), id(lengths)): name for name, (engine, lengths) in sides.items()}
    monkeypatch.setattr(module, "make_sides", lambda rollout: sides)

    def count(engine, weights, work, lengths, on_progress):
        made.append(names[id(engine), id(lengths)])
        return timed(engine, weights, work, lengths=lengths, on_progress=on_progress)

    monkeypatch.setattr(module, "timed", count)
    run_benchmark(setup, tmp_path)
    n = len(sides)
    assert sorted(made[:n]) == sorted(made[-n:]) == sorted(sides) and made[n : -2 * n] == extra


@pytest.mark.slow
def test_a_signal_ends_it(tmp_path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped, match="starts anew"):
        run_benchmark(setup_of(), tmp_path, stop)
