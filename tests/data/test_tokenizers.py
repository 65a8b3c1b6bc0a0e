"""The character tokenizer, and tokenizer.json with its end-of-text ids and its chat template."""

import json
import string

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from specrl_jax.data.special import PromptText
from specrl_jax.data.tokenizers import CharTokenizer, HFTokenizer, check_covers, load_tokenizer, token_texts
from specrl_jax.errors import InputError
from specrl_jax.rollout.inference_engine import find_stop_texts
from tests.helpers.tokenizers import QWEN_TEMPLATE, SPECIAL, save_folder, write

PRINTABLE = sorted(set(string.printable) - set("\t\r\x0b\x0c"))


def refusal(call):
    with pytest.raises(InputError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


# Characters


@given(st.text(PRINTABLE))
def test_characters_come_back(text):
    tokenizer = CharTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_character_has_an_id_of_its_own():
    ids = CharTokenizer().encode("".join(PRINTABLE))
    assert sorted(ids) == list(range(2, 2 + len(PRINTABLE)))
    assert CharTokenizer.vocab_size == 2 + len(PRINTABLE) == 98


def test_ids_of_characters_stay_those_of_stored_checkpoints():
    """A policy trained with the table keeps it: newline, space, then ASCII order."""
    assert CharTokenizer().encode("\n !09AZaz~") == [2, 3, 4, 19, 28, 36, 61, 68, 93, 97]


@pytest.mark.parametrize("character", ["é", "\t", "\r", "→", "\x00", "\u00a0"])
def test_unknown_character_is_named_in_one_line(character):
    message = refusal(lambda: CharTokenizer().encode(f"1+{character}"))
    assert repr(character) in message and "printable ASCII" in message


def test_pad_and_eos_decode_to_nothing_and_differ():
    tokenizer = CharTokenizer()
    assert tokenizer.pad_id not in tokenizer.eos_ids
    assert tokenizer.decode([tokenizer.pad_id, *tokenizer.encode("a"), *tokenizer.eos_ids]) == "a"


@given(st.lists(st.integers(0, 127)))
def test_any_id_of_a_larger_vocabulary_decodes(ids):
    """A random policy of vocabulary 128 samples ids that no character has."""
    text = CharTokenizer().decode(ids)
    assert len(text) == sum(i >= 2 for i in ids)
    assert text.count("?") >= sum(i >= CharTokenizer.vocab_size for i in ids)


def test_characters_have_no_roles():
    messages = [{"role": "user", "content": "1+1"}, {"role": "user", "content": "="}]
    assert CharTokenizer().apply_chat_template(messages) == "1+1="


# tokenizer.json

CONVERSATION = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is 12 + 30?"},
    {"role": "assistant", "content": "<think>\nsum\n</think>\n\n42"},
    {"role": "system", "content": 'Now in words: "quoted" & <tags> é'},
    {"role": "user", "content": "And 6 * 7?\n"},
]
RENDERED = (
    "<|im_start|>system\nAnswer briefly.<|im_end|>\n"
    "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n"
    "<|im_start|>assistant\n42<|im_end|>\n"
    '<|im_start|>system\nNow in words: "quoted" & <tags> é<|im_end|>\n'
    "<|im_start|>user\nAnd 6 * 7?\n<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def load(folder):
    return HFTokenizer(str(folder))


@given(text=st.text())
def test_any_text_comes_back_from_bytes(bpe, text, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "round_trip"
    if not folder.exists():
        folder.mkdir()
        bpe.save(str(folder / "tokenizer.json"))
        write(folder, "config.json", {"eos_token_id": 300})
    tokenizer = load(folder)
    if not any(special in text for special in SPECIAL):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.fixture(scope="module")
def tokenizer(bpe, tmp_path_factory):
    return load(save_folder(bpe, tmp_path_factory.mktemp("tokenizer")))


@given(parts=st.lists(st.one_of(st.text(max_size=2), st.lists(st.integers(0, 299), max_size=3))))
def test_texts_of_tokens_join_to_the_text(parts, tokenizer):
    """Characters of several tokens, and bytes that are no characters, which a policy may emit."""
    ids = [token for part in parts for token in (tokenizer.encode(part) if isinstance(part, str) else part)]
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) and "".join(texts) == tokenizer.decode(ids)


@given(text=st.text())
def test_the_bytes_of_tokens_join_to_those_of_the_text(text, tokenizer):
    spelled = tokenizer.token_bytes()
    assert b"".join(spelled[i] for i in tokenizer.encode(text)) == text.encode()


def test_a_stop_text_may_be_the_name_of_a_control_token_and_one_that_no_tokens_spell_is_refused(tokenizer):
    (token, name), *_ = tokenizer.control.items()
    stops = find_stop_texts([name, "\u00fc"], tokenizer, tokenizer.vocab_size + 1)
    assert stops.ended(np.array([[token]]), np.zeros(1, int), np.ones(1, int)) == [True]
    with pytest.raises(InputError, match=r"rollout\.stop: .*spell '\u00fc'"):
        find_stop_texts(["yes", "\u00fc"], CharTokenizer(), 128)


def test_control_tokens_have_no_bytes_and_other_decoders_are_refused(tokenizer, folder):
    spelled = tokenizer.token_bytes()
    assert not any(spelled[i] for i in tokenizer.eos_ids) and len(spelled) == tokenizer.vocab_size
    assert CharTokenizer().token_bytes()[:3] == [b"", b"", b"\n"]
    content = json.loads((folder / "tokenizer.json").read_text())
    content["decoder"] = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="byte-level tokenizers only"):
        load(folder).token_bytes()


