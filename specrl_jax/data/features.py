"""Rollouts on disk with the policy's features for draft training: written in shards, read by row in any order.

A shard is one safetensors file of several rollouts, truncated to the longest; memory mapping loads only the rows that
are read. Bytes per token: 4 for the token, 1 for who wrote it, (A + 1) D numbers for the policy's features, 4 for its
normaliser (Qwen3-8B with three features in bfloat16: 32.8 kB).
"""

import json
import os
from typing import Annotated, NamedTuple

import numpy as np
import pydantic
import safetensors
import safetensors.numpy

from specrl_jax.core import atomic_write, naming
from specrl_jax.errors import InputError
from specrl_jax.json_files import INDEX_BYTES, Checked, check, read_json, require_regular

MANIFEST = "features.json"
_KEY = "pretrain.features: "


class Manifest(Checked):
    """The content of features.json."""

    made_from: dict[str, object]
    shards: list[Annotated[int, pydantic.Field(ge=1)]]  # rows of each


class FeatureRow(NamedTuple):
    """One rollout of T tokens, or several with a leading axis; zeros beyond `length`."""

    tokens: np.ndarray  # [T] int32, prompt then response
    prompt_length: np.ndarray  # [] int32, tokens
    length: np.ndarray  # [] int32, prompt and response
    environment: np.ndarray  # [T] bool, tokens of the response that an environment wrote
    aux: np.ndarray  # [T, A, D], inputs of A of the policy's layers; A may be 0
    hidden: np.ndarray  # [T, D], input of its lm_head
    normaliser: np.ndarray  # [T] float32, logsumexp of its logits / temperature


class FeatureStore:
    """Random access to the rows of a folder, as a source of grain's MapDataset; `add` appends a shard.

    Args:
      folder: created if it does not exist.
      made_from: everything that determines the content (policy, prompts, temperature), as JSON.
      length: T of the returned rows, tokens.
    Raises:
      InputError: if the folder holds rows that were made from something else.
    """

    def __init__(self, folder: str, made_from: dict[str, object], length: int) -> None:
        self._folder, self._length = folder, length
        self._made_from, self._shards = made_from, list[int]()
        path = os.path.join(folder, MANIFEST)
        if os.path.exists(path):
            manifest = check(Manifest, read_json(path, INDEX_BYTES, _KEY), _KEY + path)
            recorded, self._shards = manifest.made_from, manifest.shards
            other = sorted(key for key in made_from.keys() | recorded.keys() if recorded.get(key) != made_from.get(key))
            if other:
                raise InputError(
                    f"pretrain.features: {folder} was made from another {', '.join(other)}; name or empty a folder"
                )
        os.makedirs(folder, exist_ok=True)
        self._open: dict[int, safetensors.safe_open] = {}

    def add(self, rows: FeatureRow) -> None:
        """Append `rows`, with a leading axis, as one shard. An interrupted run keeps the earlier shards."""
        longest = int(rows.length.max())
        arrays = {name: x if x.ndim == 1 else x[:, :longest] for name, x in rows._asdict().items()}
        arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
        with naming(path := self._path(len(self._shards))):
            safetensors.numpy.save_file(arrays, path)
        self._shards.append(len(rows.length))
        with atomic_write(os.path.join(self._folder, MANIFEST)) as file:
            json.dump({"made_from": self._made_from, "shards": self._shards}, file, indent=2)

    def __len__(self) -> int:
        return sum(self._shards)

    def __getitem__(self, index: int) -> FeatureRow:
        ends = np.cumsum(self._shards)
        number = int(np.searchsorted(ends, index, side="right"))
        row = int(index - (ends[number] - self._shards[number]))
        if number not in self._open:
            self._open[number] = self._shard(number)
        file = self._open[number]
        return FeatureRow(*[self._padded(file.get_slice(name)[row]) for name in FeatureRow._fields])

    def tokens(self) -> list[np.ndarray]:
        """Return what the policy wrote in each row, int32: its response but for an environment's tokens."""
        texts = []
        for number in range(len(self._shards)):
            with self._shard(number) as file:
                names = "tokens", "environment", "prompt_length", "length"
                parts = zip(*(file.get_tensor(name) for name in names))
            texts += [row[start:end][~written[start:end]] for row, written, start, end in parts]
        return texts

    def _shard(self, number: int) -> safetensors.safe_open:
        """Open a shard. Raises InputError where it is missing, damaged, or not as the manifest says."""
        path = self._path(number)
        require_regular(path, _KEY)
        try:
            file = safetensors.safe_open(path, framework="numpy")
        except Exception as error:  # the library's own error type changed its home between versions
            raise InputError(f"{_KEY}{path} is not a readable safetensors file: {error}") from None
        lacking = sorted(set(FeatureRow._fields) - set(file.keys()))
        if lacking or file.get_slice("length").get_shape() != [self._shards[number]]:
            what = f"lacks {lacking[0]}" if lacking else f"does not hold {self._shards[number]} rows"
            raise InputError(f"{_KEY}{path} {what}; empty the folder")
        return file

    def _padded(self, x: np.ndarray) -> np.ndarray:
        x = np.asarray(x)
        return np.pad(x, [(0, self._length - len(x))] + [(0, 0)] * (x.ndim - 1)) if x.ndim else x

    def _path(self, number: int) -> str:
        return os.path.join(self._folder, f"rows-{number:05d}.safetensors")
