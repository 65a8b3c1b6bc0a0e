"""Whole runs of a small policy and its head: what they write and learn, and that interruptions leave no trace."""

import dataclasses
import json
import shutil
import signal
import threading
import time
import types

import jax
import matplotlib.image
import numpy as np
import optax
import pytest

from configs import pretrain_tiny, rlzero_tiny
from specrl_jax.config import from_config_dict
from specrl_jax.core import InputError, Stopped
from specrl_jax.data.rows import make_rows
from specrl_jax.data.tasks import in_validation
from specrl_jax.decoding.rollouts import Chunk
from specrl_jax.io.checkpoints import Checkpoints
from specrl_jax.io.metrics import read_metrics
from specrl_jax.io.report import print_report
from specrl_jax.rewards.scorer import Scores
from specrl_jax.sharding import make_mesh
from specrl_jax.tasks import pretrain
from specrl_jax.training import evaluate, loop
from specrl_jax.training import metrics as measures
from specrl_jax.training.build import build
from specrl_jax.training.speedup import compare_with_plain
from tests.helpers.rewards import FunctionScorer
from tests.helpers.runs import arguments, finished_run, run_process, start_process

ROLLOUTS = 16  # of a step: 4 prompts x 4 answers
STEPS = 6
NEVER = threading.Event()


def lower_case(response, answer):
    """The toy reward: share of lower-case letters, a quarter at random."""
    return sum(c.islower() for c in response) / max(len(response), 1)


def make_setup(config, **changes):
    for path, value in changes.items():
        section, _, key = path.partition("__")
        if key:
            config[section][key] = value
        else:
            config[section] = value
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])
    return build(from_config_dict(config), mesh)


COMPILED = (
    "prepare_step",
    "logprob_step",
    "policy_step",
    "read_tables",
    "draft_step",
    "predict_step",
    "engine",
    "plain_engine",
    "eval_engine",
    "greedy_engine",
)


def with_settings(setup, **changes):
    """The same compiled functions under settings that they do not depend on: steps, checkpoint, eval.every."""
    changed = dataclasses.replace(setup, settings=dataclasses.replace(setup.settings, **changes))
    changed.__dict__.update({name: getattr(setup, name) for name in COMPILED})
    return changed


@pytest.fixture(scope="module")
def toy():
    setup = make_setup(
        rlzero_tiny.get_config("smoke"),
        steps=STEPS,
        optimizer__learning_rate=3e-3,
        optimizer__warmup=0,
        # Lengths that follow the clock would make every run another.
        draft__adaptive=False,
        checkpoint__every=2,
        checkpoint__keep=9,
        eval__every=3,
    )
    return dataclasses.replace(setup, scorer=FunctionScorer(lower_case))


@pytest.fixture(scope="module")
def whole(toy, tmp_path_factory):
    """(workdir, rows) of a run that nothing interrupted. Copy it before touching it."""
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, loop.train(toy, str(workdir), NEVER)


class StopAfter:
    """Stands in for the event of the signal handler: set from the n-th look at it on. A step looks four times."""

    def __init__(self, looks):
        self.left = looks

    def is_set(self):
        self.left -= 1
        return self.left < 0


def saved(setup, workdir, step):
    """(state, what the host keeps) of a checkpoint, on the host."""
    checkpoints = Checkpoints(str(workdir), 9)
    try:
        state, host = checkpoints.restore(step, setup.abstract_state())
    finally:
        checkpoints.close()
    return jax.device_get(state), host.values


def untimed(rows):
    """Rows without what depends on the clock."""
    timed = ("time/", "perf/", "draft/seconds", "spec/speedup", "rollout/tokens_per_second")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]


def samples(workdir, step):
    return [json.loads(line) for line in (workdir / f"rollouts/step_{step}.jsonl").read_text().splitlines()]


def assert_same_run(setup, workdir, whole):
    """Bit-equal parameters, moments, data position and whatever else the host keeps; equal metrics and rollouts."""
    other, rows = whole
    assert untimed(read_metrics(str(workdir))) == untimed(rows)
    state, host = saved(setup, workdir, STEPS)
    expected, expected_host = saved(setup, other, STEPS)
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert host == expected_host and host.keys() == {"position", "speculation", "alarms", "skipped"}
    for step in range(1, STEPS + 1):
        assert samples(workdir, step) == samples(other, step)


