"""Folders of block drafters: written and read back, recognised, and refused with one line."""

import dataclasses

import jax
import numpy as np
import pytest
import safetensors.numpy

from configs import rlzero_tiny
from specrl_jax.config import from_config_dict
from specrl_jax.drafts.base import DraftOptions
from specrl_jax.drafts.block import BlockDraft
from specrl_jax.drafts.kinds import make_method
from specrl_jax.errors import InputError
from specrl_jax.learner.build import make_learner
from specrl_jax.models.rotary import Rope, Yarn
from specrl_jax.planning.plan import make_plan
from tests.drafts.block.test_block_network import CONFIGS, ONE, TARGET, params_of
from tests.helpers.folders import assert_same_trees, edit_config, read_config, read_tensors
from tests.helpers.heads import drawn_params

IDS = np.sort(np.random.default_rng(5).permutation(24)[:10]).astype(np.int32)


OWN = {"dspark": "deepspec", "dflash": "zlab"}


def saved(kind, folder, dtype="float32", dialect=""):
    draft = BlockDraft(CONFIGS[kind], dialect or OWN[kind])
    draft.save(str(folder), params_of(kind), IDS if draft.has_vocab_map else None, target=TARGET, dtype=dtype)
    return folder


def options(kind, path="", **values):
    return make_method(DraftOptions(kind, path=str(path), **values), TARGET).model


