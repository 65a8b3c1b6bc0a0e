"""Rows of JSONL, JSON and Parquet files and of folders of them, with their positions for error messages.

What a row takes of memory is bounded, whatever the file's size.
"""

import json
import os
from collections.abc import Collection, Iterator
from typing import NamedTuple

import pyarrow
import pyarrow.parquet

from specrl_jax.data.parquet import TooLarge, parquet_rows
from specrl_jax.data.splits import OTHERS, PARQUET, READ, data_files
from specrl_jax.errors import InputError
from specrl_jax.json_files import MEBIBYTE

# Of a line, and of the columns of a Parquet row. The longest of LiveCodeBench's has 80 MB.
ROW_BYTES = 128 * MEBIBYTE
LIST_BYTES = 1024 * MEBIBYTE  # of a *.json file with a list, which is read whole
_BOM, _UTF16 = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
_PARQUET = b"PAR1"  # begins such a file, whatever its name


class DataRow(NamedTuple):
    where: str  # file:line, or file:number of a Parquet row or of an object in a list; all count from 1
    content: dict[str, object]
    fault: str  # why it is not an object; '' if it is one


def read_rows(path: str, key: str, columns: Collection[str] | None = None) -> Iterator[DataRow]:
    """Yield every row of a path's files (`data_files`), without blank lines of JSONL.

    Args:
      key: the config key that names the path.
      columns: those that are asked for, of Parquet files: others may be missing from the rows. None: all.
    Raises:
      InputError: for a file that is missing, unreadable, empty or of another kind. A line that is not a JSON object, or
        a row that is too large, is returned as a DataRow with a fault, since some callers skip it.
    """
    for file in data_files(path, key):
        empty = True
        try:
            for row in _file_rows(file, key, columns):
                empty = False
                yield row
        except OSError as error:
            raise InputError(f"{key}: cannot read '{file}': {error.strerror}") from None
        if empty:
            raise InputError(f"{key}: '{file}' is empty")


def _file_rows(path: str, key: str, columns: Collection[str] | None) -> Iterator[DataRow]:
    if not os.path.isfile(path):
        raise InputError(f"{key}: no file '{path}'")
    if path.lower().endswith(OTHERS):
        raise InputError(f"{key}: '{path}': {READ} are read; this is another format")
    with open(path, "rb") as file:
        start = file.read(4096)
    if path.lower().endswith(PARQUET) or start.startswith(_PARQUET):
        yield from _parquet_rows(path, key, columns)
    elif start.startswith(_UTF16):
        raise InputError(f"{key}: '{path}' is UTF-16; UTF-8 is read")
    elif path.lower().endswith(".json") and start.removeprefix(_BOM).lstrip().startswith(b"["):
        yield from _listed_rows(path, key)
    else:
        yield from _jsonl_rows(path)


def _jsonl_rows(path: str) -> Iterator[DataRow]:
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(ROW_BYTES + 1), b""), 1):
            where, first = f"{path}:{number}", number == 1
            if len(line) > ROW_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(ROW_BYTES)
                yield DataRow(where, {}, f"longer than {ROW_BYTES // MEBIBYTE} MiB")
            elif (line := line.removeprefix(_BOM)).strip():  # also behind the first line, where files were joined
                row = _parse(where, line)
                yield row._replace(fault=f"{row.fault}; {READ} are read") if row.fault and first else row


def _listed_rows(path: str, key: str) -> Iterator[DataRow]:
    """Yield the objects of a file that is one list of them."""
    with open(path, "rb") as file:
        data = file.read(LIST_BYTES + 1)
    if len(data) > LIST_BYTES:
        raise InputError(f"{key}: '{path}': a list of more than {LIST_BYTES // MEBIBYTE} MiB; write an object a line")
    try:
        content = json.loads(data.removeprefix(_BOM).decode())
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(f"{key}: {path}{line}: not JSON: {getattr(error, 'msg', error)}; {READ} are read") from None
    for number, value in enumerate(content, 1):
        yield _row(f"{path}:{number}", value)


def _parse(where: str, line: bytes) -> DataRow:
    try:
        return _row(where, json.loads(line.decode()))
    except (ValueError, RecursionError) as error:  # not UTF-8 or JSON, thousands of digits or brackets
        return DataRow(where, {}, f"not JSON: {getattr(error, 'msg', error)}")


def _row(where: str, content: object) -> DataRow:
    return DataRow(where, content, "") if isinstance(content, dict) else DataRow(where, {}, "needs an object")


def _parquet_rows(path: str, key: str, columns: Collection[str] | None) -> Iterator[DataRow]:
    number = 0
    try:
        for content, column in parquet_rows(path, columns, longest=ROW_BYTES):
            number += 1
            large = f"column '{column}' of this row takes more than {ROW_BYTES // MEBIBYTE} MiB" if column else ""
            yield DataRow(f"{path}:{number}", content, large)
    except TooLarge as error:
        raise InputError(f"{key}: {path}: {error}") from None
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{key}: {path}: not a readable Parquet file after row {number}: {reason}") from None
