"""Generation from folders, by the library and by the command: what comes out agrees with itself and with the engine."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.config import DraftConfig, RolloutConfig
from specrl_jax.data.rows import make_rows
from specrl_jax.decoding.controller import Controller
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.drafts import eagle3, mtp
from specrl_jax.errors import InputError
from specrl_jax.io import hf
from specrl_jax.models import decoder
from specrl_jax.sharding import LEARNER, make_mesh, partitioner
from specrl_jax.tasks.generate import load_generator
from tests.helpers.exact import final_probs
from tests.helpers.head_folders import EAGLE3_FOLDERS, MTP_FOLDERS
from tests.helpers.long import long_but
from tests.helpers.policies import random_params
from tests.helpers.runs import ROOT, arguments, make_call

NANO, DEEP = decoder.preset("nano"), decoder.preset("nano_deep")
SMALLER = decoder.DecoderConfig(128, 48, 1, heads=6, kv_heads=2, head_dim=8, mlp=80, tied=True, max_positions=4096)
PROMPTS = ["12+34=", "7+", "999+1=", "5+5=10", "3+4="]
# Six slots never shrink to fewer, so there is little to compile.
ROLLOUT = RolloutConfig(max_prompt_tokens=8, max_response_tokens=12, num_slots=6, top_k=50, top_p=0.95)
DRAFT = DraftConfig(length=2, adaptive=False)


def one_device():
    return make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])


def drawn(specs):
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda s: (rng.normal(size=s.shape) / np.sqrt(max(s.fan_in, 1))).astype(np.float32), specs)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Policies and drafts by name."""
    root = tmp_path_factory.mktemp("folders")

    def save(name, write, *args, **kwargs):
        write(str(root / name), *args, **kwargs)

    save("policy", hf.save_params, random_params(NANO), NANO, dtype="float32")
    save("model", hf.save_params, random_params(SMALLER, seed=3), SMALLER, dtype="float32")
    other = decoder.DecoderConfig(96, 48, 1, heads=6, kv_heads=2, head_dim=8, mlp=80, tied=True, max_positions=4096)
    save("other_words", hf.save_params, random_params(other), other, dtype="float32")
    for dialect in ("deepseek", "mimo"):
        head = mtp.mtp_config(NANO)
        save(
            f"mtp_{dialect}",
            MTP_FOLDERS.save,
            drawn(mtp.MTPDraft(head).specs),
            config=head,
            target=NANO,
            dtype="float32",
            dialect=dialect,
        )
    head = mtp.mtp_config(SMALLER)
    params = drawn(mtp.MTPDraft(head).specs)
    save("mtp_of_another", MTP_FOLDERS.save, params, config=head, target=SMALLER, dtype="float32")
    head = eagle3.eagle3_config(DEEP, 16)
    save(
        "eagle3",
        EAGLE3_FOLDERS.save,
        drawn(eagle3.Eagle3Draft(head).specs),
        np.arange(16),
        config=head,
        target=DEEP,
        dtype="float32",
    )
    return root


def load(folders, kind, path="", **changes):
    """Load with some keys of draft.* and rollout.*, or arguments, changed."""
    draft = {"kind": kind, "path": str(folders / path) if path else ""}
    rollout, options = {}, {"mesh": one_device(), "tokenizer": "char"}
    for name, value in changes.items():
        own = name in ("dtype", "mesh", "tokenizer")  # rollout.dtype has the name of an argument, the policy's
        place = options if own else draft if hasattr(DRAFT, name) else rollout
        place[name] = value
    draft, rollout = dataclasses.replace(DRAFT, **draft), dataclasses.replace(ROLLOUT, **rollout)
    return load_generator(str(folders / "policy"), draft, rollout, **options)


