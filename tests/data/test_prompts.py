"""Files of prompts: every row checked, named by file and line or counted, formatted, and each prompt taken once."""

import builtins
import datetime
import errno
import json
import random
import re

import pyarrow
import pyarrow.parquet
import pytest

from specrl_jax.data.prompts import PromptFormat, Reader
from specrl_jax.data.schemas import SCHEMAS, Schema, find_schemas
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.errors import InputError

LIMIT = 12  # tokens
PLAIN = Schema("prompt", "answer")


def read_counted(path, schema=PLAIN, **options):
    return Reader(CharTokenizer(), PromptFormat(), LIMIT, **options).read(str(path), schema)


def read(path, *arguments, **options):
    return read_counted(path, *arguments, **options)[0]


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "data.jsonl"
        path.write_text("".join(line + "\n" for line in lines), errors="surrogateescape")
        return path

    return write


def row(prompt="1+1", answer="2", **others):
    return json.dumps({"prompt": prompt, "answer": answer} | others)


def test_rows_that_nothing_scores_need_no_answer(write):
    path = write('{"prompt": "1+1"}', row("3+4", [1]), row("2+2", "4"))
    assert [problem[:2] for problem in read(path, answered=False)] == [("1+1", ""), ("3+4", ""), ("2+2", "")]
    with pytest.raises(InputError, match=r"data\.jsonl:1: needs an object with 'prompt'$"):
        read(write("{}"), answered=False)


def test_text_numbers_and_chat_messages(write):
    messages = [{"role": "system", "content": "Add. "}, {"role": "user", "content": "2+2"}]
    source = read(write(row("1+1", "2"), row("3+4", 7, level="easy"), row("1/2", 0.5), row(messages, "4")))
    assert [problem[:2] for problem in source] == [
        ("1+1", "2"),
        ("3+4", "7"),
        ("1/2", "0.5"),
        ("Add. 2+2", "4"),
    ]


def test_a_whole_number_is_written_as_one(write):
    """A column of integers that has gaps comes as floats."""
    source = read(write(row("1", 34.0), row("2", -0.0), row("3", 1e21), row("4", 2.5), row("5", "34.0")))
    assert [problem.answer for problem in source] == ["34", "0", "1" + "0" * 21, "2.5", "34.0"]


def test_blank_lines_count_as_lines_but_not_as_rows(write):
    assert len(read(write("", row(), "   ", row("2+1")))) == 2
    with pytest.raises(InputError, match=r"data\.jsonl:4: not JSON"):
        read(write("", row(), "   ", "{"))


MALFORMED = {
    "not json": "{'prompt': 1}",
    "cut off": '{"prompt": "1+1", "answer": ',
    "not an object": '["1+1", "2"]',
    "null": "null",
    "no prompt": '{"answer": "2"}',
    "no answer": '{"prompt": "1+1"}',
    "number as prompt": row(5),
    "empty prompt": row(""),
    "blank prompt": row(" \n"),
    "blank answer": row(answer=" "),
    "null prompt": row(None),
    "no messages": row([]),
    "messages without role": row([{"content": "1+1"}]),
    "messages of text": row(["1+1"]),
    "message whose content is null": row([{"role": "user", "content": None}]),
    "message with an image": row([{"role": "user", "content": [{"type": "image", "url": "a.png"}]}]),
    "message with a part that is text": row([{"role": "user", "content": ["1"]}]),
    "message whose part has no text": row([{"role": "user", "content": [{"type": "text"}]}]),
    "messages that say nothing": row([{"role": "system", "content": ""}, {"role": "user", "content": " "}]),
    "null answer": row(answer=None),
    "list answer": row(answer=["2"]),
    "boolean answer": row(answer=True),
    "answer that is no number": row(answer=float("nan")),
    "endless answer": row(answer=float("inf")),
    "answer beyond all numbers": '{"prompt": "1+1", "answer": 1e999}',
    "a character the tokenizer lacks": row("1+é"),
    "a lone surrogate": '{"prompt": "\\ud800", "answer": "2"}',
    "a number of 5000 digits": '{"prompt": "1+1", "answer": ' + "9" * 5000 + "}",
    "nested too deep": "[" * 100_000,
    "a byte that is not UTF-8": '{"prompt": "\udcff", "answer": "2"}',
    "prompt too long": row("1" * (LIMIT + 1)),
}


