"""The mixture of experts: routing, a policy of them against float64, what may not change a row, and any mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.models import cache as kv
from specrl_jax.models import decoder, grouped, moe
from specrl_jax.models.quantized import Quantized
from specrl_jax.sharding import LEARNER, ROLLOUT, make_mesh, partitioner
from tests.helpers.grouped import by_kernel
from tests.helpers.policies import (
    MOE,
    SMALL,
    compiled,
    forward,
    numpy_forward,
    numpy_logprobs,
    random_params,
    row_positions,
)

B, T = 5, 12
# As in test_qwen3: float32 through three layers, logits that reach 7; three products more in each.
ROUNDING = {"atol": 2e-5, "rtol": 0}
UNSCALED = dataclasses.replace(MOE, renormalise=False)
kinds = pytest.mark.parametrize("config", [MOE, UNSCALED], ids=["renormalised", "as they are"])


def draw_tokens(seed, shape=(B, T)):
    return jnp.asarray(np.random.default_rng(seed).integers(0, SMALL.vocab, shape), jnp.int32)


def run(params, config, tokens, partition, **arguments):
    static = {name: arguments.pop(name) for name in ("remat", "aux_layers", "dtype") if name in arguments}
    return compiled(config, partition, **static)(params, tokens, row_positions(tokens), **arguments)


def empty_pages(config, rows, partition, columns=5):
    """An empty cache in pages of 4 tokens, and the table of its rows, in a random order among each shard's pages."""
    shards = partition.num_shards("batch")
    shape = kv.PageShape(rows * columns, 4, jnp.dtype(jnp.float32), platform=jax.default_backend())
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(shape.pages // shards) for _ in range(shards)])
    table = jnp.asarray(order.reshape(rows, columns), jnp.int32)
    return kv.init_cache(config.layers, config.kv_heads, config.head_dim, shape=shape), kv.Table(table, table)


@functools.cache
def cached(config, partition):
    """`decoder.forward` over pages, jitted."""

    def run(params, tokens, positions, cache, table):
        return decoder.forward(
            params, config, decoder.ModelInputs(tokens, positions), partition=partition, cache=cache, table=table
        )

    return jax.jit(run)


def decode(rollout, config, tokens, blocks, partition):
    """Logits [B, sum(blocks), V] and routing [L, E], from feeding `tokens` in blocks of these lengths."""
    cache, table = empty_pages(config, len(tokens), partition)
    logits, routing, start = [], 0, 0
    for size in blocks:
        part = slice(start, start + size)
        out = cached(config, partition)(rollout, tokens[:, part], row_positions(tokens)[:, part], cache, table)
        logits.append(out.logits)
        cache, routing, start = out.cache, routing + out.routing, start + size
    return jnp.concatenate(logits, axis=1), routing


# Routing


def test_the_largest_of_a_softmax_over_all_experts(partition):
    logits = np.log([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]])
    x, router = jnp.ones((1, 2, 2)) * jnp.eye(2)[None], jnp.asarray(logits, jnp.float32)
    shares = moe.route(x, router, 2, renormalise=False, partition=partition)
    np.testing.assert_array_equal(shares.chosen, [[[1, 3], [0, 1]]])  # the first of those that are alike
    np.testing.assert_allclose(shares.share, [[[0.4, 0.3], [0.25, 0.25]]], rtol=1e-6)
    scaled = moe.route(x, router, 2, renormalise=True, partition=partition)
    np.testing.assert_allclose(scaled.share, [[[4 / 7, 3 / 7], [0.5, 0.5]]], rtol=1e-6)


def test_routing_is_float32_under_bfloat16_activations(partition):
    """Two experts whose logits differ in the tenth bit: rounded to bfloat16 they would be alike."""
    x, router = jnp.ones((1, 1, 4), jnp.bfloat16), jnp.ones((4, 2)).at[0, 1].add(2.0**-6)
    routes = moe.route(x, router, 1, renormalise=False, partition=partition)
    assert routes.share.dtype == jnp.float32
    assert routes.chosen[0, 0, 0] == 1


def test_copies_are_counted_of_the_tokens_that_are_asked_for():
    chosen = jnp.array([[[0, 2], [2, 1]], [[3, 2], [0, 1]]])
    np.testing.assert_array_equal(moe.count_copies(chosen, 5, None), [2, 2, 3, 1, 0])
    np.testing.assert_array_equal(
        moe.count_copies(chosen, 5, jnp.array([[True, False], [True, False]])), [1, 0, 2, 1, 0]
    )


