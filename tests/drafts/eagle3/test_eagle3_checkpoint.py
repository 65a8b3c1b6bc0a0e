"""EAGLE-3 heads in three formats: recognised, the same bits through each, refusals, and every trap of interchange.

The traps are those of the reference notes on EAGLE-3, section 6: layers off by one, positions that are clamped,
norm_before_residual's default, norm_output's two meanings, a yarn that was never trained, and the layout of q, k, v.
"""

import dataclasses
import functools
import shutil

import numpy as np
import pytest

from specrl_jax.drafts import eagle3
from specrl_jax.drafts.write_head import write_eagle
from specrl_jax.errors import InputError
from specrl_jax.models import decoder
from specrl_jax.models.rotary import Llama3Scaling, Rope, Yarn
from tests.helpers.folders import assert_same_trees, edit_config, edit_tensors, read_config, read_tensors
from tests.helpers.head_folders import EAGLE3_FOLDERS
from tests.helpers.heads import VARIANTS, random_params, torch_layout

# Every size differs from every other, and N * H from D.
TARGET = decoder.DecoderConfig(
    40, 24, 9, heads=8, kv_heads=2, head_dim=10, mlp=36, tied=False, max_positions=64, rope=Rope(1e4)
)
HEAD = dataclasses.replace(eagle3.eagle3_config(TARGET, 16), aux_layers=(1, 4, 8))
IDS = np.sort(np.random.default_rng(1).choice(TARGET.vocab, HEAD.draft_vocab, replace=False)).astype(np.int32)
LAYER = {"sglang": "midlayer.", "vllm": "layers.0.", "speculators": "layers.0."}
AUX = "eagle_aux_hidden_state_layer_ids"
dialects = pytest.mark.parametrize("dialect", LAYER)
variants = pytest.mark.parametrize("name", VARIANTS)


def head_of(name):
    return dataclasses.replace(HEAD, **VARIANTS[name])


def save(folder, dialect, head=HEAD, dtype="float32", ids=IDS):
    """The parameters, exactly representable in `dtype`."""
    params = random_params(head, dtype=dtype)
    EAGLE3_FOLDERS.save(str(folder), params, ids, config=head, target=TARGET, dtype=dtype, dialect=dialect)
    return params


def load_config(folder, target=TARGET):
    return EAGLE3_FOLDERS.load_config(str(folder), target)


def load(folder, partition):
    head = load_config(folder)
    return head, EAGLE3_FOLDERS.load_params(str(folder), head, partition)


def sizes_at(dialect):
    """Where in config.json the layer's sizes are."""
    return ("transformer_layer_config",) if dialect == "speculators" else ()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    for dialect in LAYER:
        save(folder / dialect, dialect)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """dialect -> a copy to edit."""

    def copied(dialect):
        shutil.copytree(saved / dialect, tmp_path / dialect)
        return tmp_path / dialect

    return copied


def refusal(folder, target=TARGET):
    with pytest.raises(InputError) as error:
        load_config(folder, target)
    assert (
        "\n" not in str(error.value) and str(error.value).startswith("draft.path") and str(folder) in str(error.value)
    )
    return str(error.value)


# The same head through every dialect


@dialects
@variants
def test_tensors_have_the_published_names_and_layouts(dialect, name, tmp_path):
    """Trap 6: q, k and v head after head, each over [embedding, hidden]; by hand, not through the loader."""
    params = save(tmp_path, dialect, head_of(name))
    expected = torch_layout(params, LAYER[dialect])
    tensors = read_tensors(tmp_path)
    assert tensors.keys() == expected.keys() | {"d2t", "t2d"}
    for key, tensor in expected.items():
        np.testing.assert_array_equal(tensors[key], tensor, err_msg=key)


