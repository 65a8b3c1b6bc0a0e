"""Making a head from the policy's own rollouts: which ids it drafts, what it writes, what is refused."""

import dataclasses
import json
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import draft_tiny, rlzero_tiny
from specrl_jax.config import from_config_dict
from specrl_jax.data.files import DataRow
from specrl_jax.data.rows import rows_of
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.decoding.requests import CallOptions
from specrl_jax.errors import InputError, Stopped
from specrl_jax.io import hf
from specrl_jax.io.progress import Display
from specrl_jax.models import decoder
from specrl_jax.tasks import draft_features, draft_pretrain
from specrl_jax.tasks.draft_features import ANSWERS_SEED_OFFSET, batches, fill_store, open_store
from specrl_jax.training.build import prepare
from specrl_jax.training.initial import initial_draft_params, initial_params, initial_state, initial_vocab_map
from tests.helpers.policies import random_params
from tests.helpers.training import NEVER, make_run, with_config
from tests.helpers.updates import in_parts


def smoke_config(output):
    config = draft_tiny.get_config("smoke")
    config.export.output = str(output)
    return config


def pretrained(run, state, workdir, stop=NEVER):
    """Run the task on a copy of `state`; return the log."""
    state = jax.tree.map(jnp.array, state)
    return draft_pretrain.draft_pretrain(
        run.learner, run.rollout, run.problems, state=state, workdir=str(workdir), stop=stop
    )


def without_generation(run):
    """Return the run with an engine that cannot generate."""
    idle = types.SimpleNamespace(compiled=types.SimpleNamespace())
    return run._replace(rollout=dataclasses.replace(run.rollout, plain_engine=idle))


def stored(run, folder, state):
    """Return (the store in `folder`, the weights of `state`)."""
    weights, _ = prepare(run.learner, run.rollout, state)
    return open_store(run.learner, str(folder), weights), weights


