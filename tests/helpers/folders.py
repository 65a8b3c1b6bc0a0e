"""Folders of checkpoints: compare what they hold, and damage them."""

import functools
import json

import chex
import safetensors.numpy

from specrl_jax.io.tensors import SINGLE

# Compares structures, shapes, dtypes and values; says which leaf differs.
assert_same_trees = functools.partial(chex.assert_trees_all_equal, strict=True)


def read_config(folder):
    """Return the content of config.json."""
    return json.loads((folder / "config.json").read_text())


def edit_config(folder, *path, **changes):
    """Rewrite config.json, or the object at `path` in it; a value of ... takes the key away."""
    raw = read_config(folder)
    inner = functools.reduce(lambda config, key: config[key], path, raw)
    inner |= changes
    for key in [key for key, value in inner.items() if value is ...]:
        del inner[key]
    (folder / "config.json").write_text(json.dumps(raw))


def read_tensors(folder):
    """Return the tensors of a folder with one file."""
    return safetensors.numpy.load_file(folder / SINGLE)


def edit_tensors(folder, changes):
    """Rewrite the tensors; a value of None takes one away."""
    kept = {name: tensor for name, tensor in (read_tensors(folder) | changes).items() if tensor is not None}
    safetensors.numpy.save_file(kept, folder / SINGLE, {"format": "pt"})
