"""Families of policies in Hugging Face folders: what their config.json means, and what is refused in one line."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.config import DraftConfig, RolloutConfig
from specrl_jax.errors import InputError
from specrl_jax.io import hf
from specrl_jax.io.families import FAMILIES
from specrl_jax.models import decoder
from specrl_jax.models.delta_net import DeltaNet
from specrl_jax.models.rotary import Llama3Scaling, Rope
from specrl_jax.sharding import make_mesh
from specrl_jax.tasks.generate import load_generator
from tests.helpers.folders import assert_same_trees, edit_config, edit_tensors, read_config, read_tensors
from tests.helpers.policies import HYBRID, LLAMA, QWEN2, SMALL, SMOLLM3, compiled, random_params, row_positions

MISTRAL = dataclasses.replace(LLAMA, rope=Rope(1e6), family="mistral")
MIMO = dataclasses.replace(QWEN2, family="mimo")
POLICIES = {"qwen2": QWEN2, "llama": LLAMA, "smollm3": SMOLLM3, "mistral": MISTRAL, "mimo": MIMO}
POLICIES["qwen3_5_text"] = HYBRID
# As published, without the keys that say nothing of the forward pass.
PUBLISHED = {
    "llama3p2_1b": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
    "qwen2p5_0p5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "smollm2_135m": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    },
    "qwen3p5_9b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    },
    "mimo_7b": {
        "architectures": ["MiMoForCausalLM"],
        "attention_bias": True,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 32768,
        "model_type": "mimo",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 640000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151680,
    },
}


def save(folder, policy):
    hf.save_params(str(folder), random_params(policy), policy, dtype="float32")
    return folder


def refusal(call):
    with pytest.raises(InputError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_preset(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    assert hf.load_config(str(tmp_path)) == decoder.preset(name)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_survives_its_folder(name, tmp_path, partition):
    policy = POLICIES[name]
    folder = str(save(tmp_path, policy))
    assert hf.load_config(folder) == policy
    hf.check_params(folder, policy)
    assert_same_trees(hf.load_params(folder, policy, partition), random_params(policy))
    raw = read_config(tmp_path)
    assert (raw["model_type"], raw["architectures"]) == (name, [FAMILIES[name].architecture])


def test_every_family_has_a_policy_here_or_is_qwen3():
    assert FAMILIES.keys() - POLICIES.keys() == {"qwen3", "qwen3_moe"}


def test_what_a_config_leaves_out_is_as_in_transformers(tmp_path):
    """Heads as wide as the model together, keys of each head, an lm_head of its own; of SmolLM3 the embedding's."""
    policy = dataclasses.replace(LLAMA, heads=4, kv_heads=4, head_dim=6)
    edit_config(save(tmp_path, policy), head_dim=..., num_key_value_heads=None, tie_word_embeddings=...)
    assert hf.load_config(str(tmp_path)) == policy
    edit_config(save(tmp_path, SMOLLM3), tie_word_embeddings=..., no_rope_layers=..., no_rope_layer_interval=2)
    assert hf.load_config(str(tmp_path)) == SMOLLM3


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("mistral", {"sliding_window": 4096}, "sliding_window"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layers of sliding_attention"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "2 entries in no_rope_layers, and num_hidden_layers=3"),
        ("smollm3", {"no_rope_layers": [1, 0, 2]}, "no_rope_layers"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "type 'longrope'; only default, yarn and llama3"),
        ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "low_freq_factor": 1.0}}, "low_freq_factor"),
        ("qwen2", {"rope_scaling": {"type": "default", "mrope_section": [1, 1, 1]}}, "mrope_section in rope_scaling"),
        ("qwen2", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
    ids=str,
)
def test_what_would_change_the_forward_is_refused(name, changes, words, tmp_path):
    edit_config(save(tmp_path, POLICIES[name]), **changes)
    message = refusal(lambda: hf.load_config(str(tmp_path)))
    assert words in message and message.startswith(f"policy.path: {tmp_path}")


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
def test_llama_3_positions_state_all_their_numbers(key, tmp_path):
    edit_config(save(tmp_path, LLAMA), "rope_scaling", **{key: ...})
    assert f"lacks '{key}'" in refusal(lambda: hf.load_config(str(tmp_path)))
    edit_config(save(tmp_path, LLAMA), "rope_scaling", low_freq_factor=4.0)
    assert "low_freq_factor=4, which must be below" in refusal(lambda: hf.load_config(str(tmp_path)))


