"""Parquet files that stand for far more than they have, long lines, and other formats: little memory, one line."""

import json
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from specrl_jax.data import files, parquet
from specrl_jax.data.files import read_rows
from specrl_jax.data.prompts import PromptFormat, Reader
from specrl_jax.data.schemas import Schema
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.errors import InputError

MIB = 2**20


def write(path, table, **options):
    """Write a table such that the file is small: long texts once, no samples of them in the footer."""
    options = {"dictionary_pagesize_limit": 2**30, "write_statistics": False, "compression": "zstd"} | options
    pyarrow.parquet.write_table(table, path, row_group_size=2**24, store_schema=False, **options)
    assert path.stat().st_size <= 8192, path.stat().st_size


def repeated(text, count):
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(count, np.int32)), pyarrow.array([text]))


def listed(values, lengths):
    return pyarrow.ListArray.from_arrays(np.cumsum([0, *lengths], dtype=np.int32), values)


N = 512  # rows


def bombs(folder):
    """Write files of a few KiB that stand for half a GiB; return {path: what is said, "" = its rows are read}."""
    said, ask = {}, pyarrow.array(["1+1"] * N)

    def table(name, what, column=ask, prompt=ask, **options):
        path = folder / f"{name}.parquet"
        write(path, pyarrow.table({"prompt": prompt, "answer": prompt, "extra": column}), **options)
        said[str(path)] = what

    cell, page, prefixes = [200] + [1] * (N - 1), ["a" * 80 * MIB] + ["a"] * (N - 1), ["a" * 2**19] * N
    plain = {"use_dictionary": False}
    delta = plain | {"column_encoding": "DELTA_BYTE_ARRAY"}
    table("repeated", "", repeated("a" * MIB, N))
    table("prompts", "", prompt=repeated("1" * MIB, N))
    table("lists", "", listed(repeated("a" * 2**18, 4 * N), [4] * N))
    table("structs", "", pyarrow.StructArray.from_arrays([repeated("a" * MIB, N)], ["a"]))
    table("cell", "column 'extra' of this row takes more than 128 MiB", listed(repeated("a" * MIB, sum(cell)), cell))
    table("page", "stand for", pyarrow.array(page), **plain)
    table("elements", "stand for", listed(pyarrow.array(np.zeros(2**23, np.int8)), [2**23] + [0] * (N - 1)))
    table("prefixes", "", pyarrow.array(prefixes), **delta)
    table("prefixes_in_lists", "stand for", listed(pyarrow.array(prefixes), [N] + [0] * (N - 1)), **delta)
    return said


READ = r"""
import re, resource, sys
from specrl_jax.data.files import read_rows
from specrl_jax.errors import InputError
# getrusage begins with what the process that started this one had.
peak = lambda: int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
for path in sys.argv[1:]:
    before, said, kept = peak(), "", []
    try:
        for row in read_rows(path, "data.path"):
            said = said or row.fault
            kept.append(row)
    except InputError as error:
        said = str(error)
    print(len(kept), (peak() - before) // 1024, said, sep="|")
    del kept
"""


