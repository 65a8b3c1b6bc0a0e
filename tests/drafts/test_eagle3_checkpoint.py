"""EAGLE-3 heads in and out: names and layouts as they are published, the same bits back, clear refusals.

In the usual dialect; the others, and what they say differently: test_eagle3_dialects.
"""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specrl_jax.core import InputError
from specrl_jax.drafts.eagle3 import checkpoint as eagle3_formats
from specrl_jax.drafts.eagle3 import network as eagle3
from specrl_jax.io import tensors as tensor_folder
from specrl_jax.models import qwen3
from tests.helpers.heads import torch_layout

# Every size differs from every other, and N * H from D.
TARGET = qwen3.Qwen3Config(40, 24, 7, 8, 2, 10, 36, tied=False, max_positions=64, rope_theta=1e4)
VD = 16
HEAD = eagle3.eagle3_config(TARGET, VD)
IDS = np.sort(np.random.default_rng(1).choice(TARGET.vocab, VD, replace=False)).astype(np.int32)


def random_params(dtype="float32"):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda spec: rng.normal(size=spec.shape).astype(jnp.dtype(dtype)), eagle3.param_specs(HEAD))


def save(folder, dtype="float32"):
    """The parameters, exactly representable in `dtype`."""
    params = random_params(dtype)
    eagle3_formats.save(str(folder), params, IDS, HEAD, TARGET, dtype)
    return params


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    save(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to damage."""
    shutil.copytree(saved, tmp_path / "head")
    return tmp_path / "head"


# What is written


def test_tensors_have_the_names_shapes_and_layouts_of_the_dialect(saved):
    """torch stores [out, in]; the inputs of q, k, v are [embedding, hidden], those of fc [low, middle, high]."""
    D, H = TARGET.embed, TARGET.head_dim
    expected = torch_layout(random_params()) | {
        "d2t": IDS.astype(np.int64) - np.arange(VD),
        "t2d": np.array([i in set(IDS.tolist()) for i in range(TARGET.vocab)]),
    }
    tensors = safetensors.numpy.load_file(saved / tensor_folder.SINGLE)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(tensors[name], tensor, err_msg=name)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    assert shapes["fc.weight"] == (D, 3 * D)
    assert shapes["midlayer.self_attn.q_proj.weight"] == (TARGET.heads * H, 2 * D)
    assert shapes["midlayer.self_attn.k_proj.weight"] == (TARGET.kv_heads * H, 2 * D)
    assert shapes["midlayer.self_attn.o_proj.weight"] == (D, TARGET.heads * H)
    assert shapes["lm_head.weight"] == (VD, D)
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (np.int64, np.bool_)
    assert tensors["t2d"].sum() == VD


def test_the_config_of_the_folder(saved):
    assert json.loads((saved / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "rms_norm_eps": TARGET.norm_epsilon,
        "rope_theta": 1e4,
        "max_position_embeddings": 64,
        "vocab_size": 40,
        "draft_vocab_size": 16,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        # The streams that enter layers 2, L / 2 and L - 3, and so the outputs of 1, L / 2 - 1 and L - 4.
        "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_come_back(dtype, tmp_path, partition):
    params = save(tmp_path, dtype)
    head = eagle3_formats.load_config(str(tmp_path), TARGET)
    assert head == HEAD
    loaded = eagle3_formats.load_params(str(tmp_path), head, partition)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(params)):
        assert ours.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(ours, theirs)
    vocab_map = eagle3_formats.load_vocab_map(str(tmp_path), head, TARGET)
    assert vocab_map.dtype == np.int32
    np.testing.assert_array_equal(vocab_map, IDS)


def test_stored_in_bfloat16_and_read_in_float32(tmp_path, partition):
    """What a run trains on: float32, with the values of the file."""
    params = random_params()
    eagle3_formats.save(str(tmp_path), params, IDS, HEAD, TARGET, "bfloat16")
    loaded = eagle3_formats.load_params(str(tmp_path), HEAD, partition, jnp.dtype("float32"))
    for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_array_equal(ours, theirs.astype(jnp.bfloat16).astype(np.float32))


def test_a_head_with_its_own_length_limit_loads(folder):
    """Public heads say 2048 whatever their policy says; the limit is not a size."""
    edit_config(folder, max_position_embeddings=2048)
    assert eagle3_formats.load_config(str(folder), TARGET) == HEAD


# Refusals: one line each


def refusal(call):
    with pytest.raises(InputError) as error:
        call()
    assert "\n" not in str(error.value) and str(error.value).startswith("draft.")
    return str(error.value)


def edit_config(folder, **changes):
    """Rewrites config.json; a value of None takes the key away."""
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def edit_tensors(folder, **changes):
    tensors = safetensors.numpy.load_file(folder / tensor_folder.SINGLE) | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    safetensors.numpy.save_file(kept, folder / tensor_folder.SINGLE, {"format": "pt"})


def config_refusal(folder, target=TARGET):
    return refusal(lambda: eagle3_formats.load_config(str(folder), target))


def test_a_missing_folder(tmp_path):
    message = config_refusal(tmp_path / "nowhere")
    assert "draft.path" in message and str(tmp_path / "nowhere") in message


@pytest.mark.parametrize("name", ["config.json", tensor_folder.SINGLE])
def test_a_missing_file(name, folder):
    (folder / name).unlink()
    message = config_refusal(folder)
    assert str(folder) in message and name in message


def test_a_file_that_is_not_safetensors(folder):
    (folder / tensor_folder.SINGLE).write_bytes(b"not safetensors at all")
    assert str(folder / tensor_folder.SINGLE) in config_refusal(folder)


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], ["Eagle3DraftModel"], [], None])
def test_another_architecture(architectures, folder):
    edit_config(folder, architectures=architectures)
    message = config_refusal(folder)
    assert str(folder) in message and "LlamaForCausalLMEagle3" in message and str(architectures) in message


def test_rope_scaling_would_change_the_forward(folder):
    edit_config(folder, rope_scaling={"rope_type": "llama3", "factor": 32.0})
    assert "rope_scaling" in config_refusal(folder)


@pytest.mark.parametrize("key", ["draft_vocab_size", "vocab_size", "num_key_value_heads", "rms_norm_eps", "rope_theta"])
def test_a_missing_key(key, folder):
    edit_config(folder, **{key: None})
    assert f"{folder}/config.json lacks '{key}'" in config_refusal(folder)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("vocab", 48, ["vocab_size=40", "48"]),
        ("embed", 32, ["hidden_size=24", "32"]),
        ("vocab", 12, ["vocab_size=40", "12"]),
        ("layers", 6, ["draft.kind=eagle3", "at least 7", "6"]),
    ],
)
def test_a_head_of_another_policy(field, value, words, saved):
    message = config_refusal(saved, dataclasses.replace(TARGET, **{field: value}))
    for word in words:
        assert word in message, message


def test_more_words_than_the_policy_has(folder):
    edit_config(folder, draft_vocab_size=41)
    assert "draft.vocab_size=41 must be in 1..40" in config_refusal(folder)


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.hidden_norm.weight", "lm_head.weight"])
def test_a_missing_tensor(name, folder, partition):
    edit_tensors(folder, **{name: None})
    loads = (
        lambda: eagle3_formats.load_config(str(folder), TARGET),
        lambda: eagle3_formats.load_params(str(folder), HEAD, partition),
    )
    for load in loads:
        message = refusal(load)
        assert str(folder) in message and name in message


@pytest.mark.parametrize("shape", [(24, 24), (72, 24)], ids=["one feature", "transposed"])
def test_a_tensor_of_another_shape(shape, folder):
    edit_tensors(folder, **{"fc.weight": np.zeros(shape, np.float32)})
    message = config_refusal(folder)
    assert "fc.weight" in message and str(shape) in message and "(24, 72)" in message


def d2t_of(ids):
    return np.asarray(ids, np.int64) - np.arange(len(ids))


@pytest.mark.parametrize(
    ("d2t", "words"),
    [
        (None, ["lacks the tensor d2t"]),
        (d2t_of(IDS[:-1]), ["(15,)", "(16,)"]),
        (d2t_of([*IDS[:-1], 40]), ["16 different ids below 40"]),
        (d2t_of([-1, *IDS[1:]]), ["16 different ids below 40"]),
        (d2t_of([*IDS[:-1], IDS[0]]), ["16 different ids below 40"]),
    ],
    ids=["missing", "short", "beyond the vocabulary", "negative", "twice the same"],
)
def test_a_d2t_that_names_no_ids_of_the_policy(d2t, words, folder):
    edit_tensors(folder, d2t=d2t)
    message = refusal(lambda: eagle3_formats.load_vocab_map(str(folder), HEAD, TARGET))
    for word in ["draft.path", "d2t", str(folder), *words]:
        assert word in message, message


def test_a_policy_of_six_layers_has_no_head():
    with pytest.raises(InputError, match=r"draft\.kind=eagle3 .* at least 7, this one has 6"):
        eagle3.eagle3_config(dataclasses.replace(TARGET, layers=6), VD)