@pytest.mark.slow
def test_balance_is_one_where_experts_are_used_alike():
    even, single = jnp.full((3, 8), 5.0), jnp.zeros((3, 8)).at[:, 2].set(7.0)
    for counts, entropy, peak in ((even, 1.0, 1.0), (single, 0.0, 8.0)):
        found = moe.balance(counts)
        np.testing.assert_allclose(found.entropy.value(), entropy, atol=1e-6)
        np.testing.assert_allclose(found.peak, peak, rtol=1e-6)
    np.testing.assert_allclose(moe.balance(jnp.zeros((3, 8))).peak, 0)
    mixed = moe.balance(jnp.array([[1.0, 3.0], [2.0, 2.0]]))
    np.testing.assert_allclose(mixed.peak, 1.5, rtol=1e-6)
    first = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75)) / np.log(2)
    np.testing.assert_allclose(mixed.entropy.value(), (first + 1) / 2, rtol=1e-6)


# The formula


@kinds
def test_forward_matches_the_float64_formula(config, partition):
    params, tokens = random_params(config), draw_tokens(0)
    logits = run(params, config, tokens, partition).logits
    for row in range(B):
        np.testing.assert_allclose(logits[row], numpy_forward(params, config, tokens[row])[0], **ROUNDING)


@pytest.mark.slow
def test_one_expert_is_the_dense_mlp(partition):
    dense, tokens = random_params(SMALL), draw_tokens(0)
    config = dataclasses.replace(SMALL, experts=1, experts_per_token=1)
    router = {"router": jnp.asarray(np.random.default_rng(3).normal(size=(3, 24, 1)), jnp.float32)}
    experts = {name: dense["layers"][name][:, None] for name in ("gate", "up", "down")}
    params = dense | {"layers": dense["layers"] | experts | router}
    at = row_positions(tokens)

    def decoded(params, config):
        rollout = decoder.inference_params(params, config, jnp.float32)
        return cached(config, partition)(rollout, tokens, at, *empty_pages(config, B, partition))

    def learned(params, config):
        return run(params, config, tokens, partition)

    for form in (learned, decoded):
        mixture, plain = form(params, config), form(dense, SMALL)
        np.testing.assert_allclose(mixture.logits, plain.logits, **ROUNDING)
        np.testing.assert_array_equal(mixture.routing, np.full((3, 1), B * T))
        assert plain.routing is None


def score(params, config, tokens, partition, **static):
    """A fixed weighting of the targets' log-probs, summed: something to differentiate."""
    targets, weights = draw_tokens(1, tokens.shape), jnp.asarray(np.random.default_rng(2).normal(size=tokens.shape))
    out = forward(params, config, tokens, row_positions(tokens), partition, targets=targets, **static)
    return (out.logprobs * weights.astype(jnp.float32)).sum()


@functools.cache
def graded_score(config, partition, **static):
    return jax.jit(jax.value_and_grad(lambda params, tokens: score(params, config, tokens, partition, **static)))


@pytest.mark.slow
@kinds
def test_gradient_is_the_derivative_of_the_float64_formula(config, partition):
    """Along one random direction through every weight, the routers' too; no choice changes that near."""
    params, tokens = random_params(config), draw_tokens(0)
    _, gradient = graded_score(config, partition)(params, tokens)
    targets, weights = draw_tokens(1), np.random.default_rng(2).normal(size=(B, T))

    def slope(direction):
        def exact(step):
            moved = jax.tree.map(lambda w, d: np.asarray(w, np.float64) + step * d, params, direction)
            logits = [numpy_forward(moved, config, row)[0] for row in tokens]
            return sum((numpy_logprobs(x, y, 1.0)[0] * w).sum() for x, y, w in zip(logits, targets, weights))

        return (exact(1e-6) - exact(-1e-6)) / 2e-6

    everything = jax.tree.map(lambda g: np.random.default_rng(g.size).normal(size=g.shape), gradient)
    router = jax.tree.map(np.zeros_like, everything)
    router["layers"]["router"] = everything["layers"]["router"]
    for direction in (everything, router):
        ours = sum((np.asarray(g, np.float64) * d).sum() for g, d in zip(*map(jax.tree.leaves, (gradient, direction))))
        involved = [g for g, d in zip(*map(jax.tree.leaves, (gradient, direction))) if np.any(d)]
        size = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in involved))
        # As in test_decoder.
        assert abs(ours - slope(direction)) < 2e-5 * size


# Options, forms, rows