@pytest.mark.parametrize("line", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_bad_row_is_named_by_file_and_line(write, line):
    path = write(row("1"), row("2"), line, row("3"))
    with pytest.raises(InputError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert "\n" not in str(error.value)


def test_a_long_prompt_says_how_long_and_which_key_to_change(write):
    with pytest.raises(InputError, match=r"data\.jsonl:1: .*13 tokens.*rollout\.max_prompt_tokens=12"):
        read(write(row("1" * 13)))
    assert len(read(write(row("1" * 12)))) == 1


@pytest.mark.parametrize(
    ("schema", "line", "message"),
    [
        (Schema("question", "answer"), row(), "needs an object with 'question' and 'answer'"),
        (SCHEMAS["gsm8k"], '{"question": "1", "answer": "6"}', "'answer' states no answer after '####'"),
        *(
            (Schema("prompt", "a.b"), f'{{"prompt": "1", "a": {value}}}', "needs an object with 'prompt' and 'a.b'")
            for value in ('"text"', "null", "[]", "{}")
        ),
    ],
)
def test_what_a_row_lacks_is_named(write, schema, line, message):
    path = write(line)
    with pytest.raises(InputError, match=f"^{re.escape(f'{path}:1: {message}')}"):
        read(path, schema)


@pytest.mark.parametrize("lines", [[], ["", "", "  "]])
def test_an_empty_file_is_refused(write, lines):
    with pytest.raises(InputError, match=r"data\.jsonl' is empty"):
        read(write(*lines))


def test_a_file_that_cannot_be_read_is_refused(write, monkeypatch):
    path = write(row())

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(builtins, "open", refuse)
    with pytest.raises(InputError, match=r"data\.path: cannot read '.*data\.jsonl': Permission denied"):
        read(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path, said in ((tmp_path / "nothing.jsonl", "no file '{}'"), (tmp_path, "'{}' holds no files")):
        with pytest.raises(InputError, match=said.format(re.escape(str(path)))):
            read(path)


# ---- what is left out, and counted


def test_a_prompt_counts_once(write):
    problems, counts = read_counted(write(row("1", 1), row("2", 2), row("1", 1), row("2", 3), row("2", 2)))
    assert [problem[:2] for problem in problems] == [("1", "1"), ("2", "2")]
    assert (counts.kept, counts.repeated, counts.conflicting) == (2, 3, 1)


def test_malformed_and_long_rows_are_left_out_where_asked(write):
    path = write(row("1"), "{", row("1" * 13), row("2", None), row("3"), row("1" * 13))
    problems, counts = read_counted(path, skip_malformed=True, skip_long=True)
    assert [problem.prompt for problem in problems] == ["1", "3"]
    assert (counts.malformed, counts.long, counts.repeated) == (2, 1, 1)
    said = "2 of 6 prompts; left out: 1 repeated (0 with another answer), 2 malformed, 1 too long"
    assert counts.line("f") == f"f: {said}"
    with pytest.raises(InputError, match=r"data\.jsonl:2: not JSON"):
        read(path, skip_long=True)
    with pytest.raises(InputError, match=r"data\.jsonl:3: .*13 tokens"):
        read(path, skip_malformed=True)


def test_a_file_of_which_nothing_is_left_is_refused(write):
    with pytest.raises(InputError, match=r"nothing is left of .*1 malformed, 1 too long.*data\.jsonl:1: not JSON"):
        read(write("{", row("1" * 13)), skip_malformed=True, skip_long=True)


ROWS = [
    row("12+3", "15"),
    row([{"role": "user", "content": "1+1"}], 2),
    '{"question": "2*3", "answer": "six #### 6"}',
    '{"prompt": "4-1", "reward_model": {"ground_truth": "3"}}',
]


def mutate(rng, content):
    """Bytes with some dropped, doubled, swapped, replaced or cut off."""
    raw = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(raw))
        kind = rng.randrange(6)
        if kind == 0:
            del raw[at]
        elif kind == 1:
            raw.insert(at, raw[at])
        elif kind == 2:
            raw[at] = rng.randrange(256)
        elif kind == 3:
            del raw[at:]
        elif kind == 4:
            raw[at:at] = rng.choice([b"\x00", b"null", b"[", b'"', b"\xff", b"1e999", b"NaN", b"\\ud800"])
        else:
            other = rng.randrange(len(raw))
            raw[at], raw[other] = raw[other], raw[at]
        if not raw:
            break
    return bytes(raw)


def test_a_thousand_mutations_are_each_taken_named_or_counted(tmp_path):
    rng = random.Random(0)
    path = tmp_path / "data.jsonl"
    schemas = [PLAIN, PLAIN, SCHEMAS["gsm8k"], SCHEMAS["verl"]]
    named = 0
    for i in range(1000):
        path.write_bytes(row("9").encode() + b"\n" + mutate(rng, ROWS[i % 4].encode()).replace(b"\n", b" ") + b"\n")
        schema = schemas[i % 4]
        try:
            read(path, schema)
        except InputError as error:
            # The untouched first line has other keys than the schemas of the last two.
            assert str(error).startswith((f"{path}:1: ", f"{path}:2: ")) and "\n" not in str(error)
            named += 1
        if i % 4 < 2:
            problems, counts = read_counted(path, schema, skip_malformed=True, skip_long=True)
            assert len(problems) + counts.malformed + counts.long + counts.repeated in (1, 2)
    assert 500 < named < 1000


# ---- schemas and formats


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        ("gsm8k", '{"question": "2*3", "answer": "2*3=<<6>>6\\n#### 6"}', ("2*3", "6")),
        ("dapo", '{"prompt": [{"role": "user", "content": "2*3"}], "label": "6"}', ("2*3", "6")),
        ("math", '{"problem": "2*3", "answer": "\\\\frac{12}{2}"}', ("2*3", "\\frac{12}{2}")),
        (
            "verl",
            '{"prompt": [{"role": "user", "content": "2*3"}], "reward_model": {"ground_truth": "6", "style": "rule"}}',
            ("2*3", "6"),
        ),
    ],
)
def test_the_schemas_of_published_sets(write, name, line, expected):
    assert read(write(line), SCHEMAS[name])[0][:2] == expected