@pytest.mark.slow
def test_a_small_file_takes_little_memory(tmp_path):
    """In a process of its own, with all rows kept, as a reward that reads other columns keeps them."""
    said = bombs(tmp_path)
    done = subprocess.run([sys.executable, "-c", READ, *said], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == len(said), done.stderr[-500:]
    for what, line in zip(said.values(), lines):
        count, mebibytes, fault = line.split("|")
        assert int(mebibytes) < 200, line
        assert what in fault and bool(what) == bool(fault), line
        assert "stand for" in what or int(count) == N


def test_columns_that_nobody_asks_for_are_not_read(tmp_path):
    path = tmp_path / "a.parquet"
    write(path, pyarrow.table({"prompt": ["1+1"], "answer": ["2"], "extra": ["a" * 80 * MIB]}), use_dictionary=False)
    with pytest.raises(InputError, match=r"stand for 83,\d{3},\d{3}, most of them in column 'extra'"):
        Reader(CharTokenizer(), PromptFormat(), 9).read(str(path), Schema("prompt", "answer"))
    (problem,), _ = Reader(CharTokenizer(), PromptFormat(), 9, other_columns=False).read(
        str(path), Schema("prompt", "answer")
    )
    assert problem[:2] == ("1+1", "2") and problem.row == {}
    (row,) = read_rows(str(path), "data.path", {"prompt", "nothing"})
    assert row.content == {"prompt": "1+1"}


def test_rows_are_those_of_pyarrow(tmp_path, monkeypatch):
    """Of any type, at any number of rows at once: texts go through dictionaries, and slices are cast back."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{i} " + "long " * 60, "name": None}] * (i % 3),
            "text": None if i % 5 == 0 else f"é{i % 7}",
            "number": i / 3,
            "deep": {"a": [[i, None], []], "b": {"c": "x" if i % 2 else None}},
            "bytes": bytes([i % 256]),
            "flag": i % 2 == 0,
            "nothing": None,
            "a.b": "dot",
        }
        for i in range(300)
    ]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=100)
    for size in (1, 1000, 16 * MIB):
        monkeypatch.setattr(parquet, "BATCH_BYTES", size)
        found = [row.content for row in read_rows(str(path), "data.path")]
        assert found == pyarrow.parquet.read_table(path).to_pylist() == rows
    assert found[0]["prompt"] is not rows[0]["prompt"] and found[1]["prompt"][0]["content"]
    chosen = [row.content for row in read_rows(str(path), "data.path", {"a.b", "deep"})]
    assert chosen == [{"deep": row["deep"], "a.b": "dot"} for row in rows]


def test_equal_long_texts_are_kept_once(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": ["x" * 999] * 2, "b": [[{"c": "x" * 999}]] * 2}), path)
    first, second = (row.content for row in read_rows(str(path), "data.path"))
    assert first["a"] is second["a"] is first["b"][0]["c"]


def test_a_long_line_is_neither_kept_nor_tokenised(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "ROW_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": "1", "answer": "1"}, {"prompt": "2" * 5000, "answer": "1"}, {"prompt": "3", "answer": "1"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = list(read_rows(str(path), "data.path"))
    assert [row.where.rpartition(":")[2] for row in found] == ["1", "2", "3"]
    assert [row.fault for row in found] == ["", "longer than 0 MiB", ""]
    path.write_text(json.dumps(rows[1]))  # without an end of line
    assert [row.fault for row in read_rows(str(path), "data.path")] == ["longer than 0 MiB"]


@pytest.mark.slow
def test_a_line_of_200_mb_is_refused_in_little_memory(tmp_path):
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"prompt": "')
        for _ in range(200):
            file.write(b"a" * 10**6)
        file.write(b'", "answer": "1"}\n{"prompt": "1", "answer": "1"}\n')
    done = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True, check=True)
    count, mebibytes, fault = done.stdout.strip().split("|")
    assert (count, fault) == ("2", "longer than 128 MiB") and int(mebibytes) < 400


def test_a_prompt_that_no_limit_holds_is_not_encoded(tmp_path):
    class Strict(CharTokenizer):
        def encode(self, text):
            assert len(text) < 10_000
            return super().encode(text)

    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "1" * 10_000, "answer": "1"}) + '\n{"prompt": "1", "answer": "1"}\n')
    reader = Reader(Strict(), PromptFormat(), 12)
    with pytest.raises(InputError, match=r"a.jsonl:1: the prompt has 39 tokens or more, rollout.max_prompt_tokens=12"):
        reader.read(str(path), Schema("prompt", "answer"))


# Other formats


ROWS = [{"prompt": "1+1", "answer": "2"}, {"prompt": "2+1", "answer": "3"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", b"\xef\xbb\xbf" + LINES.encode()),
        ("a.jsonl", LINES.replace("\n", "\r\n").encode()),
        ("a.jsonl", (LINES.splitlines()[0] + "\n\ufeff" + LINES.splitlines()[1]).encode()),
        ("a.json", LINES.encode()),
        ("a.json", json.dumps(ROWS).encode()),
        ("a.JSON", b"\xef\xbb\xbf \n" + json.dumps(ROWS, indent=2).encode()),
        ("a.txt", LINES.encode()),
    ],
)
def test_rows_by_any_of_these_names(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    found = list(read_rows(str(tmp_path / name), "data.path"))
    assert [row.content for row in found] == ROWS and not any(row.fault for row in found)
    assert [row.where.rpartition(":")[2] for row in found] == ["1", "2"]


def test_a_parquet_file_of_another_name(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.PARQUET")
    (tmp_path / "a.PARQUET").rename(tmp_path / "data")
    assert [row.content for row in read_rows(str(tmp_path / "data"), "data.path")] == ROWS


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.csv", b"prompt,answer\n1+1,2\n", "'{}': *.parquet, *.jsonl (an object a line) and *.json"),
        ("a.jsonl.gz", b"\x1f\x8b", "this is another format"),
        ("a.xlsx", b"PK", "this is another format"),
        ("a.jsonl", "\ufeffa".encode("utf-16"), "is UTF-16; UTF-8 is read"),
        ("a.json", b'[{"a": 1},\n{"b": }]', "{}:2: not JSON: Expecting value; *.parquet, *.jsonl"),
        ("a.json", b"[" * 100_000, "not JSON"),
        ("a.json", b"[]", "'{}' is empty"),
    ],
)
def test_what_is_not_read_says_what_is(tmp_path, name, data, said):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InputError) as error:
        list(read_rows(str(path), "data.path"))
    assert said.format(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "data", "fault"),
    [
        ("a.jsonl", b"prompt,answer\n1,2\n", "not JSON: Expecting value; *.parquet, *.jsonl (an object a line)"),
        ("a.jsonl", b'[\n{"a": 1}\n]', "not JSON: Expecting value; *.parquet, *.jsonl (an object a line)"),
        ("a.json", b'{\n"data": []}', "not JSON: Expecting property name"),
        ("a.json", b'[{"a": 1}, 3]', "needs an object"),
    ],
)
def test_the_first_row_that_is_none_says_what_is_read(tmp_path, name, data, fault):
    (tmp_path / name).write_bytes(data)
    assert next(row.fault for row in read_rows(str(tmp_path / name), "data.path") if row.fault).startswith(fault)