@pytest.mark.slow
def test_recomputing_layers_changes_nothing(partition):
    params, tokens = random_params(MOE), draw_tokens(0)
    plain, other = (graded_score(MOE, partition, **static)(params, tokens) for static in ({}, {"remat": "full"}))
    np.testing.assert_allclose(other[0], plain[0], atol=1e-4, rtol=0)
    for a, b in zip(jax.tree.leaves(other[1]), jax.tree.leaves(plain[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()), rtol=0)


def test_inference_params_have_the_declared_shapes_and_values():
    params = random_params(MOE)
    rollout = decoder.inference_params(params, MOE, jnp.float32)
    assert jax.tree.map(jnp.shape, rollout) == jax.tree.map(lambda spec: spec.shape, decoder.inference_specs(MOE))
    for i, layer in enumerate(rollout["layers"]):
        for name in ("router", "gate", "up", "down"):
            np.testing.assert_array_equal(layer[name], params["layers"][name][i])


@pytest.mark.slow
def test_cached_decode_is_the_full_forward(partition):
    params, tokens = random_params(MOE), draw_tokens(0)
    full = run(params, MOE, tokens, partition)
    logits, routing = decode(
        decoder.inference_params(params, MOE, jnp.float32), MOE, tokens, (5, 1, 4, 1, 1), partition
    )
    np.testing.assert_allclose(logits, full.logits, **ROUNDING)
    np.testing.assert_array_equal(routing, full.routing)


@pytest.mark.slow
def test_rows_are_independent(partition):
    """Nothing is dropped and nothing summed in another order: neighbours change no bit, in either form."""
    params, tokens = random_params(MOE), draw_tokens(0)
    others = draw_tokens(4).at[2].set(tokens[2])
    before, after = (run(params, MOE, t, partition).logits[2] for t in (tokens, others))
    np.testing.assert_array_equal(after, before)
    rollout = decoder.inference_params(params, MOE, jnp.float32)
    before, after = (decode(rollout, MOE, t, (4, 4), partition)[0][2] for t in (tokens, others))
    np.testing.assert_array_equal(after, before)


@pytest.mark.slow
def test_routing_is_of_the_tokens_that_are_counted(partition):
    params, tokens = random_params(MOE), draw_tokens(0)
    counted = jnp.arange(T)[None] < jnp.array([3, 0, 12, 5, 1])[:, None]
    routing = run(params, MOE, tokens, partition, counted=counted).routing
    assert routing.shape == (3, 8) and routing.dtype == jnp.float32
    np.testing.assert_array_equal(routing.sum(axis=1), [21 * 3] * 3)
    # The first layer's experts depend on a token and what is before it; that row alone gives its own counts.
    third = run(params, MOE, tokens[2:3], partition).routing
    rest = run(params, MOE, tokens, partition, counted=counted & (jnp.arange(B) != 2)[:, None]).routing
    np.testing.assert_array_equal(third + rest, routing)


@pytest.mark.slow
def test_bfloat16_stays_close_to_float32(partition):
    """Tokens whose choice of experts the rounding changes aside: of those there are few."""
    params, tokens = random_params(MOE), draw_tokens(0)
    exact = np.asarray(run(params, MOE, tokens, partition).logits)
    rounded = run(params, MOE, tokens, partition, dtype=jnp.bfloat16).logits
    assert rounded.dtype == jnp.float32
    error = np.sqrt(((np.asarray(rounded) - exact) ** 2).mean(axis=-1)) / exact.std()
    # 1.1 % by the count in test_qwen3, three times that on average.
    assert np.median(error) < 0.03 and error.max() > 0


# Sharded = unsharded

MESHES = [
    {"expert": 2, "fsdp": 2, "tensor": 2},
    pytest.param({"expert": 4, "tensor": 2}, marks=pytest.mark.long),
    pytest.param({"expert": 2, "data": 2, "fsdp": 2}, marks=pytest.mark.long),
    pytest.param({"expert": 8}, marks=pytest.mark.long),
]
DIVISIBLE = dataclasses.replace(MOE, mlp=28)


def spread(sizes, rules=LEARNER):
    return partitioner(make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1} | sizes), rules)


def assert_close(ours, theirs):
    """Float32 sums in another order: a few ulp of each leaf's largest entry."""
    for (path, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()), rtol=0, err_msg=str(path))


def mixture_and_gradients(partition, rows):
    """Of one layer: its output, the experts' copies, and gradients by its input and its weights."""
    specs = {
        name: spec
        for name, spec in decoder.param_specs(DIVISIBLE)["layers"].items()
        if name in (*moe.MATRICES, "router")
    }
    w = {name: random_params(DIVISIBLE)["layers"][name][0] for name in specs}
    placed = {name: jax.device_put(m, partition.sharding(specs[name].axes[1:])) for name, m in w.items()}
    rng = np.random.default_rng(0)
    x, direction = (jnp.asarray(rng.normal(size=(rows, T, 24)), jnp.float32) for _ in range(2))

    def loss(x, w):
        out, copies = moe.mixture(x, w, 3, renormalise=True, partition=partition)
        return (out * direction).sum(), (out, copies)

    (_, results), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(x, placed)
    return results, gradients


