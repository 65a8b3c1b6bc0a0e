"""Folders of P-EAGLE drafts: written and read back in both formats, recognised, and refused with one line."""

import numpy as np
import pytest
import safetensors.numpy

from specrl_jax.drafts.base import DraftOptions
from specrl_jax.drafts.kinds import KINDS, make_method
from specrl_jax.drafts.peagle import PEagleDraft
from specrl_jax.errors import InputError
from tests.drafts.block.test_block_network import ONE, TARGET
from tests.drafts.peagle.test_peagle_network import CONFIGS, params_of
from tests.helpers.folders import assert_same_trees, edit_config, read_config, read_tensors

FORMATS = KINDS["peagle"].formats
IDS = np.sort(np.random.default_rng(5).permutation(TARGET.vocab)[:10]).astype(np.int32)
EMBEDDING = "embed_tokens.weight"


def saved(folder, dialect="speculators", name="new"):
    PEagleDraft(CONFIGS[name], dialect).save(str(folder), params_of(name), IDS, target=TARGET, dtype="float32")
    return folder


def loaded(folder, kind="peagle", **values):
    return make_method(DraftOptions(kind, path=str(folder), **values), TARGET).model


@pytest.mark.parametrize("dialect", FORMATS)
@pytest.mark.parametrize("name", CONFIGS)
def test_what_was_saved_is_read_back(name, dialect, tmp_path):
    folder = saved(tmp_path / "draft", dialect, name)
    draft = loaded(folder)
    assert draft.config == CONFIGS[name]
    assert_same_trees(draft.load(str(folder), ONE), params_of(name))
    np.testing.assert_array_equal(draft.load_vocab_map(str(folder), TARGET), IDS)


def test_the_folders_have_the_names_of_their_libraries(tmp_path):
    """speculators' PEagleSpeculatorConfig and vLLM's parallel drafting of EAGLE-3."""
    theirs, served = (read_config(saved(tmp_path / dialect, dialect)) for dialect in FORMATS)
    assert (theirs["speculators_model_type"], theirs["mask_token_id"], theirs["embed_requires_grad"]) == (
        "peagle",
        23,
        False,
    )
    assert theirs["transformer_layer_config"]["num_hidden_layers"] == served["num_hidden_layers"] == 2
    assert served["parallel_drafting"] and served["ptd_token_id"] == 23
    assert served["architectures"] == ["LlamaForCausalLMEagle3"]
    shapes = [read_tensors(tmp_path / dialect)["mask_hidden"].shape for dialect in FORMATS]
    assert shapes == [(1, 1, 48), (1, 48)]
    names = set(read_tensors(tmp_path / "vllm"))
    assert {"layers.0.hidden_norm.weight", "layers.1.self_attn.q_proj.weight", "fc.weight", "lm_head.weight"} < names
    assert EMBEDDING not in names


def test_an_embedding_that_was_trained_is_read_and_a_copy_is_not(tmp_path):
    folder = saved(tmp_path / "draft")
    tensors = read_tensors(folder) | {EMBEDDING: np.zeros((24, 16), np.float32)}
    safetensors.numpy.save_file(tensors, f"{folder}/model.safetensors")
    assert not loaded(folder).config.own_embedding
    edit_config(folder, embed_requires_grad=True)
    draft = loaded(folder)
    assert draft.config.own_embedding and not np.asarray(draft.load(str(folder), ONE)["embed"]).any()


@pytest.mark.parametrize(
    ("dialect", "changes", "words"),
    [
        ("vllm", {"parallel_drafting": False}, "draft.kind=eagle3"),
        ("vllm", {"ptd_token_id": None}, "mask tokens"),
        ("vllm", {"pard_token": 3}, r"\[23, 3\]"),
        ("speculators", {"mask_token_id": 24}, "policy's 24"),
        ("speculators", {"speculators_model_type": "eagle3"}, "expected 'peagle'"),
        ("speculators", {"draft_vocab_size": 12}, "has shape"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_with_one_line(dialect, changes, words, tmp_path):
    folder = saved(tmp_path / "draft", dialect)
    edit_config(folder, **changes)
    with pytest.raises(InputError, match=words) as error:
        loaded(folder)
    assert "\n" not in str(error.value)


def test_norms_of_queries_and_another_kind_of_draft_are_refused(tmp_path):
    folder = saved(tmp_path / "draft")
    tensors = read_tensors(folder) | {"layers.1.self_attn.q_norm.weight": np.ones(8, np.float32)}
    for kind, words in (("eagle3", "'peagle' speculator"), ("dspark", "expected dspark or dflash")):
        with pytest.raises(InputError, match=words):
            loaded(folder, kind)
    safetensors.numpy.save_file(tensors, f"{folder}/model.safetensors")
    with pytest.raises(InputError, match="q_norm"):
        loaded(folder)
    with pytest.raises(InputError, match=r"draft\.vocab_size=12"):
        loaded(saved(tmp_path / "other"), vocab_size=12)
