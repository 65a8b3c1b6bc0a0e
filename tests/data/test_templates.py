"""Chat templates render as in transformers: the tags, filters and globals that it gives them, and no clock."""

import datetime
import importlib.util
import json
import pathlib

import pytest

from specrl_jax.data import templates
from specrl_jax.data.tokenizers import HFTokenizer
from tests.data.test_tokenizers import CONVERSATION, RENDERED
from tests.helpers.tokenizers import QWEN_TEMPLATE

NEEDS_TRANSFORMERS = "make test-slow PARITY=1 brings this test back"
TOKENS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": "<|im_start|>"}
THOUGHT = [
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": "2", "reasoning": "so", "tool_calls": None},
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
CALLED = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "name": "add", "tool_call_id": "1"},
]
# Template, conversation, text.
CASES = {
    "qwen": (QWEN_TEMPLATE, CONVERSATION, RENDERED),
    "special-tokens": (
        "{{ bos_token }}{{ messages[1].content }}{{ eos_token }}{{ pad_token }}{{ unk_token }}",
        CONVERSATION,
        "<|im_start|>What is 12 + 30?<|im_end|><|endoftext|>",
    ),
    "loop-controls": (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
        "{% if loop.index > 3 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        CONVERSATION,
        "userassistant",
    ),
    "tojson": (
        "{{ {'b': '<é&>', 'a': 1} | tojson }}|{{ [1] | tojson(indent=2) }}|{{ {'b': 'é', 'a': [1, 2]} | "
        "tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}|{{ [1] | tojson(true, 1) }}",
        CONVERSATION,
        '{"b": "<é&>", "a": 1}|[\n  1\n]|{"a":[1,2],"b":"\\u00e9"}|[\n 1\n]',
    ),
    "whitespace": ("a\n  {% if true %}\n  b\n  {% endif %}\n", CONVERSATION, "a\n  b\n"),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}\n<{% generation %}{% set x = 1 %}\n{{ m.content }}"
        "{%- endgeneration -%}\n>{{ x is defined }}{% else %}{{ m.role }}{% endif %}{% endfor %}",
        THOUGHT,
        "user<2>False",
    ),
    "date": (
        "{% if strftime_now is defined %}{{ strftime_now('%Y-%m-%d, %A %d %B %H:%M') }}{% endif %}",
        CONVERSATION,
        "2024-07-26, Friday 26 July 00:00",
    ),
    "thoughts": (
        "{{ messages[1].reasoning_content }}{{ messages[1].thinking }}{{ messages[1].tool_calls is defined }}",
        THOUGHT,
        "sosoFalse",
    ),
    "tools": (
        "{{ tools is none and documents is none }}{{ messages[1].tool_calls[0].function.arguments | tojson }}",
        CALLED,
        'True{"a": 1, "b": "é"}',
    ),
    "dict": (
        "{% set d = dict(a=1) %}{{ d.items() | list }}{{ dict.fromkeys(['x']) }}{{ dict([('k', 2)]).k }}"
        "{{ dict.mro is defined }}",
        CONVERSATION,
        "[('a', 1)]{'x': None}2False",
    ),
    "namespace": (
        "{% set ns = namespace(self=1, a=0) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{% endfor %}"
        "{{ ns.a }}{{ ns.self }}",
        CONVERSATION,
        "51",
    ),
}
REFUSED = [
    "{% set ns = namespace(_a=1) %}",
    "{% set ns = namespace() %}{% set ns._a = 1 %}",
    "{{ dict.__init__ }}{{ raise_exception('no class') }}",
]


@pytest.mark.parametrize(("template", "messages", "text"), CASES.values(), ids=CASES)
def test_a_template_finds_what_transformers_gives(template, messages, text):
    assert templates.render(template, messages, add_generation_prompt=True, **TOKENS) == text


@pytest.mark.parametrize("template", REFUSED)
def test_what_transformers_refuses_is_refused(template):
    with pytest.raises(Exception, match=r"no name|unsafe|no class"):
        templates.render(template, CONVERSATION)


def test_prompts_do_not_change_with_the_day(folder, monkeypatch):
    """In the process that renders, too."""
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}")
    assert HFTokenizer(str(folder)).apply_chat_template([{"role": "user", "content": "1"}]) == "26 Jul 2024 1"


# Parity with transformers


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return templates.DATE


@pytest.fixture
def theirs(monkeypatch):
    """Return render(source, messages, **values) of transformers, on the day that our templates have."""
    pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    from transformers.utils import chat_template_utils as utils

    monkeypatch.setattr(utils, "datetime", Clock)

    def render(source, messages, **values):
        chats = [utils._normalize_chat_messages(messages)]
        return utils.render_jinja_template(chats, chat_template=source, **values)[0][0]

    return render


@pytest.mark.slow
@pytest.mark.parametrize(("template", "messages", "text"), CASES.values(), ids=CASES)
def test_transformers_renders_the_same(template, messages, text, theirs):
    assert theirs(template, messages, add_generation_prompt=True, **TOKENS) == text


@pytest.mark.slow
def test_chat_template_renders_and_encodes_as_in_transformers(folder):
    transformers = pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    (folder / "chat_template.jinja").write_text(QWEN_TEMPLATE)
    settings = TOKENS | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    ours = HFTokenizer(str(folder))
    for messages in (CONVERSATION, CONVERSATION[:3]):
        goes_on = messages[-1]["role"] == "assistant"
        options = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
        text = ours.apply_chat_template(messages)
        assert tokenizer.apply_chat_template(messages, tokenize=False, **options) == text
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        assert ours.encode(text) == list(ids)


SYSTEM, ASKED = {"role": "system", "content": "Be brief.  "}, {"role": "user", "content": " What is <b>12</b> + 'x'?\n"}
ANSWER = {"role": "assistant", "content": '<think>\nsum\n</think>\n\n42 "é"'}
PART = {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]}
CONVERSATIONS = [
    [ASKED],
    [SYSTEM, ASKED],
    [{"role": "developer", "content": "Be brief."}, ASKED],
    [SYSTEM, ASKED, ANSWER, ASKED],
    [ASKED, ANSWER],
    [ASKED, {**ANSWER, "content": "42", "reasoning_content": "sum"}, ASKED],
    CALLED,
    [SYSTEM, *CALLED, {"role": "assistant", "content": "It is 2."}, ASKED],
    [PART],
    [{"role": "user", "content": ""}],
]


def shipped():
    """Return the chat templates of the packages that are installed."""
    found = importlib.util.find_spec("trl")
    folders = [pathlib.Path(place) for place in (found.submodule_search_locations if found else [])]
    return sorted(path for folder in folders for path in folder.rglob("*.jinja"))


@pytest.mark.slow
def test_the_templates_that_packages_ship(theirs):
    """TRL's 72: the same text, or refused by both."""
    if not (found := shipped()):
        pytest.skip(NEEDS_TRANSFORMERS)

    def attempt(render, *arguments, **values):
        try:
            return render(*arguments, **values)
        except Exception as error:
            return type(error)

    texts = 0
    for path in found:
        source = path.read_text()
        for messages in CONVERSATIONS:
            for values in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
                for begins in (True, False):
                    values = values | TOKENS | {"add_generation_prompt": begins}
                    mine, other = (attempt(render, source, messages, **values) for render in (templates.render, theirs))
                    assert mine == other, (path.name, messages)
                    texts += isinstance(mine, str)
    assert texts > 20 * len(found)
