"""Qwen3.5's head against its formulas in float64 NumPy, from tensors by their published names.

z = [pre_fc_norm_embedding(e_{t+1}); pre_fc_norm_hidden(h_t)]    h_t: behind the final norm, then what is fed back
a = norm(block(fc z))                                            one layer of gated attention; norms times 1 + w
logits = lm_head a
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.data.rows import rows_of
from specrl_jax.drafts.base import DraftOptions
from specrl_jax.drafts.kinds import make_method
from specrl_jax.errors import InputError
from specrl_jax.io import hf
from specrl_jax.models import decoder
from tests.drafts.test_in_engine import ATOL, DRAFTS, LEARNS, MODELS, compiled_unrolled, params_of
from tests.helpers.folders import edit_tensors, read_config, read_tensors
from tests.helpers.policies import compiled, row_positions

MODEL, DRAFT, STEPS = MODELS["qwen"], DRAFTS["qwen"], 3
TOKENS = np.random.default_rng(3).integers(2, MODEL.vocab, (2, 9)).astype(np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A policy with its head beside it, as published."""
    path = tmp_path_factory.mktemp("both")
    hf.save_params(str(path), params_of("qwen")[0], MODEL, dtype="float32")
    DRAFT.save(str(path / "head"), params_of("qwen")[1], None, target=MODEL, dtype="float32")
    edit_tensors(path, read_tensors(path / "head"))
    return path


def norm(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + MODEL.norm_epsilon) * (1 + scale)


def rotated(x):
    """x [T, heads, H], at positions 0, 1, 2, ...: of its first numbers i is paired with i + half."""
    half = MODEL.rotary_dim // 2
    angle = np.arange(len(x))[:, None] * MODEL.rope.theta ** (-np.arange(half) / half)
    sin, cos = np.sin(angle)[:, None], np.cos(angle)[:, None]
    a, b, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def block(w, x):
    T, H = len(x), MODEL.head_dim
    normed = norm(x, w["input_layernorm"])
    q, k, v = ((normed @ w[f"self_attn.{name}_proj"].T).reshape(T, -1, H) for name in "qkv")
    q, gate = np.split(q.reshape(T, MODEL.heads, 2 * H), 2, axis=-1)
    q, k = rotated(norm(q, w["self_attn.q_norm"])), rotated(norm(k, w["self_attn.k_norm"]))
    k, v = (np.repeat(heads, MODEL.heads // MODEL.kv_heads, axis=1) for heads in (k, v))
    scores = np.where(np.tri(T, dtype=bool), np.einsum("tnh,snh->nts", q, k) / np.sqrt(H), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    attended = np.einsum("nts,snh->tnh", weights, v) / (1 + np.exp(-gate))
    x = x + attended.reshape(T, -1) @ w["self_attn.o_proj"].T
    normed = norm(x, w["post_attention_layernorm"])
    gate = normed @ w["mlp.gate_proj"].T
    return x + (gate / (1 + np.exp(-gate)) * (normed @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T


def reference(w, tokens, start):
    """[STEPS, V] logits of drafting at pair `start` of tokens [T], those behind it being the drafts."""
    own = {name.removeprefix("layers.0."): x for name, x in w.items()}
    policy, row = params_of("qwen")[0], jnp.asarray(tokens)[None]
    hidden = np.asarray(compiled(MODEL, LEARNS)(policy, row, row_positions(row)).hidden[0], np.float64)
    hidden, embed, logits = list(hidden[: start + 1]), np.asarray(policy["embed"], np.float64), []
    for _ in range(STEPS):
        embedded = embed[tokens[1 : len(hidden) + 1]]
        z = [norm(embedded, w["pre_fc_norm_embedding"]), norm(np.stack(hidden), w["pre_fc_norm_hidden"])]
        hidden.append(norm(block(own, np.concatenate(z, axis=1) @ w["fc"].T)[-1], w["norm"]))
        logits.append(embed @ hidden[-1])
    return np.stack(logits)


@pytest.mark.parametrize("start", [0, 1, 4])
def test_training_drafts_what_the_formulas_say(folder, start):
    found = read_tensors(folder / "head")
    w = {name.removeprefix("mtp.").removesuffix(".weight"): x.astype(np.float64) for name, x in found.items()}
    length = np.full(len(TOKENS), TOKENS.shape[1])
    found, _ = compiled_unrolled("qwen")(*params_of("qwen"), rows_of(TOKENS, length, length, pad_id=0))
    for row, tokens in enumerate(TOKENS):
        wanted = reference(w, tokens, start)
        np.testing.assert_allclose(np.asarray(found)[:, row, start], wanted, rtol=0, atol=ATOL)


def test_the_published_names(folder):
    names = set(read_tensors(folder / "head"))
    layer = "mtp.layers.0."
    assert {name for name in names if not name.startswith(layer)} == {
        *("mtp.fc.weight", "mtp.norm.weight"),
        *("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"),
    }
    assert layer + "self_attn.q_proj.weight" in names and len(names) == 4 + 11
    assert read_config(folder / "head")["mtp_num_hidden_layers"] == 1
    assert make_method(DraftOptions("mtp", path=str(folder)), MODEL).model == DRAFT
    assert make_method(DraftOptions("mtp"), MODEL).model == DRAFT
    hf.check_params(str(folder), MODEL)


def test_a_head_that_is_not_this_policys_is_refused(folder, tmp_path):
    with pytest.raises(InputError, match=r"^draft\.dialect=deepseek: .* qwen3_5; leave ''$"):
        make_method(DraftOptions("mtp", dialect="deepseek"), MODEL)
    with pytest.raises(InputError, match=r"^draft\.dialect=qwen3_5: .* deepseek or mimo; leave ''$"):
        make_method(DraftOptions("mtp", dialect="qwen3_5"), decoder.preset("nano"))
    with pytest.raises(InputError, match="has hidden_size=64, this policy has 32"):
        make_method(DraftOptions("mtp", path=str(folder)), dataclasses.replace(MODEL, embed=32))
    DRAFT.save(str(tmp_path), params_of("qwen")[1], None, target=MODEL, dtype="float32")
    edit_tensors(tmp_path, {"mtp.fc.weight": np.ones((64, 64), np.float32)})
    with pytest.raises(InputError, match=r"mtp\.fc\.weight has shape \(64, 64\), \(64, 128\) is needed"):
        make_method(DraftOptions("mtp", path=str(tmp_path)), MODEL)
