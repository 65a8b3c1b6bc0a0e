"""Files of a data set: one file, or the files of a split of a folder, as published data sets are laid out.

A split is told by the names of files or folders: train-00000-of-00002.parquet, data/test.parquet,
validation/0000.parquet.
"""

import os
import re

from specrl_jax.errors import InputError

PARQUET = (".parquet", ".pq")
KINDS = (*PARQUET, ".jsonl")
READ = "*.parquet, *.jsonl (an object a line) and *.json (a list of objects, or an object a line)"
# Formats that are refused by their name, which a program would take for lines of JSON.
_TABLES = (".csv", ".tsv", ".xls", ".xlsx", ".arrow", ".feather", ".ipc", ".orc", ".avro", ".npz", ".pkl", ".pickle")
_PACKED = (".gz", ".zip", ".zst", ".bz2", ".xz", ".tar", ".tgz", ".lz4", ".db", ".sqlite", ".yaml", ".yml", ".xml")
OTHERS = (*_TABLES, *_PACKED)
# A split by the words that stand for it in names.
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")
# Splits that a folder stands for, by the config key that names it; the first that there is.
DEFAULT_SPLITS = {"data.path": ("train",), "eval.path": ("validation", "test")}


def data_files(path: str, key: str) -> list[str]:
    """Return the files that a path stands for: a file; FOLDER:SPLIT; or FOLDER, its split of `DEFAULT_SPLITS`.

    Args:
      key: the config key of the path. Under data.path, all files of a folder without splits are its training files.
    Raises:
      InputError: where there is none, naming what there is.
    """
    folder, split = _folder_and_split(path)
    if not folder:
        # What is no file, as a named pipe, is refused where it is read.
        if os.path.exists(path):
            return [path]
        raise InputError(f"{key}: no file '{path}'{_how_to_get(path)}")
    splits = folder_splits(folder, key)
    for name in (split,) if split else DEFAULT_SPLITS.get(key, ("train",)):
        if name in splits:
            return splits[name]
    if not split and [*splits] == [""] and key == "data.path":
        return splits[""]
    there = ", ".join(sorted(filter(None, splits))) or "none"
    needed = f"'{split}'" if split else " or ".join(DEFAULT_SPLITS.get(key, ("train",)))
    raise InputError(f"{key}: '{folder}' has no split {needed}; there are {there}: {folder}:SPLIT names one")


def own_validation(path: str) -> str:
    """Return FOLDER:SPLIT of the validation or test split of data.path's folder; '' where there is none."""
    folder, _ = _folder_and_split(path)
    splits = folder_splits(folder, "data.path") if folder else {}
    return next((f"{folder}:{name}" for name in DEFAULT_SPLITS["eval.path"] if name in splits), "")


def folder_splits(folder: str, key: str) -> dict[str, list[str]]:
    """Return the files of each split, sorted; "" for files whose name tells none.

    Raises InputError for a folder without data, and for one with several data sets.
    """
    files = sorted(
        os.path.relpath(os.path.join(place, name), folder)
        for place, _, names in os.walk(folder)
        for name in names
        if name.endswith(KINDS)
    )
    if not files:
        named = ", ".join(f"*{kind}" for kind in KINDS)
        raise InputError(f"{key}: '{folder}' holds no files {named}; a *.json file is read where it is named itself")
    sets = {file.split(os.sep)[0] if os.sep in file else "" for file in files}
    sets = {"" if name == "data" or _canonical(name) else name for name in sets}
    if len(sets) > 1:
        named_sets = " or ".join(sorted(os.path.join(folder, name) for name in sets if name))
        raise InputError(f"{key}: '{folder}' holds several data sets; name one: {named_sets}")
    splits: dict[str, list[str]] = {}
    for file in files:
        splits.setdefault(_split_of(file), []).append(os.path.join(folder, file))
    return splits


def _folder_and_split(path: str) -> tuple[str, str]:
    """Return (FOLDER, SPLIT or "") of a path that names a folder; ("", "") for others."""
    if os.path.isdir(path):
        return path, ""
    folder, _, split = path.rpartition(":")
    return (folder, split) if split and os.path.isdir(folder) else ("", "")


def _split_of(file: str) -> str:
    """Return the split of a file: its whole name before the number of the shard, or the word in its path."""
    stem = os.path.splitext(os.path.basename(file))[0]
    if shard := _SHARD.fullmatch(stem):
        return _canonical(shard[1]) or shard[1]
    parts = [stem, *reversed(os.path.dirname(file).split(os.sep))]
    words = [word for part in parts for word in re.split(r"[-._]", part)]
    return next(filter(None, map(_canonical, words)), "")


def _canonical(word: str) -> str:
    return next((split for split, words in _WORDS.items() if word.lower() in words), "")


def _how_to_get(path: str) -> str:
    """Return what to do about a missing path that may be the id of a data set on the hub."""
    if not re.fullmatch(r"[\w-]+/[\w.-]+", path) or path.endswith(KINDS) or os.path.isdir(os.path.dirname(path)):
        return ""
    folder = os.path.join("data", os.path.basename(path))
    return f"; get it with `hf download {path} --repo-type dataset --local-dir {folder}`, and name {folder}"