Q_BIAS = "model.layers.1.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {Q_BIAS: np.ones(80, np.float32)}, f"holds {Q_BIAS}"),
        ("llama", {"model.layers.0.self_attn.q_norm.weight": np.ones(10, np.float32)}, "q_norm.weight"),
        ("llama", {"value_head.weight": np.ones(3, np.float32)}, "value_head.weight"),
        ("qwen2", {Q_BIAS: None}, f"lacks 1 tensors, the first is {Q_BIAS}"),
        ("qwen2", {Q_BIAS: np.ones(79, np.float32)}, f"{Q_BIAS} has shape (79,), (80,) is needed"),
    ],
    ids=["a bias", "a norm", "a stranger", "no bias", "another bias"],
)
def test_tensors_that_the_config_contradicts_are_refused(name, changes, words, tmp_path):
    edit_tensors(save(tmp_path, POLICIES[name]), changes)
    assert words in refusal(lambda: hf.check_params(str(tmp_path), POLICIES[name]))


def test_heads_and_old_tables_beside_the_policy_are_left_alone(tmp_path):
    extra = {name: np.ones(3, np.float32) for name in ("model.mtp_layers.0.a", "model.layers.0.rotary_emb.inv_freq")}
    edit_tensors(save(tmp_path, MIMO), extra)
    hf.check_params(str(tmp_path), MIMO)


def test_another_family_of_the_same_sizes_is_refused(tmp_path):
    """A Qwen2 without its biases would run, and be another policy."""
    folder = save(tmp_path, QWEN2)
    edit_config(folder, model_type="llama")
    assert "k_proj.bias" in refusal(lambda: hf.check_params(str(folder), hf.load_config(str(folder))))


def test_the_text_part_of_a_model_that_reads_images_is_its_policy(tmp_path, partition):
    folder = save(tmp_path, HYBRID)
    text = read_config(folder)
    vision = {"model.visual.patch_embed.proj.weight": np.ones(3, np.float32), "mtp.norm.weight": np.ones(3, np.float32)}
    tensors = {name: x for name, x in read_tensors(folder).items() if name.startswith("model.")}
    renamed = {f"model.language_model.{name.removeprefix('model.')}": x for name, x in tensors.items()}
    edit_tensors(folder, dict.fromkeys(tensors) | renamed | vision)
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 2}, "image_token_id": 9}
    (folder / "config.json").write_text(json.dumps(whole))
    assert hf.load_config(str(folder)) == HYBRID
    hf.check_params(str(folder), HYBRID)
    assert_same_trees(hf.load_params(str(folder), HYBRID, partition), random_params(HYBRID))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["mamba"] * 6}, "layers of mamba, which is not supported"),
        ({"layer_types": ["full_attention"] * 6}, "has layers of full_attention alone"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "2 entries in layer_types, and num_hidden_layers=6"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads=5, which must be a multiple of linear_num_key_heads=2"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"partial_rotary_factor": 0.3}, "partial_rotary_factor=0.3 of head_dim=10: 3 must be even"),
        ({"model_type": "qwen3_5_moe"}, "holds a 'qwen3_5_moe' model, expected"),
        ({"model_type": "qwen3_next"}, "holds a 'qwen3_next' model, expected"),
        ({"attention_bias": True}, "asks for attention_bias, which is not supported"),
    ],
)
def test_a_hybrid_that_has_no_policy_here_is_refused(changes, words, tmp_path):
    folder = save(tmp_path, HYBRID)
    edit_config(folder, **changes)
    assert words in refusal(lambda: hf.load_config(str(folder)))


