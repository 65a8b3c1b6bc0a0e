"""A tokenizer's folder that a stranger wrote: each fault is one line, and none keeps a process busy."""

import dataclasses
import json
import os
import sys

import pytest

from specrl_jax.data import renderer
from specrl_jax.data import tokenizer_trial as trial
from specrl_jax.data import tokenizers as ours
from specrl_jax.data.prompts import PromptFormat, Reader
from specrl_jax.data.schemas import Schema
from specrl_jax.data.tokenizer_trial import try_folder
from specrl_jax.data.tokenizers import HFTokenizer, load_tokenizer
from specrl_jax.errors import InputError
from tests.helpers.tokenizers import QWEN_TEMPLATE, write

VOCAB = 512
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", "chat_template.jinja")


def refusal(call):
    with pytest.raises(InputError) as error:
        call()
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    return str(error.value)


def use(folder):
    """Do in this process what a run does with a tokenizer."""
    tokenizer = HFTokenizer(str(folder))
    return tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": "What is 12?"}]))


SETTINGS = [
    {"eos_token": 5},
    {"eos_token": ["<|im_end|>"]},
    {"eos_token": {"special": True}},
    {"eos_token": {"content": 5}},
    {"pad_token": True},
    {"bos_token": {"content": {"content": "a"}}},
    {"chat_template": 3},
    {"chat_template": {"default": "a"}},
    {"chat_template": [{"name": "default"}]},
    {"chat_template": ["a"]},
]
ENDS = ["302", -1, 1.5, True, [302, "x"], [-5], {"id": 3}, [[302]], float("nan")]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_of_another_type_are_named(settings, folder):
    write(folder, "tokenizer_config.json", settings)
    message = refusal(lambda: use(folder))
    assert f"data.tokenizer: {folder}/tokenizer_config.json: {next(iter(settings))}" in message


@pytest.mark.parametrize("end", ENDS, ids=str)
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_an_end_that_is_no_token_is_named(name, end, folder):
    write(folder, name, {"eos_token_id": end})
    assert f"{folder}/{name}: eos_token_id" in refusal(lambda: use(folder))


def test_an_end_beyond_the_vocabulary_is_named(folder):
    write(folder, "generation_config.json", {"eos_token_id": [302, VOCAB]})
    assert f"eos_token_id={VOCAB}" in refusal(lambda: load_tokenizer(str(folder), VOCAB))


@pytest.mark.parametrize("kind", ["pipe", "folder", "latin", "large"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_none(name, kind, folder, monkeypatch):
    path = folder / name
    path.unlink(missing_ok=True)
    if kind in ("latin", "large"):
        path.write_bytes(b'{"a": "\xff"}' if kind == "latin" else b'"' + b"a" * 2000 + b'"')
        for module, limit in ((ours, "CONFIG_BYTES"), (trial, "TOKENIZER_BYTES")) if kind == "large" else ():
            monkeypatch.setattr(module, limit, 1000)
        if kind == "large" and name not in ("tokenizer.json", "chat_template.jinja"):
            path.write_bytes(b" " * 5 * 2**20)
    else:
        (os.mkfifo if kind == "pipe" else os.mkdir)(path)
    named = {"latin": "not UTF-8", "large": "larger than"}.get(kind, "not a regular file")
    assert named in refusal(lambda: use(folder))


def edited(folder, edit):
    content = json.loads((folder / "tokenizer.json").read_text())
    edit(content)
    write(folder, "tokenizer.json", content)


def test_texts_are_neither_cut_nor_padded(folder):
    """Whatever tokenizer.json says of batches: transformers does not take it from there either."""
    expected = HFTokenizer(str(folder)).encode("What is 12 + 30?")
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    pad |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
    edited(folder, lambda content: content.update(truncation=cut, padding=pad))
    assert HFTokenizer(str(folder)).encode("What is 12 + 30?") == expected


def test_ids_that_are_drawn_at_random_are_refused(folder):
    edited(folder, lambda content: content["model"].update(dropout=0.5))
    assert "model.dropout=0.5" in refusal(lambda: use(folder))


def test_a_vocabulary_without_tokens_is_refused(folder):
    def empty(content):
        content["model"].update(vocab={}, merges=[])
        content["added_tokens"] = []

    edited(folder, empty)
    assert "has no tokens" in refusal(lambda: use(folder))


def test_a_lone_surrogate_is_one_line(folder):
    assert "cannot encode" in refusal(lambda: HFTokenizer(str(folder)).encode("a\ud800"))


def test_of_several_templates_the_default_is_taken(folder):
    templates = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "<{{ messages[0].content }}>"},
    ]
    write(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": templates})
    assert HFTokenizer(str(folder)).apply_chat_template([{"role": "user", "content": "1"}]) == "<1>"


# In a process of its own

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}" + "{% endfor %}" * 3