# ---- what a run writes

EVERY_STEP = (
    {"step", "reward/mean", "reward/std", "reward/accuracy", "reward/unscored"}
    | {f"time/{name}" for name in ("data", "prepare", "generate", "logprob", "train", "total")}
    | {f"rollout/{name}" for name in ("tokens", "tokens_per_second", "response_length_mean")}
    | {f"policy/{name}" for name in ("loss", "grad_norm", "entropy", "kl", "clip_fraction", "correction")}
    | {"policy/nonfinite_updates"}
    | {f"alarm/{name}" for name in ("acceptance", "mismatch", "rewards", "equal_groups", "truncated", "entropy")}
    | {"reward/equal_groups", "rollout/count", "rollout/rounds"}
    | {f"rollout_vs_learner/{name}" for name in ("kl", "logprob_abs_mean", "logprob_abs_max", "probs_pearson")}
    | {f"perf/mfu_{phase}" for phase in ("generate", "logprob", "train")}
    | {"perf/tokens_per_second_per_device", "perf/host_memory"}
    | {f"spec/{name}" for name in ("acceptance_length", "acceptance_rate", "drafted", "accepted", "draft_length_mean")}
    | {f"spec/acceptance_rate_pos_{i}" for i in (1, 2, 3)}
    | {"spec/acceptance_predicted", "spec/alarm", "spec/share_k_3"}
    | {f"draft/{name}" for name in ("loss", "grad_norm", "seconds", "version", "target_entropy", "kl")}
)


