"""Read and write parameter trees as folders of safetensors, in the Hugging Face names and layouts of each ParamSpec.

Loading streams: a tensor is read when its leaf is built, straight into the leaf's shards. Its file is opened for that
tensor alone, so that mapped pages do not accumulate. Leaves are loaded from largest to smallest, which keeps the peak
memory near the checkpoint's size.
"""

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from typing import Annotated, NamedTuple

import einops
import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import safetensors
import safetensors.numpy

from specrl_jax.core import Params, naming
from specrl_jax.errors import InputError
from specrl_jax.io.config_json import ConfigJson
from specrl_jax.json_files import INDEX_BYTES, Checked, check, read_json, require_regular
from specrl_jax.models.layers import ParamSpec, Specs
from specrl_jax.sharding import Partitioner

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_FILE_BYTES = 5 * 2**30
# As safetensors spells them. Others are quantised weights, or no weights.
FLOATING = ("F64", "F32", "F16", "BF16")

Index = tuple[slice, ...]


def _beside(name: str) -> str:
    # A path would read files outside the folder.
    if os.path.basename(name) != name or not name.endswith(".safetensors") or "\0" in name:
        raise ValueError("the name of a .safetensors file in the same folder is needed")
    return name


class ShardIndex(Checked):
    """The index of weights in several files."""

    weight_map: dict[str, Annotated[str, pydantic.AfterValidator(_beside)]]  # a tensor's name -> its file


class _Place(NamedTuple):
    """File and name of a tensor."""

    path: str
    name: str  # there


