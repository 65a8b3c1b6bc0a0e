"""Rollouts on disk with what a draft learns from them: written shard by shard, read row by row in any order.

A shard is one safetensors file of some rollouts, cut to its longest; memory maps bring in only the rows that are read.
Bytes a token: 4 for the text, (A + 1) D numbers for the policy's features, 4 for its normaliser (Qwen3-8B with three
features in bfloat16: 32.8 kB).
"""

import json
import os
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy

from specrl_jax.core import InputError, read_json

MANIFEST = "features.json"


class FeatureRow(NamedTuple):
    """One rollout of T tokens, or with a leading axis several; zeros beyond `length`."""

    tokens: np.ndarray  # [T] int32, prompt then response
    prompt_length: np.ndarray  # [] int32, tokens
    length: np.ndarray  # [] int32, prompt and response
    aux: np.ndarray  # [T, A, D], the policy's residual stream entering A layers; A may be 0
    hidden: np.ndarray  # [T, D], what its unembedding reads
    normaliser: np.ndarray  # [T] float32, logsumexp of its logits / temperature


class FeatureStore:
    """Random access to the rows of a folder, as grain's MapDataset reads a source; `add` appends a shard.

    Args:
      folder: made where it is not there.
      made_from: what decides the content (policy, prompts, temperature), as JSON can hold it.
      length: T of the rows that are given back, tokens.
    Raises:
      InputError: where the folder holds rows that were made from something else.
    """

    def __init__(self, folder: str, made_from: dict[str, Any], length: int) -> None:
        self._folder, self._length = folder, length
        self._manifest: dict[str, Any] = {"made_from": made_from, "shards": []}
        path = os.path.join(folder, MANIFEST)
        if os.path.exists(path):
            self._manifest = read_json(path)
            found = self._manifest.get("made_from", {})
            other = sorted(key for key in made_from.keys() | found.keys() if found.get(key) != made_from.get(key))
            if other:
                raise InputError(
                    f"pretrain.features: {folder} was made from another {', '.join(other)}; name or empty a folder"
                )
        os.makedirs(folder, exist_ok=True)
        self._ends = np.cumsum(self._manifest["shards"], dtype=np.int64)
        self._open: dict[int, Any] = {}

    def add(self, rows: FeatureRow) -> None:
        """Appends `rows`, with a leading axis, as one shard. An interrupted run keeps the shards before it."""
        longest = int(rows.length.max())
        arrays = {name: x if x.ndim == 1 else x[:, :longest] for name, x in rows._asdict().items()}
        number = len(self._manifest["shards"])
        arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
        safetensors.numpy.save_file(arrays, self._path(number))
        self._manifest["shards"].append(len(rows.length))
        path = os.path.join(self._folder, MANIFEST)
        with open(path + ".tmp", "w") as file:
            json.dump(self._manifest, file, indent=2)
        os.replace(path + ".tmp", path)
        self._ends = np.cumsum(self._manifest["shards"], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> FeatureRow:
        number = int(np.searchsorted(self._ends, index, side="right"))
        row = int(index - (self._ends[number - 1] if number else 0))
        if number not in self._open:
            self._open[number] = safetensors.safe_open(self._path(number), framework="numpy")
        file = self._open[number]
        return FeatureRow(*[self._padded(file.get_slice(name)[row]) for name in FeatureRow._fields])

    def tokens(self) -> list[np.ndarray]:
        """The responses of all rows, int32, without their features."""
        found = []
        for number in range(len(self._ends)):
            with safetensors.safe_open(self._path(number), framework="numpy") as file:
                tokens, starts, ends = (file.get_tensor(name) for name in ("tokens", "prompt_length", "length"))
            found += [row[start:end] for row, start, end in zip(tokens, starts, ends)]
        return found

    def _padded(self, x: np.ndarray) -> np.ndarray:
        x = np.asarray(x)
        return np.pad(x, [(0, self._length - len(x))] + [(0, 0)] * (x.ndim - 1)) if x.ndim else x

    def _path(self, number: int) -> str:
        return os.path.join(self._folder, f"rows-{number:05d}.safetensors")
