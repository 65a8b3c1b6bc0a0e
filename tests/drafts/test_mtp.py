"""The MTP head: the unrolled training pass against the formula in float64, and against drafting over a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.core import InputError
from specrl_jax.drafts.mtp import network as mtp
from specrl_jax.drafts.recurrent import network as recurrent
from specrl_jax.models import qwen3
from specrl_jax.models.layers import count_params, matmul
from tests.helpers.policies import SMALL, numpy_forward, row_positions

CONFIG = mtp.mtp_config(SMALL)
B, T, STEPS = 2, 9, 4
# float32 through one layer a step: sums of at most 100 terms of order one, and a norm after each step.
ATOL = 3e-5


@pytest.fixture(scope="module")
def params():
    """Norm scales away from one, so that a norm that is left out or swapped shows."""
    rng = np.random.default_rng(1)

    def draw(spec):
        scale = rng.uniform(0.5, 1.5, spec.shape) if spec.fan_in == 0 else rng.normal(size=spec.shape) / 4
        return jnp.asarray(scale, jnp.float32)

    return jax.tree.map(draw, mtp.param_specs(CONFIG))


@pytest.fixture(scope="module")
def fused(params):
    return mtp.inference_params(params, jnp.float32)


@pytest.fixture(scope="module")
def inputs():
    """features [B, T, 1, D], embedded [B, T, D], unembed [V, D]."""
    rng = np.random.default_rng(0)
    shapes = (B, T, 1, CONFIG.embed), (B, T, CONFIG.embed), (CONFIG.vocab, CONFIG.embed)
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def unrolled(params, inputs, steps=STEPS):
    """[steps, B, T, V] float32 logits."""
    features, embedded, unembed = inputs
    return logits_of(_unrolled(params, CONFIG, features, embedded, steps, row_positions(embedded[..., 0])), unembed)


def logits_of(a, unembed):
    return matmul("...D,VD->...V", a, unembed)


_unrolled = jax.jit(mtp.unrolled, static_argnums=(1, 4))
extend = jax.jit(mtp.extend, static_argnums=1)
write_pairs = jax.jit(mtp.write_pairs, static_argnums=1)


def test_the_head_of_qwen3_8b_has_the_size_of_one_layer_and_its_inputs():
    config = mtp.mtp_config(qwen3.preset("qwen3_8b"))
    D, F, Q, KV = 4096, 12288, 32 * 128, 8 * 128
    block = D * (Q + 2 * KV) + Q * D + 3 * D * F + 2 * D + 2 * 128
    assert config.vocab == 151_936
    assert count_params(mtp.param_specs(config)) == 2 * D * D + 3 * D + block


def test_the_block_is_the_policys():
    assert CONFIG.block == dataclasses.replace(SMALL, layers=1, tied=True)


def test_a_mixture_of_experts_has_no_head():
    with pytest.raises(InputError, match="mixture-of-experts"):
        mtp.mtp_config(qwen3.preset("qwen3_30b_a3b"))


# Against the formula


def reference(params, inputs, row, start, steps):
    """[steps, V] logits of drafting at pair `start`, in float64, from the formula and the policy's own reference.

    A block is causal, so the last row of a sequence of pairs is what drafting would compute: true hidden states up to
    pair `start`, then the head's own outputs, one run over the whole sequence for each draft step.
    """
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    features, embedded, unembed = (np.asarray(x, np.float64) for x in inputs)

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.norm_epsilon) * scale

    def pair(t, hidden):
        z = np.concatenate([norm(embedded[row, t + 1], w["embedding_norm"]), norm(hidden, w["hidden_norm"])])
        return z @ w["eh_proj"].reshape(2 * CONFIG.embed, CONFIG.embed)

    pairs = [pair(t, features[row, t, 0]) for t in range(start + 1)]
    logits = []
    for i in range(steps):
        policy = {"embed": np.stack(pairs), "unembed": unembed} | {name: w[name] for name in ("layers", "final_norm")}
        untied = dataclasses.replace(CONFIG.block, tied=False)
        out, stream = numpy_forward(policy, untied, np.arange(len(pairs)))
        logits.append(out[-1])
        if i + 1 < steps:
            pairs.append(pair(start + i + 1, norm(stream[-1, -1], w["final_norm"])))
    return np.stack(logits)


@pytest.mark.parametrize("start", [0, 1, 4])
def test_the_unrolled_pass_is_drafting_by_the_formula_from_every_pair(params, inputs, start):
    got = unrolled(params, inputs)[:, :, start]
    for row in range(B):
        expected = reference(params, inputs, row, start, STEPS)
        np.testing.assert_allclose(got[:, row], expected, rtol=1e-4, atol=ATOL)


def test_a_pair_reads_nothing_that_serving_would_not_have_yet(params, inputs):
    features, embedded, unembed = inputs
    t, steps = 3, 3
    before = unrolled(params, inputs, steps)[:, :, t]
    features = features.at[:, t + 1 :].add(1.0)
    # Step i takes the token at t + 1 + i; those after the last step's are unknown.
    embedded = embedded.at[:, t + 1 + steps :].add(1.0)
    after = unrolled(params, (features, embedded, unembed), steps)[:, :, t]
    np.testing.assert_array_equal(before, after)


# Over a cache, in rollout form


def pairs_of(first, last):
    """[B, last - first] positions."""
    return jnp.broadcast_to(jnp.arange(first, last, dtype=jnp.int32)[None], (B, last - first))


def committed(params, inputs, first, last):
    """hidden, embedded and positions of pairs first..last - 1, from true features and tokens."""
    features, embedded, _ = inputs
    hidden = mtp.project_features(params, features[:, first:last])
    return hidden, embedded[:, first + 1 : last + 1], pairs_of(first, last)


def empty_cache(length=T):
    return recurrent.init_cache(CONFIG, B, length, jnp.float32)


def test_both_forms_of_the_weights_give_the_same_logits(params, fused, inputs):
    np.testing.assert_allclose(unrolled(fused, inputs), unrolled(params, inputs), atol=ATOL)
    specs = mtp.inference_specs(CONFIG)
    assert jax.tree.map(jnp.shape, fused) == jax.tree.map(lambda spec: spec.shape, specs)
    halved = mtp.inference_params(params, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(halved)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("size", [1, 3, T - 1])
def test_extending_a_cache_is_step_0_of_the_unrolled_pass(params, fused, inputs, size):
    cache, logits = empty_cache(), []
    for first in range(0, T - 1, size):
        a, cache = extend(fused, CONFIG, *committed(fused, inputs, first, min(first + size, T - 1)), cache)
        logits.append(logits_of(a, inputs[2]))
    expected = unrolled(params, inputs, 1)[0, :, : T - 1]
    np.testing.assert_allclose(jnp.concatenate(logits, axis=1), expected, atol=ATOL)


@pytest.mark.parametrize("start", [0, 1, 4])
def test_the_recurrence_over_a_cache_is_a_row_of_the_unrolled_pass(params, fused, inputs, start):
    """As serving drafts: true pairs written, the last one extended, then the head over its own outputs."""
    embedded, unembed = inputs[1:]
    cache = empty_cache()
    if start:
        cache = write_pairs(fused, CONFIG, *committed(fused, inputs, 0, start), cache)
    hidden, _, _ = committed(fused, inputs, start, start + 1)
    logits = []
    for pair in range(start, start + STEPS):
        following = embedded[:, pair + 1 : pair + 2]
        hidden, cache = extend(fused, CONFIG, hidden, following, pairs_of(pair, pair + 1), cache)
        logits.append(logits_of(hidden, unembed)[:, 0])
    np.testing.assert_allclose(jnp.stack(logits), unrolled(params, inputs)[:, :, start], atol=ATOL)


def by_position(cache):
    """Its keys and values, each [B, S, K, H]."""
    return jnp.moveaxis(cache.keys, 3, 1), jnp.swapaxes(cache.values, 1, 2)


def test_true_pairs_replace_provisional_ones(fused, inputs):
    """What a pair writes does not depend on what the cache held, and entries of other pairs stay as they are."""
    dirty = empty_cache()
    dirty = dirty._replace(keys=dirty.keys + 3.0, values=dirty.values - 3.0)
    pairs = committed(fused, inputs, 2, 5)
    clean = write_pairs(fused, CONFIG, *pairs, empty_cache())
    written = write_pairs(fused, CONFIG, *pairs, dirty)
    for got, expected, old in zip(*map(by_position, (written, clean, dirty))):
        np.testing.assert_array_equal(got[:, 2:5], expected[:, 2:5])
        np.testing.assert_array_equal(got[:, :2], old[:, :2])
        np.testing.assert_array_equal(got[:, 5:], old[:, 5:])
        assert jnp.all(expected[:, 2:5] != 0.0)


def test_writing_pairs_leaves_what_extending_leaves(fused, inputs):
    pairs = committed(fused, inputs, 0, T - 1)
    _, extended = extend(fused, CONFIG, *pairs, empty_cache())
    # Two compiled programs: the last bit may differ.
    for ours, theirs in zip(write_pairs(fused, CONFIG, *pairs, empty_cache()), extended):
        np.testing.assert_allclose(ours, theirs, atol=ATOL)


def test_pairs_beyond_the_cache_are_dropped(fused, inputs):
    short = write_pairs(fused, CONFIG, *committed(fused, inputs, 0, 6), empty_cache(length=4))
    whole = write_pairs(fused, CONFIG, *committed(fused, inputs, 0, 4), empty_cache(length=4))
    jax.tree.map(np.testing.assert_array_equal, short, whole)


def test_the_cache_keeps_one_hidden_state_in_its_dtype():
    cache = recurrent.init_cache(CONFIG, B, 5, jnp.bfloat16)
    assert (cache.hidden.shape, cache.hidden.dtype) == ((B, 5, CONFIG.embed), jnp.bfloat16)
    K, H = CONFIG.kv_heads, CONFIG.head_dim
    assert (cache.keys.shape, cache.keys.dtype) == ((B, K, H, 5), jnp.bfloat16)
    assert (cache.values.shape, cache.values.dtype) == ((B, K, 5, H), jnp.bfloat16)


def test_bfloat16_activations_still_give_float32_logits(params, inputs):
    halved = mtp.inference_params(params, jnp.bfloat16)
    logits = unrolled(halved, tuple(x.astype(jnp.bfloat16) for x in inputs), 2)
    assert (logits.shape, logits.dtype) == ((2, B, T, CONFIG.vocab), jnp.float32)