@dialects
@variants
def test_the_same_head_comes_back(dialect, name, tmp_path, partition):
    params = save(tmp_path, dialect, head_of(name), "bfloat16")
    head, loaded = load(tmp_path, partition)
    assert head == head_of(name)
    assert_same_trees(loaded, params)
    np.testing.assert_array_equal(EAGLE3_FOLDERS.load_vocab_map(str(tmp_path), head, TARGET), IDS)


@dialects
@pytest.mark.parametrize("layers", [2, 4])
def test_a_head_of_a_shallow_policy_comes_back(dialect, layers, tmp_path, partition):
    """Under the published names; of three layers, config.json does not say how many."""
    target = dataclasses.replace(TARGET, layers=layers)
    head = eagle3.eagle3_config(target, 16)
    params = random_params(head)
    EAGLE3_FOLDERS.save(str(tmp_path), params, IDS, config=head, target=target, dtype="float32", dialect=dialect)
    assert read_tensors(tmp_path)["fc.weight"].shape == (24, 24 * len(head.aux_layers))
    said = {AUX: list(head.aux_layers)} | ({"num_aux_hidden_states": 2} if layers == 2 else {})
    assert {key: value for key, value in read_config(tmp_path).items() if "aux" in key} == said
    assert load_config(tmp_path, target) == head
    assert_same_trees(EAGLE3_FOLDERS.load_params(str(tmp_path), head, partition), params)


# What is written


def test_the_flat_configs(saved):
    sizes = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 64,
        "vocab_size": 40,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    for dialect in ("sglang", "vllm"):
        assert read_config(saved / dialect) == sizes | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": 16,
            AUX: [1, 4, 8],
            "eagle_config": {AUX: [0, 3, 7]},
        }


def test_the_nested_config_leaves_no_variant_to_a_default(saved, tmp_path):
    written = read_config(saved / "speculators")
    layer, verifier = written.pop("transformer_layer_config"), written["speculators_config"].pop("verifier")
    assert written == {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 16,
        "target_hidden_size": 24,
        AUX: [1, 4, 8],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
        },
    }
    assert verifier == {"name_or_path": None, "architectures": ["Qwen3ForCausalLM"]}
    flat = read_config(saved / "vllm")
    own = {key: flat[key] for key in layer.keys() & flat.keys()}
    assert layer == own | {"attention_bias": False, "mlp_bias": False}
    assert own.keys() >= {"head_dim", "rope_theta", "max_position_embeddings", "vocab_size", "model_type"}
    EAGLE3_FOLDERS.save(
        str(tmp_path),
        random_params(HEAD),
        IDS,
        config=HEAD,
        target=TARGET,
        dtype="float32",
        dialect="speculators",
        verifier="my/policy",
    )
    assert read_config(tmp_path)["speculators_config"]["verifier"]["name_or_path"] == "my/policy"


# Trap 1: layers off by one


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
@pytest.mark.parametrize(
    ("top", "inner", "entered"),
    [
        (..., {AUX: [0, 3, 7]}, (1, 4, 8)),  # outputs: SpecForge, SGLang, Model Optimizer
        ([1, 4, 8], ..., (1, 4, 8)),  # inputs: vLLM
        ([1, 4, 8], {AUX: [0, 3, 7]}, (1, 4, 8)),
        (..., {"layer_ids": [1, 4, 8]}, (1, 4, 8)),  # inputs: vLLM
        (None, {}, (2, 4, 6)),
        (..., ..., (2, 4, 6)),  # 2, L / 2, L - 3
        ([0, 1, 2], ..., (0, 1, 2)),
        (..., {AUX: [-1, 3, 7]}, (0, 4, 8)),  # what enters layer 0 is the embedding
    ],
)
def test_which_layers_a_flat_config_names(dialect, top, inner, entered, copy):
    folder = copy(dialect)
    edit_config(folder, **{AUX: top, "eagle_config": inner})
    assert load_config(folder).aux_layers == entered


