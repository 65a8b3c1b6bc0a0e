"""Weights whose bytes are stored apart: the same bits as before, in folders that load, and damage in one line."""

import subprocess
import sys
import zlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from experiments import pack
from specrl_jax.errors import InputError
from specrl_jax.io import hf
from specrl_jax.io.split_bytes import HIGH, LOW, Reader, split
from specrl_jax.sharding import LEARNER, make_mesh, partitioner
from tests.helpers.folders import assert_same_trees
from tests.helpers.policies import SMALL, random_params
from tests.helpers.runs import ROOT


def reader(path):
    return Reader(safetensors.safe_open(path, framework="numpy"), "policy.path: ")


def contents(path):
    """Every tensor as other programs find it."""
    with safetensors.safe_open(path, framework="numpy") as file:
        names = sorted(file.keys())
        return {name: (file.get_tensor(name).dtype, file.get_tensor(name).tobytes()) for name in names}


def test_every_bit_of_every_bfloat16_comes_back(tmp_path):
    """All 65,536 of them, not-a-numbers too, a scalar, an empty one, a transposed one; another dtype stays as it is."""
    every = np.arange(2**16, dtype="<u2").view(ml_dtypes.bfloat16).reshape(256, 256)
    tensors = {"every": every.T, "one": every[7, 7], "none": every[:0], "ids": np.arange(5), "float": np.ones(3, "f4")}
    stored = {key: value for name, t in tensors.items() for key, value in split(name, t).items()}
    assert {"ids", "float", "every" + LOW, "every" + HIGH} <= stored.keys()
    safetensors.numpy.save_file(stored, tmp_path / "file.safetensors")
    with reader(tmp_path / "file.safetensors") as file:
        assert file.names == sorted(tensors)
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape, found.tobytes()) == (tensor.dtype, tensor.shape, tensor.tobytes())
            assert file.shape_and_dtype(name)[0] == tensor.shape
        assert file.shape_and_dtype("every")[1] == "BF16" and file.shape_and_dtype("float")[1] == "F32"


def test_a_packed_policy_is_smaller_loads_to_the_same_parameters_and_can_be_undone(tmp_path, monkeypatch, capsys):
    folder, path = tmp_path / "policy", tmp_path / "policy/model.safetensors"
    hf.save_params(str(folder), random_params(SMALL, 0), SMALL, "bfloat16")
    partition = partitioner(make_mesh({"data": 1, "fsdp": -1, "tensor": 1, "expert": 1}), LEARNER)
    before, size = contents(path), path.stat().st_size
    params = hf.load_params(str(folder), SMALL, partition)
    monkeypatch.setattr(sys, "argv", ["pack", str(folder)])
    assert pack.main() == 0 and path.stat().st_size < 0.8 * size  # headers weigh in so small a model
    assert_same_trees(hf.load_params(str(folder), SMALL, partition), params)
    wide = hf.load_params(str(folder), SMALL, partition, jnp.dtype("float32"))
    assert wide["embed"].dtype == jnp.float32
    monkeypatch.setattr(sys, "argv", ["pack", "--undo", str(folder)])
    assert pack.main() == 0
    assert contents(path) == before and path.stat().st_size == size
    monkeypatch.setattr(sys, "argv", ["pack", str(tmp_path / "nowhere")])
    assert pack.main() == 1 and "no folder with a .safetensors file" in capsys.readouterr().err


DAMAGES = {
    "cut": (lambda high: high[:-3], "16 low bytes, and other high ones or not all"),
    "no stream": (lambda high: np.zeros(9, np.uint8), "the high bytes of w cannot be read"),
    "too long": (lambda high: deflated(17), "w has 16 low bytes, and other high ones or not all"),
    "endless": (lambda high: deflated(10**7), "w has 16 low bytes, and other high ones or not all"),
    "missing": (lambda high: None, "the high bytes of w cannot be read"),
}


def deflated(count):
    return np.frombuffer(zlib.compress(bytes(count)), np.uint8)


@pytest.mark.parametrize("damage", DAMAGES)
def test_high_bytes_that_do_not_fit_are_refused_by_name(damage, tmp_path):
    change, words = DAMAGES[damage]
    stored = split("w", np.linspace(-1, 1, 16).astype(ml_dtypes.bfloat16))
    high = change(stored.pop("w" + HIGH))
    stored |= {} if high is None else {"w" + HIGH: np.ascontiguousarray(high)}
    safetensors.numpy.save_file(stored, tmp_path / "file.safetensors")
    with reader(tmp_path / "file.safetensors") as file, pytest.raises(InputError, match=words) as refused:
        file.get_tensor("w")
    assert str(refused.value).startswith("policy.path: ")


def test_a_clone_without_its_history_has_less_than_forty_megabytes():
    """It travels whole to a borrowed machine. `python -m experiments.pack` makes weights and figures small."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("in a clone git lists the files")
    sizes = {
        name: (ROOT / name).stat().st_size for name in listed.stdout.split("\0") if name and (ROOT / name).exists()
    }
    largest = sorted(sizes, key=sizes.get, reverse=True)[:5]
    assert sum(sizes.values()) < 40e6, {name: sizes[name] for name in largest}
