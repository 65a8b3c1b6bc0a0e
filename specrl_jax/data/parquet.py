"""Rows of Parquet files of strangers in bounded memory: a file of 1 KiB may stand for gigabytes.

A value that is repeated is stored once, and pages are compressed. So the footer says how many rows are read at once,
texts stay in their dictionaries until the size of a row is known, and a file that stands for far more than it has is
refused.
"""

import functools
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from specrl_jax.json_files import MEBIBYTE

BATCH_BYTES = 16 * MEBIBYTE  # of rows that are read at once, as Python objects
BATCH_ROWS = 1024
# A row group may take this much memory, and beyond it EXPANSION times its bytes in the file; texts compress to 1/3.
UNSUSPECTED, EXPANSION = 64 * MEBIBYTE, 64
ELEMENT = 16  # bytes of an entry of a list while it is read: two levels, an index, and where it ends
# Encodings of texts that pyarrow keeps in dictionaries, and those in which a value may stand for one before it.
KEPT = {"PLAIN", "RLE", "BIT_PACKED", "RLE_DICTIONARY", "PLAIN_DICTIONARY"}
REPEATING = {"RLE_DICTIONARY", "PLAIN_DICTIONARY", "DELTA_BYTE_ARRAY"}
OBJECT = 32  # bytes of a Python object, beside its text
SHARED = 256  # characters of texts that are kept once


class TooLarge(Exception):
    """The columns of a row group stand for much more than the file has."""


def parquet_rows(path: str, columns: Collection[str] | None, longest: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (row, ""), or ({}, the largest column) of a row of more than `longest` bytes.

    Args:
      columns: names of those that are read, without those that the file lacks; None: all.
    Raises TooLarge, what pyarrow raises, and UnicodeDecodeError.
    """
    with pyarrow.parquet.ParquetFile(path) as file:
        metadata, plain = file.metadata, file.schema_arrow
        leaves = [file.schema.column(i) for i in range(len(file.schema))]
    names = [name for name in plain.names if columns is None or name in columns]
    plain = pyarrow.schema([plain.field(name) for name in names])
    chunks = [[metadata.row_group(g).column(i) for g in range(metadata.num_row_groups)] for i in range(len(leaves))]
    texts = [
        leaf.path
        for leaf, own in zip(leaves, chunks)
        if leaf.physical_type == "BYTE_ARRAY" and all(KEPT.issuperset(chunk.encodings) for chunk in own)
    ]
    long_texts: dict[str, str] = {}
    with pyarrow.parquet.ParquetFile(path, metadata=metadata, read_dictionary=texts) as file:
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            count = _rows_at_once(group, leaves, names)
            if not names:
                yield from (({}, "") for _ in range(group.num_rows))
                continue
            for batch in file.iter_batches(count, row_groups=[number], columns=names, use_threads=False):
                for row, large in _batch_rows(batch, plain, longest):
                    yield {name: _shared(value, long_texts) for name, value in row.items()}, large


def _rows_at_once(group: pyarrow.parquet.RowGroupMetaData, leaves: list[Any], names: list[str]) -> int:
    """Return how many rows to read at once. Raises TooLarge."""
    expected, stored, row, largest = 0, 0, 0, (0, "")
    for i, leaf in enumerate(leaves):
        if not any(leaf.path == name or leaf.path.startswith(f"{name}.") for name in names):
            continue
        chunk, nested = group.column(i), leaf.max_repetition_level > 0
        size = max(chunk.total_uncompressed_size, ELEMENT * chunk.num_values * nested)
        # Where texts are not kept in dictionaries, each may repeat what is there once.
        repeats = not KEPT.issuperset(chunk.encodings) and bool(REPEATING.intersection(chunk.encodings))
        if repeats and nested:
            size *= chunk.num_values
        expected, stored = expected + size, stored + chunk.total_compressed_size
        largest = max(largest, (size, leaf.path))
        row += size if repeats else -(-size // max(1, group.num_rows))
    if expected > UNSUSPECTED and expected > EXPANSION * stored:
        raise TooLarge(
            f"{stored:,} bytes of the file stand for {expected:,}, most of them in column '{largest[1]}'; such a file "
            "is not read"
        )
    return min(BATCH_ROWS, max(1, BATCH_BYTES // max(1, row)))


def _batch_rows(
    batch: pyarrow.RecordBatch, plain: pyarrow.Schema, longest: int
) -> Iterator[tuple[dict[str, Any], str]]:
    sizes = np.stack([_sizes(column) for column in batch.columns])  # [columns, rows] bytes
    ends, start = np.cumsum(sizes.sum(0)), 0
    while start < len(ends):
        before = ends[start - 1] if start else 0
        if ends[start] - before > longest:
            yield {}, batch.schema.names[int(sizes[:, start].argmax())]
            start += 1
            continue
        end = max(start + 1, int(np.searchsorted(ends, before + BATCH_BYTES, "right")))
        # Taken, since the cast of a slice would make texts of all elements of its lists.
        for row in batch.take(pyarrow.array(np.arange(start, end))).cast(plain).to_pylist():
            yield row, ""
        start = end


def _sizes(array: pyarrow.Array) -> np.ndarray:
    """Return the bytes of each value as a Python object, [len(array)] int64."""
    kind = array.type
    if pyarrow.types.is_dictionary(kind):
        values = np.append(_sizes(array.dictionary), OBJECT)
        return values[array.indices.fill_null(len(values) - 1).to_numpy(zero_copy_only=False)]
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_map(kind):
        before = np.concatenate([[0], np.cumsum(_sizes(array.values))])
        return OBJECT + np.diff(before[array.offsets.to_numpy()])
    if pyarrow.types.is_struct(kind):
        fields = (_sizes(array.field(i)) for i in range(kind.num_fields))
        return functools.reduce(np.add, fields, np.full(len(array), OBJECT, np.int64))
    if any(of(kind) for of in (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_binary)):
        lengths = pyarrow.compute.binary_length(array).fill_null(0)
        return OBJECT + lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    return np.full(len(array), OBJECT + array.nbytes // max(1, len(array)), np.int64)


def _shared(value: Any, texts: dict[str, str]) -> Any:
    """Return a value whose long texts are those in `known`, to which it adds its own: equal ones take memory once."""
    if isinstance(value, str):
        return texts.setdefault(value, value) if len(value) > SHARED else value
    if isinstance(value, dict):
        return {key: _shared(inner, texts) for key, inner in value.items()}
    return [_shared(inner, texts) for inner in value] if isinstance(value, list) else value
