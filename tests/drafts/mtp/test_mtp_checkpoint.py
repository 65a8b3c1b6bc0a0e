"""MTP heads as folders: names and layouts of both formats, the same bits back, clear refusals."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.drafts import mtp
from specrl_jax.drafts.base import DraftOptions
from specrl_jax.drafts.kinds import make_method
from specrl_jax.errors import InputError
from specrl_jax.io import hf
from specrl_jax.models.rotary import Rope, Yarn
from specrl_jax.sharding import LEARNER, make_mesh, partitioner
from tests.helpers.folders import assert_same_trees, edit_config, edit_tensors, read_config, read_tensors
from tests.helpers.head_folders import MTP_FOLDERS
from tests.helpers.policies import SMALL as TARGET
from tests.helpers.policies import random_params as random_policy

HEADS = {dialect: mtp.mtp_config(TARGET, dialect) for dialect in ("deepseek", "mimo")}
HEAD = HEADS["deepseek"]
MIMO = dataclasses.replace(TARGET, qk_norm=False, qkv_bias=True, family="mimo")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
# What each layer of MiMo-7B's MTP is stored as.
PUBLISHED = {
    *(f"{name}.weight" for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),
    *(f"{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")),
    *(f"self_attn.{name}_proj.{kind}" for name in "qkv" for kind in ("weight", "bias")),
    "self_attn.o_proj.weight",
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}
PREFIX = {"deepseek": f"model.layers.{TARGET.layers}.", "mimo": "model.mtp_layers.0."}
OWN = {
    "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
}
both_dialects = pytest.mark.parametrize("dialect", PREFIX)


def random_params(dtype="float32", head=HEAD):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda spec: rng.normal(size=spec.shape).astype(jnp.dtype(dtype)), mtp.MTPDraft(head).specs)


def save(folder, dialect, dtype="float32"):
    """The parameters, exactly representable in `dtype`."""
    params = random_params(dtype)
    MTP_FOLDERS.save(str(folder), params, config=HEAD, target=TARGET, dtype=dtype, dialect=dialect)
    return params


def load(folder, partition):
    return MTP_FOLDERS.load_params(str(folder), MTP_FOLDERS.load_config(str(folder), TARGET), partition)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    for dialect in PREFIX:
        save(folder / dialect, dialect)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to damage, in DeepSeek's dialect."""
    shutil.copytree(saved / "deepseek", tmp_path / "head")
    return tmp_path / "head"


# What is written


@both_dialects
def test_tensors_have_the_names_and_layouts_of_the_dialect(dialect, saved):
    """torch stores [out, in]; the projection's inputs are [embedding, hidden] in DeepSeek's, the reverse in MiMo's."""
    w = random_params()
    block = {name: leaf[0] for name, leaf in w["layers"].items()}
    halves = [half.T for half in w["eh_proj"]]
    embedding_norm, hidden_norm, projection, final_norm = (f"{name}.weight" for name in OWN[dialect])
    expected = {
        embedding_norm: w["embedding_norm"],
        hidden_norm: w["hidden_norm"],
        projection: np.concatenate(halves if dialect == "deepseek" else halves[::-1], axis=1),
        final_norm: w["final_norm"],
        "input_layernorm.weight": block["attention_norm"],
        "self_attn.q_norm.weight": block["q_norm"],
        "self_attn.k_norm.weight": block["k_norm"],
        "self_attn.o_proj.weight": np.concatenate([head.T for head in block["o"]], axis=1),
        "post_attention_layernorm.weight": block["mlp_norm"],
        "mlp.gate_proj.weight": block["gate"].T,
        "mlp.up_proj.weight": block["up"].T,
        "mlp.down_proj.weight": block["down"].T,
    }
    for name in "qkv":
        rows = [block[name][:, n].T for n in range(block[name].shape[1])]
        expected[f"self_attn.{name}_proj.weight"] = np.concatenate(rows)
    tensors = read_tensors(saved / dialect)
    assert tensors.keys() == {PREFIX[dialect] + name for name in expected}
    for name, tensor in expected.items():
        np.testing.assert_array_equal(tensors[PREFIX[dialect] + name], tensor, err_msg=name)
    assert tensors[PREFIX[dialect] + projection].shape == (TARGET.embed, 2 * TARGET.embed)


def test_the_config_is_the_policys_with_one_mtp_layer_more(saved, tmp_path):
    hf.save_params(str(tmp_path), random_policy(TARGET), TARGET, dtype="float32")
    policy, head = (read_config(folder) for folder in (tmp_path, saved / "deepseek"))
    assert head == policy | {"num_nextn_predict_layers": 1}


# What is read


@both_dialects
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_come_back(dialect, dtype, tmp_path, partition):
    params = save(tmp_path, dialect, dtype)
    assert MTP_FOLDERS.load_config(str(tmp_path), TARGET) == HEADS[dialect]
    assert_same_trees(load(tmp_path, partition), params)


