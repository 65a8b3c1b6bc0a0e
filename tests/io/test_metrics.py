"""Reading metrics.jsonl: whole rows of numbers, and a fault by its line."""

import os

import pytest
from markdown_it import MarkdownIt

from specrl_jax.errors import InputError
from specrl_jax.io.metrics import read_metrics
from specrl_jax.io.tensorboard import as_markdown

GOOD = b'{"step": 0, "reward/mean": 0.5, "eval/accuracy": null, "policy/updates": 3}\n'


def test_rows_are_read_without_an_incomplete_last_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(GOOD + b'{"step": 1}\n{"st')
    first = {"step": 0, "reward/mean": 0.5, "eval/accuracy": None, "policy/updates": 3}
    assert read_metrics(str(tmp_path)) == [first, {"step": 1}]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b"\0" * 50 + b"\n", "not JSON"),
        (b"\n", "not JSON"),
        (b"[1]\n", "expected a JSON object, found list"),
        (b'{"reward/mean": 0.5}\n', "lacks 'step'"),
        (b'{"step": "1"}\n', 'step="1"'),
        (b'{"step": -1}\n', "step=-1"),
        (b'{"step": 1.5}\n', "step=1.5"),
        (b'{"step": 1, "reward/mean": "high"}\n', "reward/mean"),
        (b'{"step": 1, "reward/mean": NaN}\n', "reward/mean"),
        (b'{"step": 1, "reward/mean": 1e999}\n', "reward/mean"),
        (b'{"step": 1, "reward/mean": {"a": 1}}\n', "reward/mean"),
        (b'{"step": 1, "x": ' + b"[" * 100_000 + b"\n", "nested too deeply"),
        (b'{"step": ' + b"9" * 5000 + b"}\n", "too many digits"),
        (b'{"step": 1, "\xff": 2}\n', "not UTF-8"),
        (b'{"step": 1, "a": "' + b"b" * 2**20 + b'"}\n', "longer than 1 MiB"),
    ],
)
def test_a_damaged_line_is_named(line, named, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(GOOD + line + GOOD)
    with pytest.raises(InputError) as error:
        read_metrics(str(tmp_path))
    message = str(error.value)
    assert named in message and message.startswith(f"{tmp_path}/metrics.jsonl:2") and len(message) < 400


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(InputError, match="not a regular file"):
        read_metrics(str(tmp_path))


@pytest.mark.parametrize("text", ["a|b `c` ```\n\n  # d\n~~~\n~~~~~ <b>&amp;", "", "\n\nx\n", "| a |\n|---|", "~" * 9])
def test_texts_in_tensorboard_are_as_they_are(text):
    markdown = as_markdown(
        [
            {"id": 3, "reward": 0.5, "prompt": text, "response": "384"},
            {"id": 4, "reward": 1, "prompt": "", "response": text},
        ]
    )
    tokens = MarkdownIt("commonmark").parse(markdown)
    assert [token.content for token in tokens if token.type == "fence"] == [f"{x}\n" for x in (text, "384", "", text)]
    assert [token.content for token in tokens if token.type == "inline"] == [
        "**rollout 3**, reward 0.5",
        "**rollout 4**, reward 1",
    ]
