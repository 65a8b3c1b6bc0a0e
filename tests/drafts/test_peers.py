"""Drafts of one pass against the modules of the speculators library, which load the folders that are written here."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specrl_jax.core import stand_in
from specrl_jax.data.rows import Rows
from specrl_jax.drafts import block, peagle
from specrl_jax.drafts.base import DraftInputs, DraftOptions, TargetTables, confidence_logits
from specrl_jax.drafts.block import BlockDraft
from specrl_jax.drafts.kinds import make_method
from specrl_jax.drafts.peagle import PEagleDraft
from specrl_jax.io import hf
from specrl_jax.io import tensors as tensor_folder
from specrl_jax.models import decoder
from specrl_jax.models.rotary import Rope
from specrl_jax.sharding import LEARNER, make_mesh, partitioner
from tests.drafts.eagle3.test_peers import NEEDS_SPECULATORS
from tests.helpers.heads import drawn_params
from tests.helpers.policies import random_params as random_policy

TARGET = decoder.DecoderConfig(
    40, 24, 9, heads=8, kv_heads=2, head_dim=10, mlp=36, tied=False, max_positions=64, rope=Rope(1e6)
)
POLICY = random_policy(TARGET)
T, S = 13, 4
ONE = partitioner(make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1]), LEARNER)
NEW = peagle.peagle_config(TARGET, 3, 16)
DRAFTS = {
    "peagle": PEagleDraft(NEW, "speculators"),
    "peagle, own embedding": PEagleDraft(
        dataclasses.replace(NEW, own_embedding=True, fc_norm=True, norm_before_residual=True), "speculators"
    ),
    "dspark": BlockDraft(block.block_config(TARGET, S, 2, draft_vocab=16, markov=True), "speculators"),
    "dflash": BlockDraft(block.block_config(TARGET, S, 2, draft_vocab=16, markov=False), "speculators"),
    "dflash from the anchor": BlockDraft(
        dataclasses.replace(block.block_config(TARGET, S, 2, draft_vocab=16, markov=False), from_anchor=True),
        "speculators",
    ),
}
rng = np.random.default_rng(0)
IDS = np.sort(rng.choice(TARGET.vocab, 16, replace=False)).astype(np.int32)
TOKENS = rng.integers(0, TARGET.vocab, T).astype(np.int32)
# float32 on both sides, logits of a few units, sums of at most 72 products through three layers.
PARITY = {"atol": 5e-5, "rtol": 0}
pytestmark = pytest.mark.slow


def features_of(draft):
    shape = (T, len(draft.aux_layers), TARGET.embed)
    return np.random.default_rng(4).normal(size=shape).astype(np.float32)


def our_logits(draft, params, steps):
    """[steps, T, Vd] of the training pass, and [steps, T] of a confidence head."""
    positions = np.arange(T, dtype=np.int32)[None]
    rows = Rows(*map(stand_in, (TOKENS[None], positions, TOKENS[None], TOKENS[None] >= 0)), None)
    tables = TargetTables(jnp.asarray(POLICY["embed"]), jnp.asarray(POLICY["unembed"]))
    inputs = DraftInputs(
        tables, jnp.asarray(features_of(draft))[None], jnp.zeros(()), rows=rows, steps=steps, dtype=jnp.dtype("float32")
    )
    outputs, table = draft.unrolled(params, inputs, ONE)
    confidence = confidence_logits(params, outputs)[:, 0] if "confidence" in params else None
    return np.asarray(jnp.einsum("SBTD,VD->SBTV", outputs, table))[:, 0], confidence


def peer(folder, kind, class_name):
    """Their module, as their own loader makes it."""
    torch = pytest.importorskip("torch", reason=NEEDS_SPECULATORS)
    modules = pytest.importorskip(f"speculators.models.{kind}", reason=NEEDS_SPECULATORS)
    module_class = getattr(modules, class_name)
    config = module_class.config_class.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # their default is compiled for a GPU
    module = module_class.from_pretrained(folder, config=config).eval()
    if "embed_tokens.weight" not in safetensors.numpy.load_file(folder / tensor_folder.SINGLE):
        # What is left in an embedding that the folder lacks is whatever the memory held (speculators 0.9).
        module.embed_tokens.weight.data.copy_(torch.tensor(np.asarray(POLICY["embed"])))
    return torch, module


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("policy"))
    hf.save_params(folder, POLICY, TARGET, dtype="float32")
    return folder


def written(name, folder, policy):
    """The draft's parameters, after they were saved and found again by its own loader."""
    draft, kind = DRAFTS[name], name.split()[0].strip(",")
    params = drawn_params(draft.specs, seed=3)
    draft.save(str(folder), params, IDS, target=TARGET, dtype="float32", target_path=policy)
    assert make_method(DraftOptions(kind, path=str(folder), dialect="speculators"), TARGET).model == draft
    return params


