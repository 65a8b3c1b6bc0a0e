"""EAGLE-3 heads against the module of the speculators library: ours give the same logits there, and theirs here.

What is loaded there is what this library writes, the policy's folder included.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specrl_jax.drafts import eagle3
from specrl_jax.drafts.eagle3 import Eagle3Draft
from specrl_jax.io import hf
from specrl_jax.io import tensors as tensor_folder
from specrl_jax.models import decoder
from specrl_jax.models.rotary import Rope
from tests.helpers.head_folders import EAGLE3_FOLDERS
from tests.helpers.heads import VARIANTS, random_params
from tests.helpers.policies import random_params as random_policy
from tests.helpers.policies import row_positions
from tests.helpers.unrolled import unrolled

NEEDS_SPECULATORS = (
    "needs speculators 0.9: `pip install speculators`, and `pip uninstall torchvision torchaudio` where torch is a CPU "
    "build, whose versions on PyPI do not go with it"
)
TARGET = decoder.DecoderConfig(
    40, 24, 9, heads=8, kv_heads=2, head_dim=10, mlp=36, tied=False, max_positions=64, rope=Rope(1e6)
)
HEAD = dataclasses.replace(eagle3.eagle3_config(TARGET, 16), aux_layers=(1, 4, 8))
POLICY = random_policy(TARGET)
T, STEPS = 11, 3
rng = np.random.default_rng(0)
IDS = np.sort(rng.choice(TARGET.vocab, HEAD.draft_vocab, replace=False))
TOKENS = rng.integers(0, TARGET.vocab, T)
FEATURES = rng.normal(size=(T, 3, TARGET.embed)).astype(np.float32)
# float32 on both sides, logits that reach 10, sums of at most 72 products in three applications of one layer.
PARITY = {"atol": 5e-5, "rtol": 0}


def peer(folder):
    """Their module, as their own loader makes it."""
    torch = pytest.importorskip("torch", reason=NEEDS_SPECULATORS)
    modules = pytest.importorskip("speculators.models.eagle3", reason=NEEDS_SPECULATORS)
    config = modules.Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # their default is compiled for a GPU
    module = modules.Eagle3DraftModel.from_pretrained(folder, config=config).eval()
    # It means to take an embedding that the folder lacks from the policy, where it finds NaN (speculators 0.9); what
    # transformers 5 leaves there is whatever the memory held.
    module.embed_tokens.weight.data.copy_(torch.tensor(np.asarray(POLICY["embed"])))
    return module


def peer_logits(module):
    """[STEPS, T - 1, Vd] of their training pass, what its unembedding gives at every step."""
    torch = pytest.importorskip("torch", reason=NEEDS_SPECULATORS)
    logits = []
    hook = module.lm_head.register_forward_hook(lambda module, inputs, out: logits.append(out[0].numpy()))
    with torch.no_grad():
        features, tokens = torch.tensor(FEATURES[:-1]).reshape(1, T - 1, -1), torch.tensor(TOKENS[1:])[None]
        module(features, tokens, torch.zeros(1, T - 1, dtype=torch.long), ttt_steps=STEPS)
    hook.remove()
    return np.stack(logits)


def our_logits(params, head, form):
    params = jax.tree.map(jnp.asarray, params)
    if form == "rollout":
        params = Eagle3Draft(head).inference_params(params, jnp.float32)
    embedded = POLICY["embed"][TOKENS][None]
    positions = row_positions(TOKENS[None])
    outputs = unrolled(Eagle3Draft(head), params, FEATURES[None], jnp.asarray(embedded), STEPS, positions)
    table = params["to_logits"].T if form == "rollout" else params["unembed"]
    return jnp.einsum("STD,VD->STV", outputs[:, 0], table)


def assert_same(ours, theirs):
    """Row t of step i takes token t + 1 + i: the last ones of later steps have none."""
    assert theirs.std() > 0.5
    for i in range(STEPS):
        np.testing.assert_allclose(ours[i, : T - 1 - i], theirs[i, : T - 1 - i], **PARITY)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("policy"))
    hf.save_params(folder, POLICY, TARGET, dtype="float32")
    return folder


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.slow
def test_a_head_of_ours_gives_the_same_logits_there(name, tmp_path, policy):
    head = dataclasses.replace(HEAD, **VARIANTS[name])
    params = random_params(head)
    EAGLE3_FOLDERS.save(
        str(tmp_path), params, IDS, config=head, target=TARGET, dtype="float32", dialect="speculators", verifier=policy
    )
    module = peer(tmp_path)
    theirs = peer_logits(module)
    for form in ("learner", "rollout"):
        assert_same(our_logits(params, head, form), theirs)
    ids = module.d2t.numpy() + np.arange(len(IDS))
    np.testing.assert_array_equal(ids, IDS)
    np.testing.assert_array_equal(np.flatnonzero(module.t2d.numpy()), IDS)
    assert tuple(module.config.eagle_aux_hidden_state_layer_ids) == head.aux_layers
    # Nothing of ours was left out, nothing of theirs made up.
    state = module.state_dict()
    tensors = safetensors.numpy.load_file(tmp_path / tensor_folder.SINGLE)
    for tensor, value in tensors.items():
        np.testing.assert_array_equal(state[tensor].numpy(), value, err_msg=tensor)
    assert state.keys() - tensors.keys() <= {
        "embed_tokens.weight",
        "verifier_lm_head.weight",
        "verifier_norm.weight",
    }


@pytest.mark.parametrize("name", ["paper", "speculators", "eagle-3.1"])
@pytest.mark.slow
def test_a_head_of_theirs_gives_the_same_logits_here(name, tmp_path, policy, partition):
    """Written by their module with its copy of the embedding, read here."""
    head = dataclasses.replace(HEAD, **VARIANTS[name])
    EAGLE3_FOLDERS.save(
        str(tmp_path / "ours"),
        random_params(head),
        IDS,
        config=head,
        target=TARGET,
        dtype="float32",
        dialect="speculators",
        verifier=policy,
    )
    module = peer(tmp_path / "ours")
    module.save_pretrained(tmp_path / "theirs")
    folder = str(tmp_path / "theirs")
    assert "embed_tokens.weight" in safetensors.numpy.load_file(tmp_path / "theirs" / tensor_folder.SINGLE)
    assert EAGLE3_FOLDERS.load_config(folder, TARGET) == head
    np.testing.assert_array_equal(EAGLE3_FOLDERS.load_vocab_map(folder, head, TARGET), IDS)
    assert_same(our_logits(EAGLE3_FOLDERS.load_params(folder, head, partition), head, "learner"), peer_logits(module))


@pytest.mark.slow
def test_what_they_take_when_norm_before_residual_is_not_said(tmp_path, policy):
    """Their default is not vLLM's, which is ours: a config that leaves it out is two heads, so none is written."""
    EAGLE3_FOLDERS.save(
        str(tmp_path),
        random_params(HEAD),
        IDS,
        config=HEAD,
        target=TARGET,
        dtype="float32",
        dialect="speculators",
        verifier=policy,
    )
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw.pop("norm_before_residual") is False
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert peer(tmp_path).config.norm_before_residual is False
    assert EAGLE3_FOLDERS.load_config(str(tmp_path), TARGET).norm_before_residual is True
