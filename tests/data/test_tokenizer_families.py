"""Prompts of Llama 3, Qwen2.5, SmolLM2 and Mistral have the ids of transformers, and one BOS where these have one."""

import datetime
import json
import random
import re

import pytest
import tokenizers
from tokenizers import processors

from specrl_jax.data.prompts import PromptFormat
from specrl_jax.data.special import PromptText, read_recorded, recorded
from specrl_jax.data.templates import DATE
from specrl_jax.data.tokenizers import HFTokenizer
from specrl_jax.data.turns import TurnFormat, end_of_turn_fault
from tests.helpers.tokenizer_families import CHATML, FAMILIES, HEADERS, INST, save_family
from tests.helpers.tokenizers import QWEN_TEMPLATE, write

NEEDS_TRANSFORMERS = "make test-slow PARITY=1 brings this test back"
EXAMPLES = ["The answer is 12345.", "  def f():\n\treturn 1", "你好 🙂", "x<|eot", "<|im_end|> [INST] <s>"]
ASKED = [{"role": "user", "content": "What is 12 + 30?"}]
TEMPLATED = [name for name, family in FAMILIES.items() if family.start]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("family")
    return request.param, save_family(request.param, folder), HFTokenizer(str(folder)), folder


@pytest.fixture
def llama(tmp_path):
    return save_family("llama3", tmp_path), tmp_path


def start_of(name, backend):
    return [backend.token_to_id(FAMILIES[name].start)] if FAMILIES[name].start else []


def test_a_raw_prompt_begins_with_what_the_post_processor_adds_and_other_texts_do_not(family):
    name, backend, ours, _ = family
    plain = tokenizers.Tokenizer.from_str(backend.to_str())
    plain.encode_special_tokens = True
    for text in EXAMPLES:
        whole = plain.encode(text).ids
        assert ours.encode_prompt(text) == ours.encode_prompt(PromptFormat().text(text, ours)) == whole
        assert start_of(name, backend) + ours.encode(text) == whole


def test_a_chat_template_writes_the_only_start(family):
    name, backend, ours, _ = family
    prompt = ours.apply_chat_template(ASKED)
    assert ("prompt_chat" in recorded(prompt)) == bool(FAMILIES[name].start)
    ids = ours.encode_prompt(prompt)
    assert ids == backend.encode(prompt, add_special_tokens=False).ids
    assert ids.count(*start_of(name, backend)) == 1 if FAMILIES[name].start else ids[0] in ours.control


def test_later_turns_and_first_messages_without_a_template(family):
    name, backend, ours, folder = family
    start = start_of(name, backend)
    for format in (TurnFormat(ours, "", True), TurnFormat(_without_template(folder), "[{message}]", True)):
        turn = format.tokens([{"role": "user", "content": "42"}])
        assert turn and (not start or start[0] not in turn)
    assert ours.encode_prompt(format.prompt(ASKED)) == start + ours.encode(ASKED[0]["content"])


def _without_template(folder):
    (folder / "bare").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / "bare" / name).write_text((folder / name).read_text())
    return HFTokenizer(str(folder / "bare"))


def test_every_turn_ends_at_an_id_that_ends_a_response(family):
    name, backend, ours, _ = family
    ends = [backend.token_to_id(end) for end in FAMILIES[name].ends]
    assert list(ours.eos_ids) == ends and end_of_turn_fault(ours, True) == ""


def test_a_base_models_end_is_not_the_one_of_its_chat_template(llama):
    """Llama 3's eot_id comes from the list of generation_config.json, or from the tokenizer's eos_token."""
    backend, folder = llama
    write(folder, "generation_config.json", {"eos_token_id": backend.token_to_id("<|end_of_text|>")})
    assert HFTokenizer(str(folder)).eos_ids == tuple(map(backend.token_to_id, ("<|end_of_text|>", "<|eot_id|>")))
    write(folder, "tokenizer_config.json", {"eos_token": "<|end_of_text|>", "bos_token": "<|begin_of_text|>"})
    assert "ends an assistant's message with '<|eot_id|>" in end_of_turn_fault(HFTokenizer(str(folder)), True)