@pytest.mark.parametrize("dialect", ["", "speculators"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_what_was_saved_is_read_back(kind, dialect, tmp_path):
    folder = saved(kind, tmp_path / "draft", dialect=dialect)
    draft = options(kind, folder)
    assert draft.config == CONFIGS[kind]
    assert_same_trees(draft.load(str(folder), ONE), params_of(kind))
    ids = draft.load_vocab_map(str(folder), TARGET)
    assert ids is None if kind == "dflash" else ids.tolist() == IDS.tolist()


def test_the_folders_have_the_names_of_their_libraries(tmp_path):
    ours, theirs = (read_config(saved(kind, tmp_path / kind)) for kind in ("dspark", "dflash"))
    assert ours["architectures"] == ["Qwen3DSparkModel"] and ours["markov_head_type"] == "vanilla"
    # The outputs of all six layers but the last, which enter the layers after them.
    assert ours["target_layer_ids"] == theirs["dflash_config"]["target_layer_ids"] == [0, 1, 2, 3, 4]
    assert ours["block_size"] == theirs["block_size"] == 4 and ours["mask_token_id"] == 23
    names = set(read_tensors(tmp_path / "dspark"))
    own = {"fc.weight", "hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t"}
    assert {name for name in names if not name.startswith("layers.")} == own | {
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    }
    layer = {name.removeprefix("layers.1.") for name in names if name.startswith("layers.1.")}
    assert {"self_attn.q_proj.weight", "self_attn.k_norm.weight", "mlp.gate_proj.weight"} < layer and len(layer) == 11


def test_what_is_frozen_is_ignored_and_what_is_unknown_is_not(tmp_path):
    folder = saved("dflash", tmp_path / "draft")
    tensors = read_tensors(folder)
    more = {"embed_tokens.weight": np.zeros((24, 16), np.float32), "lm_head.weight": np.zeros((24, 16), np.float32)}
    write(folder, tensors | more)
    assert options("dflash", folder).config == CONFIGS["dflash"]
    write(folder, tensors | {"layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)})
    with pytest.raises(InputError, match=r"q_proj\.bias"):
        options("dflash", folder)


def test_speculators_names_the_layers_that_are_entered_and_the_slots_that_predict(tmp_path):
    for kind, drafts in (("dspark", 4), ("dflash", 3)):
        found = read_config(saved(kind, tmp_path / kind, dialect="speculators"))
        assert found["speculators_model_type"] == found["speculators_config"]["algorithm"] == kind
        assert found["aux_hidden_state_layer_ids"] == list(CONFIGS[kind].aux_layers) == [1, 2, 3, 4, 5]
        assert found["sample_from_anchor"] == (kind == "dspark")
        assert found["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == drafts
    folder = tmp_path / "dspark"
    edit_config(folder, sample_from_anchor=False)
    assert options("dspark", folder).longest == 3
    edit_config(folder, speculators_model_type="eagle3")
    with pytest.raises(InputError, match="expected dspark or dflash"):
        options("dspark", folder)


@pytest.mark.parametrize("kind", CONFIGS)
def test_slots_that_a_format_cannot_state_are_saved_as_speculators(kind, tmp_path):
    folder = saved(kind, tmp_path / "draft", dialect="speculators")
    edit_config(folder, sample_from_anchor=kind == "dflash")
    draft = options(kind, folder)
    draft.save(
        str(tmp_path / "again"), params_of(kind), IDS if draft.has_vocab_map else None, target=TARGET, dtype="float32"
    )
    assert options(kind, tmp_path / "again") == draft and draft.longest == (4 if kind == "dflash" else 3)
    with pytest.raises(
        InputError, match=rf"draft\.dialect={OWN[kind]}: .* sample_from_anchor={str(kind == 'dflash').lower()}"
    ):
        options(kind, folder, dialect=OWN[kind])


@pytest.mark.parametrize("dialect", ["", "speculators"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_drafter_with_layers_of_its_own_is_read_back(kind, dialect, tmp_path):
    """Beside a policy with experts and stretched positions."""
    own = {"heads": 2, "kv_heads": 1, "head_dim": 4, "mlp": 12, "rope": Rope(300.0), "norm_epsilon": 1e-3}
    target = dataclasses.replace(TARGET, rope=Rope(1e4, Yarn(4.0, 64)), experts=4, experts_per_token=2, dense_mlp=20)
    config, folder = dataclasses.replace(CONFIGS[kind], **own), str(tmp_path)
    draft = BlockDraft(config, dialect or OWN[kind])
    params = drawn_params(draft.specs)
    draft.save(folder, params, IDS if draft.has_vocab_map else None, target=target, dtype="float32")
    assert make_method(DraftOptions(kind, path=folder), target).model.config == config
    written = read_config(tmp_path)
    written = written if not dialect else written["transformer_layer_config"]
    assert written["model_type"] == "qwen3" and written["max_position_embeddings"] == 4 * 64


def write(folder, tensors):
    safetensors.numpy.save_file(tensors, f"{folder}/model.safetensors")


@pytest.mark.parametrize(
    ("kind", "path", "changes", "words"),
    [
        ("dflash", (), {"hidden_size": 8}, "hidden_size=8, the policy has 16"),
        ("dflash", (), {"vocab_size": 25}, "vocab_size=25, the policy has 24"),
        (
            "dflash",
            ("dflash_config",),
            {"target_layer_ids": [2, 1, 3]},
            "enters layers 3, 2, 4; they must ascend within 0..5",
        ),
        (
            "dflash",
            ("dflash_config",),
            {"target_layer_ids": [1, 2, 5]},
            "enters layers 2, 3, 6; they must ascend within 0..5",
        ),
        ("dflash", ("dflash_config",), {"mask_token_id": 24}, "mask_token_id=24"),
        ("dflash", (), {"block_size": None}, "lacks 'block_size'"),
        ("dspark", (), {"markov_head_type": "rnn"}, "markov_head_type=rnn"),
        ("dspark", (), {"use_sliding_window": True}, "use_sliding_window"),
        ("dspark", (), {"num_attention_heads": 3}, "must be a multiple of the second"),
        ("dspark", (), {"draft_vocab_size": 12}, "has shape"),
        ("dspark", (), {"is_causal": True}, "is_causal=true"),
        ("dflash", ("dflash_config",), {"causal": True}, "causal=true"),
    ],
)
def test_a_drafter_of_another_policy_is_refused(kind, path, changes, words, tmp_path):
    folder = saved(kind, tmp_path / "draft")
    edit_config(folder, *path, **changes)
    with pytest.raises(InputError, match=words):
        options(kind, folder)


def test_the_kind_and_the_length_must_fit_the_block(tmp_path):
    folder = saved("dflash", tmp_path / "draft")
    with pytest.raises(InputError, match=r"is a drafter of draft\.kind=dflash"):
        options("dspark", folder)
    with pytest.raises(InputError, match=r"draft\.vocab_size=9, the draft .* has 24"):
        options("dflash", folder, vocab_size=9)
    assert options("dflash", folder).longest == 3


@pytest.mark.parametrize("key", ["length", "ttt_steps"])
def test_a_run_whose_drafts_are_longer_than_a_block_is_refused(key):
    config = rlzero_tiny.get_config("smoke")
    config.draft.update({"kind": "dspark", "length": 7, "ttt_steps": 7})
    assert make_plan(from_config_dict(config), ONE.mesh).draft.longest == 7
    config.draft[key] = 8
    with pytest.raises(InputError, match=rf"draft\.{key}=8: a block of this drafter has 7 drafts"):
        make_plan(from_config_dict(config), ONE.mesh)


@pytest.mark.parametrize(("kind", "stride", "drafts"), [("dflash", 4, 7), ("dspark", 4, 7), ("eagle3", 1, None)])
def test_drafters_of_one_pass_start_at_every_fourth_token(kind, stride, drafts):
    config = rlzero_tiny.get_config("smoke")
    config.draft.update({"kind": kind, "ttt_steps": 3})
    learner = make_learner(make_plan(from_config_dict(config), ONE.mesh))
    assert (learner.draft_forward.anchor_stride, learner.plan.draft.longest) == (stride, drafts)


def test_ids_that_are_not_different_are_refused(tmp_path):
    folder = saved("dspark", tmp_path / "draft")
    write(folder, read_tensors(folder) | {"d2t": np.zeros(10, np.int64) - np.arange(10)})
    with pytest.raises(InputError, match="10 different ids"):
        options("dspark", folder).load_vocab_map(str(folder), TARGET)


def test_a_new_drafter_starts_as_one_without_a_markov_head():
    draft = BlockDraft(CONFIGS["dspark"], "deepspec")
    lm_head, target = np.ones((10, 16), np.float32), {"final_norm": np.full(16, 2.0, np.float32)}
    params = draft.initialise_from_target(params_of("dspark"), target, lm_head)
    assert not np.asarray(params["markov_out"]).any() and (params["unembed"] == 1).all()
    assert (params["final_norm"] == 2).all()
    assert jax.tree.structure(params) == jax.tree.structure(params_of("dspark"))