@pytest.fixture
def hasty(monkeypatch):
    """Return what gives a template two seconds from then on."""
    return lambda: monkeypatch.setattr(renderer, "SECONDS", 2.0)


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (LOOP, "did not end within 2 s"),
        ("{{ 10 ** (10 ** 9) }}", "did not end within 2 s"),
        ("{{ 'a' * 10 ** 12 }}", "needs more than 4 GiB"),
        ("{{ 'a' * (2 ** 24 + messages | length) }}", "writes more than 16,777,216 characters"),
        (QWEN_TEMPLATE, ""),
        ("{{ raise_exception('never') }}", ""),
    ],
    ids=["loop", "power", "memory", "text", "qwen", "rejects"],
)
def test_a_template_that_takes_too_much_is_refused_before_any_row(template, named, folder, hasty):
    (folder / "chat_template.jinja").write_text(template)
    if "did not end" in named:
        hasty()
    if named:
        message = refusal(lambda: HFTokenizer(str(folder)))
        assert named in message and f"data.tokenizer: {folder}: the chat template" in message
    else:
        HFTokenizer(str(folder))


def test_each_row_has_the_limits_too_and_the_next_one_is_rendered(folder, hasty):
    """The template passes what it is tried with."""
    template = "{{ messages[0].content }}{% if 'loop' in messages[0].content %}" + LOOP + "{% endif %}"
    template += "{{ 'a' * 10 ** 12 if 'fill' in messages[0].content }}"
    template += "{{ 'a' * (2 ** 24 + messages | length) if 'write' in messages[0].content }}"
    (folder / "chat_template.jinja").write_text(template)
    path = folder / "rows.jsonl"
    said = {"loop": "did not end within 2 s", "fill": "needs more than 4 GiB", "write": "writes more than 16,777,216"}
    reader = Reader(HFTokenizer(str(folder)), PromptFormat(chat=True), 100)
    for word, named in reversed(said.items()):
        if word == "loop":
            hasty()
        rows = [{"prompt": prompt, "answer": "1"} for prompt in ("a", word, "b")]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        message = refusal(lambda: reader.read(str(path), Schema("prompt", "answer")))
        assert message.startswith(f"{path}:2: data.tokenizer: the chat template {named}")
    problems, counts = dataclasses.replace(reader, skip_malformed=True).read(str(path), Schema("prompt", "answer"))
    assert [problem.prompt for problem in problems] == ["a", "b"] and counts.malformed == 1


def test_a_tokenizer_that_does_not_end_is_refused(folder, monkeypatch):
    monkeypatch.setattr(trial.try_folder, "__defaults__", (0.01,))
    assert "the tokenizer did not end within 0.01 s" in refusal(lambda: load_tokenizer(str(folder), VOCAB))


def test_a_process_that_dies_of_a_folder_is_one_line(folder, monkeypatch):
    """A library written in another language may abort."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "ends the process that tries it" in refusal(lambda: try_folder(str(folder), 60))