def test_a_key_with_a_dot_may_also_be_a_key(write):
    assert read(write('{"prompt": "1", "a.b": "2"}'), Schema("prompt", "a.b"))[0].answer == "2"


class Chat(CharTokenizer):
    def apply_chat_template(self, messages, thinking=True):
        return "".join(f"{m['role'][0]}:{m['content']};" for m in messages) + ("" if thinking else "!")


@pytest.mark.parametrize(
    ("prompt_format", "text", "chat"),
    [
        (PromptFormat(), "1", "u:1;"),
        (PromptFormat(template="Q{prompt}A"), "Q1A", "u:1;"),
        (PromptFormat(template="Q{prompt}", chat=True), "u:Q1;", "u:1;"),
        (PromptFormat(chat=True, system="S"), "s:S;u:1;", "s:S;u:1;"),
        (PromptFormat(chat=True, thinking=False), "u:1;!", "u:1;!"),
    ],
)
def test_what_is_put_around_a_prompt(prompt_format, text, chat):
    assert prompt_format.text("1", Chat()) == text
    assert prompt_format.text([{"role": "user", "content": "1"}], Chat()) == chat


def test_a_row_that_the_chat_template_refuses_is_named(write):
    class Strict(Chat):
        def apply_chat_template(self, messages, thinking=True):
            if messages[0]["role"] != "user":
                raise InputError("data.tokenizer: the chat template fails: unknown role")
            return super().apply_chat_template(messages, thinking)

    path = write(row([{"role": "user", "content": "1"}]), row([{"role": "tool", "content": "2"}]))
    reader = Reader(Strict(), PromptFormat(), LIMIT)
    with pytest.raises(InputError, match=r"data\.jsonl:2: data\.tokenizer: the chat template fails: unknown role"):
        reader.read(str(path), PLAIN)
    assert Reader(Strict(), PromptFormat(), LIMIT, skip_malformed=True).read(str(path), PLAIN)[1].malformed == 1


