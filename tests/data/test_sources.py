"""JSONL files, checked row by row, and the resumable stream over them."""

import collections
import json

import pytest

from specrl_jax.core import BadInput
from specrl_jax.data.sources import JsonlSource, ProblemStream
from specrl_jax.data.tasks import TaskSource
from specrl_jax.data.tokenizers import CharTokenizer

LIMIT = 12  # tokens


def read(path, prompt_key="prompt", answer_key="answer"):
    return JsonlSource(str(path), prompt_key, answer_key, CharTokenizer(), LIMIT)


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "data.jsonl"
        path.write_text("".join(line + "\n" for line in lines))
        return path

    return write


def row(prompt="1+1", answer="2", **others):
    return json.dumps({"prompt": prompt, "answer": answer} | others)


def test_text_numbers_and_chat_messages(write):
    messages = [{"role": "system", "content": "Add. "}, {"role": "user", "content": "2+2"}]
    source = read(write(row("1+1", "2"), row("3+4", 7, level="easy"), row("1/2", 0.5), row(messages, "4")))
    assert [source[i][:2] for i in range(len(source))] == [
        ("1+1", "2"),
        ("3+4", "7"),
        ("1/2", "0.5"),
        ("Add. 2+2", "4"),
    ]


def test_keys_may_be_named(write):
    source = read(write('{"question": "1+2", "target": "3"}'), "question", "target")
    assert source[0][:2] == ("1+2", "3")


def test_blank_lines_count_as_lines_but_not_as_rows(write):
    assert len(read(write("", row(), "   ", row()))) == 2
    with pytest.raises(BadInput, match=r"data\.jsonl:4: not JSON"):
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
    "null prompt": row(None),
    "no messages": row([]),
    "messages without role": row([{"content": "1+1"}]),
    "messages of text": row(["1+1"]),
    "message whose content is null": row([{"role": "user", "content": None}]),
    "message whose content is a list": row([{"role": "user", "content": [{"type": "text", "text": "1"}]}]),
    "null answer": row(answer=None),
    "list answer": row(answer=["2"]),
    "boolean answer": row(answer=True),
    "a character the tokenizer lacks": row("1+é"),
    "a lone surrogate": '{"prompt": "\\ud800", "answer": "2"}',
    "a number of 5000 digits": '{"prompt": "1+1", "answer": ' + "9" * 5000 + "}",
    "nested too deep": "[" * 100_000,
    "prompt too long": row("1" * (LIMIT + 1)),
}


@pytest.mark.parametrize("line", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_bad_row_is_named_by_file_and_line(write, line):
    path = write(row(), row(), line, row())
    with pytest.raises(BadInput) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert "\n" not in str(error.value)


def test_a_line_that_is_not_utf8_is_named_by_file_and_line(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(row().encode() + b"\n" + b'{"prompt": "\xff", "answer": "2"}\n')
    with pytest.raises(BadInput) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:2: ")


def test_a_long_prompt_says_how_long_and_which_key_to_change(write):
    with pytest.raises(BadInput, match=r"data\.jsonl:1: .*13 tokens.*rollout\.max_prompt_tokens=12"):
        read(write(row("1" * 13)))
    assert len(read(write(row("1" * 12)))) == 1


def test_a_missing_key_is_named(write):
    with pytest.raises(BadInput, match=r"data\.jsonl:1: .*'question'.*'answer'"):
        read(write(row()), prompt_key="question")


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_an_empty_file_is_refused(tmp_path, content):
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(BadInput, match=r"data\.jsonl' is empty"):
        read(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(BadInput, match=r"no file '.*nothing\.jsonl'"):
        read(tmp_path / "nothing.jsonl")
    with pytest.raises(BadInput, match="no file"):
        read(tmp_path)


@pytest.fixture
def ten_rows(write):
    return read(write(*(row(str(i), i) for i in range(10))))


def prompts(stream, batches):
    return [[problem.prompt for problem in next(stream)] for _ in range(batches)]


def test_an_epoch_covers_every_row_once_and_epochs_differ(ten_rows):
    # Batches of 4 from 10 rows: two epochs in five batches, one batch across the border.
    taken = [prompt for batch in prompts(ProblemStream(ten_rows, 4, seed=0), 10) for prompt in batch]
    epochs = [taken[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == [str(i) for i in range(10)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_batch_may_be_larger_than_the_file(write):
    stream = ProblemStream(read(write(row("1"), row("2"), row("3"))), 9, seed=0)
    assert collections.Counter(prompts(stream, 1)[0]) == {"1": 3, "2": 3, "3": 3}


def test_the_order_depends_on_the_seed_alone(ten_rows):
    first = prompts(ProblemStream(ten_rows, 5, seed=1), 4)
    assert prompts(ProblemStream(ten_rows, 5, seed=1), 4) == first
    assert prompts(ProblemStream(ten_rows, 5, seed=2), 4) != first


@pytest.mark.parametrize("stop", [0, 1, 3, 7])
def test_a_stream_resumes_at_the_row_from_its_position(ten_rows, stop):
    stream = ProblemStream(ten_rows, 4, seed=0)
    prompts(stream, stop)
    position = json.loads(json.dumps(stream.position))
    rest = prompts(stream, 5)
    resumed = ProblemStream(ten_rows, 4, seed=0)
    resumed.position = position
    assert prompts(resumed, 5) == rest


@pytest.mark.parametrize("stop", [0, 1, 4])
def test_a_built_in_task_comes_in_order_and_resumes(stop):
    source = TaskSource("arithmetic", "train", 0)
    stream = ProblemStream(source, 3, seed=0)
    prompts(stream, stop)
    position = json.loads(json.dumps(stream.position))
    resumed = ProblemStream(source, 3, seed=0)
    resumed.position = position
    expected = [[source[3 * batch + i].prompt for i in range(3)] for batch in range(stop, stop + 3)]
    assert prompts(resumed, 3) == prompts(stream, 3) == expected


def test_setting_a_position_goes_back_too(ten_rows):
    stream = ProblemStream(ten_rows, 4, seed=0)
    position = stream.position
    first = prompts(stream, 3)
    stream.position = position
    assert prompts(stream, 3) == first