def test_the_token_that_completes_a_character_has_it(tokenizer):
    a, *heart, b = tokenizer.encode("a♥b")
    assert len(heart) == 3 and token_texts(tokenizer, [a, *heart, b]) == ["a", "", "", "♥", "b"]
    assert token_texts(tokenizer, [a, heart[0]]) == ["a", "\ufffd"]  # never completed
    assert token_texts(CharTokenizer(), [1, *CharTokenizer().encode("7\n")]) == ["", "7", "\n"]


def test_ids_are_those_of_the_library_with_nothing_around_them(folder, bpe):
    """Of any text but a whole prompt: only that gets what a post-processor adds (test_tokenizer_families)."""
    added = tokenizers.Tokenizer.from_str(bpe.to_str())
    added.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 300)]
    )
    added.save(str(folder / "tokenizer.json"))
    assert added.encode("a").ids[0] == 300
    text = "What is 42?<|im_end|>\n"
    assert load(folder).encode(PromptText(text)) == bpe.encode(text).ids


def test_special_tokens_are_not_shown(folder):
    tokenizer = load(folder)
    assert tokenizer.decode([*tokenizer.encode("The answer is 42."), 302, 300]) == "The answer is 42."


def test_holes_in_the_vocabulary_count_too(folder):
    """Ids need not be dense: the largest one decides."""
    sparse = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 7, "<unk>": 3}, unk_token="<unk>"))
    sparse.save(str(folder / "tokenizer.json"))
    assert load(folder).vocab_size == 8


# The end


IM_END = {"eos_token": "<|im_end|>"}


@pytest.mark.parametrize(
    ("generation", "config", "settings", "eos"),
    [
        ({"eos_token_id": [302, 300]}, None, IM_END, (302, 300)),
        ({"eos_token_id": 300}, None, IM_END, (300, 302)),
        ({"eos_token_id": 0}, None, IM_END, (0, 302)),
        (None, {"eos_token_id": 301}, {}, (301,)),
        (None, None, {"eos_token": {"content": "<|im_end|>", "special": True}}, (302,)),
    ],
    ids=["all-of-generation-config", "and-the-tokenizers-own", "id-0", "model-config", "added-token"],
)
def test_end_of_text_ids(generation, config, settings, eos, folder):
    (folder / "generation_config.json").unlink()
    for name, content in (("generation_config", generation), ("config", config), ("tokenizer_config", settings)):
        if content is not None:
            write(folder, f"{name}.json", content)
    assert load(folder).eos_ids == eos


def test_no_end_anywhere_is_refused(folder):
    (folder / "generation_config.json").unlink()
    write(folder, "tokenizer_config.json", {"eos_token": None})
    message = refusal(lambda: load(folder))
    assert "eos_token_id" in message and str(folder) in message


