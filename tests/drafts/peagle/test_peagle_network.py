"""A P-EAGLE draft's training pass against its module's formulas, written out slot by slot in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.core import stand_in
from specrl_jax.data.rows import Rows
from specrl_jax.drafts import peagle as network
from specrl_jax.drafts.base import DraftInputs, TargetTables
from specrl_jax.drafts.peagle import PEagleDraft
from tests.drafts.block.test_block_network import ONE, TARGET, rms, softmax, turned
from tests.helpers.heads import drawn_params

V, T, STEPS = TARGET.vocab, 9, 3
NEW = network.peagle_config(TARGET, layers=2, draft_vocab=10)
CONFIGS = {
    "new": NEW,
    "speculators": dataclasses.replace(NEW, own_embedding=True, norm_before_residual=True, fc_norm=True),
    "one layer": dataclasses.replace(NEW, layers=1, norm_before_fc=True),
}
configs = pytest.mark.parametrize("name", CONFIGS)


@functools.cache
def params_of(name):
    return drawn_params(PEagleDraft(CONFIGS[name]).specs)


@functools.cache
def text(seed=0):
    """(tokens [1, T], features [1, T, A, D], the target's embedding [V, D])."""
    rng, A = np.random.default_rng(seed), len(NEW.aux_layers)
    tokens = rng.integers(V, size=(1, T)).astype(np.int32)
    return tokens, *(rng.normal(size=shape).astype(np.float32) for shape in ((1, T, A, 16), (V, 16)))


def logits_of(name, tokens, features, embed, segments=None, positions=None, anchors=None):
    """[STEPS, 1, T, Vd] of the training pass."""
    positions = np.arange(T, dtype=np.int32)[None] if positions is None else positions
    rows = Rows(*map(stand_in, (tokens, positions, tokens, tokens > 0)), segments)
    tables = TargetTables(jnp.asarray(embed), jnp.zeros((10, 16)))
    inputs = DraftInputs(
        tables,
        jnp.asarray(features),
        jnp.zeros(()),
        rows=rows,
        steps=STEPS,
        dtype=jnp.dtype("float32"),
        anchors=anchors,
    )
    outputs, table = PEagleDraft(CONFIGS[name]).unrolled(params_of(name), inputs, ONE)
    return jnp.einsum("SBTD,VD->SBTV", outputs, table)


def first_hidden(c, w, features):
    """[..., D] of [..., A, D]."""
    if c.norm_before_fc:
        joined = features.reshape(*features.shape[:-2], -1)
        features = rms(joined, w["features_norm"]).reshape(features.shape)
    if c.fc_norm:
        scales = (
            list(w["fc_norm"].values())
            if len(w["fc_norm"]) != 3
            else [w["fc_norm"][name] for name in ("low", "middle", "high")]
        )
        features = np.stack([rms(features[..., i, :], scale) for i, scale in enumerate(scales)], axis=-2)
    return np.einsum("...ae,aed->...d", features, w["fc"])


def attended(c, z, places, w, project):
    """[Q, D]: one head and query at a time, every query reading all places up to its own."""
    out = np.zeros((len(z), c.embed))
    for n in range(c.heads):
        g = n // (c.heads // c.kv_heads)
        keys = np.stack([turned(project(row, w["k"], g), place) for row, place in zip(z, places)])
        values = np.stack([project(row, w["v"], g) for row in z])
        for i, row in enumerate(z):
            query = turned(project(row, w["q"], n), places[i])
            out[i] += softmax(keys[: i + 1] @ query / np.sqrt(c.head_dim)) @ values[: i + 1] @ w["o"][n]
    return out


def mlp(w, x):
    gate = x @ w["gate"]
    return (gate / (1 + np.exp(-gate)) * (x @ w["up"])) @ w["down"]


def by_hand(name, t, tokens, features, embed):
    """[STEPS, Vd] logits of the draft behind pair t: the sequence is the pairs up to t, then the mask slots."""
    c = CONFIGS[name]
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), params_of(name))
    table = w.get("embed", embed)
    read = np.concatenate([features[0, : t + 1], np.stack([w["mask_hidden"]] * (STEPS - 1))])
    h = first_hidden(c, w, read.astype(np.float64))
    e = table[[*tokens[0, 1 : t + 2], *[c.mask_token] * (STEPS - 1)]].astype(np.float64)
    places = range(t + STEPS)
    z = np.stack([rms(e, w["input_norm"]), rms(h, w["hidden_norm"])], axis=1)
    residual = z[:, 1] if c.norm_before_residual else h
    a = residual + attended(c, z, places, w, lambda row, p, n: np.einsum("cd,cdh->h", row, p[:, :, n]))
    a = a + mlp(w, rms(a, w["mlp_norm"]))
    for i in range(1, c.layers):
        own = w[f"layer_{i}"]
        a = a + attended(c, rms(a, own["attention_norm"]), places, own, lambda row, p, n: row @ p[:, n])
        a = a + mlp(own, rms(a, own["mlp_norm"]))
    return rms(a[t:], w["final_norm"]) @ w["unembed"].T