@pytest.mark.parametrize(("ids", "entered"), [([1, 4, 8], (1, 4, 8)), ([0, 3, 7], (0, 3, 7)), (..., (2, 4, 6))])
def test_which_layers_speculators_names(ids, entered, copy):
    folder = copy("speculators")
    edit_config(folder, **{AUX: ids})
    assert load_config(folder).aux_layers == entered


@pytest.mark.parametrize(
    ("top", "inner", "words"),
    [
        # The same numbers under both conventions.
        ([0, 3, 7], [0, 3, 7], [f"{AUX}=[0, 3, 7] (inputs)", f"eagle_config.{AUX}=[0, 3, 7] (outputs)"]),
        ([1, 4, 9], ..., ["1, 4, 9", "0..8"]),
        (..., [0, 3, 8], ["1, 4, 9", "0..8"]),  # the output of the last layer
        ([-1, 4, 8], ..., ["-1, 4, 8"]),
        ([4, 1, 8], ..., ["4, 1, 8", "ascend"]),
        ([1, 4, 4], ..., ["1, 4, 4", "ascend"]),
        ([1, 2, 4, 6, 8], ..., [f"{AUX}=[1, 2, 4, 6, 8]", "at most 3 items"]),
        (..., [1, 7], ["reads 2 layers", "num_aux_hidden_states=3"]),
        ("1, 4, 8", ..., [f'{AUX}="1, 4, 8"', "list"]),
        ([1, 4, 8.5], ..., [f"{AUX}.2=8.5", "integer"]),
    ],
    ids=str,
)
def test_layers_that_cannot_be(top, inner, words, copy):
    folder = copy("sglang")
    edit_config(folder, **{AUX: top, "eagle_config": inner if inner is ... else {AUX: inner}})
    message = refusal(folder)
    for word in words:
        assert word in message, message


# Trap 2: positions that are clamped


@dialects
def test_a_heads_own_length_limit_neither_clamps_nor_comes_back(dialect, copy, tmp_path, partition):
    """Many say 2048. The policy's limit is what is run to and what is written; unclamped angles: tests/models."""
    folder = copy(dialect)
    edit_config(folder, *sizes_at(dialect), max_position_embeddings=8)
    head, params = load(folder, partition)
    assert head == HEAD and head.max_positions == TARGET.max_positions
    EAGLE3_FOLDERS.save(
        str(tmp_path / "again"), params, IDS, config=head, target=TARGET, dtype="float32", dialect=dialect
    )
    written = read_config(tmp_path / "again")
    sizes = functools.reduce(lambda config, key: config[key], sizes_at(dialect), written)
    assert sizes["max_position_embeddings"] == TARGET.max_positions
    stretched = dataclasses.replace(TARGET, rope=Rope(1e4, Yarn(4.0, TARGET.max_positions)))
    written = write_eagle(head, dialect, stretched, kind="eagle3", dtype="float32", verifier="")
    sizes = functools.reduce(lambda config, key: config[key], sizes_at(dialect), written)
    assert sizes["max_position_embeddings"] == stretched.longest == 4 * TARGET.max_positions


# Trap 3: norm_before_residual


@dialects
def test_norm_before_residual_that_is_not_said(dialect, copy):
    """False in a flat config and True in a nested one, as vLLM reads them."""
    folder = copy(dialect)
    for absent in (..., None):
        edit_config(folder, norm_before_residual=absent)
        assert load_config(folder).norm_before_residual == (dialect == "speculators")
    for said in (False, True):
        edit_config(folder, norm_before_residual=said)
        assert load_config(folder).norm_before_residual == said


# Trap 4: norm_output


@pytest.mark.parametrize("dialect", ["vllm", "speculators"])
def test_norm_output_feeds_back_where_it_says_only_that(dialect, copy):
    folder = copy(dialect)
    for said, expected in ((True, True), (False, False), (..., False)):
        edit_config(folder, norm_output=said)
        assert load_config(folder).norm_output == expected


