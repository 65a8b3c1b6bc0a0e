"""MiMo's head against its formulas in float64 NumPy, from tensors by their published names: training and the engine.

z = [hidden_layernorm(h_t); token_layernorm(e_{t+1})]    h_t: before the policy's final norm, then what is fed back
a = final_layernorm(block(input_proj z))                 e_1, of pair 0, is zeros; the block has q, k and v biases
logits = lm_head a
"""

import numpy as np
import pytest

from specrl_jax.data.rows import rows_of
from tests.drafts.test_in_engine import ATOL, DRAFTS, MODELS, compiled_unrolled, draft_of, params_of, started, step
from tests.helpers.folders import read_tensors
from tests.helpers.policies import numpy_forward

MODEL, DRAFT, STEPS = MODELS["mimo"], DRAFTS["mimo"], 3
TOKENS = np.random.default_rng(3).integers(2, MODEL.vocab, (2, 9)).astype(np.int32)


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    """The head, as it is stored."""
    folder = tmp_path_factory.mktemp("head")
    DRAFT.save(str(folder), params_of("mimo")[1], None, target=MODEL, dtype="float32")
    return {name.removeprefix("model.mtp_layers.0."): x.astype(np.float64) for name, x in read_tensors(folder).items()}


def norm(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + MODEL.norm_epsilon) * scale


def rotated(x):
    """x [T, heads, H], at positions 0, 1, 2, ...: number i is paired with i + H/2."""
    half = MODEL.head_dim // 2
    angle = np.arange(len(x))[:, None] * MODEL.rope.theta ** (-np.arange(half) / half)
    sin, cos = np.sin(angle)[:, None], np.cos(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def block(w, x):
    """A layer of Qwen2 over x [T, D]."""
    T = len(x)
    normed = norm(x, w["input_layernorm.weight"])
    q, k, v = (normed @ w[f"self_attn.{name}_proj.weight"].T + w[f"self_attn.{name}_proj.bias"] for name in "qkv")
    q, k, v = (part.reshape(T, -1, MODEL.head_dim) for part in (q, k, v))
    q, k = rotated(q), rotated(k)
    k, v = (np.repeat(heads, MODEL.heads // MODEL.kv_heads, axis=1) for heads in (k, v))
    scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(MODEL.head_dim)
    scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    x = x + np.einsum("nts,snh->tnh", weights, v).reshape(T, -1) @ w["self_attn.o_proj.weight"].T
    normed = norm(x, w["post_attention_layernorm.weight"])
    gate = normed @ w["mlp.gate_proj.weight"].T
    return x + (gate / (1 + np.exp(-gate)) * (normed @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


def reference(w, tokens, start, *, normed_hidden=False, zeroed=True):
    """[STEPS, V] logits of drafting at pair `start` of tokens [T], those behind it being the drafts."""
    policy = {name: np.asarray(x, np.float64) for name, x in params_of("mimo")[0].items() if name != "layers"}
    stream = numpy_forward(params_of("mimo")[0], MODEL, tokens)[1][-1]
    hidden = list((norm(stream, policy["final_norm"]) if normed_hidden else stream)[: start + 1])
    logits = []
    for _ in range(STEPS):
        embedded = policy["embed"][tokens[1 : len(hidden) + 1]]
        embedded[0] *= not zeroed
        z = [norm(np.stack(hidden), w["hidden_layernorm.weight"]), norm(embedded, w["token_layernorm.weight"])]
        x = block(w, np.concatenate(z, axis=1) @ w["input_proj.weight"].T)
        hidden.append(norm(x[-1], w["final_layernorm.weight"]))
        logits.append(policy["unembed"] @ hidden[-1])
    return np.stack(logits)


OTHERS = ({"normed_hidden": True}, {"zeroed": False})


@pytest.mark.parametrize("start", [0, 1, 4])
def test_training_drafts_what_the_formulas_say(tensors, start):
    length = np.full(len(TOKENS), TOKENS.shape[1])
    found, _ = compiled_unrolled("mimo")(*params_of("mimo"), rows_of(TOKENS, length, length, pad_id=0))
    for row, tokens in enumerate(TOKENS):
        drafts = np.asarray(found)[:, row, start]
        np.testing.assert_allclose(drafts, reference(tensors, tokens, start), rtol=0, atol=ATOL)
        # What it is not: a head on the normed state, and one that reads every embedding.
        for other in OTHERS:
            assert np.abs(drafts - reference(tensors, tokens, start, **other)).max() > 100 * ATOL


@pytest.mark.slow
@pytest.mark.parametrize("iterations", [0, 4])
def test_the_engine_drafts_what_the_formulas_say(tensors, iterations):
    """After prompts of two and three tokens, and after speculative iterations behind them."""
    slots = started("mimo", [[40 + row + i for i in range(2 + row % 2)] for row in range(16)])
    for _ in range(iterations):
        slots = step("mimo", slots)
    draft, _ = draft_of("mimo", slots)
    running = np.flatnonzero(~np.asarray(slots.done))
    assert len(running) > 8
    for row in running:
        length = int(slots.length[row])
        tokens = np.concatenate([np.asarray(slots.tokens)[row, :length], np.asarray(draft.tokens)[row]])
        drafts = np.asarray(draft.logits)[row]
        np.testing.assert_allclose(drafts, reference(tensors, tokens, length - 2), rtol=0, atol=ATOL)
        for other in OTHERS:
            assert np.abs(drafts - reference(tensors, tokens, length - 2, **other)).max() > 100 * ATOL
