"""Folders of checkpoints: compare what they hold, and damage them."""

import functools
import json

import jax
import numpy as np
import safetensors.numpy

from specrl_jax.io.tensors import SINGLE


def assert_same_trees(ours, theirs):
    """Compare structures, dtypes and bits."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


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