@pytest.fixture
def mimo(tmp_path):
    """A folder of a MiMo with its head, as published: attention_bias is said."""
    hf.save_params(str(tmp_path), random_policy(MIMO), MIMO, dtype="float32")
    head = mtp.mtp_config(MIMO, "mimo")
    params = random_params(head=head)
    MTP_FOLDERS.save(str(tmp_path / "h"), params, config=head, target=MIMO, dtype="float32", dialect="mimo")
    edit_tensors(tmp_path, read_tensors(tmp_path / "h"))
    edit_config(tmp_path, num_nextn_predict_layers=1)
    return tmp_path


def test_a_folder_of_mimo_has_policy_and_head_in_the_published_names(mimo, partition):
    assert set(read_tensors(mimo / "h")) == {PREFIX["mimo"] + name for name in PUBLISHED}
    config = read_config(mimo / "h")
    assert config == read_config(mimo) and config["attention_bias"] is True and config["num_nextn_predict_layers"] == 1
    assert hf.load_config(str(mimo)) == MIMO
    hf.check_params(str(mimo), MIMO)
    assert_same_trees(hf.load_params(str(mimo), MIMO, partition), random_policy(MIMO))
    head = MTP_FOLDERS.load_config(str(mimo), MIMO)
    assert (head.qk_norm, head.qkv_bias, head.aux_layers, head.zeroes_first) == (False, True, (MIMO.layers,), True)
    assert_same_trees(MTP_FOLDERS.load_params(str(mimo), head, partition), random_params(head=head))


def test_a_head_is_saved_as_it_was_read(mimo):
    """Another format's heads compute otherwise."""
    options = DraftOptions("mtp", path=str(mimo))
    assert make_method(options, MIMO).model.dialect == "mimo"
    assert make_method(dataclasses.replace(options, dialect="mimo"), MIMO).model.dialect == "mimo"
    with pytest.raises(InputError, match=r"^draft\.dialect=deepseek: .* 'mimo' says; leave ''$"):
        make_method(dataclasses.replace(options, dialect="deepseek"), MIMO)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("self_attn.o_proj.bias", np.zeros(24, np.float32), ["does not have", "biases of q, k and v alone"]),
        ("self_attn.q_norm.weight", np.ones(10, np.float32), ["does not have"]),
        ("input_layernorm.bias", np.ones(24, np.float32), ["does not have"]),
        ("self_attn.k_proj.bias", None, ["lacks 1 tensors"]),
        ("self_attn.v_proj.bias", np.zeros(10, np.float32), ["shape (10,), (20,) is needed"]),
    ],
)
def test_a_mimo_head_of_another_block(name, tensor, words, mimo):
    edit_tensors(mimo, {PREFIX["mimo"] + name: tensor})
    message = refusal(mimo, MIMO)
    for word in (PREFIX["mimo"] + name, *words):
        assert word in message, message


def test_a_sharded_load_gives_the_same_head(saved):
    """Shards of a projection whose halves are exchanged on the way in."""
    mesh = make_mesh({"data": 1, "fsdp": 2, "expert": 1, "tensor": 2}, jax.devices()[:4])
    loaded = load(saved / "mimo", partitioner(mesh, LEARNER))
    assert len(loaded["eh_proj"].addressable_shards[0].data.ravel()) < loaded["eh_proj"].size
    assert_same_trees(loaded, random_params())


@both_dialects
def test_a_checkpoint_of_the_whole_model(dialect, saved, tmp_path, partition):
    """The policy's tensors beside the head's, its copies of the policy's tables, and more MTP layers than one."""
    hf.save_params(str(tmp_path), random_policy(TARGET), TARGET, dtype="float32")
    head, prefix = read_tensors(saved / dialect), PREFIX[dialect]
    following = {"deepseek": f"model.layers.{TARGET.layers + 1}.", "mimo": "model.mtp_layers.1."}[dialect]
    more = {name.replace(prefix, following): -tensor for name, tensor in head.items()}
    table = np.zeros((TARGET.vocab, TARGET.embed), np.float32)
    copies = {f"{prefix}embed_tokens.weight": table, f"{prefix}shared_head.head.weight": table}
    edit_tensors(tmp_path, more | head | copies)
    assert_same_trees(load(tmp_path, partition), random_params())


