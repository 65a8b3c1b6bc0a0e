"""A policy's folder that a stranger wrote: each fault is one line that names file and key, and nothing hangs."""

import functools
import json
import os

import numpy as np
import pytest

from specrl_jax.errors import InputError
from specrl_jax.io import hf
from specrl_jax.io import tensors as tensor_folder
from tests.helpers.folders import edit_config, edit_tensors, read_tensors
from tests.helpers.policies import SMALL, random_params


@pytest.fixture
def folder(tmp_path):
    hf.save_params(str(tmp_path), random_params(SMALL), SMALL, dtype="float32")
    return tmp_path


@pytest.fixture
def sharded_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_folder, "MAX_FILE_BYTES", 10_000)
    hf.save_params(str(tmp_path), random_params(SMALL), SMALL, dtype="float32")
    return tmp_path


def load(folder, partition):
    return functools.partial(hf.load_params, str(folder), SMALL, partition)


def refusal(call):
    with pytest.raises(InputError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "name", ["../{base}/{name}", "{folder}/{name}", "a/../{name}", "..", "", "weights.bin", "a\0.safetensors", 3, None]
)
def test_index_reads_only_files_beside_it(name, sharded_folder, partition):
    """Names in an index are a stranger's: those of files elsewhere are refused, though these exist and would load."""
    file = sorted(path.name for path in sharded_folder.glob("*.safetensors"))[0]
    (sharded_folder / "a").mkdir()
    index = json.loads((sharded_folder / tensor_folder.INDEX).read_text())
    wrong = name.format(name=file, folder=sharded_folder, base=sharded_folder.name) if isinstance(name, str) else name
    index["weight_map"] |= {tensor: wrong for tensor, where in index["weight_map"].items() if where == file}
    (sharded_folder / tensor_folder.INDEX).write_text(json.dumps(index))
    assert f"{tensor_folder.INDEX}: weight_map." in refusal(load(sharded_folder, partition))


def test_shards_may_be_links(sharded_folder, partition):
    """As in the cache of huggingface_hub."""
    blobs = sharded_folder / "blobs"
    blobs.mkdir()
    for path in sharded_folder.glob("*.safetensors"):
        path.rename(blobs / path.name)
        path.symlink_to(blobs / path.name)
    load(sharded_folder, partition)()


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
@pytest.mark.parametrize("name", ["config.json", tensor_folder.SINGLE, tensor_folder.INDEX])
def test_what_is_no_file_is_refused_and_does_not_hang(name, kind, folder, partition):
    path = folder / name
    path.unlink(missing_ok=True)
    if name == tensor_folder.INDEX:
        (folder / tensor_folder.SINGLE).unlink()  # which is read before an index
    make = {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda path: path.symlink_to("/dev/zero")}
    make[kind](path)
    message = refusal(lambda: hf.load_config(str(folder)) and load(folder, partition)())
    assert message == f"policy.path: {path}: not a regular file"


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint8, bool])
def test_weights_that_are_not_floating_point_are_refused_by_name(dtype, folder, partition):
    edit_tensors(folder, {"model.layers.1.self_attn.k_proj.weight": np.ones((20, 24), dtype)})
    message = refusal(load(folder, partition))
    assert "model.layers.1.self_attn.k_proj.weight in" in message and "F32" in message


def test_a_table_that_tying_would_lose_is_refused(folder):
    """tie_word_embeddings that is true by mistake gives other logits without a word."""
    edit_config(folder, tie_word_embeddings=True)
    config = hf.load_config(str(folder))
    assert "tie_word_embeddings=true" in refusal(lambda: hf.check_params(str(folder), config))
    edit_tensors(folder, {"lm_head.weight": read_tensors(folder)["model.embed_tokens.weight"]})
    hf.check_params(str(folder), config)


def test_layers_that_config_json_leaves_out_are_named(folder):
    """Without its last layers a model still runs, and answers otherwise; an MTP head after them is none of them."""
    edit_config(folder, num_hidden_layers=SMALL.layers - 1)
    config, name = hf.load_config(str(folder)), f"model.layers.{SMALL.layers - 1}."
    assert f"num_hidden_layers={SMALL.layers - 1}, but" in refusal(lambda: hf.check_params(str(folder), config))
    edit_tensors(folder, {name + "eh_proj.weight": np.zeros((24, 48), np.float32)})
    hf.check_params(str(folder), config)


WRONG = {
    "hidden_size": [-24, 0, 24.0, 24.5, "24", True, [24], {}, 10**12, 10**400, float("inf"), float("nan")],
    "num_attention_heads": [3, -8, "8", False],
    "num_key_value_heads": [3, 0, 16],
    "head_dim": [-10, 7, 0.5],
    "num_hidden_layers": [-1, 10**9, "3"],
    "vocab_size": [-1, 2**60],
    "rms_norm_eps": [-1, 0, 1, "1e-6", float("nan"), float("inf"), 1e999, True],
    "rope_theta": [-1.0, 0, 1, "1e4", float("inf"), [1e4]],
    "tie_word_embeddings": ["no", "false", 0, 1, "", []],
    "max_position_embeddings": [-64, 0, "64", 2**40],
    "hidden_act": ["gelu", 1, ["silu"]],
    "attention_bias": ["false", 0],
    "rope_scaling": ["yarn", 4.0, [], {"rope_type": "yarn", "factor": -4.0}, {"rope_type": 3}],
    "rope_parameters": [True, {"rope_theta": "x"}],
}


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key, values in WRONG.items() for value in values],
    ids=lambda x: str(x)[:20],
)
def test_a_value_that_no_model_has_is_named(key, value, folder):
    edit_config(folder, **{key: value})
    message = refusal(lambda: hf.load_config(str(folder)))
    assert message.startswith(f"policy.path: {folder}") and key in message and len(message) < 400


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b'{"a": ' * 100 + b"1" + b"}" * 100, "nested too deeply"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"a":\n"\xff"}', "config.json:2: not UTF-8: byte 0xff"),
        (b"\xff\xfe{\0}\0", "not UTF-8"),
        (b"\0" * 100, "config.json:1: not JSON"),
        (b"", "config.json:1: not JSON"),
        (b'"' + b"a" * 5_000_000 + b'"', "larger than 4 MiB"),
    ],
    ids=["nested", "nested and whole", "lists", "digits", "latin", "utf-16", "zeros", "empty", "large"],
)
def test_config_that_is_not_readable(content, named, folder):
    (folder / "config.json").write_bytes(content)
    assert named in refusal(lambda: hf.load_config(str(folder)))