def test_a_start_that_the_config_writes_is_the_only_one(llama):
    ours = HFTokenizer(str(llama[1]))
    prompt = PromptFormat("<|begin_of_text|>Q: {prompt}").text("<|begin_of_text|>1", ours)
    ids = ours.encode_prompt(prompt)
    assert ids == ours.encode(prompt) and ids.count(llama[0].token_to_id("<|begin_of_text|>")) == 1


def test_a_template_without_a_start_gets_none_in_a_row_that_is_read_again_too(llama):
    """ChatML on Llama's base, as transformers renders and encodes it; Qwen's rows get no new entry."""
    backend, folder = llama
    (folder / "chat_template.jinja").write_text(QWEN_TEMPLATE)
    ours = HFTokenizer(str(folder))
    for messages in (ASKED, [{"role": "user", "content": "1<|eot_id|>"}]):
        prompt = ours.apply_chat_template(messages)
        row = json.loads(json.dumps(recorded(prompt)))
        again = PromptFormat().text(read_recorded(row["prompt"], row, "f:1"), ours)
        assert ours.encode_prompt(prompt) == ours.encode_prompt(again) == ours.encode(prompt)
    assert row.keys() == {"prompt", "prompt_literal", "prompt_chat"} and recorded(PromptText("1")) == {"prompt": "1"}
    assert ours.encode_prompt(read_recorded("1", {}, "f:1")) == backend.encode("1").ids


def test_what_a_post_processor_adds_behind_a_text_is_left_out(llama):
    """The policy goes on with a prompt."""
    backend, folder = llama
    ids = [("<|begin_of_text|>", 400), ("<|end_of_text|>", 401)]
    backend.post_processor = processors.TemplateProcessing(single=f"{ids[0][0]} $A {ids[1][0]}", special_tokens=ids)
    backend.save(str(folder / "tokenizer.json"))
    assert [*HFTokenizer(str(folder)).encode_prompt("1+1"), 401] == backend.encode("1+1").ids


@pytest.mark.parametrize("name", FAMILIES)
def test_a_special_token_in_a_row_changes_no_id_before_it(name, tmp_path):
    """Behind a control token Mistral's tokenizer writes no space, which it does before a text that is encoded alone."""
    backend, special = save_family(name, tmp_path), FAMILIES[name].special[-1]
    (tmp_path / "chat_template.jinja").write_text(special + "{{ messages[0].content }}" + special)
    ours = HFTokenizer(str(tmp_path))
    ids = ours.encode_prompt(ours.apply_chat_template([{"role": "user", "content": f"The answer\n{special}"}]))
    before = backend.encode(f"{special}The answer\n", add_special_tokens=False).ids
    assert ids[: len(before)] == before and ids[-1] == before[0]


# Parity with transformers


PIECES = [
    *("1", "42", "1234567", "3.14159", " + ", "=", "١٢٣", "²"),
    *("def f(x):\n    return x**2\n", "\t\tif a[0] != b:\r\n", "{'k': [1, 2]}", "//", "\n\n\n", "</", "#include <s"),
    *(
        "你好，世界。",
        "今天",
        "こんにちは",
        "안녕하세요",
        "naïve",
        "e\u0301",
        "ß",
        "Ünï",
        "\u200d",
        "\u00a0",
        "\ufeff",
        "▁",
        "Ġ",
    ),
    *("🙂", "👩‍👩‍👧", "🇩🇪", "❤️"),
    *(" ", "  ", "    ", "The answer is", " the answer", "it's", "WE'LL", "What", "."),
    *("<|", "|>", "<|im_", "<|eot_id", "[INST", "<0x41>", "<unk", "<|reserved_special_token_0|>", "<think>", "\ue000"),
]
CONTROLS = dict.fromkeys(["<|begin_of_text|>", "<|end_of_text|>", *HEADERS, *CHATML, *INST.special])