def test_norm_output_under_midlayer_says_two_things(copy):
    """SGLang feeds back the normed output, SpecForge trains on the other, with the same config: never guessed."""
    folder = copy("sglang")
    edit_config(folder, norm_output=True)
    message = refusal(folder)
    for word in ("norm_output=true", "norm_output_feeds_back=true", "SGLang", "false", "SpecForge"):
        assert word in message
    for meant in (True, False):
        edit_config(folder, norm_output_feeds_back=meant)
        assert load_config(folder).norm_output == meant
    edit_config(folder, norm_output=..., norm_output_feeds_back=...)
    assert load_config(folder).norm_output is False


def test_what_is_written_of_norm_output(saved, tmp_path):
    """On: SGLang's key and what it means. Off: no key at all, for SpecForge reads false as no final norm."""
    assert not {"norm_output", "norm_output_feeds_back"} & read_config(saved / "sglang").keys()
    save(tmp_path, "sglang", head_of("norm_output"))
    written = read_config(tmp_path)
    assert written["norm_output"] is True and written["norm_output_feeds_back"] is True


# Trap 5: rope_scaling


@dialects
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 32.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 32.0}},
        {"rope_scaling": {"factor": 2.0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
        {"rope_scaling": {"rope_type": "yarn"}},
    ],
    ids=str,
)
def test_scaled_positions(dialect, changes, copy):
    folder = copy(dialect)
    edit_config(folder, *sizes_at(dialect), **changes)
    stretched = "yarn" in str(changes) or "llama3" in str(changes)
    assert ("lacks 'factor'" if stretched else "rope_scaling of type") in refusal(folder)


@dialects
@pytest.mark.parametrize(
    "changes",
    [
        # As Model Optimizer writes it, and as speculators and transformers 5 do.
        {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}},
        {"rope_scaling": {"type": "yarn", "factor": 32.0}, "max_position_embeddings": 2048},
        {
            "rope_theta": ...,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 32.0,
                "original_max_position_embeddings": 2048,
            },
        },
    ],
    ids=str,
)
def test_positions_that_are_the_heads_own(dialect, changes, copy):
    """Its config.json's, though its target's are plain; and the other way round."""
    folder = copy(dialect)
    stretched = dataclasses.replace(TARGET, rope=Rope(1e4, Yarn(2.0, 32)))
    assert load_config(folder, stretched) == HEAD
    edit_config(folder, *sizes_at(dialect), **changes)
    own = dataclasses.replace(HEAD, rope=Rope(1e4, Yarn(32.0, 2048)))
    assert load_config(folder) == load_config(folder, stretched) == own


def test_a_head_of_llama_3_1_has_its_positions(copy):
    folder, scaling = copy("sglang"), {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}
    edit_config(folder, rope_scaling=scaling | {"low_freq_factor": 1.0, "high_freq_factor": 4.0})
    assert load_config(folder) == dataclasses.replace(HEAD, rope=Rope(1e4, Llama3Scaling(8.0, 32)))


