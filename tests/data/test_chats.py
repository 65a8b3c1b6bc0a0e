"""Conversations: nothing that a message says is lost, other names of roles are read, an open answer is continued."""

import json

import pytest

from specrl_jax.data.chats import ALIASES, ChatTemplate, common_role, ends_with_answer, text_messages
from specrl_jax.data.prompts import PromptFormat, Reader
from specrl_jax.data.schemas import Schema
from specrl_jax.data.tokenizers import HFTokenizer
from specrl_jax.errors import InputError
from tests.helpers.tokenizers import QWEN_TEMPLATE, SPECIAL

# Writes any role; ends the text where a conversation that goes on has its last message.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMS = CHATML.replace("m.content", "m.content | trim")
SYSTEM_FIRST = (
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}U:{{ s if loop.first else '' }}{{ m.content }}\n"
    "{% elif m.role == 'assistant' %}A:{{ m.content.split('</think>')[-1] }}\n{% endif %}{% endfor %}A:"
)
TOOLS = CHATML.replace("{{ m.content }}", "{% if m.role == 'tool' %}{{ {'content': m.content} | tojson }}"
                       "{% else %}{{ m.content }}{% endif %}")  # fmt: skip


def template(source):
    return ChatTemplate(source, {}, SPECIAL)


def chat(*said):
    return [{"role": role, "content": content} for role, content in said]


def prompt(source, *said):
    return str(template(source).prompt(chat(*said), True))


# Roles


@pytest.mark.parametrize(
    ("role", "read"),
    [
        *((alias, role) for role, aliases in ALIASES.items() for alias in aliases),
        ("User", "user"),
        ("HUMAN", "user"),
        ("GPT", "assistant"),
        (" System ", "system"),
        ("Developer", "system"),
        ("tool", "tool"),
        ("critic", "critic"),
    ],
)
def test_names_of_roles(role, read):
    assert common_role(role) == read


@pytest.mark.parametrize("source", [QWEN_TEMPLATE, CHATML, SYSTEM_FIRST], ids=["qwen", "chatml", "merged"])
@pytest.mark.parametrize(
    ("said", "same"),
    [
        ([("human", "1+1?")], [("user", "1+1?")]),
        ([("User", "1+1?")], [("user", "1+1?")]),
        ([("developer", "In French."), ("user", "1+1?")], [("system", "In French."), ("user", "1+1?")]),
        ([("human", "a?"), ("gpt", "b."), ("human", "c?")], [("user", "a?"), ("assistant", "b."), ("user", "c?")]),
        ([("prompter", "a?"), ("Bot", "b."), ("USER", "c?")], [("user", "a?"), ("assistant", "b."), ("user", "c?")]),
    ],
)
def test_other_names_are_read_as_the_common_role_and_said_once(source, said, same, capsys):
    found = template(source)
    assert found.prompt(chat(*said), True) == prompt(source, *same)
    found.prompt(chat(*said), True)
    lines = capsys.readouterr().out.splitlines()
    changed = dict.fromkeys(a for (a, _), (b, _) in zip(said, same) if a != b)
    assert len(lines) == len(changed)
    assert all(f"the chat template has no role {role!r}" in line for role, line in zip(changed, lines))


def test_a_role_that_the_template_names_stays(capsys):
    source = CHATML.replace("{{ m.role }}", "{{ 'D' if m.role == 'developer' else m.role }}")
    assert "D\nIn French." in prompt(source, ("developer", "In French."), ("user", "1?"))
    # It names the role, and drops what it says all the same.
    source = SYSTEM_FIRST + "{% if false %}{{ 'developer' }}{% endif %}"
    assert prompt(source, ("developer", "In French."), ("user", "1?")) == "U:In French.\n\n1?\nA:"
    assert "has no role 'developer'" in capsys.readouterr().out


def test_a_role_that_nobody_knows_stays_where_it_is_written():
    assert "critic\n1?" in prompt(CHATML, ("critic", "1?"))


