"""The EAGLE-3 head: sizes, the two forms of its weights, and the unrolled training pass against drafting itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.core import InputError
from specrl_jax.drafts.eagle3 import network as eagle3
from specrl_jax.drafts.recurrent import network as recurrent
from specrl_jax.models import qwen3
from specrl_jax.models.layers import Yarn, count_params, init_params, rotary_angles
from specrl_jax.sharding import LEARNER, make_mesh, partitioner
from tests.helpers.policies import row_positions

# Seven layers is the least that has three distinct auxiliary layers; head_dim differs from embed / heads on purpose.
TARGET = qwen3.Qwen3Config(40, 24, 7, 4, 2, 8, 32, tied=True, max_positions=64)
CONFIG = eagle3.eagle3_config(TARGET, draft_vocab=16)
B, T = 2, 9
# float32 through one layer a step: sums of at most 100 terms of order one.
ATOL = 1e-5


@pytest.fixture(scope="module")
def params():
    params = init_params(jax.random.key(0), eagle3.param_specs(CONFIG))
    # Norm scales away from one, so that a norm that is left out or swapped shows.
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return treedef.unflatten([w + 0.3 * jax.random.normal(k, w.shape) for w, k in zip(leaves, keys)])


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.normal(size=(B, T, 3, TARGET.embed)), jnp.float32)
    embedded = jnp.asarray(rng.normal(size=(B, T, TARGET.embed)), jnp.float32)
    return features, embedded


def test_the_head_of_qwen3_8b_has_the_published_size():
    config = eagle3.eagle3_config(qwen3.preset("qwen3_8b"), draft_vocab=32_000)
    D, F, Q, KV = 4096, 12288, 32 * 128, 8 * 128
    assert config.aux_layers == (2, 18, 33)
    expected = 3 * D * D + 2 * D * (Q + 2 * KV) + Q * D + 3 * D * F + 32_000 * D + 4 * D
    assert count_params(eagle3.param_specs(config)) == expected


@pytest.mark.parametrize(("name", "width"), [("qwen3_30b_a3b", 6144), ("qwen3_235b_a22b", 12_288)])
def test_the_head_of_a_mixture_of_experts_is_dense(name, width):
    """As wide as config.json says of layers without experts."""
    target = qwen3.preset(name)
    config = eagle3.eagle3_config(target, draft_vocab=32_000)
    assert (config.embed, config.heads, config.kv_heads, config.mlp) == (
        target.embed,
        target.heads,
        target.kv_heads,
        width,
    )
    assert config.aux_layers == (2, target.layers // 2, target.layers - 3)


def test_a_fresh_head_has_plain_positions():
    stretched = dataclasses.replace(TARGET, yarn=Yarn(4.0, 16), rope_theta=300.0)
    head = eagle3.eagle3_config(stretched, 16)
    assert (head.yarn, head.rope_theta) == (None, 300.0)


@pytest.mark.parametrize("draft_vocab", [0, 41])
def test_a_draft_vocabulary_that_does_not_fit_is_refused(draft_vocab):
    with pytest.raises(InputError, match=r"draft\.vocab_size"):
        eagle3.eagle3_config(TARGET, draft_vocab)


def test_a_policy_too_shallow_for_three_features_is_refused():
    with pytest.raises(InputError, match="at least 7"):
        eagle3.eagle3_config(dataclasses.replace(TARGET, layers=6), 16)


def unrolled(params, features, embedded, steps):
    """[steps, B, T, D], what the unembedding reads."""
    return eagle3.unrolled(params, CONFIG, features, embedded, steps, row_positions(embedded[..., 0]))


def logits_of(params, outputs):
    return jnp.einsum("SBTD,VD->SBTV", outputs, params["unembed"])


def draft_by_hand(params, features, embedded, start, steps):
    """[steps, B, Vd] logits of drafting at pair `start` as serving does it: true features up to it, then own outputs.

    One pair at a time over a growing list of keys, no mask anywhere.
    """
    keys, values, logits = [], [], []

    def attend(q, k, v):
        keys.append(k[:, 0])
        values.append(v[:, 0])
        K, R = CONFIG.kv_heads, CONFIG.heads // CONFIG.kv_heads
        q = q[:, 0].reshape(B, K, R, CONFIG.head_dim)
        scores = jnp.einsum("BKRH,SBKH->BKRS", q, jnp.stack(keys)) / CONFIG.head_dim**0.5
        out = jnp.einsum("BKRS,SBKH->BKRH", jax.nn.softmax(scores, axis=-1), jnp.stack(values))
        return out.reshape(B, 1, CONFIG.heads, CONFIG.head_dim)

    a = None
    for pair in range(start + steps):
        hidden = eagle3.project_features(params, features[:, pair : pair + 1]) if pair <= start else a
        angles = rotary_angles(jnp.full((B, 1), pair), CONFIG.head_dim, CONFIG.rope_theta)
        a = eagle3.layer(params, CONFIG, hidden, embedded[:, pair + 1 : pair + 2], angles, attend)
        if pair >= start:
            logits.append(eagle3.draft_logits(params, CONFIG, a)[:, 0])
    return jnp.stack(logits)


@pytest.mark.parametrize("start", [0, 1, 4])
def test_the_unrolled_pass_is_drafting_from_every_pair_at_once(params, inputs, start):
    features, embedded = inputs
    logits = logits_of(params, unrolled(params, features, embedded, steps=4))
    by_hand = draft_by_hand(params, features, embedded, start, steps=4)
    np.testing.assert_allclose(logits[:, :, start], by_hand, atol=ATOL)


def test_a_pair_reads_nothing_that_serving_would_not_have_yet(params, inputs):
    features, embedded = inputs
    t, steps = 3, 3
    before = unrolled(params, features, embedded, steps)[:, :, t]
    features = features.at[:, t + 1 :].add(1.0)
    # Step i takes the token at t + 1 + i; those after the last step's are unknown.
    embedded = embedded.at[:, t + 1 + steps :].add(1.0)
    after = unrolled(params, features, embedded, steps)[:, :, t]
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("T", [9, 8])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_long_rows_go_in_parts_to_the_same_outputs_and_gradient(packed, T, params, inputs, monkeypatch):
    """Nine pairs in three parts, or eight, the last of which is not full, on two devices that share each row."""
    features, embedded = (x[:, :T] for x in inputs)
    if T % 2 == 0:
        rows = partitioner(make_mesh({"sequence": 2}, jax.devices()[:2]), LEARNER).sharding(("batch", "sequence"))
        features, embedded = jax.device_put((features, embedded), rows)
    positions = row_positions(embedded[..., 0])
    segments = (positions // 5) if packed else None

    def values():
        def loss(params, features):
            out = eagle3.unrolled(params, CONFIG, features, embedded, 3, positions, segments)
            return jnp.sin(out).sum(), out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, features)

    (_, expected), whole = values()
    monkeypatch.setattr(recurrent, "QUERIES", 3)
    (_, found), parts = values()
    np.testing.assert_allclose(found, expected, atol=ATOL)
    for a, b in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, float(jnp.abs(b).max())), rtol=0)


def test_the_scores_of_a_long_row_are_never_there_at_once(monkeypatch):
    T, steps = 4 * recurrent.QUERIES, 3
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), eagle3.param_specs(CONFIG))
    rows = [jax.ShapeDtypeStruct((1, T, *width, CONFIG.embed), jnp.float32) for width in ((3,), ())]
    positions = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def temporaries():
        def loss(params, features, embedded, positions):
            return eagle3.unrolled(params, CONFIG, features, embedded, steps, positions).sum()

        return jax.jit(jax.grad(loss)).lower(shapes, *rows, positions).compile().memory_analysis().temp_size_in_bytes

    parts = temporaries()
    monkeypatch.setattr(recurrent, "QUERIES", T)
    # A fourth of the scores of one step, in the place of those of three.
    assert parts < temporaries() / 4


def test_both_forms_of_the_weights_give_the_same_logits(params, inputs):
    features, embedded = inputs
    fused = eagle3.inference_params(params, jnp.float32)
    expected = unrolled(params, features, embedded, 2)
    np.testing.assert_allclose(unrolled(fused, features, embedded, 2), expected, atol=ATOL)
    # The unembedding, and the norm before it, which serving applies itself.
    a = jnp.asarray(np.random.default_rng(1).normal(size=(B, T, CONFIG.embed)), jnp.float32)
    by_either = (eagle3.draft_logits(form, CONFIG, a) for form in (fused, params))
    np.testing.assert_allclose(*by_either, atol=ATOL)
    specs = eagle3.inference_specs(CONFIG)
    assert jax.tree.map(jnp.shape, fused) == jax.tree.map(lambda spec: spec.shape, specs)


def test_the_first_output_matches_the_published_formula_in_float64(params, inputs):
    """Pair 0 attends to itself alone, so its attention is its value: the rest of the layer by hand."""
    features, embedded = (np.asarray(x, np.float64) for x in inputs)
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.norm_epsilon) * scale

    h = np.einsum("BAE,AED->BD", features[:, 0], w["fc"])
    z = np.stack([norm(embedded[:, 1], w["input_norm"]), norm(h, w["hidden_norm"])], axis=1)
    value = np.einsum("BCD,CDKH->BKH", z, w["v"]).repeat(CONFIG.heads // CONFIG.kv_heads, axis=1)
    a = h + np.einsum("BNH,NHD->BD", value, w["o"])
    x = norm(a, w["mlp_norm"])
    gate = x @ w["gate"]
    a = a + (gate / (1 + np.exp(-gate)) * (x @ w["up"])) @ w["down"]
    expected = norm(a, w["final_norm"]) @ w["unembed"].T
    got = logits_of(params, unrolled(params, *inputs, steps=1))[0, :, 0]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=ATOL)