def test_the_rotary_base_where_transformers_5_keeps_it(folder):
    edit_config(folder, rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": TARGET.rope.theta})
    assert MTP_FOLDERS.load_config(str(folder), TARGET) == HEAD


def test_positions_are_stretched_as_the_policys(folder, tmp_path):
    """A folder that says nothing of it goes with a policy that is; one that does must say the same."""
    rope = Rope(TARGET.rope.theta, Yarn(4.0, 16))
    stretched = dataclasses.replace(TARGET, rope=rope)
    assert MTP_FOLDERS.load_config(str(folder), stretched) == dataclasses.replace(HEAD, rope=rope)
    head = mtp.mtp_config(stretched)
    MTP_FOLDERS.save(str(tmp_path / "own"), random_params(), config=head, target=stretched, dtype="float32")
    assert MTP_FOLDERS.load_config(str(tmp_path / "own"), stretched) == head
    other = dataclasses.replace(TARGET, rope=Rope(TARGET.rope.theta, Yarn(2.0, 16)))
    assert "factor=4.0" in refusal(tmp_path / "own", other) and "factor=2.0" in refusal(tmp_path / "own", other)


# Refusals: one line each


def refusal(folder, target=TARGET):
    with pytest.raises(InputError) as error:
        MTP_FOLDERS.load_config(str(folder), target)
    assert "\n" not in str(error.value) and str(error.value).startswith("draft.path")
    return str(error.value)


def test_a_missing_folder(tmp_path):
    assert str(tmp_path / "nowhere") in refusal(tmp_path / "nowhere")


def test_a_policy_without_a_head(tmp_path):
    hf.save_params(str(tmp_path), random_policy(TARGET), TARGET, dtype="float32")
    message = refusal(tmp_path)
    assert str(tmp_path) in message and "eh_proj" in message and "input_proj" in message


def test_heads_of_both_dialects_at_once(folder, saved):
    edit_tensors(folder, read_tensors(saved / "mimo"))
    assert "one dialect" in refusal(folder)


@pytest.mark.parametrize(
    "name",
    [
        "self_attn.q_a_proj.weight",
        "self_attn.kv_b_proj.weight",
        "mlp.experts.0.gate_proj.weight",
        "mlp.gate.weight",
        "self_attn.q_proj.bias",
        "mlp.down_proj.weight_scale_inv",
    ],
)
@both_dialects
def test_a_block_that_is_not_qwen3s(dialect, name, saved, tmp_path):
    shutil.copytree(saved / dialect, tmp_path, dirs_exist_ok=True)
    edit_tensors(tmp_path, {PREFIX[dialect] + name: np.zeros(3, np.float32)})
    message = refusal(tmp_path)
    assert PREFIX[dialect] + name in message and str(tmp_path) in message


@pytest.mark.parametrize("name", ["hnorm.weight", "self_attn.k_norm.weight", "mlp.up_proj.weight"])
def test_a_missing_tensor(name, folder, partition):
    edit_tensors(folder, {PREFIX["deepseek"] + name: None})
    message = refusal(folder)
    assert str(folder) in message and PREFIX["deepseek"] + name in message
    with pytest.raises(InputError, match=r"draft\.path"):
        MTP_FOLDERS.load_params(str(folder), HEAD, partition)


def test_a_layer_number_that_is_not_the_policys_depth(folder):
    moved = dict.fromkeys(read_tensors(folder))
    moved |= {name.replace(PREFIX["deepseek"], "model.layers.5."): t for name, t in read_tensors(folder).items()}
    edit_tensors(folder, moved)
    message = refusal(folder)
    assert "at 5" in message and "at 3" in message


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("vocab", 48, ["vocab_size=40", "48"]),
        ("embed", 32, ["hidden_size=24", "32"]),
        ("layers", 4, ["num_hidden_layers=3", "4"]),
        ("heads", 4, ["num_attention_heads=8", "4"]),
        ("kv_heads", 4, ["num_key_value_heads=2", "4"]),
        ("head_dim", 12, ["head_dim=10", "12"]),
        ("mlp", 40, ["intermediate_size=36", "40"]),
        ("rope", Rope(1e6), ["rope_theta=10000.0", "1000000.0"]),
        ("norm_epsilon", 1e-5, ["rms_norm_eps=1e-06", "1e-05"]),
    ],
)
def test_a_head_of_another_policy(field, value, words, saved):
    message = refusal(saved / "deepseek", dataclasses.replace(TARGET, **{field: value}))
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("key", ["num_hidden_layers", "rope_theta"])
def test_a_missing_key(key, folder):
    edit_config(folder, **{key: ...})
    assert f"{folder}/config.json lacks '{key}'" in refusal(folder)


def test_without_head_dim_the_heads_are_as_wide_as_the_model(folder, tmp_path):
    """As of a policy: 24 / 8 here, whose heads have 10."""
    edit_config(folder, head_dim=...)
    assert "head_dim=3, this policy has 10" in refusal(folder)
    target = dataclasses.replace(TARGET, head_dim=6, heads=4)
    head = mtp.mtp_config(target)
    MTP_FOLDERS.save(str(tmp_path / "own"), random_params(head=head), config=head, target=target, dtype="float32")
    edit_config(tmp_path / "own", head_dim=...)
    assert MTP_FOLDERS.load_config(str(tmp_path / "own"), target) == head


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 32.0}}, "rope_scaling"),
        ({"rope_scaling": LLAMA3}, "this policy has None"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 32.0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 32.0}}, "this policy has None"),
        ({"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_what_would_change_the_forward(changes, word, folder):
    edit_config(folder, **changes)
    assert word in refusal(folder)


def test_a_head_with_its_own_length_limit_loads(folder):
    edit_config(folder, max_position_embeddings=2048)
    assert MTP_FOLDERS.load_config(str(folder), TARGET) == HEAD