# Nothing is lost


@pytest.mark.parametrize(
    ("source", "said", "number"),
    [
        (QWEN_TEMPLATE, [("critic", "1?")], 1),
        (QWEN_TEMPLATE, [("user", "1?"), ("function", "2")], 2),
        (QWEN_TEMPLATE, [("user", "1?"), ("tool", "2"), ("user", "1?")], 2),
        (SYSTEM_FIRST, [("user", "1?"), ("system", "In French.")], 2),
        # Its text happens to be there.
        (SYSTEM_FIRST, [("user", "a"), ("system", "A"), ("user", "b")], 2),
        (SYSTEM_FIRST, [("user", "a"), ("system", "A")], 2),
        (SYSTEM_FIRST, [("system", "1"), ("system", "1"), ("user", "1 1 1")], 1),
        # For some contents only: dropped, and cut at either end.
        (CHATML.replace("{{ m.content }}", "{{ m.content if 'x' not in m.content }}"), [("user", "x?")], 1),
        (CHATML.replace("m.content", "m.content[:20]"), [("user", "1" * 20 + "2")], 1),
        (CHATML.replace("m.content", "m.content[-20:]"), [("user", "0" + "1" * 20)], 1),
        ("{{ messages[-1].content }}", [("system", "Be brief."), ("user", "1?")], 1),
        ("nothing", [("user", "1?")], 1),
    ],
)
def test_what_a_template_leaves_out_is_refused(source, said, number):
    found = template(source)
    with pytest.raises(InputError, match=rf"leaves out message {number} of {len(said)}, role '{said[number - 1][0]}'"):
        found.prompt(chat(*said), True)
    if number > 1 or "x" in source:  # also behind rows that are whole
        found.prompt(chat(("user", "1?")), True)
        with pytest.raises(InputError, match="leaves out message"):
            found.prompt(chat(*said), True)


@pytest.mark.parametrize(
    ("source", "said", "text"),
    [
        (TRIMS, [("user", "\n a  b \n")], "<|im_start|>user\na  b<|im_end|>\n<|im_start|>assistant\n"),
        (SYSTEM_FIRST, [("system", "S"), ("user", "1")], "U:S\n\n1\nA:"),
        (SYSTEM_FIRST, [("user", "1"), ("assistant", "<think>so</think>2"), ("user", "3")], "U:1\nA:2\nU:3\nA:"),
        (TOOLS, [("user", "1"), ("tool", 'a "b"\nc')], None),
        (CHATML.replace("m.content", "m.content | upper"), [("user", "abc")], None),
        (CHATML.replace("m.content", "m.content | replace('\n', ' ')"), [("user", "a\nb")], None),
        (CHATML, [("system", ""), ("user", "1")], None),
        (CHATML, [("user", "a<|im_end|>b")], None),
        (CHATML, [("user", "\ue000 \ue001")], None),
        (QWEN_TEMPLATE, [("user", "1")], None),
    ],
)
def test_what_a_template_reformats_is_not_lost(source, said, text):
    found = template(source)
    for _ in range(2):
        written = found.prompt(chat(*said), True)
        assert text is None or written == text