@dataclasses.dataclass(frozen=True)
class TensorFolder:
    """A folder to read from. Every method raises InputError."""

    path: str
    key: str  # of our config, which names the folder, for messages
    get_it: str = ""  # advice for the message about a missing folder
    prefix: str = ""  # of names that the folder may have without it, as transformers saves a model without its lm_head

    def config(self) -> ConfigJson:
        """Read config.json."""
        path = self._require("config.json")
        return ConfigJson(read_json(path, prefix=f"{self.key}: "), self.path, self.key)

    def check(self, specs: Specs) -> None:
        """Check from headers alone that every tensor of `specs` is present, floating point and of the right shape."""
        shapes_needed = {name: _hf_shape(spec) for spec in jax.tree.leaves(specs) for name in _names(spec)}
        missing = sorted(shapes_needed.keys() - self._places.keys())
        if missing:
            raise InputError(f"{self.key}: '{self.path}' lacks {len(missing)} tensors, the first is {missing[0]}")
        for path in sorted({self._places[name].path for name in shapes_needed}):
            with self._open(path) as file:
                present = set(file.keys())
                for name, shape in shapes_needed.items():
                    place = self._places[name]
                    if place.path != path:
                        continue
                    if place.name not in present:
                        raise InputError(f"{self.key}: {INDEX} says {path} holds {place.name}, and it does not")
                    header = file.get_slice(place.name)
                    if (stored := tuple(header.get_shape())) != shape:
                        raise InputError(f"{self.key}: {name} has shape {stored}, {shape} is needed")
                    if (dtype := header.get_dtype()) not in FLOATING:
                        kinds = ", ".join(FLOATING)
                        raise InputError(f"{self.key}: {name} in {path} is {dtype}; one of {kinds} is needed")

    def load(self, specs: Specs, partition: Partitioner, dtype: jnp.dtype | None = None) -> Params:
        """Read the tree of `specs`, laid out by `partition`; dtype None = each tensor's own. Every value is finite."""
        self.check(specs)
        leaves, treedef = jax.tree.flatten(specs)
        shardings = jax.tree.leaves(partition.shardings(specs))
        loaded: dict[int, jax.Array] = {}
        for i in sorted(range(len(leaves)), key=lambda i: -leaves[i].size):
            read = self._leaf_reader(leaves[i], dtype)
            # Waiting copies one leaf at a time; the host would otherwise read ahead of the copies to the device
            # (measured: peak 1.36 times the checkpoint instead of 1.07).
            loaded[i] = jax.block_until_ready(jax.make_array_from_callback(leaves[i].shape, shardings[i], read))
        return jax.tree.unflatten(treedef, [loaded[i] for i in range(len(leaves))])

    def names(self) -> list[str]:
        """Return the name of every tensor."""
        return list(self._places)

    def beyond(self, specs: Specs) -> list[str]:
        """Return the names, sorted, of the tensors that `specs` do not have."""
        return sorted(self._places.keys() - {name for spec in jax.tree.leaves(specs) for name in _names(spec)})

    def tensor(self, name: str) -> np.ndarray:
        """Read one tensor by its Hugging Face name."""
        if name not in self._places:
            raise InputError(f"{self.key}: '{self.path}' lacks the tensor {name}")
        place = self._places[name]
        with self._open(place.path) as file:
            return file.get_tensor(place.name)

    @functools.cached_property
    def _places(self) -> dict[str, _Place]:
        """Map each tensor's name, with the prefix where there is such a tensor without it, to where it stands."""
        # Of a model that also reads images, the text part's tensors have a name more.
        text = f"{self.prefix}language_model."
        places, prefixed = dict[str, _Place](), dict[str, _Place]()
        for name, path in self._files().items():
            places[self.prefix + name.removeprefix(text) if name.startswith(text) else name] = _Place(path, name)
        for name, place in places.items():
            bare = name.startswith((self.prefix, "lm_head.", "mtp.")) or self.prefix + name in places
            prefixed[name if bare else self.prefix + name] = place
        return prefixed

    def _files(self) -> dict[str, str]:
        """Map the name of each tensor to the path of its file; one file comes before an index, as in transformers."""
        path, single = (os.path.join(self.path, name) for name in (INDEX, SINGLE))
        if os.path.exists(path) and os.path.exists(single):
            warning = f"{self.key}: {single} is read, as transformers does, and not the files of {INDEX}"
            warnings.warn(warning, stacklevel=2)
        elif os.path.exists(path):
            index = check(ShardIndex, read_json(path, INDEX_BYTES, f"{self.key}: "), f"{self.key}: {path}")
            paths = {file: self._require(file) for file in set(index.weight_map.values())}
            return {name: paths[file] for name, file in index.weight_map.items()}
        path = self._require(SINGLE)
        with self._open(path) as file:
            return dict.fromkeys(file.keys(), path)

    def _require(self, name: str) -> str:
        if not os.path.isdir(self.path):
            raise InputError(f"{self.key}: no folder '{self.path}'" + (f"; {self.get_it}" if self.get_it else ""))
        path = os.path.join(self.path, name)
        if not os.path.exists(path):
            raise InputError(f"{self.key}: '{self.path}' has no {name}")
        require_regular(path, f"{self.key}: ")
        return path

    def _open(self, path: str) -> safetensors.safe_open:
        try:
            return safetensors.safe_open(path, framework="numpy")
        except Exception as error:  # the library's own error type changed its home between versions
            raise InputError(f"{self.key}: {path} is not a readable safetensors file: {error}") from None

    def _leaf_reader(self, spec: ParamSpec, dtype: jnp.dtype | None) -> Callable[[Index | None], np.ndarray]:
        """Return a function from a shard's index to its values; it reads only the shard's layers and experts.

        A shard with a value that is not finite (in its own dtype or in `dtype`) is refused.
        """
        leading = _leading(spec)

        def read(index: Index | None) -> np.ndarray:
            assert index is not None, "the sharding knows the leaf's shape"
            outer, inner = index[: len(leading)], index[len(leading) :]
            ranges = [range(size)[part] for size, part in zip(leading, outer)]
            indices = list(np.ndindex(*map(len, ranges)))
            out = np.empty(0)
            for index_of_part in indices:
                name = _slice_name(spec, tuple(r[i] for r, i in zip(ranges, index_of_part)))
                part = _from_hf(spec, self.tensor(name)[_rows(spec)])[inner]
                if index_of_part is indices[0]:
                    out = np.empty((*map(len, ranges), *part.shape), dtype or part.dtype)
                with np.errstate(over="ignore"):  # refused below
                    out[index_of_part] = part
                # Under 1 ns a value, less than reading and widening it.
                if bad := out[index_of_part].size - np.count_nonzero(np.isfinite(out[index_of_part])):
                    raise InputError(
                        f"{self.key}: {name} in '{self.path}' has {bad} values that are not finite, of {part.size}"
                    )
            return out

        return read