def filled(run, folder, state):
    """Fill the store in `folder`, and return it."""
    store, weights = stored(run, folder, state)
    with Display(12, 0, NEVER) as display:
        params = state.policy.params
        fill_store(run.learner, run.rollout, run.problems, params=params, weights=weights, store=store, display=display)
    return store


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(run, workdir, output, log, state before) of the smoke variant, its loss logged at every step."""
    workdir, output = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("out") / "head"
    output.mkdir()
    run = make_run(smoke_config(output))
    start = jax.device_get(initial_state(run.learner))
    # As it is drawn, the tied table is so small that the policy says every token alike, and there is nothing to learn.
    for params, table in ((start.policy.params, "embed"), (start.draft.params, "unembed")):
        params[table] = 20 * params[table]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_pretrain, "LOG_EVERY", 1)
        log = pretrained(run, start, workdir)
    return run, workdir, output, log, start


@pytest.mark.slow
def test_the_head_loads_into_a_run(made):
    """Beside the same policy: the same ids, and weights that have learnt."""
    setup, _, output, _, start = made
    config = rlzero_tiny.get_config("smoke")
    config.draft.path = str(output)
    run = make_run(config)
    assert run.plan.draft == setup.plan.draft and run.plan.draft.vocab == 32
    vocab_map = np.asarray(initial_vocab_map(run.learner))
    assert vocab_map.dtype == np.int32 and len(set(vocab_map.tolist())) == 32
    assert (np.diff(vocab_map) > 0).all() and vocab_map[0] >= 0 and vocab_map[-1] < setup.learner.plan.model.vocab
    start, learnt = start.draft.params, initial_draft_params(run.learner, initial_params(run.learner))
    for name in ("fc", "unembed"):
        # Further from the start than bfloat16 storage moves a weight.
        moved = np.abs(learnt[name] - start[name]).max()
        assert moved > 2 * np.abs(start[name]).max() * 2.0**-8


@pytest.mark.slow
def test_the_ids_are_those_that_the_texts_use_most(made):
    """Counted again here, from the policy's own samples of the stream's first prompts."""
    setup, _, output, _, start = made
    counts = np.zeros(setup.learner.plan.model.vocab, int)
    weights, _ = prepare(setup.learner, setup.rollout, start)
    stream, noise = setup.problems.stream(4), setup.config.rollout.seed + ANSWERS_SEED_OFFSET
    for wave in range(3):
        prompts = [setup.rollout.tokenizer.encode_prompt(problem.prompt) for problem in next(stream)]
        rollouts = setup.rollout.plain_engine.generate(
            weights, prompts, 4, seed=noise, options=CallOptions(first_id=16 * wave)
        )
        for row in range(16):
            for token in rollouts.tokens[row, rollouts.prompt_length[row] : rollouts.length[row]]:
                counts[token] += 1
    chosen = setup.learner.plan.draft.load_vocab_map(str(output), setup.learner.plan.model)
    left_out = np.setdiff1d(np.arange(setup.learner.plan.model.vocab), chosen)
    assert counts[chosen].min() >= counts[left_out].max() and counts[chosen].sum() > counts.sum() / 4


@pytest.mark.slow
def test_the_log_lies_in_both_places_and_the_loss_falls(made):
    _, workdir, output, log, _ = made
    for folder in (workdir, output):
        assert [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()] == log
    assert [row["step"] for row in log] == [*range(13), 12]
    losses = [row["draft/loss"] for row in log[1:-1]]
    # Of 8 texts of 12 tokens each; six epochs over 48 of them.
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.1
    measured = [row["step"] for row in log if "spec/acceptance_length" in row]
    assert measured == [0, 6, 12, 12]
    for row in (log[0], log[-1]):
        assert 1.0 <= row["spec/acceptance_length"] <= 4.0
        assert 0.0 <= row["spec/acceptance_rate_pos_1"] <= 1.0


@pytest.mark.slow
def test_what_it_cost_and_when_that_is_earned_back(made):
    last = made[3][-1]
    seconds = {name: last[f"seconds/{name}"] for name in ("generate", "features", "train", "evaluate")}
    assert all(value > 0 for value in seconds.values())
    saved = last["seconds/plain_rollouts"] * (1 - 1 / last["spec/speedup"])
    if last["spec/speedup"] > 1:
        np.testing.assert_allclose(last["break_even_step"], sum(seconds.values()) / saved)
    else:
        assert last["break_even_step"] is None


@pytest.mark.slow
def test_a_second_run_finds_the_features_of_the_first(made, tmp_path):
    setup, workdir, _, log, start = made
    used = with_config(
        setup, pretrain={"features": str(workdir / "features")}, export={"output": str(tmp_path / "head")}
    )
    (tmp_path / "head").mkdir()
    used = without_generation(with_config(used, draft={"compare_rounds": 0}))
    again = pretrained(used, start, tmp_path)
    assert again[-1]["seconds/generate"] == again[-1]["seconds/features"] == 0.0
    assert "break_even_step" not in again[-1]
    ours, theirs = ([row[name] for row in rows if (name := "spec/acceptance_length") in row] for rows in (again, log))
    assert ours == theirs


@pytest.mark.slow
def test_features_of_another_policy_are_refused(made, tmp_path):
    setup, workdir, _, _, start = made
    used = with_config(setup, pretrain={"features": str(workdir / "features")})
    changed = start.replace(policy=start.policy.replace(params=jax.tree.map(lambda x: 1.01 * x, start.policy.params)))
    with pytest.raises(InputError, match=r"pretrain\.features: .* was made from another policy"):
        pretrained(used, changed, tmp_path)


@pytest.mark.slow
def test_the_best_weights_are_kept_and_it_ends_when_they_stay_the_best(made, tmp_path, monkeypatch):
    """Acceptance 1.5 before, then 2.0, 1.9, 1.9: over after the third measurement, with the weights of the first."""
    setup, workdir, _, _, start = made
    used = with_config(
        setup,
        pretrain={"features": str(workdir / "features"), "patience": 2},
        eval={"every": 2},
        draft={"compare_rounds": 0},
    )
    seen, lengths = [], iter([1.5, 2.0, 1.9, 1.9])

    def measure(learner, rollout, problems, *, state, display):
        seen.append(jax.device_get(state.draft.params))
        return {"spec/acceptance_length": next(lengths)}

    monkeypatch.setattr(draft_pretrain, "held_out_acceptance", measure)
    with Display(12, 0, NEVER) as display:
        store, _ = stored(used, workdir / "features", start)
        data, placed = batches(used.learner, 0, store), jax.tree.map(jnp.array, start)
        log, best, _ = draft_pretrain.train_draft(
            used.learner, used.rollout, used.problems, state=placed, data=data, display=display
        )
    assert [row["step"] for row in log if "spec/acceptance_length" in row] == [0, 2, 4, 6]
    assert len(seen) == 4
    jax.tree.map(np.testing.assert_array_equal, best, seen[1])
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(seen[1]), jax.tree.leaves(seen[2])))


@pytest.mark.slow
def test_a_signal_ends_it_without_a_head_and_keeps_the_texts(made, tmp_path):
    setup, start = made[0], made[4]
    stop = threading.Event()
    used = with_config(setup, export={"output": str(tmp_path / "head")})

    class Interrupted:
        """The first wave goes through; the signal comes when the second begins, which is dropped."""

        waves, compiled = 0, setup.rollout.plain_engine.compiled

        def generate(self, *args, **kwargs):
            self.waves += 1
            if self.waves == 2:
                stop.set()
            return setup.rollout.plain_engine.generate(*args, **kwargs)

    used = used._replace(rollout=dataclasses.replace(used.rollout, plain_engine=Interrupted()))
    with pytest.raises(Stopped, match="16 rollouts are kept; the same command goes on from there"):
        pretrained(used, start, tmp_path, stop)
    assert not (tmp_path / "head").exists()
    store, _ = stored(setup, tmp_path / "features", start)
    assert len(store) == 16
    store = filled(setup, tmp_path / "features", start)
    whole, _ = stored(setup, made[1] / "features", start)
    assert len(store) == len(whole) == 48
    for i in range(48):
        jax.tree.map(np.testing.assert_array_equal, store[i], whole[i])


@pytest.mark.slow
def test_a_store_grows_by_the_rest_of_a_wave(made, tmp_path):
    """21 rollouts end inside the second wave of 16; 48 later are those of one go."""
    setup, workdir, _, _, start = made
    for wanted in (21, 48):
        store = filled(with_config(setup, pretrain={"rollouts": wanted}), tmp_path / "features", start)
        assert len(store) == wanted
    whole, _ = stored(setup, workdir / "features", start)
    for i in range(48):
        np.testing.assert_array_equal(store[i].tokens, whole[i].tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rollout": {"top_p": 0.9}}, "sampling"),
        ({"data": {"template": "Q: {prompt}"}}, "prompt format"),
        ({"data": {"schema": "question:answer"}}, "prompt format"),
        ({"seed": 1}, "prompt order"),
    ],
    ids=str,
)
def test_features_of_other_texts_are_refused(made, changes, named):
    setup, workdir, _, _, start = made
    weights, _ = prepare(setup.learner, setup.rollout, start)
    with pytest.raises(InputError, match=f"was made from another {named}"):
        open_store(with_config(setup, **changes).learner, str(workdir / "features"), weights)


@pytest.fixture
def began(monkeypatch):
    """Stand in for the work of the task; return its calls."""
    calls = []
    monkeypatch.setattr(draft_pretrain, "initial_state", lambda learner: None)
    monkeypatch.setattr(draft_pretrain, "draft_pretrain", lambda *inputs, **more: calls.append(inputs))
    return calls


def test_a_good_config_makes_its_output_folder(began, tmp_path):
    draft_pretrain.run(from_config_dict(smoke_config(tmp_path / "a/head")), str(tmp_path / "run"))
    assert (tmp_path / "a/head").is_dir() and len(began) == 1


def test_the_policys_folder_is_no_output(began, tmp_path):
    config = smoke_config(tmp_path / "policy")
    config.policy.path = str(tmp_path / "x/../policy")
    with pytest.raises(InputError, match=r"export\.output=.*: it is policy\.path"):
        draft_pretrain.run(from_config_dict(config), str(tmp_path / "run"))
    assert not began and not (tmp_path / "policy").exists()


def test_a_bad_output_is_refused_before_any_rollout(began, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"export\.output=.*file/head"):
        draft_pretrain.run(from_config_dict(smoke_config(tmp_path / "file/head")), str(tmp_path / "run"))
    assert not began


@pytest.mark.slow
def test_the_features_are_those_of_the_policys_own_pass(made):
    setup, workdir, _, _, start = made
    store, _ = stored(setup, workdir / "features", start)
    found = [store[i] for i in range(20, 36)]
    tokens, prompt_length, length = (
        np.stack([getattr(row, x) for row in found]) for x in ("tokens", "prompt_length", "length")
    )
    rows = rows_of(tokens, prompt_length, length, pad_id=0)
    features = in_parts(
        setup.learner.feature_step, start.policy.params, rows, setup.learner.packing.microbatch(rows.tokens.shape[1])
    )
    for i, row in enumerate(found):
        n = row.length
        for name in ("aux", "hidden", "normaliser"):
            # The same program over the same rows in other places.
            np.testing.assert_allclose(getattr(row, name)[:n], getattr(features, name)[i, :n], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_batches_go_over_every_text_once_an_epoch_in_another_order(made):
    setup, workdir, _, _, start = made
    store, _ = stored(setup, workdir / "features", start)
    data = batches(setup.learner, 0, store)
    epochs = [[text for _ in range(6) for part in next(data) for text in unpacked(*part)] for _ in range(2)]
    found = [store[i] for i in range(48)]
    kept = [(row.tokens[: row.length], row.aux[: row.length], row.hidden[: row.length]) for row in found]
    texts = sorted((tokens.tolist(), aux.tolist(), hidden.tolist()) for tokens, aux, hidden in kept)
    for epoch in epochs:
        assert sorted(epoch) == texts
    assert epochs[0] != epochs[1]
    # Of a store that holds more, the first ones.
    data = batches(with_config(setup, pretrain={"rollouts": 16}).learner, 0, store)
    for _ in range(2):
        first = [text for _ in range(2) for part in next(data) for text in unpacked(*part)]
        assert sorted(tokens for tokens, _, _ in first) == sorted(tokens.tolist() for tokens, _, _ in kept[:16])


def unpacked(features, rows):
    """Return (tokens, aux, hidden) of every text of packed rows, as lists."""
    for row, segments in enumerate(np.asarray(rows.segments)):
        for segment in range(1, segments.max() + 1):
            held = segments == segment
            yield tuple(np.asarray(x[row])[held].tolist() for x in (rows.tokens, features.aux, features.hidden))


TOKENIZER = CharTokenizer()


def row_of(**content):
    return DataRow("answers.jsonl:1", {"prompt": "1+2\n"} | content, "")


def test_a_row_of_rollouts_is_read_by_its_tokens():
    """One that was cut has no end, and what an environment wrote is told apart."""
    ended, cut = [*TOKENIZER.encode("a=3"), *TOKENIZER.eos_ids], TOKENIZER.encode("a=3")
    for tokens in (ended, cut):
        found = draft_features.recorded_text(row_of(response="a=3", tokens=tokens), TOKENIZER, vocab=99)
        assert found == (TOKENIZER.encode("1+2\n"), tokens, [False] * len(tokens))
    row = row_of(response="a=3", tokens=cut, environment=[False, True, False])
    assert draft_features.recorded_text(row, TOKENIZER, vocab=99).environment == [False, True, False]
    # One that ended at once has no text.
    row = row_of(response="", tokens=list(TOKENIZER.eos_ids))
    assert draft_features.recorded_text(row, TOKENIZER, vocab=99).response == list(TOKENIZER.eos_ids)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"tokens": 3}, "tokens=3"),
        ({"tokens": []}, "at least one"),
        ({"tokens": [TOKENIZER.encode("3")[0], 99]}, "below 99"),
        ({"tokens": TOKENIZER.encode("4")}, "'tokens' are not those of 'response'"),
        ({"tokens": TOKENIZER.encode("3"), "environment": [True, False]}, "is about 2 of 1 tokens"),
        ({"tokens": TOKENIZER.encode("3"), "prompt": [{"role": "user", "content": "1"}]}, "'prompt' must be text"),
    ],
)
def test_tokens_that_are_not_a_responses_are_refused(content, named):
    with pytest.raises(InputError, match=r"^answers\.jsonl:1") as error:
        draft_features.recorded_text(row_of(response="3", **content), TOKENIZER, vocab=99)
    assert named in str(error.value)


def test_a_file_that_is_written_anew_is_another(tmp_path):
    """Of the data, of the answers and of the tokenizer, each under the same name."""
    config = smoke_config(tmp_path / "head")
    files = [tmp_path / name for name in ("data.jsonl", "answers.jsonl", "tokenizer.json")]
    for file in files:
        file.write_text("1")
    config.data.path, config.data.tokenizer = str(files[0]), str(tmp_path)
    for answers, first in (("", 0), (str(files[1]), 1)):
        config.pretrain.answers = answers
        found = [draft_features.text_digests(from_config_dict(config))]
        for file in (files[first], files[2]):
            file.write_text(file.read_text() + "2")
            found.append(draft_features.text_digests(from_config_dict(config)))
        assert found[0] != found[1] != found[2] and len(found[0]) == 2


@pytest.mark.slow
def test_answers_that_are_there_are_read(made, tmp_path):
    """As rollouts/step_N.jsonl holds them; ended, repeated to fill a wave, cut to the number wanted."""
    setup, start = made[0], made[4]
    answers = [("12+3\n", "15"), ("4*5\n", "2=0 #20"), ("9-1\n", "8")]
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "response": r, "reward": 1.0}) + "\n" for p, r in answers))
    used = with_config(setup, pretrain={"answers": str(path), "rollouts": 18})
    store = filled(without_generation(used), tmp_path / "features", start)
    assert len(store) == 18
    for i in range(18):
        prompt, answer = answers[i % 3]
        whole = [*setup.rollout.tokenizer.encode(prompt + answer), setup.rollout.tokenizer.eos_ids[0]]
        assert store[i].tokens[: store[i].length].tolist() == whole
        assert store[i].prompt_length == len(prompt)


@pytest.mark.slow
def test_what_an_environment_wrote_in_an_answer_is_not_learned(made, tmp_path):
    """And a response that was cut at the limit is taken as it is."""
    setup, start, encode = made[0], made[4], made[0].rollout.tokenizer.encode
    text, written = "3=1+2 #12345", [False] * 3 + [True] * 2 + [False] * 7
    path = tmp_path / "answers.jsonl"
    row = {"prompt": "1+2\n", "response": text, "tokens": encode(text), "environment": written}
    path.write_text(json.dumps(row) + "\n")
    used = with_config(setup, pretrain={"answers": str(path), "rollouts": 8})
    store = filled(without_generation(used), tmp_path / "features", start)
    assert store[0].tokens[4 : store[0].length].tolist() == encode(text)
    assert store.tokens()[0].tolist() == [token for token, by in zip(encode(text), written) if not by]
    parts = [rows for _, rows in next(batches(used.learner, 0, store))]
    assert parts
    for segments, mask in (pair for rows in parts for pair in zip(np.asarray(rows.segments), np.asarray(rows.mask))):
        for segment in range(1, segments.max() + 1):
            # Entry t is about token t + 1.
            assert mask[segments == segment].tolist() == [False] * 3 + [not by for by in written] + [False]


@pytest.mark.slow
def test_an_answer_that_is_too_long_is_refused(made, tmp_path):
    setup, start = made[0], made[4]
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"prompt": "1\n", "response": "2" * 12}) + "\n")
    used = with_config(setup, pretrain={"answers": str(path)})
    with pytest.raises(InputError, match=r":1: the response has 13 tokens, rollout\.max_response_tokens=12"):
        filled(used, tmp_path / "features", start)


# ---- the other kinds


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mtp", "model"])
def test_other_drafts_learn_and_what_is_stored_drafts_as_well_as_what_was_made(kind, tmp_path):
    """A policy that has something to say, thirty updates, and the folder read back into the same engine."""
    nano = decoder.preset("nano")
    hf.save_params(str(tmp_path / "policy"), random_params(nano), nano, dtype="float32")
    config = smoke_config(tmp_path / "draft")
    config.policy.preset, config.policy.path = "nano", str(tmp_path / "policy")
    config.draft.kind, config.draft.vocab_size = kind, 0
    config.draft.preset = "nano" if kind == "model" else ""
    config.draft.adaptive, config.draft.dialect = False, "mimo" if kind == "mtp" else ""
    config.draft.learning_rate = 1e-2
    config.steps = 30
    # Six slots never shrink to fewer, so there is less to compile.
    config.rollout.num_slots = 6
    (tmp_path / "draft").mkdir()
    run = make_run(config)
    start, rng = initial_state(run.learner), np.random.default_rng(0)
    drawn = jax.tree.map(lambda s: rng.normal(size=s.shape) / np.sqrt(max(s.fan_in, 1)), run.plan.draft.specs)
    drawn = jax.tree.map(lambda w: jnp.array(w, jnp.float32), drawn)
    start = start.replace(draft=start.draft.replace(params=drawn))
    log = pretrained(run, start, tmp_path)
    assert log[-1]["spec/acceptance_length"] > log[0]["spec/acceptance_length"] + 0.2
    config.draft.path, config.draft.preset = str(tmp_path / "draft"), ""
    loaded = make_run(config)
    assert loaded.plan.draft == run.plan.draft and initial_vocab_map(loaded.learner) is None
    params = initial_draft_params(loaded.learner, start.policy.params)
    state = start.replace(draft=start.draft.replace(params=params))
    with Display(12, 0, NEVER) as display:
        found = draft_pretrain.held_out_acceptance(run.learner, run.rollout, run.problems, state=state, display=display)
    assert found.items() <= log[-1].items()