DRAFTS = [("none", ""), ("mtp", "mtp_mimo"), ("model", "model"), ("suffix", "")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "path"), long_but(DRAFTS[:1], DRAFTS), ids=lambda value: value or "-")
def test_what_comes_out_agrees_with_itself(folders, kind, path):
    """Texts, tokens, log-probs and counts of the same answers; log-probs are the policy's, read from the folder."""
    generator, calls = load(folders, kind, path), []
    assert generator.lengths is None  # not adaptive
    out = generator.generate(PROMPTS, samples=3, seed=4, on_progress=lambda *call: calls.append(call))
    assert out.prompts == [prompt for prompt in PROMPTS for _ in range(3)] and calls[-1] == (15, 15)
    decode, eos = generator.tokenizer.decode, generator.tokenizer.eos_ids[0]
    for text, tokens, logprobs, ended in zip(out.texts, out.tokens, out.logprobs, out.ended, strict=True):
        assert ended == (tokens[-1] == eos) and eos not in tokens[:-1]
        assert text == decode(tokens[:-1] if ended else tokens)
        assert len(tokens) == len(logprobs) and (len(tokens) == 12 or ended)
    for text, texts, tokens, positions in zip(out.texts, out.token_texts, out.tokens, out.draft_positions, strict=True):
        assert "".join(texts) == text and len(texts) == len(tokens) == len(positions)
    encoded = [generator.tokenizer.encode(prompt) for prompt in out.prompts]
    rows = make_rows(encoded, out.tokens, 20, pad_id=0)
    partition = partitioner(one_device(), LEARNER)
    policy = hf.load_params(str(folders / "policy"), NANO, partition, dtype=jnp.float32)
    logits = jax.jit(
        lambda w: decoder.forward(w, NANO, decoder.ModelInputs(rows.tokens, rows.positions), partition=partition).logits
    )
    sampling = Sampling(ROLLOUT.temperature, ROLLOUT.top_k, ROLLOUT.top_p)
    probs = final_probs(np.asarray(logits(policy))[rows.mask], sampling)
    expected = np.log(probs[np.arange(len(probs)), rows.targets[rows.mask]])
    np.testing.assert_allclose(np.concatenate(out.logprobs), expected, rtol=0, atol=1e-4)
    spec, tokens = out.speculation, sum(map(len, out.tokens))
    assert out.tokens_per_second == pytest.approx(tokens / out.seconds)
    if kind == "none":
        assert (spec["spec/acceptance_length"], spec["spec/drafted"]) == (1.0, 0)
    else:
        assert spec["spec/drafted"] > spec["spec/accepted"] > 0 and 1 < spec["spec/acceptance_length"] <= 3
        assert spec["spec/acceptance_rate"] == pytest.approx(spec["spec/accepted"] / spec["spec/drafted"])
    assert out.draft_kind == kind
    # Accepted drafts that an end cut off are no tokens.
    positions = np.concatenate(out.draft_positions)
    assert set(positions.tolist()) == ({0} if kind == "none" else {0, 1, 2})
    assert np.count_nonzero(positions) <= spec["spec/accepted"]
    # Equal seeds, equal noise.
    assert generator.generate(PROMPTS, samples=3, seed=4).tokens == out.tokens
    assert generator.generate(PROMPTS, samples=3, seed=5).tokens != out.tokens


@pytest.mark.slow
def test_chat_messages_go_through_the_template(folders):
    generator = load(folders, "none")
    template = types.SimpleNamespace(
        apply_chat_template=lambda messages: "".join(message["content"] for message in messages) + "=",
        **{name: getattr(generator.tokenizer, name) for name in ("encode_prompt", "decode", "eos_ids", "pad_id")},
    )
    changed = dataclasses.replace(generator, tokenizer=template)
    out = changed.generate([[{"role": "user", "content": "1+1"}], "1+1="], samples=2)
    assert out.prompts == ["1+1="] * 4
    # The prompts are equal; their noise is not.
    assert generator.generate(["1+1="], samples=2).texts == out.texts[:2]


def test_lengths_are_chosen_where_that_is_asked_for(folders):
    generator = load(folders, "ngram", adaptive=True)
    assert isinstance(generator.lengths, Controller) and generator.lengths.lengths == (0, 1, 2)


# --- the command


@pytest.fixture
def call(monkeypatch, capfd):
    with make_call(monkeypatch, capfd) as call:
        yield call


