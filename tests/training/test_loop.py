"""Whole runs of a small policy and its head: what they write and learn, and that interruptions leave no trace."""

import dataclasses
import itertools
import json
import re
import shutil
import signal
import threading
import time
import weakref

import jax
import matplotlib.image
import numpy as np
import optax
import pytest

from configs import rlzero_tiny
from specrl_jax.data.rows import make_rows
from specrl_jax.data.tasks import in_validation
from specrl_jax.errors import RunFailed, Stopped
from specrl_jax.io.metrics import read_metrics
from specrl_jax.io.report import print_report
from specrl_jax.training import loop, update
from specrl_jax.training import step as training_step
from specrl_jax.training.build import prepare
from specrl_jax.training.initial import initial_params, initial_state
from specrl_jax.training.update import score
from tests.helpers.long import long_but
from tests.helpers.rewards import FunctionScorer
from tests.helpers.runs import arguments, finished_run, run_process, start_process
from tests.helpers.training import Changed, StopAfter, lower_case, make_run, samples, saved, train, untimed, with_config

ROLLOUTS = 16  # of a step: 4 prompts x 4 answers
STEPS = 6


@pytest.fixture(scope="module")
def toy():
    return make_run(
        rlzero_tiny.get_config("smoke"),
        scorer=FunctionScorer(lower_case),
        rollout__num_slots=18,  # no multiple of four: no smaller batches, so a third of the programs
        steps=STEPS,
        optimizer__learning_rate=3e-3,
        optimizer__warmup=0,
        # Lengths that follow the clock would make every run another.
        draft__adaptive=False,
        checkpoint__every=2,
        checkpoint__keep=9,
        eval__every=3,
    )


@pytest.fixture(scope="module")
def whole(toy, tmp_path_factory):
    """(workdir, rows) of a run that nothing interrupted. Copy it before touching it."""
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, train(toy, workdir)


def assert_same_run(run, workdir, whole):
    """Bit-equal parameters, moments, data position and whatever else the host keeps; equal metrics and rollouts."""
    other, rows = whole
    assert untimed(read_metrics(str(workdir))) == untimed(rows)
    state, host = saved(run, workdir, STEPS)
    expected, expected_host = saved(run, other, STEPS)
    host.pop("unfinished", None)  # of a step that was saved before its evaluation
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert host == expected_host and host.keys() == {"position", "speculation", "alarms", "skipped", "ahead", "files"}
    for step in range(1, STEPS + 1):
        assert samples(workdir, step) == samples(other, step)


# ---- what a run writes

# The contract of DESIGN.md, section 6; docs/metrics.md lists all names, and a test holds it complete.
CONTRACT = (
    {"step", "reward/mean", "reward/std", "rollout_vs_learner/kl", "rollout_vs_learner/logprob_abs_max"}
    | {f"time/{name}" for name in ("data", "prepare", "generate", "logprob", "train", "total", "exposed_generation")}
    | {f"rollout/{name}" for name in ("tokens", "tokens_per_second", "response_length_mean")}
    | {f"policy/{name}" for name in ("loss", "grad_norm", "entropy", "kl", "clip_fraction", "nonfinite_updates")}
    | {f"spec/{name}" for name in ("acceptance_length", "acceptance_rate", "drafted", "accepted", "draft_length_mean")}
    | {f"spec/acceptance_rate_pos_{i}" for i in (1, 2, 3)}
    | {"spec/acceptance_predicted"}
    | {f"draft/{name}" for name in ("loss", "target_entropy", "kl", "grad_norm", "version", "seconds")}
)