@pytest.mark.slow
@configs
def test_every_draft_is_as_the_formulas_say(name):
    found = logits_of(name, *text())
    for t in range(T - STEPS - 1):
        np.testing.assert_allclose(found[:, 0, t], by_hand(name, t, *text()), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_draft_reads_nothing_that_serving_would_not_have_yet():
    """Features behind its pair, and tokens from the first draft on."""
    tokens, features, embed = text()
    t, other = 3, text(seed=1)
    before = logits_of("new", *text())[:, 0, t]
    later = np.arange(T) > t
    mixed = np.where(later[None, :, None, None], other[1], features)
    np.testing.assert_array_equal(logits_of("new", tokens, mixed, embed)[:, 0, t], before)
    following = np.where(np.arange(T)[None] > t + 1, (tokens + 1) % V, tokens)
    np.testing.assert_array_equal(logits_of("new", following, features, embed)[:, 0, t], before)
    own = np.where(np.arange(T)[None] == t + 1, (tokens + 1) % V, tokens)
    assert (logits_of("new", own, features, embed)[:, 0, t] != before).any(axis=-1).all()


@pytest.mark.slow
def test_drafts_of_some_anchors_are_those_of_all():
    """Every third pair, from the second on; the last anchor lies behind the row's end. Also of packed texts."""
    segments = jnp.asarray(np.where(np.arange(T) < 4, 1, 2)[None], jnp.int32)
    for packed in (None, segments):
        whole = logits_of("new", *text(), packed)
        some = logits_of("new", *text(), packed, anchors=1 + 3 * jnp.arange(4))
        assert some.shape[2] == 4
        np.testing.assert_allclose(some[:, 0, :2], whole[:, 0, [1, 4]], rtol=0, atol=1e-5)


def test_packed_texts_do_not_see_each_other():
    tokens, features, embed = text()
    start = 4
    segments = jnp.asarray(np.where(np.arange(T) < start, 1, 2)[None], jnp.int32)
    positions = np.where(np.arange(T) < start, np.arange(T), np.arange(T) - start)[None].astype(np.int32)
    packed = logits_of("new", tokens, features, embed, segments, positions)
    alone = logits_of("new", *(np.roll(x, -start, axis=1) for x in (tokens, features)), embed)
    for t in range(start, T - STEPS - 1):
        np.testing.assert_allclose(packed[:, 0, t], alone[:, 0, t - start], rtol=0, atol=1e-5)


def test_the_inference_layout_has_the_shapes_that_it_declares():
    for name, config in CONFIGS.items():
        fused = PEagleDraft(config).inference_params(params_of(name), jnp.dtype("bfloat16"))
        shapes = jax.tree.map(lambda spec: spec.shape, PEagleDraft(config).inference_specs)
        assert jax.tree.map(lambda w: w.shape, fused) == shapes
