"""A block drafter's training pass against its module's formulas, written out for one anchor at a time in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.core import stand_in
from specrl_jax.data.rows import Rows
from specrl_jax.drafts import block as network
from specrl_jax.drafts import one_pass
from specrl_jax.drafts.base import DraftInputs, TargetTables
from specrl_jax.drafts.block import BlockDraft
from specrl_jax.models import attention
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.sharding import LEARNER, make_mesh, partitioner
from tests.helpers.heads import drawn_params
from tests.helpers.long import slow_but

TARGET = DecoderConfig(24, 16, 6, heads=4, kv_heads=2, head_dim=8, mlp=20, tied=False, max_positions=64)
CONFIGS = {
    "dspark": network.block_config(TARGET, slots=4, layers=2, draft_vocab=10, markov=True),
    "dflash": network.block_config(TARGET, slots=4, layers=2, draft_vocab=24, markov=False),
}
T, STEPS = 9, 3
ONE = partitioner(make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1]), LEARNER)
kinds = pytest.mark.parametrize("kind", CONFIGS)


@functools.cache
def params_of(kind):
    return drawn_params(BlockDraft(CONFIGS[kind], "").specs)


@functools.cache
def text(seed=0):
    """(tokens [1, T], features [1, T, A, D], the target's embedding and lm_head)."""
    rng, A = np.random.default_rng(seed), len(CONFIGS["dspark"].aux_layers)
    tokens = rng.integers(24, size=(1, T)).astype(np.int32)
    return tokens, *(rng.normal(size=shape).astype(np.float32) for shape in ((1, T, A, 16), (24, 16), (24, 16)))


def inputs_of(tokens, features, embed, lm_head, segments=None, positions=None, anchors=None):
    positions = np.arange(T, dtype=np.int32)[None] if positions is None else positions
    rows = Rows(*map(stand_in, (tokens, positions, tokens, tokens > 0)), segments)
    tables = TargetTables(jnp.asarray(embed), jnp.asarray(lm_head))
    float32, hidden = jnp.dtype("float32"), jnp.zeros(())
    return DraftInputs(tables, jnp.asarray(features), hidden, rows=rows, steps=STEPS, dtype=float32, anchors=anchors)


def logits_of(kind, *arrays, **more):
    """[STEPS, 1, T, Vd] of the training pass; arguments as of `inputs_of`."""
    inputs = inputs_of(*arrays, **more)
    outputs, table = BlockDraft(CONFIGS[kind], "").unrolled(params_of(kind), inputs, ONE)
    return jnp.einsum("SBTD,VD->SBTV", outputs, table)


# --- the formulas


def rms(x, scale):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + TARGET.norm_epsilon) * scale