@pytest.mark.parametrize(
    ("settings", "pad"),
    [
        ({"pad_token": "<|endoftext|>"}, 300),
        ({}, 302),
        ({"pad_token": None}, 302),
        ({"pad_token": "<|not there|>"}, 302),
    ],
)
def test_pad_is_the_named_token_or_the_first_end(settings, pad, folder):
    write(folder, "tokenizer_config.json", settings)
    assert load(folder).pad_id == pad


# The chat template


def test_a_template_of_its_own_file_wins_over_the_tokenizer_config(folder):
    write(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": QWEN_TEMPLATE})
    assert load(folder).apply_chat_template(CONVERSATION) == RENDERED
    (folder / "chat_template.jinja").write_text("new{% for m in messages %} {{ m.content }}{% endfor %}")
    assert load(folder).apply_chat_template(CONVERSATION[:2]) == "new Answer briefly. What is 12 + 30?"


def test_rendered_prompt_becomes_special_ids(folder):
    (folder / "chat_template.jinja").write_text(QWEN_TEMPLATE)
    tokenizer = load(folder)
    ids = tokenizer.encode(tokenizer.apply_chat_template(CONVERSATION))
    assert (ids.count(301), ids.count(302)) == (6, 5)


def test_no_template_and_chat_messages_is_one_clear_line(folder):
    assert "no chat template" in refusal(lambda: load(folder).apply_chat_template(CONVERSATION))


def test_template_that_does_not_parse_names_the_folder(folder):
    (folder / "chat_template.jinja").write_text("{% for message in messages %}\n{{ message.content }}")
    message = refusal(lambda: load(folder))
    assert "does not parse" in message and str(folder) in message


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages.nothing.here }}", "nothing"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ messages[0].content.index('zzz') }}", "substring not found"),
        ("{{ raise_exception('only one user turn') }}", "only one user turn"),
    ],
)
def test_template_that_fails_is_one_clear_line(template, reason, folder):
    (folder / "chat_template.jinja").write_text(template)
    message = refusal(lambda: load(folder).apply_chat_template(CONVERSATION))
    assert "chat template fails" in message and reason in message and "\n" not in message


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{{ raise_exception.__globals__['os'].getcwd() }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{% set _ = messages.append({}) %}",
        "{% set _ = messages[0].update(role='x') %}",
        "{% include 'tokenizer.json' %}",
    ],
)
def test_sandbox_refuses_what_leads_out_of_the_template(template, folder):
    """The template is downloaded code: no dunder access, no file, and it changes nothing it is given."""
    (folder / "chat_template.jinja").write_text(template)
    before = json.dumps(CONVERSATION)
    assert "chat template fails" in refusal(lambda: load(folder).apply_chat_template(CONVERSATION))
    assert json.dumps(CONVERSATION) == before


# Refusals


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"model": 3}'])
def test_missing_or_malformed_tokenizer_names_the_file(content, folder):
    (folder / "tokenizer.json").unlink()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    assert str(folder / "tokenizer.json") in refusal(lambda: load(folder))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "config.json"])
def test_settings_that_are_not_json_name_file_and_line(name, folder):
    (folder / name).write_text("{\n\n,")
    assert f"{folder / name}:3: not JSON" in refusal(lambda: load(folder))


@pytest.mark.parametrize("vocab", [303, 512])
def test_tokenizer_that_fits_the_policy(vocab, folder):
    assert load_tokenizer(str(folder), vocab).vocab_size == 303


def test_tokenizer_larger_than_the_policy_names_both_sizes(folder):
    message = refusal(lambda: load_tokenizer(str(folder), 302))
    assert str(folder) in message and "ids up to 302" in message and "vocabulary is 302" in message


def test_tokenizer_much_smaller_than_a_trained_policy_names_both_sizes(folder):
    tokenizer = load_tokenizer(str(folder), 512)
    check_covers(tokenizer, str(folder), 384)  # a vocabulary is padded to a multiple of 128
    check_covers(CharTokenizer(), "char", 128)
    message = refusal(lambda: check_covers(tokenizer, str(folder), 512))
    assert str(folder) in message and "has 303 ids" in message and "vocabulary 512" in message
    assert "'char' has 98 ids" in refusal(lambda: check_covers(CharTokenizer(), "char", 151_936))


def test_character_tokenizer_by_name():
    assert isinstance(load_tokenizer("char", 128), CharTokenizer)
    assert "ids up to 97" in refusal(lambda: load_tokenizer("char", 97))