def test_one_row_a_step_with_the_agreed_names(whole):
    workdir, rows = whole
    assert rows == [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for row in rows[1:]:
        assert row.keys() >= EVERY_STEP
        assert all(np.isfinite(value) for value in row.values())
    # Before training, every third step, and at the end.
    assert [row["step"] for row in rows if {"eval/accuracy", "eval/pass_at_k"} <= row.keys()] == [0, 3, 6]


def test_values_that_must_hold_in_every_row(whole):
    for row in whole[1][1:]:
        assert 0 <= row["reward/mean"] <= 1 and row["reward/std"] > 0
        phases = [row[f"time/{name}"] for name in ("data", "prepare", "generate", "logprob", "train")]
        assert min(phases) >= 0 and sum(phases) <= row["time/total"]
        assert row["rollout/tokens"] == pytest.approx(ROLLOUTS * row["rollout/response_length_mean"])
        assert 0 < row["rollout/response_length_mean"] <= 12
        # One update a step at ratio 1: nothing is clipped, and there is no reference.
        assert row["policy/clip_fraction"] == 0.0 and row["policy/kl"] == 0.0
        assert 0 < row["policy/entropy"] <= np.log(128) and row["policy/grad_norm"] > 0


def test_what_speculation_reports_in_every_row(whole):
    """Rates are unconditional: verifications that kept draft i over those that drafted it. Here k = 3."""
    for step, row in enumerate(whole[1][1:], start=1):
        rates = [row[f"spec/acceptance_rate_pos_{i}"] for i in (1, 2, 3)]
        assert "spec/acceptance_rate_pos_4" not in row
        assert 1 >= rates[0] >= rates[1] >= rates[2] >= 0 and rates[0] > 0
        assert row["spec/accepted"] < row["spec/drafted"] and row["spec/drafted"] % 3 == 0
        assert row["spec/acceptance_rate"] == pytest.approx(row["spec/accepted"] / row["spec/drafted"])
        # Every verification drafts three, so the rates weigh the same.
        verifications = row["spec/drafted"] // 3
        assert row["spec/draft_length_mean"] == 3.0 and row["spec/share_k_3"] == 1.0
        assert row["spec/alarm"] == 0.0
        # Along the sampled text of the same weights: an estimate of what happened, of 192 tokens.
        assert row["spec/acceptance_predicted"] == pytest.approx(1 + sum(rates), abs=0.25)
        assert row["spec/acceptance_rate"] == pytest.approx(np.mean(rates))
        assert row["spec/acceptance_length"] == pytest.approx(row["rollout/tokens"] / verifications)
        # A verification commits what it keeps and one more; the end of a response may cut some of it off.
        assert 1 <= row["spec/acceptance_length"] <= 1 + sum(rates) + 1e-9
        assert row["draft/version"] == step and row["draft/loss"] > 0 and row["draft/grad_norm"] > 0
        # Cross-entropy of three steps that weigh 1, 0.8 and 0.64 against their plain averages.
        assert row["draft/kl"] > 0 and 0 < row["draft/target_entropy"] < np.log(128)
        assert row["draft/loss"] == pytest.approx(2.44 * (row["draft/target_entropy"] + row["draft/kl"]), rel=0.1)
        assert 0 < row["draft/seconds"] < row["time/train"]


def test_acceptance_counts_what_was_committed():
    """speculation_metrics on counters written by hand, where no verification is like the next."""
    rollouts = types.SimpleNamespace(
        drafted=np.array([[4, 4, 2], [3, 3, 0]], np.int32),
        accepted=np.array([[3, 1, 1], [2, 0, 0]], np.int32),
        verifications=np.array([4, 3], np.int32),
        response_length=np.array([8, 5], np.int32),
        # Two programs of one length count together.
        chunks=[Chunk(2, 3, 1.0, 2, 4, 0.0), Chunk(2, 0, 1.0, 1, 2, 0.0), Chunk(1, 3, 1.0, 1, 1, 0.0)],
    )
    assert measures.speculation_metrics(rollouts) == pytest.approx(
        {
            "spec/acceptance_length": 13 / 7,
            "spec/acceptance_rate": 7 / 16,
            "spec/drafted": 16,
            "spec/accepted": 7,
            "spec/draft_length_mean": 16 / 7,
            "spec/acceptance_rate_pos_1": 5 / 7,
            "spec/acceptance_rate_pos_2": 1 / 7,
            "spec/acceptance_rate_pos_3": 1 / 2,
            "spec/share_k_0": 2 / 7,
            "spec/share_k_3": 5 / 7,
        }
    )
    # What nothing reached has no rate.
    rollouts.drafted, rollouts.accepted = rollouts.drafted * [[1, 1, 0]], rollouts.accepted * [[1, 1, 0]]
    assert "spec/acceptance_rate_pos_3" not in measures.speculation_metrics(rollouts)


def test_only_the_last_row_compares_with_plain_decoding(whole):
    *rest, last = whole[1]
    assert not any(key.startswith("spec/speedup") for row in rest for key in row)
    assert 0 < last["spec/speedup_low"] <= last["spec/speedup"] <= last["spec/speedup_high"]


def test_reward_mean_is_that_of_the_rollouts(whole):
    workdir, rows = whole
    for step in range(1, STEPS + 1):
        rewards = [sample["reward"] for sample in samples(workdir, step)]
        np.testing.assert_allclose(rows[step]["reward/mean"], np.mean(rewards), rtol=1e-6)


def test_sampled_rollouts(whole, toy):
    workdir, _ = whole
    for step in range(1, STEPS + 1):
        found = samples(workdir, step)
        assert len(found) == ROLLOUTS
        for sample in found:
            assert sample.keys() >= {"id", "prompt", "response", "tokens", "logprobs", "reward"}
            assert toy.tokenizer.decode(sample["tokens"]) == sample["response"]
            assert sample["reward"] == pytest.approx(lower_case(sample["response"], ""))
            assert len(sample["tokens"]) == len(sample["logprobs"]) <= 12
            assert max(sample["logprobs"]) <= 0
            assert sample["weights_version"] == sample["draft_version"] == step - 1
            assert not in_validation(sample["prompt"])
        # Four answers to each of four prompts.
        assert len({sample["prompt"] for sample in found}) == 4


def test_rollouts_carry_the_checksum_of_their_weights(whole, toy):
    """One a step, another each step; that of a step is that of the state saved before it."""
    sums = [{sample["weights_checksum"] for sample in samples(whole[0], step)} for step in range(1, STEPS + 1)]
    assert all(len(found) == 1 for found in sums) and len(set.union(*sums)) == STEPS
    state, _ = saved(toy, whole[0], 2)
    weights, stamp = toy.prepare(state)
    assert {stamp.checksum} == {int(weights.checksum)} == sums[2]
    assert (stamp.weights_version, stamp.draft_version) == (2, 2)
    # Of both models: the head alone changes it too.
    _, other = toy.prepare(state.replace(draft=saved(toy, whole[0], 4)[0].draft))
    assert other.checksum not in set.union(*sums) and other.draft_version == 4


def test_rollout_ids_are_unique_in_a_run(whole):
    ids = [sample["id"] for step in range(1, STEPS + 1) for sample in samples(whole[0], step)]
    assert len(set(ids)) == len(ids) == STEPS * ROLLOUTS


def test_checkpoints_are_kept_as_asked(whole):
    assert sorted(int(path.name) for path in (whole[0] / "checkpoints").iterdir()) == [2, 4, 6]


def test_tensorboard_holds_the_same_scalars(whole):
    (events,) = (whole[0] / "tensorboard").iterdir()
    content = events.read_bytes()
    # Tags stand in the file as they are; every row writes each of its scalars.
    for name in EVERY_STEP - {"step"}:
        assert content.count(name.encode()) >= STEPS, name
    assert content.count(b"eval/pass_at_k") == 3


def test_files_of_the_command(tmp_path_factory):
    workdir, _, _ = finished_run(tmp_path_factory)
    names = {path.name for path in workdir.iterdir()}
    files = {"config.json", "metrics.jsonl", "lock"}
    assert names == files | {"rollouts", "evaluations", "checkpoints", "tensorboard", "plots"}
    written = json.loads((workdir / "config.json").read_text())
    assert written["config"]["policy"]["preset"] == "nano_deep" and written["config"]["steps"] == 3
    assert set(written["versions"]) == {"specrl_jax", "jax"}
    assert sorted(path.name for path in (workdir / "rollouts").iterdir()) == [f"step_{i}.jsonl" for i in (1, 2, 3)]


def test_the_figure_shows_something(tmp_path_factory):
    workdir, _, _ = finished_run(tmp_path_factory)
    image = matplotlib.image.imread(workdir / "plots/run.png")
    assert image.shape[0] > 400 and image.shape[1] > 600
    # Lines, legends and stacked areas have far more colours than empty axes.
    assert len(np.unique((image[..., :3] * 255).astype(np.uint8).reshape(-1, 3), axis=0)) > 100
    ink = (image[..., :3].min(axis=-1) < 0.9).mean(axis=1)
    assert (ink > 0).mean() > 0.5


# ---- what a run computes


def test_behaviour_logprobs_are_the_learners(whole, toy):
    """Recorded by the engine, token by token with a cache; recomputed here from the initial policy in one pass."""
    workdir, rows = whole
    found = samples(workdir, 1)
    prompts = [toy.tokenizer.encode(sample["prompt"]) for sample in found]
    batch = make_rows(prompts, [sample["tokens"] for sample in found], toy.rollout.limits.cache_length, 0)
    learner = np.asarray(toy.logprob_step(toy.initial_params(), batch)[0])[batch.mask]
    behaviour = np.concatenate([sample["logprobs"] for sample in found])
    # Float32 sums in another order, over 64 and 128 terms in two layers.
    np.testing.assert_allclose(behaviour, learner, atol=1e-4)
    assert rows[1]["rollout_vs_learner/logprob_abs_max"] == pytest.approx(np.abs(behaviour - learner).max(), abs=2e-6)
    for row in rows[1:]:
        assert 0 <= row["rollout_vs_learner/logprob_abs_max"] < 1e-4
        assert 0 <= row["rollout_vs_learner/kl"] < 1e-9


def test_a_tiny_policy_learns(toy, tmp_path):
    """Deterministic on one machine; elsewhere rounding sends it down another path, to 0.7 as well."""
    setup = with_settings(
        toy,
        steps=30,
        eval=dataclasses.replace(toy.settings.eval, every=0),
        checkpoint=dataclasses.replace(toy.settings.checkpoint, every=30),
    )
    rewards = [row["reward/mean"] for row in loop.train(setup, str(tmp_path), NEVER)[1:]]
    # 26 of 128 ids at first; the mean of 16 x 12 draws has a standard error of 0.03, so neither bound is near chance.
    assert np.mean(rewards[:2]) < 0.35
    assert np.mean(rewards[-5:]) > 0.5


def test_every_option_of_the_objective_and_of_sampling_at_once(tmp_path, monkeypatch):
    """A reference, two minibatches of two microbatches, a cut and sharpened distribution."""
    setup = make_setup(
        rlzero_tiny.get_config("smoke"),
        steps=2,
        grpo__kl_coef=0.1,
        grpo__minibatches=2,
        grpo__microbatch=4,
        rollout__temperature=0.7,
        rollout__top_k=40,
        rollout__top_p=0.9,
        optimizer__learning_rate=3e-3,
        draft__adaptive=False,
        draft__compare_rounds=0,
    )
    # Engines of other temperatures would be compiled for it.
    monkeypatch.setattr(loop, "evaluation_row", lambda *_, **__: {})
    rows = loop.train(dataclasses.replace(setup, scorer=FunctionScorer(lower_case)), str(tmp_path), NEVER)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        # The learner scores at the same temperature, before top-k and top-p.
        assert 0 <= row["rollout_vs_learner/logprob_abs_max"] < 1e-4
        assert all(np.isfinite(value) for value in row.values())
        # One update of the head for each of the policy's.
        assert row["draft/version"] == 2 * row["step"]
        assert "spec/speedup" not in row
    assert [sample["draft_version"] for sample in samples(tmp_path, 2)] == [2] * ROLLOUTS
    # The second minibatch of step 1 has already left the reference; step 2 is further away.
    assert 0 < rows[1]["policy/kl"] < rows[2]["policy/kl"]


def test_a_head_that_does_not_learn_stays_as_it_is(toy, whole, tmp_path):
    """It still drafts; the policy's first update is that of the run in which it learns."""
    draft = dataclasses.replace(toy.settings.draft, online=False, compare_rounds=0)
    setup = with_settings(toy, steps=2, draft=draft, eval=dataclasses.replace(toy.settings.eval, every=0))
    rows = loop.train(setup, str(tmp_path), NEVER)
    state, learnt = saved(setup, tmp_path, 2)[0], saved(toy, whole[0], 2)[0]
    jax.tree.map(np.testing.assert_array_equal, state.draft, jax.device_get(toy.initial_state().draft))
    for row in rows[1:]:
        assert row["draft/version"] == 0 and row["spec/drafted"] > 0
        assert not {"draft/loss", "draft/grad_norm", "draft/seconds", "spec/speedup"} & row.keys()
        assert row["draft/kl"] > 0 and row["draft/target_entropy"] > 0
    (asked, learning) = (
        {k: v for k, v in untimed(run)[1].items() if not k.startswith("draft/")} for run in (rows, whole[1])
    )
    # By two programs.
    predicted = [row.pop("spec/acceptance_predicted") for row in (asked, learning)]
    assert asked == learning and predicted[0] == pytest.approx(predicted[1], rel=1e-5)
    assert np.any(learnt.draft.params["fc"] != state.draft.params["fc"])


def test_a_draft_that_learns_every_other_step_is_asked_in_between(toy, whole, tmp_path, monkeypatch):
    """The step that rests runs the prediction alone, and reports of it what a step that learns reports of itself."""
    draft = dataclasses.replace(toy.settings.draft, update_every=2, compare_rounds=0)
    setup = with_settings(toy, steps=4, draft=draft, eval=dataclasses.replace(toy.settings.eval, every=0))
    ran = []
    for name in ("draft_step", "predict_step"):
        function = getattr(toy, name)
        setup.__dict__[name] = lambda *inputs, name=name, function=function: (ran.append(name), function(*inputs))[1]
    monkeypatch.setattr(loop, "evaluation_row", lambda *_, **__: {})
    rows = loop.train(setup, str(tmp_path), NEVER)[1:]
    assert ran == ["predict_step", "draft_step"] * 2
    assert [row["draft/version"] for row in rows] == [0, 1, 1, 2]
    learnt = {"draft/loss", "draft/grad_norm", "draft/seconds"}
    for row in rows:
        assert (learnt & row.keys()) == (learnt if row["step"] % 2 == 0 else set())
        assert row["draft/kl"] > 0 and row["draft/target_entropy"] > 0
        assert {"spec/acceptance_predicted", "spec/alarm"} <= row.keys() and row["spec/drafted"] > 0
    # The first step has the draft and the rollouts of the run in which it learns, by two programs.
    for name in ("draft/kl", "draft/target_entropy", "spec/acceptance_predicted"):
        assert rows[0][name] == pytest.approx(whole[1][1][name], rel=1e-5)


def test_plain_decoding_has_nothing_of_a_draft(tmp_path, monkeypatch):
    # Engines of other temperatures would be compiled for it.
    monkeypatch.setattr(loop, "evaluation_row", lambda *_, **__: {})
    setup = make_setup(rlzero_tiny.get_config("smoke"), steps=1, policy__preset="nano", draft__kind="none")
    (_, row) = loop.train(setup, str(tmp_path), NEVER)
    assert not [key for key in row if key.startswith(("spec/", "draft/"))]
    state, _ = saved(setup, tmp_path, 1)
    assert (state.draft, state.vocab_map) == (None, None)
    for sample in samples(tmp_path, 1):
        assert (sample["weights_version"], sample["draft_version"]) == (0, 0)


def test_answers_of_every_evaluation_are_kept(whole):
    workdir, rows = whole
    assert sorted(path.name for path in (workdir / "evaluations").iterdir()) == [f"step_{n}.jsonl" for n in (0, 3, 6)]
    for step in (0, 3, 6):
        kept = [json.loads(line) for line in (workdir / f"evaluations/step_{step}.jsonl").read_text().splitlines()]
        assert len(kept) == 16
        assert rows[step]["eval/accuracy"] == np.mean([row["correct"] for row in kept])
        assert all(row["reward"] == pytest.approx(lower_case(row["response"], "")) for row in kept)


def test_mismatch_is_what_numpy_says():
    rng = np.random.default_rng(0)
    mask = rng.random((4, 9)) < 0.7
    b = np.where(mask, -rng.random((4, 9)), np.nan).astype(np.float32)
    p = (b + 0.1 * rng.standard_normal((4, 9))).astype(np.float32)
    row = measures.mismatch_metrics(b, p, mask)
    x, y = b[mask].astype(float), p[mask].astype(float)
    expected = [np.mean(np.expm1(y - x) - (y - x)), abs(x - y).mean(), abs(x - y).max()]
    expected.append(np.corrcoef(np.exp(x), np.exp(y))[0, 1])
    assert [*row] == [
        f"rollout_vs_learner/{name}" for name in ("kl", "logprob_abs_mean", "logprob_abs_max", "probs_pearson")
    ]
    np.testing.assert_allclose([*row.values()], expected, rtol=1e-4)


def test_probabilities_that_do_not_vary_correlate_with_nothing():
    zeros = np.zeros((2, 3), np.float32)
    assert "rollout_vs_learner/probs_pearson" not in measures.mismatch_metrics(zeros, zeros, np.ones((2, 3), bool))


def test_faults_of_a_reward_are_counted_by_cause():
    values = np.array([1.0, 0.0, 0.5], np.float32)
    scores = Scores(values * 2, {"a": values, "b": values}, values > 0, {"timeout": 2, "died": 0}, [None] * 3)
    row = measures.reward_metrics(scores, 0.25)
    assert row == {
        "reward/equal_groups": 0.25,
        "reward/mean": 1.0,
        "reward/std": pytest.approx(np.std(values * 2)),
        "reward/accuracy": pytest.approx(2 / 3),
        "reward/unscored": 2,
        "reward/unscored_timeout": 2,
        "reward/a": 0.5,
        "reward/b": 0.5,
    }


def test_evaluation_of_a_policy(toy, tmp_path):
    evaluate.run_evaluation(toy, str(tmp_path))
    summary = json.loads((tmp_path / "evaluation.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "generations.jsonl").read_text().splitlines()]
    assert summary["problems"] == len(rows) == 16 and summary["eval/unscored"] == 0
    assert summary["eval/accuracy"] == np.mean([row["reward"] > 0 for row in rows])
    assert all(in_validation(row["prompt"]) for row in rows)
    assert all(row["reward"] == pytest.approx(lower_case(row["response"], row["answer"])) for row in rows)


def test_pretraining_writes_a_policy_that_loads(tmp_path, monkeypatch):
    # Its engines would be compiled for it.
    monkeypatch.setattr(pretrain, "evaluation_row", lambda *_, **__: {"eval/accuracy": 0.0})
    config = pretrain_tiny.get_config("smoke")
    setup = make_setup(config, steps=12, pretrain__batch_size=16, pretrain__output=str(tmp_path / "base"))
    log = pretrain.pretrain(setup, str(tmp_path), NEVER)
    # Uniform over 128 ids is 4.85 nats; a dozen steps learn at least which characters occur.
    assert log[-1]["loss"] < 4.0
    loaded = make_setup(
        rlzero_tiny.get_config("smoke"),
        policy__preset="nano",
        policy__path=str(tmp_path / "base"),
        draft__kind="none",
    )
    initial, trained = setup.initial_params()["embed"], loaded.initial_params()["embed"]
    # Further from the start than bfloat16 storage moves a weight of 0.02.
    assert trained.shape == initial.shape and np.abs(trained - initial).max() > 1e-3
    assert (tmp_path / "base/log.jsonl").read_text() == (tmp_path / "log.jsonl").read_text()


# ---- interruptions


def test_a_run_stopped_again_and_again_ends_like_the_whole_one(toy, whole, tmp_path):
    """Stops in each phase: before any step is done, in the middle of steps, and right after a restart."""
    setup = with_settings(toy, checkpoint=dataclasses.replace(toy.settings.checkpoint, every=100))
    done = []
    for looks in (1, 6, 0, 3, 8, 5):
        with pytest.raises(Stopped) as stopped:
            loop.train(setup, str(tmp_path), StopAfter(looks))
        rows = read_metrics(str(tmp_path))
        assert [row["step"] for row in rows] == list(range(len(rows)))
        done.append(rows[-1]["step"])
        # The message says what was kept; before the first step that is nothing.
        assert (f"step {done[-1]} is saved" in str(stopped.value)) == (done[-1] > 0)
    # Four looks a step: what was finished is kept, what was begun is done again.
    assert done == [0, 1, 1, 1, 3, 4]
    loop.train(setup, str(tmp_path), NEVER)
    assert_same_run(toy, tmp_path, whole)


def test_checkpoints_hold_the_head_and_its_optimizer(toy, whole):
    """What the comparisons of interrupted runs go over: everything of the head, and none of it as it began."""
    state, fresh = saved(toy, whole[0], STEPS)[0], jax.device_get(toy.initial_state())
    assert int(state.draft.step) == STEPS
    np.testing.assert_array_equal(state.vocab_map, np.arange(toy.model.vocab))
    for name, leaf in state.draft.params.items():
        assert np.any(leaf != fresh.draft.params[name]), name
    for moment in ("mu", "nu"):
        assert all(np.any(leaf) for leaf in jax.tree.leaves(optax.tree.get(state.draft.opt_state, moment)))


@pytest.fixture
def killed_after_two(whole, tmp_path):
    """A run killed while writing the row of step 4, whose last complete checkpoint is that of step 2."""
    workdir = tmp_path / "killed"
    shutil.copytree(whole[0], workdir)
    for step in (4, 6):
        shutil.rmtree(workdir / f"checkpoints/{step}")
    lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (workdir / "metrics.jsonl").write_text("".join(lines[:4]) + lines[4][: len(lines[4]) // 2])
    return workdir


def test_rows_after_the_restored_step_go_first(toy, killed_after_two):
    with pytest.raises(Stopped):
        loop.train(toy, str(killed_after_two), StopAfter(0))
    text = (killed_after_two / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == [0, 1, 2]
    assert text.endswith("}\n")


def test_a_killed_run_ends_like_the_whole_one(toy, whole, killed_after_two):
    loop.train(toy, str(killed_after_two), NEVER)
    assert_same_run(toy, killed_after_two, whole)


def test_a_checkpoint_half_written_does_not_count(toy, whole, killed_after_two):
    """Orbax renames a finished save into place; what a kill leaves has another name or lacks its mark."""
    half = killed_after_two / "checkpoints/4.orbax-checkpoint-tmp"
    shutil.copytree(whole[0] / "checkpoints/4", half)
    loop.train(toy, str(killed_after_two), NEVER)
    assert_same_run(toy, killed_after_two, whole)


def test_a_finished_run_does_nothing_more(toy, whole, tmp_path, monkeypatch):
    workdir = tmp_path / "copy"
    shutil.copytree(whole[0], workdir)
    before = {path: path.stat().st_mtime_ns for path in (workdir / "checkpoints").rglob("*")}

    def began(*_, **__):
        raise AssertionError("a finished run worked")

    monkeypatch.setattr(loop, "run_step", began)
    monkeypatch.setattr(loop, "evaluation_row", began)
    assert loop.train(toy, str(workdir), NEVER) == whole[1]
    assert {path: path.stat().st_mtime_ns for path in (workdir / "checkpoints").rglob("*")} == before


def test_more_steps_extend_a_finished_run(toy, whole, tmp_path):
    workdir = tmp_path / "copy"
    shutil.copytree(whole[0], workdir)
    rows = loop.train(with_settings(toy, steps=STEPS + 2), str(workdir), NEVER)
    assert rows[: STEPS + 1] == whole[1]
    assert [row["step"] for row in rows[STEPS + 1 :]] == [STEPS + 1, STEPS + 2]
    first = {sample["prompt"] for step in range(1, STEPS + 1) for sample in samples(workdir, step)}
    assert not first & {sample["prompt"] for sample in samples(workdir, STEPS + 1)}


def test_fewer_steps_than_done_are_refused(toy, whole, tmp_path):
    workdir = tmp_path / "copy"
    shutil.copytree(whole[0], workdir)
    with pytest.raises(InputError, match=r"steps=4.* 6"):
        loop.train(with_settings(toy, steps=4), str(workdir), NEVER)


def test_a_signal_saves_and_the_same_command_goes_on(tmp_path, tmp_path_factory, toy):
    """The real command: stopped by a signal, resumed, and compared with a run that was never stopped."""
    common = ["--config.eval.problems=1", "--config.checkpoint.every=1000", "--config.eval.every=0"]
    common += ["--config.draft.adaptive=False"]
    stopped, unbroken = tmp_path / "stopped", tmp_path / "unbroken"
    process = start_process(arguments(*common, "--config.steps=100000", workdir=stopped))
    while process.poll() is None and len(read_metrics(str(stopped))) < 3:
        time.sleep(0.02)
    # A scheduler's warning, and then what it kills with: both ask for the same.
    process.send_signal(signal.SIGUSR2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert err.count("\n") == 1 and "Traceback" not in err, err
    done = int(max(path.name for path in (stopped / "checkpoints").iterdir()))
    assert [row["step"] for row in read_metrics(str(stopped))] == list(range(done + 1))
    assert str(done) in err

    steps = done + 2
    for workdir in (stopped, unbroken):
        status, _, err = run_process(arguments(*common, f"--config.steps={steps}", workdir=workdir))
        assert (status, err) == (0, "")
    assert untimed(read_metrics(str(stopped))) == untimed(read_metrics(str(unbroken)))
    jax.tree.map(np.testing.assert_array_equal, saved(toy, stopped, steps), saved(toy, unbroken, steps))


def test_steps_set_to_what_is_done_ends_with_a_table(whole, capsys):
    """A checkpoint before the last step, `steps` set to it: nothing is left to do, and the table says what there is."""
    rows = [row for row in whole[1] if row["step"] < STEPS]
    assert "eval/accuracy_greedy" not in rows[-1]
    print_report(rows, "figure.png")
    printed = capsys.readouterr().out
    assert "mean reward" in printed and "greedy" not in printed


def test_a_comparison_that_is_stopped_keeps_the_rounds_it_has():
    class Engine:
        def generate(self, *_, **__):
            return types.SimpleNamespace(response_length=np.array([5]))

    looks = iter([False, False, False, True])
    ratios = compare_with_plain(Engine(), Engine(), None, [[1]], 1, 0, 5, enough=lambda: next(looks))
    assert len(ratios) == 1
    assert len(compare_with_plain(Engine(), Engine(), None, [[1]], 1, 0, 5, enough=lambda: True)) == 0


def test_too_few_validation_problems_for_the_processes_are_refused(toy, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 1000)
    with pytest.raises(InputError, match="validation problems; each of the 1000 processes takes some"):
        toy.check_problems()