def test_a_system_message_and_braces_of_a_prompt_stay():
    messages = [{"role": "system", "content": "T"}, {"role": "user", "content": "1"}]
    assert PromptFormat(system="S").text(messages, Chat()) == "s:T;u:1;"
    assert PromptFormat(template="<{prompt}>").text("{x} {prompt}", Chat()) == "<{x} {prompt}>"


def test_schemas_are_found_one_for_all_or_one_each():
    assert find_schemas("", 2, key="k") == [PLAIN, PLAIN]
    assert find_schemas("math", 2, key="k") == [SCHEMAS["math"]] * 2
    assert find_schemas("math,,gsm8k", 3, key="k") == [SCHEMAS["math"], PLAIN, SCHEMAS["gsm8k"]]
    assert find_schemas("q:a.b", 1, key="k") == [Schema("q", "a.b")]
    with pytest.raises(InputError, match="k: no schema 'x'"):
        find_schemas("x", 1, key="k")
    with pytest.raises(InputError, match="one for each of the 3 files"):
        find_schemas("math,dapo", 3, key="k")
    with pytest.raises(InputError, match=r"k=math,auto: .*name the schema"):
        find_schemas("math,auto", 2, key="k")


# ---- Parquet


@pytest.fixture
def parquet(tmp_path):
    def write(rows):
        path = tmp_path / "data.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path

    return write


def test_parquet_rows_are_read_as_jsonl_rows_are(parquet, write):
    rows = [
        {"prompt": [{"role": "user", "content": f"{i}+1"}], "reward_model": {"ground_truth": str(i + 1)}}
        for i in range(3000)
    ]
    lines = write(*map(json.dumps, rows))
    of_parquet, of_lines = (
        [problem._replace(where="") for problem in read(path, SCHEMAS["verl"])] for path in (parquet(rows), lines)
    )
    assert of_parquet == of_lines


def test_the_other_columns_of_a_row_go_with_it(parquet, write):
    """Whole, and as JSON holds them; a column that holds the answer among other things stays."""
    (problem,) = read(write(row(level=[1, {"a": None}])))
    assert problem.row == {"level": [1, {"a": None}]}
    nested = {"prompt": "1+1", "reward_model": {"ground_truth": "2", "style": "rule"}}
    day = datetime.date(2026, 11, 23)
    (problem,) = read(parquet([nested | {"day": day}]), SCHEMAS["verl"])
    assert problem.row == {"reward_model": nested["reward_model"], "day": "2026-11-23"}


def test_a_bad_parquet_row_is_named_by_file_and_number(parquet):
    path = parquet([{"prompt": "1", "answer": "2"}, {"prompt": None, "answer": "2"}])
    with pytest.raises(InputError, match=r"data\.parquet:2: 'prompt' must be"):
        read(path)


@pytest.mark.parametrize("damage", [lambda raw: b"", lambda raw: raw[: len(raw) // 2], lambda raw: b"text" * 50])
def test_a_damaged_parquet_file_is_one_clear_line(parquet, damage):
    path = parquet([{"prompt": str(i), "answer": "2"} for i in range(100)])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=r"data\.parquet: not a readable Parquet file") as error:
        read(path)
    assert "\n" not in str(error.value)


def test_mutations_of_a_parquet_file_are_each_taken_named_or_counted(parquet):
    rng = random.Random(0)
    chat = [[{"role": "user", "content": f"{i}+1"}] for i in range(40)]
    path = parquet([{"prompt": prompt, "reward_model": {"ground_truth": "1", "style": "rule"}} for prompt in chat])
    whole, named = path.read_bytes(), 0
    for i in range(300):
        path.write_bytes(mutate(rng, whole))
        try:
            problems, counts = read_counted(path, SCHEMAS["verl"], skip_malformed=i % 2 == 0)
            assert len(problems) + counts.malformed + counts.repeated == 40
        except InputError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            named += 1
    assert 200 < named < 300
