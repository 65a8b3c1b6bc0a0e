"""MTP heads: sizes, and the head against its formula in float64, in training and in serving."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.drafts import mtp
from specrl_jax.drafts.mtp import MTPDraft
from specrl_jax.errors import InputError
from specrl_jax.models import decoder
from specrl_jax.models.cache import Paging
from specrl_jax.models.layers import count_params, matmul
from specrl_jax.sharding import ROLLOUT, make_mesh, partitioner
from tests.drafts.paged import own_pages
from tests.helpers.policies import SMALL, numpy_forward, row_positions
from tests.helpers.unrolled import unrolled

DRAFT = MTPDraft(mtp.mtp_config(SMALL))
CONFIG = DRAFT.config
B, T, STEPS = 2, 9, 4
ONE = partitioner(make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1]), ROLLOUT)
# float32 through one layer a step: sums of at most 100 terms of order one, and a norm after each step.
ATOL = 3e-5


@pytest.fixture(scope="module")
def params():
    """Norm scales away from one, so that a norm that is left out or swapped shows."""
    rng = np.random.default_rng(1)

    def draw(spec):
        scale = rng.uniform(0.5, 1.5, spec.shape) if spec.fan_in == 0 else rng.normal(size=spec.shape) / 4
        return jnp.asarray(scale, jnp.float32)

    return jax.tree.map(draw, mtp.MTPDraft(CONFIG).specs)


@pytest.fixture(scope="module")
def inputs():
    """hidden [B, T, D], embedded [B, T, D], lm_head [V, D]."""
    rng = np.random.default_rng(0)
    shapes = (B, T, CONFIG.embed), (B, T, CONFIG.embed), (CONFIG.vocab, CONFIG.embed)
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


@jax.jit
def unrolled_logits(params, inputs):
    """[STEPS, B, T, V] float32."""
    hidden, embedded, lm_head = inputs
    outputs = unrolled(DRAFT, params, hidden, embedded, STEPS, row_positions(embedded[..., 0]))
    return matmul("SBTD,VD->SBTV", outputs, lm_head)


def test_the_head_of_qwen3_8b_has_the_size_of_one_layer_and_its_inputs():
    config = mtp.mtp_config(decoder.preset("qwen3_8b"))
    D, F, Q, KV = 4096, 12288, 32 * 128, 8 * 128
    block = D * (Q + 2 * KV) + Q * D + 3 * D * F + 2 * D + 2 * 128
    assert config.vocab == 151_936
    assert count_params(mtp.MTPDraft(config).specs) == 2 * D * D + 3 * D + block


def test_the_block_is_the_policys():
    assert CONFIG.block == dataclasses.replace(SMALL, layers=1, tied=True)


def test_a_mixture_of_experts_has_no_head():
    with pytest.raises(InputError, match="mixture-of-experts"):
        mtp.mtp_config(decoder.preset("qwen3_30b_a3b"))


def reference(params, inputs, row, start):
    """[STEPS, V] logits of drafting at pair `start`, in float64, from the formula and the policy's own reference.

    A block is causal, so the last row of a sequence of pairs is what drafting would compute: true hidden states up to
    pair `start`, then the head's own outputs, one run over the whole sequence for each draft step.
    """
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    hidden, embedded, lm_head = (np.asarray(x, np.float64) for x in inputs)

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.norm_epsilon) * scale

    def pair(t, hidden):
        z = np.concatenate([norm(embedded[row, t + 1], w["embedding_norm"]), norm(hidden, w["hidden_norm"])])
        return z @ w["eh_proj"].reshape(2 * CONFIG.embed, CONFIG.embed)

    pairs = [pair(t, hidden[row, t]) for t in range(start + 1)]
    logits = []
    for i in range(STEPS):
        policy = {"embed": np.stack(pairs), "unembed": lm_head} | {name: w[name] for name in ("layers", "final_norm")}
        untied = dataclasses.replace(CONFIG.block, tied=False)
        out, stream = numpy_forward(policy, untied, np.arange(len(pairs)))
        logits.append(out[-1])
        if i + 1 < STEPS:
            pairs.append(pair(start + i + 1, norm(stream[-1, -1], w["final_norm"])))
    return np.stack(logits)


@pytest.mark.parametrize("start", [0, 1, 4])
def test_training_drafts_what_the_formula_says(params, inputs, start):
    got = unrolled_logits(params, inputs)[:, :, start]
    for row in range(B):
        np.testing.assert_allclose(got[:, row], reference(params, inputs, row, start), rtol=1e-4, atol=ATOL)


@pytest.mark.slow
@pytest.mark.parametrize("start", [1, 4])
def test_serving_drafts_what_training_does(params, inputs, start):
    """Over a cache: pairs before the last one are written; the last one and the drafts are extended."""
    fused = DRAFT.inference_params(params, jnp.float32)
    shape, table = own_pages(B, T)
    pairs = jnp.broadcast_to(jnp.arange(T)[None], (B, T))

    @jax.jit
    def serve(fused, inputs):
        hidden, embedded, lm_head = inputs
        cache = DRAFT.init_cache(shape)
        at, fed, logits = Paging(table, pairs[:, :start]), hidden[:, start : start + 1], []
        _, cache = DRAFT.extend(
            fused, hidden[:, :start], embedded[:, 1 : start + 1], pairs=at, cache=cache, partition=ONE
        )
        for pair in range(start, start + STEPS):
            at = Paging(table, pairs[:, pair][:, None])
            fed, cache = DRAFT.extend(fused, fed, embedded[:, pair + 1][:, None], pairs=at, cache=cache, partition=ONE)
            logits.append(matmul("BD,VD->BV", fed[:, 0], lm_head))
        return jnp.stack(logits)

    np.testing.assert_allclose(serve(fused, inputs), unrolled_logits(params, inputs)[:, :, start], atol=ATOL)


@pytest.mark.slow
def test_the_inference_layout_is_as_declared_and_gives_the_same_logits(params, inputs):
    fused = DRAFT.inference_params(params, jnp.float32)
    np.testing.assert_allclose(unrolled_logits(fused, inputs), unrolled_logits(params, inputs), atol=ATOL)
    assert jax.tree.map(jnp.shape, fused) == jax.tree.map(lambda spec: spec.shape, DRAFT.inference_specs)
    halved = DRAFT.inference_params(params, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(halved)} == {jnp.dtype("bfloat16")}
