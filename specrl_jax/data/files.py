"""Rows of JSONL and Parquet files and of folders of them, with their positions for error messages."""

import json
import os
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow
import pyarrow.parquet

from specrl_jax.data.splits import PARQUET, data_files
from specrl_jax.errors import InputError


class Row(NamedTuple):
    where: str  # file:line, or file:number of a Parquet row; both count from 1
    content: dict[str, object]
    fault: str  # why it is not an object; '' if it is one


def read_rows(path: str, key: str) -> Iterator[Row]:
    """Yield every row of a path's files (`data_files`), without blank lines of JSONL; a file's name decides between
    Parquet and JSONL.

    Args:
      key: the config key that names the path.
    Raises:
      InputError: for a file that is missing, unreadable, empty or not valid Parquet. A line that is not a JSON object
        is returned as a Row with a fault, since some callers skip it.
    """
    for file in data_files(path, key):
        yield from _file_rows(file, key)


def _file_rows(path: str, key: str) -> Iterator[Row]:
    if not os.path.isfile(path):
        raise InputError(f"{key}: no file '{path}'")
    read = _parquet_rows if path.endswith(PARQUET) else _jsonl_rows
    empty = True
    try:
        for row in read(path, key):
            empty = False
            yield row
    except OSError as error:
        raise InputError(f"{key}: cannot read '{path}': {error.strerror}") from None
    if empty:
        raise InputError(f"{key}: '{path}' is empty")


def _jsonl_rows(path: str, key: str) -> Iterator[Row]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parse(f"{path}:{number}", line)


def _parse(where: str, line: bytes) -> Row:
    try:
        content = json.loads(line.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8 or JSON, thousands of digits or brackets
        return Row(where, {}, f"not JSON: {getattr(error, 'msg', error)}")
    return Row(where, content, "") if isinstance(content, dict) else Row(where, {}, "needs an object")


def _parquet_rows(path: str, key: str) -> Iterator[Row]:
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for content in batch.to_pylist():
                    number += 1
                    yield Row(f"{path}:{number}", content, "")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{key}: {path}: not a readable Parquet file after row {number}: {reason}") from None
