"""Whole runs under `pipeline.schedule=exact`: to the last bit those whose rollouts begin with their weights."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from configs import rlzero_tiny
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.decoding.features.reverify import Reverification
from specrl_jax.decoding.lookahead import Lookahead
from specrl_jax.io.metrics import read_metrics
from specrl_jax.rollout.generate import Published, RolloutGenerator
from specrl_jax.rollout.stale import exact
from specrl_jax.sharding import make_mesh
from specrl_jax.training import loop
from tests.helpers.engine_sizes import engine_sizes
from tests.helpers.rewards import FunctionScorer
from tests.helpers.training import assert_refused, lower_case, make_run, saved, train, untimed

STEPS = 5
PROMPTS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(6)]  # a step takes four
# What generates beside the learner has a device of its own.
MODES = {
    "sync": {"rollout_devices": 1},
    "sync, 1 ahead": {"schedule": "exact", "lag": 1},
    "sync, 2 ahead": {"schedule": "exact", "lag": 2},
    "async": {"schedule": "exact", "lag": 1, "rollout_devices": 1},
    "async, 2 ahead": {"schedule": "exact", "lag": 2, "rollout_devices": 1},
}
# Metrics of how the rollouts came about, which is what differs.
HOW = ("spec/", "rollout/reverified", "alarm/", "rollout/parked")


def run_of(folder, mode, reward=lower_case, changes=(), chunk=4):
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    config = rlzero_tiny.get_config("smoke")
    config.update({"steps": STEPS, "seed": 1})
    config.data.path = config.eval.path = str(file)
    config.policy.preset = "nano"
    config.draft.update({"kind": "eagle3", "path": "", "compare_rounds": 0, "length": 2})
    config.grpo.old_logprobs = "learner"
    config.rollout.update({"num_slots": 6, "temperature": 1.0, "rule": "coupled", "parity": True})
    config.rollout.max_response_tokens = 24
    config.optimizer.update({"learning_rate": 1e-3, "warmup": 0})
    config.checkpoint.update({"every": 2, "keep": 9})
    config.pipeline.update(MODES[mode])
    for section, values in dict(changes).items():
        config[section].update(values)
    with engine_sizes(chunk=chunk):
        return make_run(config, make_mesh({}, jax.devices()[:1]), FunctionScorer(reward))


@pytest.fixture(autouse=True)
def no_evaluation(monkeypatch):
    monkeypatch.setattr(loop, "evaluation_metrics", lambda *_, **__: {})  # its programs take longer than the run


def test_evaluations_by_an_engine_of_their_own_take_no_tokens_of_earlier_weights(tmp_path):
    """Only one that truncates where training, which is greedy, does not needs programs of its own."""
    greedy = {"rollout": {"temperature": 0.0, "top_k": 3}, "eval": {"temperature": 1.0}}
    apart = run_of(tmp_path, "sync, 1 ahead", changes=greedy).rollout
    assert apart.engine.config.feature(Reverification) and apart.eval_engine.compiled is not apart.engine.compiled
    assert not any(one.config.feature(Reverification) for one in (apart.eval_engine, apart.greedy_engine))


def test_a_prompt_that_begins_early_has_the_start_that_the_tokenizer_puts_before_it(tmp_path, monkeypatch):
    """As in its own step, which else could keep little of what was drawn early."""
    monkeypatch.setattr(CharTokenizer, "encode_prompt", lambda self, prompt: [2, *self.encode(prompt)])
    run, begun = run_of(tmp_path, "sync, 1 ahead"), []
    engine = SimpleNamespace(begin=lambda _, later, *__, **___: begun.extend(later.prompts))
    generation = RolloutGenerator(
        dataclasses.replace(run.rollout, engine=engine),
        run.problems.stream(4),
        run.scorer,
        speculation=SimpleNamespace(as_of=lambda _: (None, None)),
        on_progress=lambda *_: None,
    )
    generation.begin(1, Published(None, None, 0), until=lambda: True)
    assert len(begun) == 4 and begun == [CharTokenizer().encode_prompt(problem.prompt) for problem in generation.draw()]


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synchronous")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "evaluation_metrics", lambda *_, **__: {})
        run = run_of(folder, "sync")
        train(run, folder / "run")
    return run, folder / "run"


def learned(rows):
    return [{name: value for name, value in row.items() if not name.startswith(HOW)} for row in untimed(rows)]


def assert_same_run(run, workdir, synchronous):
    """Metrics, tokens, log-probs and rewards of every step; parameters, moments and draft after the last."""
    setup, expected = synchronous
    assert learned(read_metrics(str(workdir))) == learned(read_metrics(str(expected)))
    (state, _), (expected_state, _) = saved(run, workdir, STEPS), saved(setup, expected, STEPS)
    jax.tree.map(np.testing.assert_array_equal, state, expected_state)
    for step in range(1, STEPS + 1):
        ours, theirs = (
            [json.loads(line) for line in (where / f"rollouts/step_{step}.jsonl").read_text().splitlines()]
            for where in (workdir, expected)
        )
        for name in ("id", "tokens", "logprobs", "reward", "weights_version"):
            assert [one[name] for one in ours] == [one[name] for one in theirs], (step, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["sync, 1 ahead", *(pytest.param(mode, marks=pytest.mark.long) for mode in list(MODES)[2:])]
)
def test_an_exact_run_is_the_synchronous_one_to_the_last_bit(mode, synchronous, tmp_path):
    run, workdir = run_of(tmp_path, mode), tmp_path / "run"
    rows = train(run, workdir)[1:]
    assert_same_run(run, workdir, synchronous)
    kept = [row["rollout/reverified"] for row in rows]
    assert kept[0] == 0 and min(kept[1:]) > 0 and max(kept) < 1
    assert [row["rollout/lag"] for row in rows] == [0] * STEPS


def forget(workdir, *steps):
    """Remove checkpoints, as if the run had been killed before them."""
    for step in steps:
        shutil.rmtree(workdir / f"checkpoints/{step}")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync, 1 ahead", "async"])
def test_a_killed_run_draws_again_what_had_begun(mode, synchronous, tmp_path):
    """Nothing of it is in a checkpoint, and the resumed run ends like the whole one."""
    run, workdir = run_of(tmp_path, mode), tmp_path / "run"
    train(run, workdir)
    assert not saved(run, workdir, 4)[1]["ahead"]["batches"]
    forget(workdir, 4, 5)
    train(run, workdir)
    assert_same_run(run, workdir, synchronous)


class Counting:
    """A stream of numbers in place of problems."""

    position = -1

    def __next__(self):
        self.position += 1
        return [self.position]


def test_what_begins_early_are_the_problems_that_its_step_takes():
    """Whether or not the steps before it take further rounds."""
    for takes_more in (False, True):
        upcoming = exact.Upcoming(Counting(), rounds=2)
        assert (upcoming.take(), upcoming.peek(2)) == ([0], [[2], [4]])
        if takes_more:
            assert upcoming.take_more() == [1]
        assert (upcoming.position, upcoming.take(), upcoming.position) == (1, [2], 3)


def often_equal(response, answer):
    """0 or 1: some groups have no variance."""
    return float(lower_case(response, answer) > 0.22)


@pytest.mark.slow
def test_rounds_of_a_step_take_no_problems_of_later_ones(tmp_path, monkeypatch):
    """With dynamic sampling, begun early or not, learning asynchronously or not: the same run, some steps in two
    rounds."""

    def rounds_run(name, mode, begins=True):
        (tmp_path / name).mkdir()
        run = run_of(tmp_path / name, mode, often_equal, {"grpo": {"sampling_rounds": 2}})
        if not begins:
            monkeypatch.setattr(exact.LookaheadBuffer, "after", lambda self, step: Lookahead([], np.zeros(0, np.int64)))
        rows = train(run, tmp_path / name / "run")[1:]
        monkeypatch.undo()
        monkeypatch.setattr(loop, "evaluation_metrics", lambda *_, **__: {})
        return run, tmp_path / name / "run", rows

    *expected, rows = rounds_run("none", "sync, 1 ahead", begins=False)
    assert {row["rollout/rounds"] for row in rows} == {1, 2}
    assert not any(row["rollout/reverified"] for row in rows)
    for mode in ("sync, 1 ahead", "async, 2 ahead"):
        run, workdir, rows = rounds_run(mode.replace(", ", "_"), mode)
        assert any(row["rollout/reverified"] for row in rows)
        assert_same_run(run, workdir, expected)


WRONG = [
    (
        {"rollout": {"rule": "rejection", "parity": False}},
        r"rollout\.rule=rejection beside pipeline\.schedule=exact: .*set coupled",
    ),
    ({"pipeline": {"lag": 0}}, r"pipeline\.lag=0 beside pipeline\.schedule=exact: .*set 1"),
]


@pytest.mark.parametrize("changes, said", WRONG)
def test_what_is_not_exact_is_refused_in_one_line(changes, said):
    exact = {"pipeline": MODES["sync, 1 ahead"], "rollout": {"rule": "coupled"}}
    assert_refused({name: exact[name] | changes.get(name, {}) for name in exact}, said)