@pytest.mark.slow
def test_the_command_gives_what_the_library_gives(call, folders, tmp_path):
    """By another road: a config, eight devices, the run's engine."""
    config = {
        "policy.path": folders / "policy",
        "draft.kind": "mtp",
        "draft.path": folders / "mtp_deepseek",
        "draft.length": 2,
        "draft.adaptive": False,
        "rollout.temperature": 1.0,
        "rollout.top_k": 50,
        "rollout.top_p": 0.95,
        "rollout.max_prompt_tokens": 8,
        "rollout.max_response_tokens": 12,
        "rollout.num_slots": 8,
        "rollout.seed": 4,
        "eval.samples": 3,
        "generate.prompts": tuple(PROMPTS),
        "grpo.prompts_per_step": 8,
    }
    overrides = [f"--config.{key}={value}" for key, value in config.items()]
    status, printed, err = call(arguments(*overrides, workdir=tmp_path, config=ROOT / "configs/generate.py"))
    assert (status, err) == (0, "")
    rows = [json.loads(line) for line in (tmp_path / "generations.jsonl").read_text().splitlines()]
    out = load(folders, "mtp", "mtp_deepseek").generate(PROMPTS, samples=3, seed=4)
    assert [row["prompt"] for row in rows] == out.prompts
    assert [row["response"] for row in rows] == out.texts
    assert [row["tokens"] for row in rows] == out.tokens
    assert [row["ended"] for row in rows] == out.ended.tolist()
    assert [row["draft_positions"] for row in rows] == out.draft_positions
    assert [row["token_texts"] for row in rows] == out.token_texts and {row["draft_kind"] for row in rows} == {"mtp"}
    for row, logprobs in zip(rows, out.logprobs, strict=True):
        np.testing.assert_allclose(row["logprobs"], logprobs, rtol=0, atol=1e-4)
    summary = json.loads((tmp_path / "generation.json").read_text())
    assert {name: summary[name] for name in out.speculation} == pytest.approx(out.speculation)
    assert summary["rollout/tokens_per_second"] > 0 and summary["time/generate"] > 0
    for text in (out.texts[0], "15 answers", "generations.jsonl", "engine program decode B=8 k=2"):
        assert text in printed


# --- what is refused, in one line, before any weights are read


@pytest.mark.parametrize(
    ("kind", "path", "changes", "words"),
    [
        ("model", "", {}, "draft.preset=.*draft.kind=model without draft.path, which needs it"),
        ("eagle3", "", {}, "draft.path: no folder ''"),
        ("mtp", "", {}, "draft.path: no folder ''"),
        ("model", "", {"preset": "nano"}, "draft.path: no folder ''"),
        ("model", "other_words", {}, "vocabulary is 96, the policy's 128"),
        ("mtp", "mtp_of_another", {}, "mtp_of_another"),
        ("eagle3", "eagle3", {}, "reads what enters layers 2, 3, 4; they must ascend within 0..1"),
        ("mtp", "nowhere", {}, "nowhere"),
        ("ngram", "model", {}, "draft.path=.*no weights, to load"),
        ("ngram", "", {"cascade": 3}, "draft.cascade=3: draft.kind=ngram"),
        ("none", "", {"dtype": "float16"}, "policy.dtype=float16"),
        ("none", "", {"tokenizer": "nowhere"}, "nowhere"),
        ("none", "", {"tokenizer": ""}, "tokenizer.json"),
        ("none", "", {"max_response_tokens": 5000}, "5008 tokens, the policy was made for 4096; at most 4088"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(folders, monkeypatch, kind, path, changes, words):
    def began(*_, **__):
        raise AssertionError("weights were read before the mistake was found")

    monkeypatch.setattr(hf, "load_params", began)
    with pytest.raises(InputError, match=words) as error:
        load(folders, kind, path, **changes)
    assert "\n" not in str(error.value)


def test_slots_that_do_not_split_over_the_devices_are_refused(folders):
    with pytest.raises(InputError, match="6"):
        load(folders, "none", mesh=None)


@pytest.mark.parametrize(("prompts", "words"), [(["1+1=", ""], "prompt 1 has 0"), (["123456789"], "prompt 0 has 9")])
def test_a_prompt_that_does_not_fit_is_refused(folders, prompts, words):
    with pytest.raises(InputError, match=words):
        load(folders, "none").generate(prompts)


def test_a_policy_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="nothing"):
        load_generator(str(tmp_path / "nothing"))