@dialects
def test_positions_that_are_not_scaled(dialect, copy):
    folder = copy(dialect)
    for changes in (
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "default"}},
        # Where transformers 5 keeps the base.
        {"rope_scaling": ..., "rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ):
        edit_config(folder, *sizes_at(dialect), **changes)
        assert load_config(folder) == HEAD


# Variants, as others write them


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_variants_in_eagle_config(dialect, tmp_path):
    """Where Model Optimizer writes them."""
    save(tmp_path, dialect, head_of("norm_before_fc"))
    edit_config(tmp_path, norm_before_fc=...)
    edit_config(tmp_path, "eagle_config", norm_before_fc=True)
    assert load_config(tmp_path) == head_of("norm_before_fc")


def test_feature_norms_under_sglangs_earlier_names(tmp_path, partition):
    params = save(tmp_path, "sglang", head_of("fc_norm"))
    edit_config(tmp_path, fc_norm=..., use_aux_norm=True)
    tensors = read_tensors(tmp_path)
    earlier = {
        f"aux_norm_{name}.weight": tensors[f"fc_norm.{i}.weight"] for i, name in enumerate(("low", "mid", "high"))
    }
    edit_tensors(tmp_path, dict.fromkeys(f"fc_norm.{i}.weight" for i in range(3)) | earlier)
    head, loaded = load(tmp_path, partition)
    assert head == head_of("fc_norm")
    assert_same_trees(loaded, params)


@dialects
def test_both_norms_of_features(dialect, copy):
    folder = copy(dialect)
    edit_config(folder, norm_before_fc=True, fc_norm=True)
    message = refusal(folder)
    assert "norm_before_fc" in message and "fc_norm" in message


@pytest.mark.parametrize(
    ("name", "key", "tensor"),
    [
        ("norm_before_fc", "norm_before_fc", "input_norm.weight"),
        ("fc_norm", "fc_norm", "fc_norm.0.weight"),
    ],
)
@dialects
def test_norms_that_are_declared_or_there_but_not_both(dialect, name, key, tensor, tmp_path):
    save(tmp_path, dialect, head_of(name))
    edit_config(tmp_path, **{key: False})
    assert tensor in refusal(tmp_path) and key in refusal(tmp_path)
    edit_config(tmp_path, **{key: True})
    edit_tensors(tmp_path, {tensor: None})
    assert f"lacks 1 tensors, the first is {tensor}" in refusal(tmp_path)


@dialects
def test_heads_of_the_width_that_is_usual_need_not_say_so(dialect, tmp_path):
    head = dataclasses.replace(HEAD, heads=6, head_dim=4)
    save(tmp_path, dialect, head)
    for absent in (None, ...):
        edit_config(tmp_path, *sizes_at(dialect), head_dim=absent)
        assert load_config(tmp_path) == head


# Embedding and vocabulary


@dialects
def test_a_copy_of_the_embedding_is_ignored(dialect, copy, partition):
    folder = copy(dialect)
    edit_tensors(folder, {"embed_tokens.weight": np.zeros((40, 24), np.float32)})
    assert_same_trees(load(folder, partition)[1], random_params(HEAD))


def test_an_embedding_of_its_own(copy):
    folder = copy("speculators")
    edit_config(folder, embed_requires_grad=True)
    assert load_config(folder) == HEAD  # and yet none there
    edit_tensors(folder, {"embed_tokens.weight": np.zeros((40, 24), np.float32)})
    assert "embed_requires_grad" in refusal(folder)


def test_an_embedding_of_another_width(copy):
    folder = copy("sglang")
    edit_tensors(folder, {"embed_tokens.weight": np.zeros((40, 32), np.float32)})
    with pytest.raises(InputError, match=r"embed_tokens\.weight has shape \(40, 32\), \(40, 24\) is needed"):
        load_config(folder)


def test_a_head_over_the_whole_vocabulary_needs_no_map(tmp_path):
    """speculators writes none."""
    head = dataclasses.replace(HEAD, draft_vocab=TARGET.vocab)
    save(tmp_path, "speculators", head, ids=np.arange(TARGET.vocab))
    edit_tensors(tmp_path, {"d2t": None, "t2d": None})
    assert load_config(tmp_path) == head
    ids = EAGLE3_FOLDERS.load_vocab_map(str(tmp_path), head, TARGET)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, np.arange(TARGET.vocab))


def test_t2d_may_be_missing_but_not_wrong(copy):
    folder = copy("vllm")
    mask = read_tensors(folder)["t2d"]
    edit_tensors(folder, {"t2d": None})
    assert load_config(folder) == HEAD
    edit_tensors(folder, {"t2d": np.roll(mask, 1)})
    assert "t2d" in refusal(folder) and "d2t" in refusal(folder)