def turned(x, position):
    """[..., H] rotated by its position, halves paired as in Qwen3."""
    half = x.shape[-1] // 2
    angle = position / TARGET.rope.theta ** (np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=-1
    )


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def by_hand(kind, t, tokens, features, embed, lm_head):
    """[STEPS, Vd] logits of the block whose anchor is token t + 1, one slot, head and key at a time."""
    c = CONFIGS[kind]
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), params_of(kind))
    context = rms(np.einsum("tae,aed->td", features[0, : t + 1], w["fc"]), w["hidden_norm"])
    x = np.stack([embed[tokens[0, t + 1]], *[embed[c.mask_token]] * (c.slots - 1)]).astype(np.float64)
    for layer in range(c.layers):
        own = {name: values[layer] for name, values in w["layers"].items()}
        normed, out = rms(x, own["attention_norm"]), np.zeros_like(x)
        for n in range(c.heads):
            g = n // (c.heads // c.kv_heads)
            read = [*enumerate(context), *((t + 1 + i, row) for i, row in enumerate(normed))]
            keys = np.stack([turned(rms(row @ own["k"][:, g], own["k_norm"]), place) for place, row in read])
            values = np.stack([row @ own["v"][:, g] for _, row in read])
            for i, row in enumerate(normed):
                query = turned(rms(row @ own["q"][:, n], own["q_norm"]), t + 1 + i)
                out[i] += softmax(keys @ query / np.sqrt(c.head_dim)) @ values @ own["o"][n]
        x = x + out
        normed = rms(x, own["mlp_norm"])
        gate = normed @ own["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ own["up"])) @ own["down"]
    x = rms(x, w["final_norm"])
    if kind == "dflash":  # slot i predicts the token at its own position
        return (x @ lm_head.T)[1 : 1 + STEPS]
    before = w["markov_in"][tokens[0, t + 1 : t + 1 + STEPS]]  # the anchor, then the drafts
    return (x @ w["unembed"].T)[:STEPS] + before @ w["markov_out"].T


@pytest.mark.parametrize("kind", slow_but(["dspark"], CONFIGS))
def test_every_block_is_as_the_formulas_say(kind):
    found = logits_of(kind, *text())
    for t in range(T - STEPS - 1):
        np.testing.assert_allclose(found[:, 0, t], by_hand(kind, t, *text()), rtol=0, atol=1e-4)


@kinds
def test_a_block_reads_nothing_that_serving_would_not_have_yet(kind):
    """Features from the anchor on, and tokens from the first draft on but for the Markov head's."""
    tokens, features, *tables = text()
    t, other = 3, text(seed=1)
    before = logits_of(kind, *text())[:, 0, t]
    later = np.arange(T) > t
    mixed = np.where(later[None, :, None, None], other[1], features)
    np.testing.assert_array_equal(logits_of(kind, tokens, mixed, *tables)[:, 0, t], before)
    following = np.where(np.arange(T)[None] > t + 1, (tokens + 1) % 24, tokens)
    changed = np.asarray(logits_of(kind, following, features, *tables)[:, 0, t] != before).any(axis=-1)
    # The first draft follows the anchor; with a Markov head the others follow a draft that is another now.
    assert changed.tolist() == [False, kind == "dspark", kind == "dspark"]


@pytest.mark.slow
@kinds
def test_drafts_of_some_anchors_are_those_of_all(kind):
    """Every third token, from the second on; the last anchor lies behind the row's end. Also of packed texts."""
    segments = jnp.asarray(np.where(np.arange(T) < 4, 1, 2)[None], jnp.int32)
    for packed in (None, segments):
        whole = logits_of(kind, *text(), packed)
        some = logits_of(kind, *text(), packed, anchors=1 + 3 * jnp.arange(4))
        assert some.shape[2] == 4
        np.testing.assert_allclose(some[:, 0, :2], whole[:, 0, [1, 4]], rtol=0, atol=1e-5)


@kinds
def test_packed_texts_do_not_see_each_other(kind):
    tokens, features, *tables = text()
    start = 4
    segments = jnp.asarray(np.where(np.arange(T) < start, 1, 2)[None], jnp.int32)
    positions = np.where(np.arange(T) < start, np.arange(T), np.arange(T) - start)[None].astype(np.int32)
    packed = logits_of(kind, tokens, features, *tables, segments, positions)
    moved = [np.roll(x, -start, axis=1) for x in (tokens, features)]
    alone = logits_of(kind, *moved, *tables)
    for t in range(start, T - STEPS - 1):
        np.testing.assert_allclose(packed[:, 0, t], alone[:, 0, t - start], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_long_rows_go_in_parts_to_the_same_gradient(monkeypatch):
    tokens, features, embed, _ = map(jnp.asarray, text())

    draft = BlockDraft(CONFIGS["dspark"], "")

    def gradient():
        def loss(params):
            return jnp.sin(draft.outputs(params, inputs_of(tokens, features, embed, embed))).sum()

        return jax.jit(jax.grad(loss))(params_of("dspark"))

    whole = gradient()
    monkeypatch.setattr(one_pass, "SCORES", 3 * T * CONFIGS["dspark"].slots)
    assert attention.SCORES != one_pass.SCORES
    for a, b in zip(jax.tree.leaves(gradient()), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, float(jnp.abs(b).max())), rtol=0)


@pytest.mark.parametrize(
    "layers, wanted",
    [(36, (2, 10, 18, 26, 34)), (8, (2, 3, 4, 5, 6)), (7, (2, 3, 4, 5, 6)), (4, (1, 2, 3)), (2, (0, 1)), (1, (0,))],
)
def test_a_new_drafter_reads_the_layers_of_dflash_or_what_there_is(layers, wanted):
    assert network.default_aux_layers(layers) == wanted