def test_one_row_a_step_with_the_agreed_names(whole):
    workdir, rows = whole
    assert rows == [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for row in rows[1:]:
        assert row.keys() >= CONTRACT
        assert all(np.isfinite(value) for value in row.values())
    # Before training, every third step, and at the end.
    assert [row["step"] for row in rows if {"eval/accuracy", "eval/pass_at_k"} <= row.keys()] == [0, 3, 6]


@pytest.mark.parametrize("every", [0, 1, 3, 5, 10, 11])
def test_evaluations_to_come(every):
    steps = 10
    due = {step for step in range(1, steps + 1) if step == steps or (every and step % every == 0)}
    for step in range(steps + 1):
        assert loop.evaluations_left(step, steps, every) == len([other for other in due if other > step])


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


def test_only_the_last_row_compares_with_plain_decoding(whole):
    *rest, last = whole[1]
    assert not any(key.startswith("spec/speedup") for row in rest for key in row)
    assert 0 < last["spec/speedup_low"] <= last["spec/speedup"] <= last["spec/speedup_high"]


def test_sampled_rollouts(whole, toy):
    workdir, rows = whole
    ids = {sample["id"] for step in range(1, STEPS + 1) for sample in samples(workdir, step)}
    assert len(ids) == STEPS * ROLLOUTS
    for step in range(1, STEPS + 1):
        found = samples(workdir, step)
        assert len(found) == ROLLOUTS
        np.testing.assert_allclose(rows[step]["reward/mean"], np.mean([x["reward"] for x in found]), rtol=1e-6)
        drafts = sum(position > 0 for sample in found for position in sample["draft_positions"])
        assert 0 < drafts <= rows[step]["spec/accepted"]  # some are cut off at the end of a rollout
        for sample in found:
            assert sample.keys() >= {"id", "prompt", "response", "tokens", "logprobs", "reward"}
            assert toy.rollout.tokenizer.decode(sample["tokens"]) == sample["response"]
            assert sample["reward"] == pytest.approx(lower_case(sample["response"], ""))
            assert len(sample["tokens"]) == len(sample["logprobs"]) == len(sample["draft_positions"]) <= 12
            assert "".join(sample["token_texts"]) == sample["response"] and sample["draft_kind"] == "eagle3"
            assert max(sample["logprobs"]) <= 0
            assert sample["weights_version"] == sample["draft_version"] == step - 1
            assert not in_validation(sample["prompt"])
        # Four answers to each of four prompts.
        assert len({sample["prompt"] for sample in found}) == 4


@pytest.mark.slow
def test_a_synchronous_run_learns_without_the_rollout_weights(toy, tmp_path, monkeypatch):
    """They are as large as the policy; the dry run counts on it."""
    of_the_step, alive, computed = [], [], training_step.compute_loss_inputs

    def prepared(*args):
        weights, version = prepare(*args)
        of_the_step[:] = [weakref.ref(leaf) for leaf in jax.tree.leaves(weights)]
        return weights, version

    def watched(*args):
        alive.append(sum(leaf() is not None for leaf in of_the_step))
        return computed(*args)

    monkeypatch.setattr(training_step, "prepare", prepared)
    monkeypatch.setattr(training_step, "compute_loss_inputs", watched)
    train(with_config(toy, steps=2), tmp_path)
    assert of_the_step and alive == [0, 0]


def test_rollouts_carry_the_checksum_of_their_weights(whole, toy):
    """One a step, another each step; that of a step is that of the state saved before it."""
    sums = [{sample["weights_checksum"] for sample in samples(whole[0], step)} for step in range(1, STEPS + 1)]
    assert all(len(found) == 1 for found in sums) and len(set.union(*sums)) == STEPS
    state, _ = saved(toy, whole[0], 2)
    weights, version = prepare(toy.learner, toy.rollout, state)
    assert {version.checksum} == {int(weights.checksum)} == sums[2]
    assert (version.weights_version, version.draft_version) == (2, 2)
    # Of both models: the head alone changes it too.
    _, other = prepare(toy.learner, toy.rollout, state.replace(draft=saved(toy, whole[0], 4)[0].draft))
    assert other.checksum not in set.union(*sums) and other.draft_version == 4


def test_checkpoints_are_kept_as_asked(whole):
    assert sorted(int(path.name) for path in (whole[0] / "checkpoints").iterdir()) == [2, 4, 6]


def test_tensorboard_holds_the_same_scalars(whole):
    (events,) = (whole[0] / "tensorboard").iterdir()
    content = events.read_bytes()
    # Tags stand in the file as they are; every row writes each of its scalars.
    for name in CONTRACT - {"step"}:
        assert content.count(name.encode()) >= STEPS, name
    assert content.count(b"eval/pass_at_k") == 3


@pytest.mark.slow
def test_files_of_the_command(tmp_path_factory):
    workdir, _, _ = finished_run(tmp_path_factory)
    names = {path.name for path in workdir.iterdir()}
    files = {"config.json", "metrics.jsonl", "lock"}
    assert names == files | {"rollouts", "evaluations", "checkpoints", "tensorboard", "plots"}
    written = json.loads((workdir / "config.json").read_text())
    assert written["config"]["policy"]["preset"] == "nano_deep" and written["config"]["steps"] == 3
    assert set(written["versions"]) == {"specrl_jax", "jax"}
    assert sorted(path.name for path in (workdir / "rollouts").iterdir()) == [f"step_{i}.jsonl" for i in (1, 2, 3)]


@pytest.mark.slow
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
    prompts = [toy.rollout.tokenizer.encode(sample["prompt"]) for sample in found]
    batch = make_rows(prompts, [sample["tokens"] for sample in found], toy.rollout.config.limits.cache_length, pad_id=0)
    learner = score(toy.learner, initial_params(toy.learner), batch)[batch.mask]
    behaviour = np.concatenate([sample["logprobs"] for sample in found])
    # Float32 sums in another order, over 64 and 128 terms in two layers.
    np.testing.assert_allclose(behaviour, learner, atol=1e-4)
    assert rows[1]["rollout_vs_learner/logprob_abs_max"] == pytest.approx(np.abs(behaviour - learner).max(), abs=2e-6)
    for row in rows[1:]:
        assert 0 <= row["rollout_vs_learner/logprob_abs_max"] < 1e-4
        assert 0 <= row["rollout_vs_learner/kl"] < 1e-9


@pytest.mark.slow
def test_a_tiny_policy_learns(toy, tmp_path):
    """Deterministic on one machine; elsewhere rounding sends it down another path, to 0.7 as well."""
    run = with_config(
        toy,
        steps=30,
        eval=dataclasses.replace(toy.config.eval, every=0),
        checkpoint=dataclasses.replace(toy.config.checkpoint, every=30),
    )
    rewards = [row["reward/mean"] for row in train(run, tmp_path)[1:]]
    # 26 of 128 ids at first; the mean of 16 x 12 draws has a standard error of 0.03, so neither bound is near chance.
    assert np.mean(rewards[:2]) < 0.35
    assert np.mean(rewards[-5:]) > 0.5


@pytest.mark.slow
def test_a_head_that_does_not_learn_stays_as_it_is(toy, whole, tmp_path):
    """It still drafts; the policy's first update is that of the run in which it learns."""
    draft = dataclasses.replace(toy.config.draft, online=False, compare_rounds=0)
    run = with_config(toy, steps=2, draft=draft, eval=dataclasses.replace(toy.config.eval, every=0))
    rows = train(run, tmp_path)
    state, learnt = saved(run, tmp_path, 2)[0], saved(toy, whole[0], 2)[0]
    jax.tree.map(np.testing.assert_array_equal, state.draft, jax.device_get(initial_state(toy.learner).draft))
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


@pytest.mark.slow
def test_a_draft_that_learns_every_other_step_is_asked_in_between(toy, whole, tmp_path, monkeypatch):
    """The step that rests runs the prediction alone, and reports of it what a step that learns reports of itself."""
    draft = dataclasses.replace(toy.config.draft, update_every=2, compare_rounds=0)
    run = with_config(toy, steps=4, draft=draft, eval=dataclasses.replace(toy.config.eval, every=0))
    ran = []

    def recorded(name):
        step = getattr(toy.learner, name)
        return Changed(step, lambda *inputs: (ran.append(name), step(*inputs))[1])

    steps = {name: recorded(name) for name in ("draft_step", "predict_step")}
    run = run._replace(learner=dataclasses.replace(run.learner, **steps))
    monkeypatch.setattr(loop, "evaluation_metrics", lambda *_, **__: {})
    rows = train(run, tmp_path)[1:]
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


@pytest.mark.slow
def test_plain_decoding_has_nothing_of_a_draft(tmp_path, monkeypatch):
    # Engines of other temperatures would be compiled for it.
    monkeypatch.setattr(loop, "evaluation_metrics", lambda *_, **__: {})
    run = make_run(rlzero_tiny.get_config("smoke"), steps=1, policy__preset="nano", draft__kind="none")
    (_, row) = train(run, tmp_path)
    assert not [key for key in row if key.startswith(("spec/", "draft/"))]
    state, _ = saved(run, tmp_path, 1)
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


# ---- interruptions


@pytest.mark.slow
def test_a_run_stopped_again_and_again_ends_like_the_whole_one(toy, whole, tmp_path):
    """Stops in each phase: before any step is done, in the middle of steps, and right after a restart."""
    run = with_config(toy, checkpoint=dataclasses.replace(toy.config.checkpoint, every=100))
    done = []
    for looks in (1, 6, 0, 3, 8, 5):
        with pytest.raises(Stopped) as stopped:
            train(run, tmp_path, StopAfter(looks))
        rows = read_metrics(str(tmp_path))
        assert [row["step"] for row in rows] == list(range(len(rows)))
        done.append(rows[-1]["step"])
        # The message says what was kept; before the first step that is nothing.
        assert (f"step {done[-1]} is saved" in str(stopped.value)) == (done[-1] > 0)
    # Four looks a step: what was finished is kept, what was begun is done again.
    assert done == [0, 1, 1, 1, 3, 4]
    train(run, tmp_path)
    assert_same_run(toy, tmp_path, whole)


def stop_when(monkeypatch, name, step):
    """Return an event that is set when the loop calls its function `name` with the state after `step`."""
    stop, called = threading.Event(), getattr(loop, name)

    def call(*arguments, **named):
        if step is None or step in arguments or named.get("step") == step:
            stop.set()
        return called(*arguments, **named)

    monkeypatch.setattr(loop, name, call)
    return stop


@pytest.mark.parametrize("step", long_but([3], [0, 3, STEPS]))
def test_an_evaluation_that_was_stopped_is_made_by_the_same_command(toy, whole, tmp_path, monkeypatch, step):
    """Its step is saved, with what was measured of it so far; the row is written once the rest is."""
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="saved" if step else "no step"):
        train(toy, tmp_path, stop_when(patch, "evaluation_metrics", step))
    assert [row["step"] for row in read_metrics(str(tmp_path))] == list(range(step))
    train(toy, tmp_path)
    assert_same_run(toy, tmp_path, whole)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluation_metrics", lambda *_: pytest.fail("a finished run worked"))
        train(toy, tmp_path)
    assert {path.name for path in (tmp_path / "evaluations").iterdir()} == {f"step_{i}.jsonl" for i in (0, 3, 6)}