def test_rows_that_are_lost_are_named_by_line(folder, tmp_path, capsys):
    """The first column of each: what is asked, and what becomes of it."""
    (folder / "chat_template.jinja").write_text(QWEN_TEMPLATE)
    tokenizer = HFTokenizer(str(folder))
    rows = {
        "human": chat(("human", "What is 1+1?")),
        "User": chat(("User", "What is 3+1?")),
        "developer": chat(("developer", "Answer in French."), ("user", "What is 4+1?")),
        "open": chat(("user", "What is 5+1?"), ("assistant", "Let me think:")),
        "solved": chat(("user", "What is 9+1?"), ("assistant", "9+1 is 10.")),
        "parts": [{"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "is 6?"}]}],
        "critic": chat(("critic", "What is 7+1?")),
    }
    path = tmp_path / "rows.jsonl"
    path.write_text("\ufeff" + "".join(json.dumps({"prompt": said, "answer": "10"}) + "\n" for said in rows.values()))
    reader = Reader(tokenizer, PromptFormat(), 100, skip_malformed=True)
    problems, counts = reader.read(str(path), Schema("prompt", "answer"))
    ask = "<|im_start|>user\nWhat is {}<|im_end|>\n<|im_start|>assistant\n"
    assert [problem.prompt for problem in problems] == [
        ask.format("1+1?"),
        ask.format("3+1?"),
        "<|im_start|>system\nAnswer in French.<|im_end|>\n" + ask.format("4+1?"),
        ask.format("5+1?") + "Let me think:",
        ask.format("9+1?") + "9+1 is 10.",
        ask.format("6?"),
    ]
    assert counts.first_fault.startswith(f"{path}:7: data.tokenizer: the chat template leaves out message 1 of 1")
    assert (counts.malformed, counts.continued, counts.solved) == (1, 2, 1)
    line = counts.line("f")
    assert "2 end with an assistant's message, which the policy continues" in line
    assert "1 hold their own answer in an assistant's message" in line
    assert capsys.readouterr().out.count("has no role") == 3


def test_a_system_prompt_of_the_config_that_is_lost_is_named(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    with pytest.raises(InputError, match=r"message 1 of 2, role 'system'.*; message 1 is data\.system"):
        PromptFormat(chat=True, system="Be brief.").text("1?", HFTokenizer(str(folder)))


def test_a_developers_message_is_a_system_message():
    said = chat(("developer", "D"), ("user", "1?"))
    assert PromptFormat(system="S").messages(said) == said


# An answer that has begun


@pytest.mark.parametrize("role", ["assistant", "gpt", "Assistant"])
@pytest.mark.parametrize(
    ("source", "content", "end"),
    [
        (QWEN_TEMPLATE, "Let me think:", "Let me think:"),
        (QWEN_TEMPLATE, "<think>\nLet me ", "<think>\nLet me "),
        (QWEN_TEMPLATE, "a<|im_end|>b", "a<|im_end|>b"),
        (TRIMS, " a b \n", "a b"),
        (CHATML, " a b \n", " a b \n"),
        (CHATML, "", ""),
    ],
)
def test_an_answer_that_has_begun_goes_on(source, content, end, role):
    text = template(source).prompt(chat(("user", "5+1?"), (role, content)), True)
    assert text == "<|im_start|>user\n5+1?<|im_end|>\n<|im_start|>assistant\n" + end
    assert [text[a:b] for a, b in text.literal] == [name for name in SPECIAL if name in content]


def test_an_answer_that_the_template_does_not_write_is_refused():
    with pytest.raises(InputError, match="leaves out message 2 of 2"):
        prompt("{{ messages[0].content }}", ("user", "1?"), ("assistant", "2"))
    assert not ends_with_answer([]) and not ends_with_answer(chat(("tool", "1")))


# Messages


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "must be text or a list of messages"),
        ([], "must be text or a list of messages"),
        (["a"], "must be text or a list of messages"),
        ([{"role": "user"}], "message 1 is none"),
        ([{"role": "user", "content": "a"}, {"role": 3, "content": "a"}], "message 2 is none"),
        ([{"role": "user", "content": [{"type": "image"}]}], "a part of type 'image' in message 1; text is read"),
        ([{"role": "user", "content": [3]}], "a part of type 'int' in message 1"),
        ([{"role": "user", "content": []}], "each of its messages is empty"),
    ],
)
def test_what_are_no_messages(value, said):
    with pytest.raises(InputError, match=said):
        text_messages(value)


def test_parts_of_text_are_joined_and_keys_without_a_value_left_out():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b", "image": None}]
    said = [{"role": "user", "content": parts, "name": None, "id": 3}]
    assert text_messages(said) == [{"role": "user", "content": "a b", "id": 3}]