def odd_shape(family, seed):
    """A small policy of a family: every size, factor and base drawn, head_dim not embed / heads in most."""
    rng = np.random.default_rng([seed, *family.encode()])
    kv_heads, group, head_dim = (int(rng.choice(sizes)) for sizes in ((1, 2, 3), (1, 2, 4), (6, 8, 10, 16)))
    layers, theta = int(rng.integers(1, 5)), float(rng.choice([1e4, 1e5, 6.4e5, 1e6]))
    scaling = Llama3Scaling(float(rng.choice([8.0, 32.0])), int(rng.choice([8, 24]))) if family == "llama" else None
    own = {}
    if family == "qwen3_5_text":
        layers += 1
        # A key of one number would be its sign, which rounding can turn.
        key_heads, dk, dv = (int(n) for n in rng.integers((1, 4, 1), 12))
        delta = tuple(sorted(rng.permutation(layers)[: rng.integers(1, layers)].tolist()))
        sizes = DeltaNet(delta, key_heads, key_heads * int(rng.integers(1, 4)), key_dim=dk, value_dim=dv, window=4)
        own = {"delta": sizes, "rotary_dim": int(rng.choice([2, 4, head_dim]))}
    return dataclasses.replace(
        POLICIES.get(family, SMALL),
        vocab=int(rng.integers(30, 60)),
        embed=kv_heads * group * int(rng.integers(4, 9)),  # Llama's config asks for a multiple
        layers=layers,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=int(rng.integers(20, 50)),
        tied=bool(rng.integers(2)),
        rope=Rope(theta, scaling if seed % 3 else None),
        norm_epsilon=float(rng.choice([1e-5, 1e-6])),
        no_rope_layers=tuple(i for i in range(layers) if rng.integers(2)) if family == "smollm3" else (),
        **own,
    )


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "smollm3", "mistral", "qwen3_5_text"])
def test_logits_of_odd_shapes_are_those_of_transformers(family, tmp_path, partition):
    """14 of each, written by us, read by transformers and by us: float32, or stored in bfloat16, in one file or more.

    1e-4 of the largest logit; a summing order changes 1e-6 of it.
    """
    reason = "pip install -r requirements-parity.txt brings this test back"
    transformers = pytest.importorskip("transformers", reason=reason)
    torch = pytest.importorskip("torch", reason=reason)
    for seed in range(14):
        policy, folder = odd_shape(family, seed), str(tmp_path / str(seed))
        stored = "bfloat16" if seed % 4 == 3 else "float32"
        hf.save_params(folder, random_params(policy, seed), policy, dtype=stored)
        assert hf.load_config(folder) == policy
        hf.check_params(folder, policy)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager")
        tokens = np.random.default_rng(seed).integers(0, policy.vocab, (2, 40))
        with torch.no_grad():
            expected = model.eval()(torch.tensor(tokens)).logits.numpy()
        params = hf.load_params(folder, policy, partition, dtype=jnp.float32)
        ours = jnp.asarray(tokens, jnp.int32)
        logits = compiled(policy, partition)(params, ours, row_positions(ours)).logits
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max(), err_msg=str(policy))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nano_qwen2", "nano_llama", "nano_smollm3", "nano_mistral", "nano_hybrid"])
def test_greedy_answers_with_drafts_are_those_of_transformers(name, tmp_path):
    """20 prompts, 40 tokens each, n-gram drafts here; up to the first tie of float32."""
    reason = "pip install -r requirements-parity.txt brings this test back"
    transformers = pytest.importorskip("transformers", reason=reason)
    torch = pytest.importorskip("torch", reason=reason)
    policy = decoder.preset(name)
    folder = str(save(tmp_path, policy))
    rng = np.random.default_rng(0)
    prompts = ["".join(rng.choice(list("0123456789+-="), 8)) for _ in range(20)]
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])
    rollout = RolloutConfig(max_prompt_tokens=8, max_response_tokens=40, num_slots=20, temperature=0.0)
    draft = DraftConfig(kind="ngram", length=3, adaptive=False)
    generator = load_generator(folder, draft, rollout, mesh=mesh, tokenizer="char")
    out = generator.generate(prompts, samples=1, seed=0)
    assert out.speculation["spec/accepted"] > 0
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", attn_implementation="eager"
    ).eval()
    for prompt, tokens in zip(prompts, out.tokens, strict=True):
        text = [*generator.tokenizer.encode(prompt), *tokens]
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0, len(text) - len(tokens) - 1 : -1]
        best = logits.topk(2, dim=-1)
        for token, values, ids in zip(tokens, best.values, best.indices, strict=True):
            if token != int(ids[0]):
                assert float(values[0] - values[1]) < 1e-5
                break