@pytest.mark.slow
def test_a_closing_comparison_that_is_stopped_leaves_a_finished_run(toy, whole, tmp_path, monkeypatch):
    rows = train(toy, tmp_path, stop_when(monkeypatch, "speedup_metrics", None))
    assert_same_run(toy, tmp_path, whole)
    assert not any(name.startswith("spec/speedup") for row in rows for name in row)


def test_checkpoints_hold_the_head_and_its_optimizer(toy, whole):
    """What the comparisons of interrupted runs go over: everything of the head, and none of it as it began."""
    state, fresh = saved(toy, whole[0], STEPS)[0], jax.device_get(initial_state(toy.learner))
    assert int(state.draft.step) == STEPS
    np.testing.assert_array_equal(state.vocab_map, np.arange(toy.learner.plan.model.vocab))
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


def test_a_killed_run_ends_like_the_whole_one(toy, whole, killed_after_two):
    """Its rows after the restored step go first, and a checkpoint half written does not count.

    Orbax renames a finished save into place; what a kill leaves has another name or lacks its mark.
    """
    half = killed_after_two / "checkpoints/4.orbax-checkpoint-tmp"
    shutil.copytree(whole[0] / "checkpoints/4", half)
    train(toy, killed_after_two)
    assert_same_run(toy, killed_after_two, whole)