def assert_complete(module, folder):
    """Nothing of ours was left out."""
    state = module.state_dict()
    for tensor, value in safetensors.numpy.load_file(folder / tensor_folder.SINGLE).items():
        np.testing.assert_array_equal(state[tensor].numpy(), value, err_msg=tensor)


@pytest.mark.parametrize("name", ["peagle", "peagle, own embedding"])
def test_p_eagle_gives_the_same_logits_there(name, tmp_path, policy, monkeypatch):
    draft, params = DRAFTS[name], written(name, tmp_path, policy)
    torch, module = peer(tmp_path, "peagle", "PEagleDraftModel")
    # Every pair at every depth, where theirs drops some at random.
    anchors = [range(T - 1), *(range(T - 1 - d) for d in range(1, S))]
    places = torch.tensor([t for depth in anchors for t in depth])
    depths = torch.tensor([d for d, depth in enumerate(anchors) for _ in depth])
    core = importlib.import_module("speculators.models.peagle.core")
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **values: (places, depths))
    monkeypatch.setattr(core, "compute_metrics", lambda logits, **values: (logits, {}))
    with torch.no_grad():
        features = torch.tensor(features_of(draft)[:-1]).reshape(1, T - 1, -1)
        last = torch.zeros(1, T - 1, TARGET.embed)
        tokens, documents = torch.tensor(TOKENS[1:])[None].long(), torch.zeros(1, T - 1, dtype=torch.long)
        theirs = module(features, tokens, documents, verifier_last_hidden_states=last, num_depths=S)[1][0].numpy()
    ours, _ = our_logits(draft, params, S)
    assert theirs.std() > 0.5
    np.testing.assert_allclose(ours[depths.numpy(), places.numpy()], theirs, **PARITY)
    assert_complete(module, tmp_path)


@pytest.mark.parametrize("name", ["dspark", "dflash", "dflash from the anchor"])
def test_a_block_gives_the_same_logits_there(name, tmp_path, policy, monkeypatch):
    draft, params = DRAFTS[name], written(name, tmp_path, policy)
    kind = name.split()[0]
    torch, module = peer(tmp_path, kind, {"dspark": "DSparkDraftModel", "dflash": "DFlashDraftModel"}[kind])
    core = importlib.import_module(f"speculators.models.{kind}.core")
    monkeypatch.setattr(core, "compute_metrics", lambda logits, *values, **more: (logits, values))
    blocks = T - S
    with torch.no_grad():
        features, last = torch.tensor(features_of(draft)).reshape(1, T, -1), torch.zeros(1, T, TARGET.embed)
        _, theirs, values = module(
            features,
            torch.tensor(TOKENS)[None].long(),
            torch.ones(1, T),
            last,
            torch.zeros(1, T, dtype=torch.long),
            max_anchors=blocks,
        )
    theirs = theirs[0].numpy().reshape(blocks, S, -1)[1:, draft.config.unused :]
    ours, confidence = our_logits(draft, params, draft.longest)
    assert theirs.std() > 0.5
    # Row t drafts behind token t + 1; the block of their first anchor has no row.
    np.testing.assert_allclose(np.moveaxis(ours[:, : blocks - 1], 0, 1), theirs, **PARITY)
    if kind == "dspark":
        np.testing.assert_allclose(confidence[:, : blocks - 1].T, values[1][0].numpy().reshape(blocks, S)[1:], **PARITY)
    assert_complete(module, tmp_path)