@pytest.fixture(scope="module")
def one_device(partition):
    return {rows: mixture_and_gradients(partition, rows) for rows in (5, 8)}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_mesh_changes_neither_outputs_nor_gradients(sizes, one_device):
    assert_close(mixture_and_gradients(spread(sizes), 8), one_device[8])


@pytest.mark.slow
def test_neither_does_the_table_of_the_rollout(one_device):
    assert_close(mixture_and_gradients(spread(MESHES[0], ROLLOUT), 8), one_device[8])


@pytest.mark.slow
def test_rows_that_do_not_divide_over_the_devices(one_device):
    """Five rows on eight: filled up, and cut again."""
    assert_close(mixture_and_gradients(spread({"expert": 4, "data": 2}), 5), one_device[5])


@pytest.mark.slow
@pytest.mark.parametrize("way", [grouped.by_ragged_dot, by_kernel], ids=["ragged_dot", "kernel"])
def test_sums_of_accelerators_over_a_mesh(way, one_device, monkeypatch):
    """What a TPU and a GPU take, with copies that belong to the experts of other devices."""
    monkeypatch.setitem(grouped.SUMS, "cpu", way)
    assert_close(mixture_and_gradients(spread({"expert": 2, "fsdp": 2, "tensor": 2}), 8), one_device[8])


@pytest.mark.slow
def test_a_policy_on_a_mesh_is_the_policy_on_one_device(partition):
    params, tokens = random_params(DIVISIBLE), draw_tokens(0, (8, T))
    over = spread({"expert": 2, "fsdp": 2, "tensor": 2})
    placed = jax.device_put(params, over.shardings(decoder.param_specs(DIVISIBLE)))
    (one, grad_one), (many, grad_many) = (
        graded_score(DIVISIBLE, p, remat="full")(w, tokens) for p, w in ((partition, params), (over, placed))
    )
    np.testing.assert_allclose(many, one, atol=1e-4, rtol=0)  # a sum of 96 log-probs of a few nats
    assert_close(grad_many, grad_one)


@pytest.mark.slow
def test_decoding_on_a_mesh_is_decoding_on_one_device(partition):
    params, tokens = random_params(DIVISIBLE), draw_tokens(0, (8, T))
    over, rollout = (
        spread({"expert": 4, "tensor": 2}, ROLLOUT),
        decoder.inference_params(params, DIVISIBLE, jnp.float32),
    )
    placed = jax.device_put(rollout, over.shardings(decoder.inference_specs(DIVISIBLE)))
    many, one = (decode(w, DIVISIBLE, tokens, (4, 4, 4), p) for w, p in ((placed, over), (rollout, partition)))
    np.testing.assert_allclose(many[0], one[0], **ROUNDING)
    np.testing.assert_array_equal(many[1], one[1])


def dequantized(w):
    return w.values.astype(jnp.float32) * w.scale if isinstance(w, Quantized) else w


@pytest.mark.slow
@pytest.mark.parametrize("config", [DIVISIBLE, dataclasses.replace(DIVISIBLE, experts=0)], ids=["experts", "dense"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_weights_decode_as_the_numbers_they_stand_for(kind, config, partition):
    """On one device and on a mesh: the scale of each output channel is applied to the right products."""
    params, tokens = random_params(config), draw_tokens(0, (8, T))
    rollout = decoder.inference_params(params, config, jnp.float32, kind=kind)
    numbers = jax.tree.map(dequantized, rollout, is_leaf=lambda w: isinstance(w, Quantized))
    over = spread({"expert": 4, "tensor": 2}, ROLLOUT)
    placed = jax.device_put(rollout, over.shardings(decoder.inference_specs(config, kind)))

    def logits(w, partition):
        cache, table = empty_pages(config, len(tokens), partition)
        return cached(config, partition)(w, tokens, row_positions(tokens), cache, table).logits

    expected = logits(numbers, partition)
    np.testing.assert_allclose(logits(rollout, partition), expected, **ROUNDING)
    np.testing.assert_allclose(logits(placed, over), expected, **ROUNDING)
    plain = logits(decoder.inference_params(params, config, jnp.float32), partition)
    assert 0.0 < float(jnp.abs(expected - plain).mean()) < 0.3 * float(plain.std())


def test_each_device_has_its_own_experts_and_no_others():
    over = spread({"expert": 4, "tensor": 2})
    placed = jax.device_put(random_params(DIVISIBLE), over.shardings(decoder.param_specs(DIVISIBLE)))
    assert {shard.data.shape for shard in placed["layers"]["gate"].addressable_shards} == {(3, 2, 24, 14)}
    assert {shard.data.shape for shard in placed["layers"]["down"].addressable_shards} == {(3, 2, 14, 24)}
