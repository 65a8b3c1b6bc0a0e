"""EAGLE-3 heads: sizes, and every published variant against the head in float64 numpy, in training and in serving."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.drafts import eagle3
from specrl_jax.drafts.eagle3 import Eagle3Draft
from specrl_jax.drafts.weights import Weights
from specrl_jax.errors import InputError
from specrl_jax.models import decoder
from specrl_jax.models.cache import Paging
from specrl_jax.models.layers import count_params
from specrl_jax.models.rotary import Llama3Scaling, Rope, Yarn
from specrl_jax.sharding import ROLLOUT, make_mesh, partitioner
from tests.drafts.paged import own_pages
from tests.helpers.heads import VARIANTS, numpy_draft, random_params, torch_layout
from tests.helpers.policies import row_positions
from tests.helpers.unrolled import unrolled

# Every size differs from every other, and N * H from D.
TARGET = decoder.DecoderConfig(
    40, 24, 9, heads=8, kv_heads=2, head_dim=10, mlp=36, tied=False, max_positions=64, rope=Rope(1e4)
)
HEAD = eagle3.eagle3_config(TARGET, 16)
B, T, STEPS = 2, 8, 3
ONE = partitioner(make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1]), ROLLOUT)
# float32 against float64 through one layer a step: sums of at most 100 terms of order one.
ATOL = 2e-5

# Three of them have every switch on somewhere.
variants = pytest.mark.parametrize(
    "name",
    [
        name if name in ("paper", "eagle-3.1", "speculators") else pytest.param(name, marks=pytest.mark.long)
        for name in VARIANTS
    ],
)


def head_of(name):
    return dataclasses.replace(HEAD, **VARIANTS[name])


def test_the_head_of_qwen3_8b_has_the_published_size():
    config = eagle3.eagle3_config(decoder.preset("qwen3_8b"), draft_vocab=32_000)
    D, F, Q, KV = 4096, 12288, 32 * 128, 8 * 128
    assert config.aux_layers == (2, 18, 33)
    expected = 3 * D * D + 2 * D * (Q + 2 * KV) + Q * D + 3 * D * F + 32_000 * D + 4 * D
    assert count_params(eagle3.Eagle3Draft(config).specs) == expected


@pytest.mark.parametrize(("name", "width"), [("qwen3_30b_a3b", 6144), ("qwen3_235b_a22b", 12_288)])
def test_the_head_of_a_mixture_of_experts_is_dense(name, width):
    """Its mlp has the width that config.json gives layers without experts."""
    target = decoder.preset(name)
    config = eagle3.eagle3_config(target, draft_vocab=32_000)
    assert (config.embed, config.heads, config.kv_heads) == (target.embed, target.heads, target.kv_heads)
    assert (config.mlp, config.aux_layers) == (width, (2, target.layers // 2, target.layers - 3))


def test_a_new_head_has_plain_positions():
    head = eagle3.eagle3_config(dataclasses.replace(TARGET, rope=Rope(300.0, Yarn(4.0, 16))), 16)
    assert head.rope == Rope(300.0)


def test_a_new_head_has_the_positions_of_the_pretraining():
    rope = Rope(300.0, Llama3Scaling(8.0, 16))
    assert eagle3.eagle3_config(dataclasses.replace(TARGET, rope=rope), 16).rope == rope


@pytest.mark.parametrize("draft_vocab", [0, 41])
def test_a_draft_vocabulary_that_does_not_fit_is_refused(draft_vocab):
    with pytest.raises(InputError, match=r"draft\.vocab_size"):
        eagle3.eagle3_config(TARGET, draft_vocab)


@pytest.mark.parametrize(
    ("layers", "read"),
    [(1, (0,)), (2, (0, 1)), (3, (0, 1, 2)), (4, (1, 2, 3)), (5, (1, 2, 4)), (6, (1, 3, 5)), (7, (2, 3, 4))],
)
def test_a_head_of_a_shallow_policy_reads_the_layers_that_it_has(layers, read):
    assert eagle3.eagle3_config(dataclasses.replace(TARGET, layers=layers), 16).aux_layers == read


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(1)
    return tuple(rng.normal(size=(B, T, *shape)).astype(np.float32) for shape in ((3, 24), (24,)))


def expected(name, inputs, row, start, first_position=0):
    """[STEPS, Vd] logits of drafting at pair `start`, by the formula in float64."""
    head, (features, embedded) = head_of(name), (x[row] for x in inputs)
    return numpy_draft(torch_layout(random_params(head)), head, features, embedded, start, STEPS, first_position)


@functools.partial(jax.jit, static_argnums=1)
def unrolled_logits(params, head, features, embedded, first_position=0):
    positions = first_position + row_positions(embedded[..., 0])
    outputs = unrolled(Eagle3Draft(head), params, features, embedded, STEPS, positions)
    table = params["to_logits"].T if "to_logits" in params else params["unembed"]
    return jnp.einsum("SBTD,VD->SBTV", outputs, table, preferred_element_type=jnp.float32)


@pytest.mark.slow
@variants
@pytest.mark.parametrize("layout", ["training", "inference"])
def test_training_drafts_what_the_formula_says(name, layout, inputs):
    params = random_params(head_of(name))
    if layout == "inference":
        params = Eagle3Draft(head_of(name)).inference_params(params, jnp.float32)
    logits = unrolled_logits(params, head_of(name), *inputs)
    for row in range(B):
        for start in (0, 1, 4):
            np.testing.assert_allclose(logits[:, row, start], expected(name, inputs, row, start), atol=ATOL)


@variants
def test_serving_drafts_what_the_formula_says(name, inputs):
    """Over a cache: pairs before the last one are written; the last one and the drafts are extended."""
    head, start = Eagle3Draft(head_of(name)), 4
    params = head.inference_params(random_params(head.config), jnp.float32)
    shape, table = own_pages(B, T)
    pairs = jnp.broadcast_to(jnp.arange(T)[None], (B, T))

    @jax.jit
    def serve(params, features, embedded):
        hidden = head.hidden_states(params, features, features)
        cache = head.init_cache(shape)
        at, fed, logits = Paging(table, pairs[:, :start]), hidden[:, start : start + 1], []
        _, cache = head.extend(
            params, hidden[:, :start], embedded[:, 1 : start + 1], pairs=at, cache=cache, partition=ONE
        )
        for pair in range(start, start + STEPS):
            at = Paging(table, pairs[:, pair][:, None])
            fed, cache = head.extend(params, fed, embedded[:, pair + 1][:, None], pairs=at, cache=cache, partition=ONE)
            logits.append(head.logits(Weights({}, params, None, None), head.lm_head_input(params, fed))[:, 0])
        return jnp.stack(logits, axis=1)

    logits = serve(params, *inputs)
    for row in range(B):
        np.testing.assert_allclose(logits[row], expected(name, inputs, row, start), atol=ATOL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "norm"),
    [
        (2, "fc_norm"),
        pytest.param(1, "fc_norm", marks=pytest.mark.long),
        pytest.param(2, "norm_before_fc", marks=pytest.mark.long),
    ],
)
def test_a_head_of_fewer_than_three_features_is_the_formula(layers, norm, inputs):
    """In both layouts of the weights."""
    head = dataclasses.replace(HEAD, aux_layers=tuple(range(layers)), **{norm: True})
    features, embedded, params = inputs[0][:, :, :layers], inputs[1], random_params(head)
    expected = numpy_draft(torch_layout(params), head, features[0], embedded[0], 4, STEPS)
    fused = Eagle3Draft(head).inference_params(params, jnp.float32)
    assert jax.tree.map(jnp.shape, fused) == jax.tree.map(lambda spec: spec.shape, Eagle3Draft(head).inference_specs)
    for weights in (params, fused):
        np.testing.assert_allclose(unrolled_logits(weights, head, features, embedded)[:, 0, 4], expected, atol=ATOL)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("paper", "own sizes")])
@pytest.mark.slow
def test_a_variant_that_is_overlooked_shows(name, inputs):
    """The same weights without it give other logits, from the first draft or, of what is fed back, from the second."""
    shown = 1 if name == "norm_output" else 0
    params = random_params(head_of(name))
    ours = unrolled_logits(params, head_of(name), *inputs)[:, :, 4]
    plain = unrolled_logits(params, HEAD, *inputs)[:, :, 4]
    assert jnp.abs(ours - plain)[shown].max() > 0.1
    assert shown == 0 or (ours[0] == plain[0]).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_inference_layout_is_as_declared(name):
    head, params = head_of(name), random_params(head_of(name))
    fused = Eagle3Draft(head).inference_params(params, jnp.bfloat16)
    assert jax.tree.map(jnp.shape, fused) == jax.tree.map(lambda spec: spec.shape, Eagle3Draft(head).inference_specs)
    assert {leaf.dtype for leaf in jax.tree.leaves(fused)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["speculators", pytest.param("eagle-3.1", marks=pytest.mark.long)])
def test_every_weight_of_a_variant_learns(name, inputs):
    def loss(params):
        return jax.nn.log_softmax(unrolled_logits(params, head_of(name), *inputs))[..., 0].mean()

    for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(random_params(head_of(name)))):
        assert jnp.isfinite(leaf).all() and jnp.abs(leaf).max() > 0


def test_positions_are_not_clamped(inputs):
    """Far beyond the 64 positions of target and head, the formula still holds."""
    far = 700
    logits = unrolled_logits(random_params(HEAD), HEAD, *inputs, far)[:, 0, 4]
    # An angle of 700 radians is known to 3e-5 in float32.
    np.testing.assert_allclose(logits, expected("paper", inputs, 0, 4, far), atol=1e-3)
