"""Training on rollouts of several turns, with a small model: what is learned, and that no timing changes it."""

import json
import shutil

import jax
import numpy as np
import pytest

from configs import rlzero_tiny
from specrl_jax.config import from_config_dict
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.errors import Stopped
from specrl_jax.sharding import make_mesh
from specrl_jax.tasks.evaluate import evaluate_policy
from specrl_jax.training import dynamic_sampling
from specrl_jax.training.build import make_learner, make_rollout, make_scorer
from specrl_jax.training.plan import make_plan
from specrl_jax.training.problems import load_problems
from tests.helpers.training import NEVER, Run, StopAfter, changed, samples, saved, train

STRANGE = "tests.rewards.environments.strange:"
STEPS = 3


class ManyEnds(CharTokenizer):
    """A random policy ends a turn after a few tokens."""

    eos_ids = tuple(range(1, 21))


def make(name="Chatty", **changes):
    changes = {
        "steps": STEPS,
        "environment__name": STRANGE + name,
        "environment__turn_tokens": 12,
        "environment__seconds": 2.0,
        "reward__name": "",
        "rollout__max_response_tokens": 48,
        "rollout__rule": "coupled",
        "rollout__parity": True,
        "rollout__num_slots": 8,
        "rollout__prefill_tokens": 8,
        "rollout__page_tokens": 16,
        "draft__compare_rounds": 0,
        "eval__every": 0,
        "eval__problems": 4,
    } | changes
    config = from_config_dict(changed(rlzero_tiny.get_config("smoke"), **changes))
    plan = make_plan(config, make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1]))
    rollout = make_rollout(plan, tokenizer=ManyEnds())
    return Run(make_learner(plan), rollout, load_problems(config, rollout.tokenizer), make_scorer(config, []))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A whole run, its rows, and its scored rollouts."""
    workdir, seen = tmp_path_factory.mktemp("whole") / "run", []
    inner = dynamic_sampling.select_groups

    def spy(generated, grpo):
        seen.append(generated)
        return inner(generated, grpo)

    run = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specrl_jax.training.step.select_groups", spy)
        rows = train(run, workdir)
    run.scorer.close()
    return run, workdir, rows, seen


def assert_same(run, workdir, whole):
    _, expected, _, _ = whole
    ours, theirs = (saved(run, folder, STEPS)[0] for folder in (workdir, expected))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    for step in range(1, STEPS + 1):
        assert samples(workdir, step) == samples(expected, step)


@pytest.mark.slow
def test_logprobs_of_all_turns_are_the_learners(whole):
    _, workdir, rows, seen = whole
    for row in rows[1:]:
        assert row["rollout_vs_learner/logprob_abs_max"] < 1e-5
        assert row["environment/turns"] > 1.5 and row["environment/computed_share"] == 1.0
        assert row["environment/failed"] == 0 and row["policy/grad_norm"] > 0
        assert 0 < row["environment/call_tokens"] <= 2 * row["environment/turns"]
    assert any(any(sample.get("environment", [])) for sample in samples(workdir, 1))
    written = seen[0].rollouts.environment
    assert written.any() and not seen[0].rollouts.logprobs[written].any()


@pytest.mark.slow
def test_rewards_are_summed_over_turns_and_whole_rollouts_compared(whole):
    for generated in whole[3]:
        rollouts: Rollouts = generated.rollouts
        tokenizer = ManyEnds()
        for row in range(len(rollouts.length)):
            part = rollouts.response_part(row)
            own, texts = ~rollouts.environment[row, part], []
            ids = rollouts.tokens[row, part]
            edges = np.flatnonzero(np.diff(np.concatenate([[0], own.astype(int), [0]])))
            for begin, end in edges.reshape(-1, 2):
                turn = ids[begin:end].tolist()
                texts.append(tokenizer.decode(turn[:-1] if turn[-1] in tokenizer.eos_ids else turn))
            assert generated.rewards[row] == pytest.approx(sum(len(text) % 3 / 2 for text in texts))


@pytest.mark.slow
def test_the_order_of_answers_changes_no_bit(whole, tmp_path):
    """Answers that take up to 0.1 s, of four processes, while other rollouts take the slots."""
    run = make("Slow", environment__workers=4)
    rows = train(run, tmp_path / "run")
    run.scorer.close()
    assert_same(run, tmp_path / "run", whole)
    assert rows[1]["rollout/parked"] > 0


@pytest.mark.slow
def test_pages_prefilled_again_change_no_token(whole, tmp_path):
    """Log-probs differ in their last bits: a forward of another shape rounds otherwise."""
    run = make("Slow", environment__workers=4, environment__pages="prefill", steps=1)
    rows = train(run, tmp_path / "run")
    run.scorer.close()
    assert rows[1]["environment/computed_share"] > 1
    for found, expected in zip(samples(tmp_path / "run", 1), samples(whole[1], 1), strict=True):
        assert found["tokens"] == expected["tokens"]
        np.testing.assert_allclose(found["logprobs"], expected["logprobs"], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_run_killed_amid_conversations_ends_like_the_whole_one(whole, tmp_path):
    run, workdir = whole[0], tmp_path / "run"
    shutil.copytree(whole[1], workdir)
    for step in (2, 3):
        shutil.rmtree(workdir / f"checkpoints/{step}", ignore_errors=True)
    with pytest.raises(Stopped):
        train(run, workdir, StopAfter(8, by="on_progress"))
    train(run, workdir)
    run.scorer.close()
    assert_same(run, workdir, whole)


@pytest.mark.slow
def test_environments_that_fail_cost_their_own_rollouts_their_reward(whole, tmp_path):
    run, seen = make("SeldomWell", environment__workers=2, steps=1), []
    inner = dynamic_sampling.select_groups

    def spy(generated, grpo):
        seen.append(generated)
        return inner(generated, grpo)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specrl_jax.training.step.select_groups", spy)
        rows = train(run, tmp_path / "run")
    run.scorer.close()
    scores, well = seen[0].scores, whole[3][0]
    failed = scores.environment["failed"].astype(bool)
    assert 0 < failed.sum() < len(failed)
    assert sum(scores.failures.values()) == failed.sum() == rows[1]["reward/unscored"]
    assert not scores.total[failed].any() and not scores.correct[failed].any()
    np.testing.assert_array_equal(scores.total[~failed], well.scores.total[~failed])
    for row in np.flatnonzero(~failed):
        np.testing.assert_array_equal(seen[0].rollouts.sequence(row), well.rollouts.sequence(row))


@pytest.mark.slow
def test_an_evaluation_says_what_its_environments_did(tmp_path):
    run = make()
    evaluate_policy(*run, str(tmp_path), NEVER)
    run.scorer.close()
    summary = json.loads((tmp_path / "evaluation.json").read_text())
    assert 1 < summary["eval/environment/turns"] <= 4 and summary["eval/environment/computed_share"] == 1