def test_a_damaged_checkpoint_leaves_no_trace(toy, whole, tmp_path, capfd):
    """One flipped bit of the weights: the run goes on from the checkpoint before, and saves the step again."""
    workdir = tmp_path / "damaged"
    shutil.copytree(whole[0], workdir)
    files = (path for path in (workdir / "checkpoints/6").rglob("*") if path.is_file())
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    train(toy, workdir)
    assert re.search(r"checkpoint 6 is damaged \(.*6\.damaged\); going on from 4", capfd.readouterr().out)
    assert_same_run(toy, workdir, whole)


def test_a_policy_that_is_not_finite_is_not_saved(toy, whole, tmp_path):
    """One NaN in a weight at step 4: the run ends, and the same command goes on from step 2, as it said."""
    count, real = itertools.count(1), toy.learner.policy_step

    def poisoned(policy, sums):
        policy, metrics = real.apply(policy, sums)
        if next(count) == 4:
            embed = policy.params["embed"].at[0, 0].set(np.nan)
            policy = dataclasses.replace(policy, params={**policy.params, "embed": embed})
        return policy, metrics

    step = dataclasses.replace(real, apply=Changed(real.apply, poisoned))
    broken = toy._replace(learner=dataclasses.replace(toy.learner, policy_step=step))
    says = (
        "step 4: policy/params/embed has a value that is not finite; .* is step 2; the same command goes on from there"
    )
    with pytest.raises(RunFailed, match=says):
        train(broken, tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
    train(toy, tmp_path)
    assert_same_run(toy, tmp_path, whole)


def test_a_finished_run_does_nothing_more(toy, whole, tmp_path, monkeypatch):
    workdir = tmp_path / "copy"
    shutil.copytree(whole[0], workdir)
    before = {path: path.stat().st_mtime_ns for path in (workdir / "checkpoints").rglob("*")}

    def began(*_, **__):
        raise AssertionError("a finished run worked")

    monkeypatch.setattr(loop, "train_step", began)
    monkeypatch.setattr(loop, "evaluation_metrics", began)
    assert train(toy, workdir) == whole[1]
    assert {path: path.stat().st_mtime_ns for path in (workdir / "checkpoints").rglob("*")} == before


@pytest.mark.slow
def test_a_draft_that_turns_nan_is_replaced_and_the_run_goes_on(toy, tmp_path, monkeypatch, capsys):
    """Its weights are NaN after the update of step 2. Step 3 sees it and replaces it; step 4 drafts nothing."""
    finished = update.DraftBeside.finish

    def spoilt(beside):
        draft, *found = finished(beside)
        bad = draft.replace(params=jax.tree.map(lambda x: x * np.nan, draft.params))
        return (bad if int(draft.step) == 2 else draft), *found

    monkeypatch.setattr(update.DraftBeside, "finish", spoilt)
    rows = train(toy, tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if "/6  " in line]
    assert [line.split()[1] for line in lines] == [f"{step}/6" for step in range(7)]
    assert "ALARM: acceptance (the draft's outputs are not finite" in lines[3]
    assert "ALARM: acceptance" in lines[4] and "not finite" not in lines[4]
    assert [row["alarm/acceptance"] for row in rows[1:]] == [0, 0, 1, 1, 1, 1]
    assert rows[3]["draft/loss"] is None and rows[3]["draft/nonfinite_updates"] == 1
    assert rows[2]["spec/drafted"] > 0 and [row["spec/drafted"] for row in rows[4:]] == [0, 0, 0]
    assert all(np.isfinite(row[name]) for row in rows[4:] for name in ("draft/loss", "draft/kl", "policy/loss"))
    assert [row["draft/version"] for row in rows[1:]] == [1, 2, 3, 4, 5, 6]
    # Step 2 was not saved, and what was due then is saved with the new draft.
    kept = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit())
    assert kept == [3, 4, 6]
    state, _ = saved(toy, tmp_path, 3)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.draft))
    print_report(rows, 3, "figure.png")
    assert "accepted tokens" in capsys.readouterr().out


def test_steps_set_to_what_is_done_end_with_a_table(whole, capsys):
    """A checkpoint before the last step, `steps` set to it: nothing is left to do, and greedy accuracy is unknown."""
    rows = [row for row in whole[1] if row["step"] < STEPS]
    assert "eval/accuracy_greedy" not in rows[-1]
    print_report(rows, 3, "figure.png")
    printed = capsys.readouterr().out
    assert "mean reward" in printed and "greedy" not in printed


@pytest.mark.slow
def test_more_steps_extend_a_finished_run(toy, whole, tmp_path):
    workdir = tmp_path / "copy"
    shutil.copytree(whole[0], workdir)
    rows = train(with_config(toy, steps=STEPS + 2), workdir)
    assert rows[: STEPS + 1] == whole[1]
    assert [row["step"] for row in rows[STEPS + 1 :]] == [STEPS + 1, STEPS + 2]
    first = {sample["prompt"] for step in range(1, STEPS + 1) for sample in samples(workdir, step)}
    assert not first & {sample["prompt"] for sample in samples(workdir, STEPS + 1)}


@pytest.mark.slow
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