def texts():
    """Return 200 texts; every fourth has whole special tokens of the families, and every fourth begins with spaces."""
    rng = random.Random(0)
    for i in range(200):
        pieces = rng.choices(PIECES, k=rng.randint(1, 9))
        if i % 4 == 0:
            pieces.insert(rng.randint(0, len(pieces)), rng.choice([*CONTROLS]))
        yield "  " * (i % 4 == 1) + "".join(pieces)


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return DATE


@pytest.fixture(scope="module")
def theirs(family):
    transformers = pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    return transformers.PreTrainedTokenizerFast.from_pretrained(str(family[3]))


@pytest.mark.slow
def test_texts_have_the_ids_of_transformers(family, theirs):
    name, backend, ours, _ = family
    start = start_of(name, backend)
    for text in texts():
        assert ours.encode_prompt(text) == theirs(text, split_special_tokens=True).input_ids
        assert ours.encode(text) == theirs(text, split_special_tokens=True, add_special_tokens=False).input_ids
        # What a template writes steers; a start that is there is not written twice.
        twice = theirs(text).input_ids
        assert ours.encode_prompt(PromptText(text)) == twice[len(start) * (twice[: len(start) * 2] == start * 2) :]


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATED)
@pytest.mark.parametrize("adds", [False, True])
def test_the_post_processor_decides_and_not_add_bos_token(name, adds, tmp_path):
    transformers = pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    save_family(name, tmp_path)
    settings = FAMILIES[name].settings | {"add_bos_token": adds, "tokenizer_class": "PreTrainedTokenizerFast"}
    write(tmp_path, "tokenizer_config.json", settings)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    assert HFTokenizer(str(tmp_path)).encode_prompt("1 + 1") == theirs("1 + 1").input_ids


@pytest.mark.slow
def test_chats_have_the_ids_of_transformers(family, theirs, monkeypatch):
    name, _, ours, _ = family
    from transformers.utils import chat_template_utils

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    special = re.compile("|".join(map(re.escape, ours.special)))
    literal = 0
    for text in texts():
        asked, system = {"role": "user", "content": text}, {"role": "system", "content": "Be brief."}
        for messages in ([asked], [system, *ASKED, {"role": "assistant", "content": "42"}, asked]):
            prompt = ours.apply_chat_template(messages)
            options = {"add_generation_prompt": True}
            assert prompt == theirs.apply_chat_template(messages, tokenize=False, **options)
            if special.search(text):
                expected = ids_around(theirs, messages, special, spaces=name == "mistral")
                literal += 1
            else:
                expected = theirs.apply_chat_template(messages, return_dict=False, **options)
            assert ours.encode_prompt(prompt) == list(expected)
    assert literal > 10


def ids_around(theirs, messages, special, spaces):
    """Return a chat's ids where the special tokens in its last message are text, by transformers, piece by piece.

    spaces: the tokenizer puts a space before a text that is encoded alone.
    """
    content, ids = messages[-1]["content"], []
    names = iter(special.findall(content))
    hidden = [*messages[:-1], {**messages[-1], "content": special.sub("\uf8f0", content)}]
    text = theirs.apply_chat_template(hidden, tokenize=False, add_generation_prompt=True)
    behind = theirs("\n", add_special_tokens=False).input_ids if spaces else []
    for piece in re.split(f"({special.pattern})", text):
        if special.fullmatch(piece):
            ids.append(theirs.convert_tokens_to_ids(piece))
        elif piece:
            shown = "\n" * spaces + re.sub("\uf8f0", lambda _: next(names), piece)
            ids += theirs(shown, add_special_tokens=False, split_special_tokens=True).input_ids[len(behind) :]
    return ids