def save_folder(
    folder: str, tensors: Iterable[tuple[str, np.ndarray]], config: dict[str, object], *, copies: Iterable[str] = ()
) -> None:
    """Write safetensors, config.json and copies of other files.

    Everything is written beside the folder first, so that a save that fails leaves an earlier one unchanged. One
    that is killed while it moves the files leaves a folder without weights, which readers refuse.
    """
    partial = os.path.normpath(folder) + ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with naming(partial):
            os.makedirs(partial)
            _write_shards(partial, _shards(tensors))
            with open(os.path.join(partial, "config.json"), "w") as file:
                json.dump(config, file, indent=2)
            for path in copies:
                shutil.copy(path, partial)
        os.makedirs(folder, exist_ok=True)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    # What a reader looks at first goes first and comes last: between them nothing is read, no mixture either.
    for name in (INDEX, SINGLE):
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, name))
    new = sorted(os.listdir(partial), key=lambda name: (name in (INDEX, SINGLE), name))
    for name in new:
        os.replace(os.path.join(partial, name), os.path.join(folder, name))
    # Weights of an earlier save under other file names would be read instead of these, or beside them.
    for name in set(os.listdir(folder)) - set(new):
        if name.startswith("model") and name.endswith(".safetensors"):
            os.remove(os.path.join(folder, name))
    os.rmdir(partial)


def hf_tensors(specs: Specs, params: Params, dtype: str) -> Iterable[tuple[str, np.ndarray]]:
    """Yield (Hugging Face name, tensor) of every leaf."""
    shared: dict[str, list[tuple[ParamSpec, jax.Array]]] = {}  # leaves by the tensor that they are rows of
    for spec, leaf in zip(jax.tree.leaves(specs), jax.tree.leaves(params), strict=True):
        shared.setdefault(spec.hf_name, []).append((spec, leaf))
    for parts in shared.values():
        parts.sort(key=lambda part: part[0].hf_rows)
        arrays = [np.asarray(leaf).astype(jnp.dtype(dtype)) for _, leaf in parts]
        for i in np.ndindex(*_leading(first := parts[0][0])):
            rows = [_rearrange_to_hf(spec, array[i]) for (spec, _), array in zip(parts, arrays)]
            yield _slice_name(first, i), np.ascontiguousarray(rows[0] if len(rows) == 1 else np.concatenate(rows))


def _slice_name(spec: ParamSpec, index: tuple[int, ...]) -> str:
    if spec.hf_layers:
        index = (spec.hf_layers[index[0]], *index[1:])
    return spec.hf_name.format(**dict(zip(("layer", "expert"), index)))


def _rows(spec: ParamSpec) -> slice:
    """Return which rows of its Hugging Face tensor a leaf has."""
    return slice(*spec.hf_rows[:2]) if spec.hf_rows else slice(None)


def _names(spec: ParamSpec) -> list[str]:
    """Return the names of the Hugging Face tensors of this leaf."""
    return [_slice_name(spec, index) for index in np.ndindex(*_leading(spec))]


def _leading(spec: ParamSpec) -> tuple[int, ...]:
    """Return the sizes of the axes that Hugging Face spreads over tensor names: layers, experts."""
    return tuple(size for size, axis in zip(spec.shape, spec.axes) if axis in ("layers", "experts"))


def _hf_shape(spec: ParamSpec) -> tuple[int, ...]:
    """Return the shape of one Hugging Face tensor of this leaf."""
    # Every stride is zero, so merging axes copies nothing.
    own = _rearrange_to_hf(spec, np.broadcast_to(np.False_, spec.shape[len(_leading(spec)) :])).shape
    return (spec.hf_rows[2], *own[1:]) if spec.hf_rows else own


def _rearrange_to_hf(spec: ParamSpec, ours: np.ndarray) -> np.ndarray:
    theirs, right = spec.hf_layout.split(" -> ")
    return einops.rearrange(ours, f"{right} -> {theirs}")


def _from_hf(spec: ParamSpec, tensor: np.ndarray) -> np.ndarray:
    names = spec.hf_layout.split(" -> ")[1].split()
    sizes = dict(zip(names, spec.shape[len(_leading(spec)) :], strict=True))
    return einops.rearrange(tensor, spec.hf_layout, **sizes)


def _shards(tensors: Iterable[tuple[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """Distribute tensors over files of at most MAX_FILE_BYTES; return them by Hugging Face name."""
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, tensor in tensors:
        if size + tensor.nbytes > MAX_FILE_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _write_shards(folder: str, shards: list[dict[str, np.ndarray]]) -> None:
    metadata = {"format": "pt"}  # transformers refuses a file without it
    if len(shards) == 1:
        safetensors.numpy.save_file(shards[0], os.path.join(folder, SINGLE), metadata)
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        safetensors.numpy.save_file(shard, os.path.join(folder, name), metadata)
        weight_map |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    with open(os.path.join(folder, INDEX), "w") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, file, indent=2)
