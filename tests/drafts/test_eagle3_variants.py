"""EAGLE-3 heads as they are published: every variant and size of its own, against the head in float64 numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.drafts.eagle3 import network as eagle3
from specrl_jax.drafts.recurrent import network as recurrent
from specrl_jax.models import qwen3
from tests.helpers.heads import VARIANTS, numpy_draft, random_params, torch_layout
from tests.helpers.policies import row_positions

# Every size differs from every other, and N * H from D.
TARGET = qwen3.Qwen3Config(40, 24, 9, 8, 2, 10, 36, tied=False, max_positions=64, rope_theta=1e4)
HEAD = eagle3.eagle3_config(TARGET, 16)
B, T, STEPS = 2, 8, 3
# float32 against float64 through one layer a step: sums of at most 100 terms of order one.
ATOL = 2e-5

variants = pytest.mark.parametrize("name", VARIANTS)


def head_of(name):
    return dataclasses.replace(HEAD, **VARIANTS[name])


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(1)
    return tuple(rng.normal(size=(B, T, *shape)).astype(np.float32) for shape in ((3, 24), (24,)))


@functools.cache
def expected(name, row, start):
    rng = np.random.default_rng(1)
    features, embedded = (rng.normal(size=(B, T, *shape)).astype(np.float32)[row] for shape in ((3, 24), (24,)))
    return numpy_draft(torch_layout(random_params(head_of(name))), head_of(name), features, embedded, start, STEPS)


@functools.partial(jax.jit, static_argnums=1)
def unrolled_logits(params, head, features, embedded, first_position=0):
    positions = first_position + row_positions(embedded[..., 0])
    outputs = eagle3.unrolled(params, head, features, embedded, STEPS, positions)
    table = params["to_logits"].T if "to_logits" in params else params["unembed"]
    return jnp.einsum("SBTD,VD->SBTV", outputs, table, preferred_element_type=jnp.float32)


first_hidden = jax.jit(eagle3.first_hidden, static_argnums=1)
write_pairs = jax.jit(eagle3.write_pairs, static_argnums=1)


@functools.partial(jax.jit, static_argnums=1)
def extend(params, head, *state):
    a, cache = eagle3.extend(params, head, *state)
    return a, cache, eagle3.draft_logits(params, head, a)[:, 0]


@variants
@pytest.mark.parametrize("form", ["learner", "rollout"])
def test_training_drafts_what_the_formula_says(name, form, inputs):
    params = random_params(head_of(name))
    if form == "rollout":
        params = eagle3.inference_params(params, jnp.float32)
    logits = unrolled_logits(params, head_of(name), *inputs)
    for row in range(B):
        for start in (0, 1, 4):
            np.testing.assert_allclose(logits[:, row, start], expected(name, row, start), atol=ATOL)


@variants
def test_serving_drafts_what_the_formula_says(name, inputs):
    """Over a cache, in rollout form: pairs before the last one are written, the last one and drafts are extended."""
    head, start = head_of(name), 4
    params = eagle3.inference_params(random_params(head), jnp.float32)
    features, embedded = inputs
    hidden = first_hidden(params, head, features)
    pairs = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
    cache = recurrent.init_cache(head, B, T, jnp.float32)
    cache = write_pairs(params, head, hidden[:, :start], embedded[:, 1 : start + 1], pairs[:, :start], cache)
    fed = hidden[:, start : start + 1]
    for step in range(STEPS):
        pair = slice(start + step, start + step + 1)
        following = slice(start + step + 1, start + step + 2)
        fed, cache, logits = extend(params, head, fed, embedded[:, following], pairs[:, pair], cache)
        for row in range(B):
            np.testing.assert_allclose(logits[row], expected(name, row, start)[step], atol=ATOL)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("paper", "own sizes")])
def test_a_variant_that_is_overlooked_shows(name, inputs):
    """The same weights without it: other logits, from the first draft or, of what is fed back, from the second."""
    shown = 1 if name == "norm_output" else 0
    params = random_params(head_of(name))
    ours = unrolled_logits(params, head_of(name), *inputs)[:, :, 4]
    plain = unrolled_logits(params, HEAD, *inputs)[:, :, 4]
    assert jnp.abs(ours - plain)[shown].max() > 0.1
    assert shown == 0 or (ours[0] == plain[0]).all()


@variants
def test_the_forms_have_the_declared_shapes(name):
    head, params = head_of(name), random_params(head_of(name))
    rollout = eagle3.inference_params(params, jnp.bfloat16)
    assert jax.tree.map(jnp.shape, rollout) == jax.tree.map(lambda spec: spec.shape, eagle3.inference_specs(head))
    assert {leaf.dtype for leaf in jax.tree.leaves(rollout)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("name", ["speculators", "eagle-3.1"])
def test_every_weight_of_a_variant_learns(name, inputs):
    head = head_of(name)

    def loss(params):
        logits = unrolled_logits(params, head, *inputs)
        return (jax.nn.log_softmax(logits)[..., 0]).mean()

    for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(random_params(head))):
        assert jnp.isfinite(leaf).all() and jnp.abs(leaf).max() > 0


def test_positions_are_not_clamped(inputs):
    """Far beyond the 64 positions of target and head, as the formula goes on."""
    far = 700
    params = random_params(HEAD)
    logits = unrolled_logits(params, HEAD, *inputs, far)[:, 0, 4]
    features, embedded = (x[0] for x in inputs)
    exact = numpy_draft(torch_layout(params), HEAD, features, embedded, 4, STEPS, first_position=far)
    # An angle of 700 radians is known to 3e-5 in float32.
    np.testing.assert_allclose(logits, exact, atol=1e-3)


def test_the_head_of_the_paper_has_no_further_weights():
    extra = {"norm_before_fc": {"features_norm"}, "fc_norm": {"fc_norm"}}
    plain = eagle3.param_specs(HEAD).keys()
    for name in ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm"):
        assert eagle3.param_specs(head_of(name)).keys() - plain == extra.get(name, set())
