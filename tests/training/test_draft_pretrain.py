"""Making a head from the policy's own rollouts: which ids it drafts, what it writes, what is refused."""

import dataclasses
import json
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import main as command_line
from configs import draft_tiny, rlzero_tiny
from specrl_jax.core import BadInput, Stopped
from specrl_jax.io import hf
from specrl_jax.models import qwen3
from specrl_jax.sharding import make_mesh
from specrl_jax.training import draft_pretrain
from specrl_jax.training.setup import build
from tests.helpers.policies import random_params


def make_setup(config):
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])
    return build(command_line.to_settings(config), mesh)


def smoke_config(output):
    config = draft_tiny.get_config("smoke")
    config.pretrain.output = str(output)
    return config


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(setup, workdir, output, log) of the smoke variant, its loss logged at every step."""
    workdir, output = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("out") / "head"
    setup = make_setup(smoke_config(output))
    # Once: a jitted normal of every shape takes seconds to compile, and the tests want to know where it began.
    start = jax.device_get(setup.initial_state())
    setup.__dict__["initial_state"] = lambda: jax.tree.map(jnp.array, start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_pretrain, "LOG_EVERY", 1)
        log = draft_pretrain.draft_pretrain(setup, str(workdir), threading.Event())
    return setup, workdir, output, log


def test_the_head_loads_into_a_run(made):
    """Beside the same policy: the same ids, and weights that have learnt."""
    setup, _, output, _ = made
    config = rlzero_tiny.get_config("smoke")
    config.draft.path = str(output)
    run = make_setup(config)
    assert run.draft == setup.draft and run.draft.vocab == 32
    vocab_map = np.asarray(run.initial_vocab_map())
    assert vocab_map.dtype == np.int32 and len(set(vocab_map.tolist())) == 32
    assert (np.diff(vocab_map) > 0).all() and vocab_map[0] >= 0 and vocab_map[-1] < setup.model.vocab
    start, learnt = setup.initial_state().draft.params, run.initial_draft_params()
    for name in ("fc", "unembed"):
        # Further from the start than bfloat16 storage moves a weight.
        moved = np.abs(learnt[name] - start[name]).max()
        assert moved > 2 * np.abs(start[name]).max() * 2.0**-8


def test_the_ids_are_those_of_the_first_rollouts(made):
    """Counted again here, from the stream's first eight batches and the policy's own samples."""
    setup, _, output, _ = made
    counts = np.zeros(setup.model.vocab, int)
    weights, _ = setup.prepare(setup.initial_state())
    stream = draft_pretrain.ProblemStream(setup.train_source, 4, setup.settings.seed)
    for i in range(8):
        rollouts = draft_pretrain.generate(setup, weights, stream, -1 - i)
        for row in range(len(rollouts.tokens)):
            for token in rollouts.tokens[row, rollouts.prompt_length[row] : rollouts.length[row]]:
                counts[token] += 1
    chosen = setup.draft.load_vocab_map(str(output), setup.model)
    left_out = np.setdiff1d(np.arange(setup.model.vocab), chosen)
    assert counts[chosen].min() >= counts[left_out].max() and counts[chosen].sum() > counts.sum() / 4


def test_the_log_lies_in_both_places_and_the_loss_falls(made):
    setup, workdir, output, log = made
    for folder in (workdir, output):
        assert [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()] == log
    assert [row["step"] for row in log] == list(range(setup.settings.steps + 1))
    losses = [row["draft/loss"] for row in log[1:]]
    # Each on fresh rollouts of 16 x 12 tokens, whose own spread is some hundredths of a nat.
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.1
    for row in (log[0], log[-1]):
        assert 1.0 <= row["spec/acceptance_length"] <= 4.0
        assert 0.0 <= row["spec/acceptance_rate_pos_1"] <= 1.0
    assert not any("spec/acceptance_length" in row for row in log[1:-1])


def test_every_step_has_rollout_ids_of_its_own(made):
    """Equal ids would draw equal noise."""
    setup, ids = made[0], []
    fake = types.SimpleNamespace(generate=lambda weights, prompts, samples, seed, first_id: ids.append(first_id))
    changed = dataclasses.replace(setup)
    changed.__dict__["plain_engine"] = fake
    stream = draft_pretrain.ProblemStream(setup.train_source, 4, 0)
    for step in [-8, -7, -1, 1, 2, 12]:
        draft_pretrain.generate(changed, None, stream, step)
    assert ids == [0, 16, 112, 144, 160, 320]


def test_a_signal_ends_it_without_a_head(made, tmp_path):
    setup = made[0]
    stop = threading.Event()
    stop.set()
    pretrain = dataclasses.replace(setup.settings.pretrain, output=str(tmp_path / "head"))
    settings = dataclasses.replace(setup.settings, pretrain=pretrain)
    changed = dataclasses.replace(setup)
    changed.__dict__.update(setup.__dict__ | {"settings": settings})  # with what is compiled
    with pytest.raises(Stopped, match="step 1 is lost"):
        draft_pretrain.draft_pretrain(changed, str(tmp_path), stop)
    assert not (tmp_path / "head").exists()


# ---- the other kinds


@pytest.mark.parametrize("kind", ["mtp", "model"])
def test_other_drafts_learn_and_what_is_stored_drafts_as_well_as_what_was_made(kind, tmp_path):
    """A policy that has something to say, thirty updates, and the folder read back into the same engine."""
    nano = qwen3.preset("nano")
    hf.save_params(str(tmp_path / "policy"), random_params(nano), nano, "float32")
    config = smoke_config(tmp_path / "draft")
    config.policy.preset, config.policy.path = "nano", str(tmp_path / "policy")
    config.draft.kind, config.draft.preset, config.draft.vocab_size = kind, "nano", 0
    config.draft.adaptive, config.draft.dialect = False, "mimo"
    config.draft.learning_rate = 1e-2
    config.steps = 30
    # Six slots never shrink to fewer, so there is less to compile.
    config.rollout.num_slots = 6
    setup = make_setup(config)
    # As in `made`; what is drawn by NumPy need not be compiled at all.
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(lambda s: rng.normal(size=s.shape) / np.sqrt(max(s.fan_in, 1)), setup.draft.specs)
    setup.__dict__["initial_draft_params"] = lambda: jax.tree.map(lambda w: jnp.array(w, jnp.float32), drawn)
    start = jax.device_get(setup.initial_state())
    setup.__dict__["initial_state"] = lambda: jax.tree.map(jnp.array, start)
    log = draft_pretrain.draft_pretrain(setup, str(tmp_path), threading.Event())
    assert log[-1]["spec/acceptance_length"] > log[0]["spec/acceptance_length"] + 0.2
    config.draft.path = str(tmp_path / "draft")
    loaded = make_setup(config)
    assert loaded.draft == setup.draft and loaded.initial_vocab_map() is None
    state = setup.initial_state()
    state = state.replace(draft=state.draft.replace(params=loaded.initial_draft_params()))
    assert draft_pretrain.held_out_acceptance(setup, state).items() <= log[-1].items()


# ---- which ids


def rollouts_of(*rows):
    """Rollouts as `most_frequent` reads them: (prompt, response) pairs, padded with 9."""
    tokens = np.full((len(rows), 8), 9, np.int32)
    for row, (prompt, response) in enumerate(rows):
        tokens[row, : len(prompt) + len(response)] = [*prompt, *response]
    prompt_length = np.array([len(prompt) for prompt, _ in rows])
    return types.SimpleNamespace(
        tokens=tokens, prompt_length=prompt_length, length=prompt_length + [len(response) for _, response in rows]
    )


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, [7]),
        (2, [2, 7]),
        # 4 and 5 occur once each: the lower one goes first.
        (3, [2, 4, 7]),
        (4, [2, 4, 5, 7]),
        # Then ids that never occur, though prompts hold 3 and padding is 9.
        (5, [0, 2, 4, 5, 7]),
        (10, list(range(10))),
    ],
)
def test_most_frequent(count, expected):
    batches = [rollouts_of(([3, 3, 3], [7, 2]), ([3], [7, 7, 5])), rollouts_of(([3, 3], [2, 4]), ([3], [7]))]
    found = draft_pretrain.most_frequent(batches, count, vocab=10)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, expected)


# ---- refusals


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("draft", "kind", "none", "task=draft_pretrain .* draft.kind to eagle3"),
        ("draft", "length", 0, "draft.length of at least 1"),
        ("pretrain", "dtype", "float16", "pretrain.dtype: 'float16'"),
    ],
)
def test_what_it_refuses(section, key, value, words, tmp_path):
    config = smoke_config(tmp_path / "head")
    config[section][key] = value
    with pytest.raises(BadInput, match=words):
        draft_pretrain.check_draft_pretrain(command_line.to_settings(config))
    assert not (tmp_path / "head").exists()


def test_an_output_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"pretrain\.output=.*file/head"):
        draft_pretrain.check_draft_pretrain(command_line.to_settings(smoke_config(tmp_path / "file/head")))


def test_a_good_config_makes_the_output_folder(tmp_path):
    draft_pretrain.check_draft_pretrain(command_line.to_settings(smoke_config(tmp_path / "a/head")))
    assert (tmp_path / "a/head").is_dir()