# What is not supported: one line each


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_hidden_size": 48}, ["target_hidden_size=48", "24"]),
        ({"num_aux_hidden_states": 5}, ["num_aux_hidden_states=5", "reads 3 layers"]),
        ({"draft_vocab_size": None}, ["lacks 'draft_vocab_size'"]),
        ({"num_hidden_layers": 2}, ["num_hidden_layers=2", "1"]),
        ({"hidden_act": "gelu"}, ['hidden_act="gelu"', "silu"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings"]),
        ({"use_sliding_window": True, "sliding_window": 512}, ["use_sliding_window"]),
        ({"layer_types": ["sliding_attention"]}, ["sliding_attention"]),
        ({"hidden_size": 32}, ["hidden_size=32", "24"]),
        ({"vocab_size": 48}, ["vocab_size=48", "40"]),
        ({"hidden_size": None}, ["lacks 'hidden_size'"]),
        ({"num_attention_heads": None}, ["lacks 'num_attention_heads'"]),
        ({"rms_norm_eps": "1e-6"}, ['rms_norm_eps="1e-6"', "number"]),
        ({"rope_theta": ...}, ["lacks 'rope_theta'"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads=8", "num_key_value_heads=3"]),
        ({"head_dim": 5}, ["head_dim=5", "even"]),
    ],
    ids=str,
)
@dialects
def test_a_head_or_a_layer_that_is_not_this_one(dialect, changes, words, copy):
    folder = copy(dialect)
    of_head = changes.keys() & {"target_hidden_size", "num_aux_hidden_states", "draft_vocab_size"}
    edit_config(folder, *(() if of_head else sizes_at(dialect)), **changes)
    message = refusal(folder)
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    "name",
    [
        "{layer}self_attn.q_norm.weight",
        "{layer}self_attn.q_proj.bias",
        "{layer}mlp.down_proj.weight_scale",
        "layers.1.hidden_norm.weight",  # a further layer
        "mask_hidden",  # parallel drafting
    ],
)
@dialects
def test_tensors_that_are_not_known(dialect, name, copy):
    folder, name = copy(dialect), name.format(layer=LAYER[dialect])
    edit_tensors(folder, {name: np.zeros(10, np.float32)})
    assert name in refusal(folder)


@dialects
def test_a_missing_tensor(dialect, copy):
    folder = copy(dialect)
    edit_tensors(folder, {LAYER[dialect] + "self_attn.k_proj.weight": None})
    assert f"the first is {LAYER[dialect]}self_attn.k_proj.weight" in refusal(folder)


def test_a_layer_under_both_names_or_none(copy, saved):
    folder = copy("sglang")
    edit_tensors(folder, read_tensors(saved / "vllm"))
    assert "midlayer.* or layers.0.*" in refusal(folder) and "has 2" in refusal(folder)
    edit_tensors(folder, {name: None for name in read_tensors(folder) if "layer" in name})
    assert "midlayer.* or layers.0.*" in refusal(folder) and "has 0" in refusal(folder)


@pytest.mark.parametrize("kind", ["dflash", "peagle", None])
def test_another_speculator(kind, copy):
    folder = copy("speculators")
    edit_config(folder, speculators_model_type=kind)
    assert str(kind) in refusal(folder) and "'eagle3'" in refusal(folder)
    edit_config(folder, speculators_model_type="eagle3", transformer_layer_config=...)
    assert "lacks 'transformer_layer_config'" in refusal(folder)


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], ["Eagle3DraftModel"], [], None])
def test_another_architecture(architectures, copy):
    folder = copy("sglang")
    edit_config(folder, architectures=architectures)
    message = refusal(folder)
    assert "LlamaForCausalLMEagle3" in message and str(architectures) in message


def test_a_missing_folder(tmp_path):
    assert "no folder" in refusal(tmp_path / "nowhere")


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
def test_a_d2t_that_names_no_ids_of_the_policy(d2t, words, copy):
    folder = copy("sglang")
    edit_tensors(folder, {"d2t": d2t})
    message = refusal(folder)
    for word in words:
        assert word in message, message
