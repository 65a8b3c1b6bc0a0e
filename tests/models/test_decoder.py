"""The policy: published sizes, the float64 formula, the two layouts of the weights, and independence of rows."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.hlo.count import count
from kernels_pallas.attention import gpu, heads_gpu, op
from kernels_pallas.attention.op import loaded
from kernels_pallas.attention.types import KEYS, VALUES
from specrl_jax.errors import InputError
from specrl_jax.models import cache as kv
from specrl_jax.models import decoder
from specrl_jax.models.decoder import network
from specrl_jax.models.layers import count_params
from specrl_jax.models.rotary import Rope, Yarn
from specrl_jax.sharding import LEARNER, make_mesh, partitioner
from tests.helpers.interpreted import GPU
from tests.helpers.policies import (
    LLAMA,
    QWEN2,
    SMALL,
    SMOLLM3,
    compiled,
    forward,
    numpy_forward,
    numpy_logprobs,
    random_params,
    row_positions,
)

TIED = dataclasses.replace(SMALL, tied=True)
# Twelve tokens, and the last four are beyond what it was pretrained on.
STRETCHED = dataclasses.replace(SMALL, rope=Rope(1e4, Yarn(4.0, 8, beta_fast=2.0, beta_slow=0.1)))
B, T = 5, 12  # rows and tokens of most tests
ROOM = 20  # positions that a row has pages for, more than T

# float32 against float64, or two orders of summation in float32: three layers of sums over at most 80 products, on
# logits that reach 7. A sum errs by up to sqrt(80) * 2^-24 = 5e-7 of its size; errors of some twenty of them add up.
ROUNDING = {"atol": 2e-5, "rtol": 0}

# Parameters of the released checkpoints, every tensor counted once (tied lm_heads are not stored).
PUBLISHED = {
    "qwen3_0p6b": 596_049_920,
    "qwen3_1p7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen2p5_0p5b": 494_032_768,
    "qwen2p5_1p5b": 1_543_714_304,
    "qwen2p5_7b": 7_615_616_512,
    "llama3p2_1b": 1_235_814_400,
    "llama3p2_3b": 3_212_749_824,
    "llama3p1_8b": 8_030_261_248,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1p7b": 1_711_376_384,
    "mimo_7b": 7_833_409_536 - 210_790_400,  # without its MTP layer
}


@pytest.fixture(scope="module")
def config(request):
    return getattr(request, "param", SMALL)


# For the tests where the lm_head matters; the others run untied.
both_tables = pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied", "tied"], indirect=True)


@pytest.fixture(scope="module")
def params(config):
    return random_params(config)


@pytest.fixture(scope="module")
def rollout(params, config):
    return decoder.inference_params(params, config, jnp.float32)


@pytest.fixture(scope="module")
def tokens():
    return draw_tokens(0)


def draw_tokens(seed, shape=(B, T)):
    return jnp.asarray(np.random.default_rng(seed).integers(0, SMALL.vocab, shape), jnp.int32)


def learner_logits(params, config, tokens, partition, **arrays):
    positions = arrays.pop("positions", row_positions(tokens))
    return compiled(config, partition)(params, tokens, positions, **arrays).logits


class Paged(NamedTuple):
    """A cache and the pages of each row."""

    cache: kv.KVCache
    table: kv.Table


def empty_pages(config, room=ROOM, page=4, dtype=jnp.float32, seed=0):
    """Pools in which B rows have pages for `room` positions, in a random order between three pages of no row."""
    columns = -(-room // page)
    shape = kv.PageShape(B * columns + 3, page, jnp.dtype(dtype), platform=jax.default_backend())
    order = np.random.default_rng(seed).permutation(shape.pages)[: B * columns]
    table = jnp.asarray(order.reshape(B, columns), jnp.int32)
    return Paged(kv.init_cache(config.layers, config.kv_heads, config.head_dim, shape=shape), kv.Table(table, table))


def entries(paged):
    """Keys and values of each layer by row and position: arrays [B, S, K, H]."""

    def by_position(pool):
        found = jnp.swapaxes(loaded(pool)[paged.table.read], 2, 3)
        return found.reshape(len(found), -1, *found.shape[3:])

    return [by_position(pages[:, :, which]) for pages in paged.cache for which in (KEYS, VALUES)]


@functools.cache
def cached(config, partition, **static):
    """`decoder.forward` over pages, jitted once for each set of static arguments: its output, the pages after it."""

    def run(params, tokens, positions, paged):
        inputs, options = decoder.ModelInputs(tokens, positions), decoder.Options(**static)
        out = decoder.forward(
            params, config, inputs, partition=partition, options=options, cache=paged.cache, table=paged.table
        )
        return out, paged._replace(cache=out.cache)

    return jax.jit(run)


def decode(rollout, config, tokens, blocks, partition, paged=None, **static):
    """Logits [B, sum(blocks), V] and the pages, from feeding `tokens` in blocks of these lengths."""
    paged = empty_pages(config) if paged is None else paged
    logits, start = [], 0
    for size in blocks:
        part = slice(start, start + size)
        out, paged = cached(config, partition, **static)(
            rollout, tokens[:, part], row_positions(tokens)[:, part], paged
        )
        logits.append(out.logits)
        start += size
    return jnp.concatenate(logits, axis=1), paged


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [SMALL, QWEN2], ids=["qwen3", "qwen2"])
def test_a_kernel_that_takes_the_fused_product_is_the_same_layer(sizes, partition, monkeypatch):
    """Interpreted, with pages of bfloat16: queries and keys differ by a rounding of it where statistics do in float32.

    A rounding is 1 / 256 of a query; scores of unit normals, and so logits of this size, change by about as much.
    """
    config, bf16 = dataclasses.replace(sizes, head_dim=128, layers=2), jnp.dtype("bfloat16")
    rollout, tokens = decoder.inference_params(random_params(config), config, bf16), draw_tokens(1, (2, 2))
    cache = kv.init_cache(
        config.layers, config.kv_heads, config.head_dim, shape=kv.PageShape(2, 16, bf16, platform="gpu")
    )
    pages = jnp.arange(2, dtype=jnp.int32)[:, None]
    table = kv.Table(pages, pages)
    calls = []

    def attend_fused(*arrays):
        calls.append(arrays)
        return gpu.attend_fused(*arrays, interpret=GPU)

    def logits(**fused):
        kernel = op.AttentionKernel(functools.partial(gpu.attend, interpret=GPU), gpu.fits, **fused)
        monkeypatch.setattr(op, "kernel_of", lambda device: kernel)
        inputs, options = decoder.ModelInputs(tokens, row_positions(tokens)), decoder.Options()
        run = functools.partial(decoder.forward, config=config, inputs=inputs, partition=partition, options=options)
        network.decoded_layer.clear_cache()  # it was traced with another kernel
        out = jax.jit(run)(rollout, cache=cache, table=table)
        return out.logits

    expected = logits()
    assert not calls
    found = logits(attend_fused=attend_fused, fits_fused=heads_gpu.fits)
    assert len(calls) == 1  # one trace for both layers
    np.testing.assert_allclose(found, expected, rtol=0, atol=1 / 256)


# Sizes


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_number_of_parameters(name):
    assert count_params(decoder.param_specs(decoder.preset(name))) == PUBLISHED[name]


@pytest.mark.parametrize(("name", "active"), [("qwen3_30b_a3b", 3.3e9), ("qwen3_235b_a22b", 22e9)])
def test_preset_has_the_published_number_of_active_parameters(name, active):
    config = decoder.preset(name)
    specs = jax.tree.leaves(decoder.param_specs(config))
    used = config.experts_per_token / config.experts
    count = sum(spec.size * (used if "experts" in spec.axes else 1) for spec in specs)
    # Published with two digits.
    assert count == pytest.approx(active, rel=0.02)


def test_every_large_preset_has_a_published_number():
    families = ("qwen3_", "qwen2p5_", "llama3", "smollm2_", "mimo_")
    assert set(PUBLISHED) == {name for name in decoder.PRESETS if name.startswith(families)}


def test_every_hugging_face_name_belongs_to_one_weight():
    for name in decoder.PRESETS:
        names = [(spec.hf_name, spec.hf_rows) for spec in jax.tree.leaves(decoder.param_specs(decoder.preset(name)))]
        assert len(set(names)) == len(names)


def test_misspelt_preset_lists_those_there_are():
    with pytest.raises(InputError, match=r"policy\.preset: no preset 'qwen3_0\.6b'; .*qwen3_0p6b") as error:
        decoder.preset("qwen3_0.6b")
    assert "\n" not in str(error.value)


# The formula


@pytest.mark.parametrize(
    "config",
    [SMALL, TIED, STRETCHED, QWEN2, LLAMA, SMOLLM3],
    ids=["untied", "tied", "stretched positions", "qwen2", "llama", "smollm3"],
    indirect=True,
)
def test_forward_matches_the_float64_formula(params, config, tokens, partition):
    logits = learner_logits(params, config, tokens, partition)
    assert logits.dtype == jnp.float32
    for row in range(B):
        np.testing.assert_allclose(logits[row], numpy_forward(params, config, tokens[row])[0], **ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_logprobs_and_entropy_match_the_float64_formula(temperature, params, config, tokens, partition):
    targets = draw_tokens(1)
    out = compiled(config, partition, temperature=temperature)(params, tokens, row_positions(tokens), targets=targets)
    assert out.logits is None
    for row in range(B):
        logits, _ = numpy_forward(params, config, tokens[row])
        logprobs, entropy = numpy_logprobs(logits, targets[row], temperature)
        np.testing.assert_allclose(out.logprobs[row], logprobs, **ROUNDING)
        np.testing.assert_allclose(out.entropy[row], entropy, **ROUNDING)


def score(params, config, tokens, partition, **static):
    """A fixed weighting of the targets' log-probs, summed: something to differentiate."""
    targets, weights = draw_tokens(1), jnp.asarray(np.random.default_rng(2).normal(size=(B, T)), jnp.float32)
    out = forward(params, config, tokens, row_positions(tokens), partition, targets=targets, **static)
    return (out.logprobs * weights).sum()


@functools.cache
def graded_score(config, partition, **static):
    """Jitted value and gradient of `score`."""
    return jax.jit(jax.value_and_grad(lambda params, tokens: score(params, config, tokens, partition, **static)))


@pytest.mark.parametrize("config", [SMALL, TIED, QWEN2], ids=["untied", "tied", "qwen2"], indirect=True)
def test_gradient_is_the_derivative_of_the_float64_formula(params, config, tokens, partition):
    """Along one random direction through every weight: a stop_gradient in the wrong place shows here."""
    _, gradient = graded_score(config, partition)(params, tokens)
    targets, weights = draw_tokens(1), np.random.default_rng(2).normal(size=(B, T))
    direction = jax.tree.map(lambda g: np.random.default_rng(g.size).normal(size=g.shape), gradient)

    def exact(step):
        moved = jax.tree.map(lambda w, d: np.asarray(w, np.float64) + step * d, params, direction)
        logits = [numpy_forward(moved, config, row)[0] for row in tokens]
        return sum((numpy_logprobs(x, y, 1.0)[0] * w).sum() for x, y, w in zip(logits, targets, weights))

    slope = (exact(1e-6) - exact(-1e-6)) / 2e-6
    ours = sum((np.asarray(g, np.float64) * d).sum() for g, d in zip(*map(jax.tree.leaves, (gradient, direction))))
    size = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in jax.tree.leaves(gradient)))
    # Gradient entries err by some 1e-6 of their size, and so does their product with a random direction; central
    # differences in float64 err less.
    assert abs(ours - slope) < 2e-5 * size


# The learner's options change the schedule, not the numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    "static",
    [
        pytest.param({"vocab_tile": 16}, marks=pytest.mark.long),
        pytest.param({"remat": "full"}, marks=pytest.mark.long),
        pytest.param({"remat": "selective"}, marks=pytest.mark.long),
        {"vocab_tile": 7, "remat": "selective", "aux_layers": (0, 2)},
    ],
    ids=["tiled", "full", "selective", "all-with-features"],
)
def test_schedule_changes_neither_logprobs_nor_gradients(static, params, config, tokens, partition):
    plain, plain_grad = graded_score(config, partition)(params, tokens)
    other, other_grad = graded_score(config, partition, **static)(params, tokens)
    # A sum of 60 log-probs of a few nats.
    np.testing.assert_allclose(other, plain, atol=1e-4, rtol=0)
    for a, b in zip(jax.tree.leaves(other_grad), jax.tree.leaves(plain_grad), strict=True):
        # Sums over 60 tokens in another order: a few ulp of the leaf's largest entry.
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, option",
    [({"vocab": 4000, "layers": 1}, {"vocab_tile": 250}), ({"vocab": 40, "layers": 8}, {"remat": "full"})],
    ids=["tiled", "remat"],
)
def test_memory_options_lower_the_peak_of_the_backward_pass(sizes, option, partition):
    """What the two options are for, read from the compiler without running."""
    config = dataclasses.replace(TIED, **sizes)
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), decoder.param_specs(config))
    rows = jax.ShapeDtypeStruct((4, 64), jnp.int32)

    def peak(**static):
        def loss(params, tokens):
            at = row_positions(tokens)
            return forward(params, config, tokens, at, partition, targets=tokens, **static).logprobs.sum()

        return jax.jit(jax.grad(loss)).lower(params, rows).compile().memory_analysis().temp_size_in_bytes

    assert peak(**option) < 0.5 * peak()


@pytest.mark.slow
def test_selective_repeats_no_product_and_holds_less_than_nothing_repeated(partition):
    """Of a layer with wide matrices: `full` repeats all of its products but that of `down`, which no gradient reads."""
    config = dataclasses.replace(TIED, vocab=40, layers=8, embed=32, mlp=96)
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), decoder.param_specs(config))
    B, T = 4, 64

    def step(remat):
        def loss(params, tokens):
            at = row_positions(tokens)
            return forward(params, config, tokens, at, partition, targets=tokens, remat=remat).logprobs.sum()

        return jax.jit(jax.grad(loss)).lower(params, jax.ShapeDtypeStruct((B, T), jnp.int32)).compile()

    full, selective, none = (step(remat) for remat in ("full", "selective", "none"))
    flops = [count(x.as_text()).flops for x in (full, selective, none)]
    heads = 2 * (config.heads + config.kv_heads) * config.head_dim  # of q, k, v and o
    products = config.embed * (heads + 2 * config.mlp)
    # Scores are computed again by both, and are not counted here; their product with the values only by `full`.
    values = config.heads * config.head_dim * T
    assert flops[0] - flops[1] == 2 * B * T * config.layers * (products + values)
    assert flops[1] - flops[2] == 2 * B * T * config.layers * values
    held = [x.memory_analysis().temp_size_in_bytes for x in (full, selective, none)]
    assert held == sorted(held)


# Auxiliary features


@pytest.mark.parametrize("layers", [(2, 3, 0), pytest.param((0, 1, 2, 3), marks=pytest.mark.long)], ids=str)
def test_features_are_the_residual_stream_entering_the_named_layers(layers, params, config, tokens, partition):
    """The third of three layers is the last: 3 is what leaves it."""
    out = compiled(config, partition, aux_layers=layers)(params, tokens, row_positions(tokens))
    assert out.aux.shape == (B, T, len(layers), config.embed)
    for row in range(B):
        _, stream = numpy_forward(params, config, tokens[row])
        for place, index in enumerate(layers):
            np.testing.assert_allclose(out.aux[row, :, place], stream[index], **ROUNDING)


@pytest.mark.slow
def test_both_layouts_give_the_same_features(params, rollout, config, tokens, partition):
    at = row_positions(tokens)
    learner = compiled(config, partition, aux_layers=(2, 3, 0))(params, tokens, at)
    decoded, _ = cached(config, partition, aux_layers=(2, 3, 0))(rollout, tokens, at, empty_pages(config))
    np.testing.assert_allclose(decoded.aux, learner.aux, **ROUNDING)


@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.long), "selective"])
def test_features_carry_no_gradient(remat, params, config, tokens, partition):
    def size_of_features(params):
        out = forward(
            params,
            config,
            tokens,
            row_positions(tokens),
            partition,
            aux_layers=(0, 1, 2, 3),
            remat=remat,
            return_logits=False,
        )
        return (out.aux**2).sum()

    value, gradient = jax.jit(jax.value_and_grad(size_of_features))(params)
    assert value > 1
    for leaf in jax.tree.leaves(gradient):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


# The inference layout


@pytest.mark.parametrize("config", [SMALL, TIED, QWEN2], ids=["untied", "tied", "qwen2"], indirect=True)
def test_inference_params_keep_every_weight_bit_for_bit(params, rollout, config):
    group = config.heads // config.kv_heads
    for i, ours in enumerate(rollout["layers"]):
        w = {name: np.asarray(leaf[i]) for name, leaf in params["layers"].items()}
        for kind in ("", "_bias") if config.qkv_bias else ("",):
            fused = ours[f"qkv{kind}"]
            q, k, v = (w[f"{name}{kind}"] for name in "qkv")
            for head in range(config.heads):
                np.testing.assert_array_equal(fused[..., head // group, head % group, :], q[..., head, :])
            for head in range(config.kv_heads):
                np.testing.assert_array_equal(fused[..., head, group, :], k[..., head, :])
                np.testing.assert_array_equal(fused[..., head, group + 1, :], v[..., head, :])
        np.testing.assert_array_equal(ours["gate"], w["gate"])
        np.testing.assert_array_equal(ours["up"], w["up"])
        for name in ("attention_norm", "o", "mlp_norm", "down") + ("q_norm", "k_norm") * config.qk_norm:
            np.testing.assert_array_equal(ours[name], w[name])
    for name in ("embed", "final_norm"):
        np.testing.assert_array_equal(rollout[name], params[name])
    np.testing.assert_array_equal(rollout["to_logits"], params["embed" if config.tied else "unembed"].T)


@both_tables
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_inference_params_have_the_declared_shapes_and_dtype(dtype, params, config):
    made = jax.eval_shape(lambda p: decoder.inference_params(p, config, dtype), params)
    specs = decoder.inference_specs(config)
    assert jax.tree.map(lambda w: w.shape, made) == jax.tree.map(lambda s: s.shape, specs)
    assert {w.dtype for w in jax.tree.leaves(made)} == {jnp.dtype(dtype)}
    assert all(len(s.axes) == len(s.shape) for s in jax.tree.leaves(specs))


# Cached decode = full forward


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "blocks", "page"),
    [
        (SMALL, (5, 1, 4, 1, 1), 4),
        pytest.param(SMALL, (1,) * 12, 8, marks=pytest.mark.long),
        (TIED, (12,), 8),
        pytest.param(STRETCHED, (5, 1, 4, 1, 1), 4, marks=pytest.mark.long),
        (QWEN2, (5, 1, 4, 1, 1), 4),
        (LLAMA, (5, 1, 4, 1, 1), 4),
        (SMOLLM3, (5, 1, 4, 1, 1), 4),
    ],
    ids=["untied", "one by one", "tied", "stretched positions", "qwen2", "llama", "smollm3"],
    indirect=["config"],
)
def test_cached_decode_is_the_full_forward(blocks, page, params, rollout, config, tokens, partition):
    logits, _ = decode(rollout, config, tokens, blocks, partition, empty_pages(config, page=page))
    np.testing.assert_allclose(logits, learner_logits(params, config, tokens, partition), **ROUNDING)


@pytest.mark.slow
def test_chunked_prefill_leaves_the_cache_of_one_prefill(rollout, config, tokens, partition):
    """By position, whatever the pages: positions beyond the text, too, are left as they were."""
    _, whole = decode(rollout, config, tokens, (12,), partition, empty_pages(config, seed=1))
    _, parts = decode(rollout, config, tokens, (4, 4, 4), partition)
    for a, b in zip(entries(parts), entries(whole), strict=True):
        assert a.shape == (B, ROOM, config.kv_heads, config.head_dim) and jnp.abs(a[:, :T]).max(axis=(2, 3)).all()
        np.testing.assert_allclose(a, b, **ROUNDING)


@pytest.mark.slow
def test_prefill_without_lm_head_fills_the_same_cache(rollout, config, tokens, partition):
    at = row_positions(tokens)
    _, plain = cached(config, partition)(rollout, tokens, at, empty_pages(config))
    out, bare = cached(config, partition, return_logits=False)(rollout, tokens, at, empty_pages(config))
    assert out.logits is None
    for a, b in zip(jax.tree.leaves(bare.cache), jax.tree.leaves(plain.cache), strict=True):
        np.testing.assert_allclose(a, b, **ROUNDING)


def test_rows_decode_at_their_own_positions(params, rollout, config, tokens, partition):
    """Right-padded prompts of different lengths, prefilled together, continue each from its own end."""
    lengths = np.array([1, 5, 2, 4, 3])
    run = cached(config, partition)
    full = learner_logits(params, config, tokens, partition)
    garbage = jnp.where(jnp.arange(5)[None] < lengths[:, None], tokens[:, :5], 7)
    _, paged = run(rollout, garbage, row_positions(garbage), empty_pages(config))
    for step in range(T - 5):
        at = jnp.asarray(lengths + step)[:, None]
        out, paged = run(rollout, jnp.take_along_axis(tokens, at, axis=1), at, paged)
        for row in range(B):
            np.testing.assert_allclose(out.logits[row, 0], full[row, lengths[row] + step], **ROUNDING)


def test_rejected_block_leaves_no_trace(rollout, config, tokens, partition):
    """Rollback is index arithmetic: the same positions computed again with other tokens, bit for bit."""
    run, at = cached(config, partition), row_positions(tokens)
    _, paged = decode(rollout, config, tokens, (4,), partition)
    _, wrong = run(rollout, draw_tokens(3, (B, 4)), at[:, 4:8], paged)
    (direct, _), (again, _) = (run(rollout, tokens[:, 4:8], at[:, 4:8], p) for p in (paged, wrong))
    np.testing.assert_array_equal(again.logits, direct.logits)
    for a, b in zip(jax.tree.leaves(again.cache), jax.tree.leaves(direct.cache), strict=True):
        np.testing.assert_array_equal(a, b)


def test_entries_beyond_a_row_are_never_read(rollout, config, tokens, partition):
    """Nor are pages of no row."""
    clean = empty_pages(config)
    stale = clean._replace(cache=jax.tree.map(lambda pool: pool + 100.0, clean.cache))
    expected, _ = decode(rollout, config, tokens, (4, 4, 4), partition, clean)
    logits, _ = decode(rollout, config, tokens, (4, 4, 4), partition, stale)
    np.testing.assert_array_equal(logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize("unnamed", [0, 3], ids=["the table ends", "the table names no page"])
def test_writes_beyond_the_pages_of_a_row_are_dropped(unnamed, rollout, config, tokens, partition):
    """A block that sticks out of them must not wrap around, pile up on the last entry or reach another page."""
    few = empty_pages(config, room=8)
    pages = len(few.cache[0])
    table = jnp.pad(few.table.read, ((0, 0), (0, unnamed)), constant_values=pages)
    _, filled = decode(rollout, config, tokens, (3, 3), partition, few._replace(table=kv.Table(table, table)))
    _, filled = cached(config, partition)(rollout, tokens[:, 6:], row_positions(tokens)[:, 6:], filled)
    _, longer = decode(rollout, config, tokens, (4, 4, 4), partition)
    for a, b in zip(entries(filled._replace(table=few.table)), entries(longer), strict=True):
        np.testing.assert_allclose(a, b[:, :8], **ROUNDING)
    nobodys = np.setdiff1d(np.arange(pages), few.table.read)
    assert len(nobodys) == 3
    for pool in jax.tree.leaves(filled.cache):
        np.testing.assert_array_equal(pool[nobodys], np.zeros_like(pool[nobodys]))


# One row never affects another; padding changes nothing; packing changes nothing


def test_rows_of_the_learner_are_independent(params, config, tokens, partition):
    others = draw_tokens(4).at[2].set(tokens[2])
    before, after = (learner_logits(params, config, t, partition)[2] for t in (tokens, others))
    np.testing.assert_array_equal(after, before)


def test_rows_of_the_cache_are_independent(rollout, config, tokens, partition):
    """Neighbours with other tokens at other positions, over a cache with other content: row 2 keeps its bits."""
    run = cached(config, partition)
    _, paged = decode(rollout, config, tokens, (4,), partition)
    at = row_positions(tokens)[:, 4:8]
    before, left = run(rollout, tokens[:, 4:8], at, paged)
    row = jnp.arange(B)[:, None] == 2
    moved = jnp.where(row, at, at + 5)
    others = jnp.where(row, tokens[:, 4:8], draw_tokens(4, (B, 4)))
    own = paged.table.read[2]
    stirred = jax.tree.map(lambda pool: (pool + 1.0).at[own].set(pool[own]), paged.cache)
    after, beside = run(rollout, others, moved, paged._replace(cache=stirred))
    np.testing.assert_array_equal(after.logits[2], before.logits[2])
    for a, b in zip(entries(beside), entries(left), strict=True):
        np.testing.assert_array_equal(a[2], b[2])


def test_later_tokens_never_affect_earlier_ones(params, config, tokens, partition):
    later = jnp.where(jnp.arange(T)[None] < 6, tokens, draw_tokens(5))
    before, after = (learner_logits(params, config, t, partition)[:, :6] for t in (tokens, later))
    np.testing.assert_array_equal(after, before)


PLACES = [(3, 4), (0, 12), (2, 9), (9, 12), (0, 6)]  # where the text of each row begins and ends


def padded(tokens, seed):
    """Rows with their text at PLACES, segment 1, and random tokens before and after it, segment 0."""
    column = jnp.arange(T)[None]
    begin, end = jnp.array(PLACES).T[:, :, None]
    real = (begin <= column) & (column < end)
    return jnp.where(real, tokens, draw_tokens(seed, tokens.shape)), real.astype(jnp.int32)


def test_tokens_in_the_padding_change_nothing(params, config, tokens, partition):
    outputs = []
    for seed in (6, 7):
        rows, segments = padded(tokens, seed)
        outputs.append(learner_logits(params, config, rows, partition, segment_ids=segments))
    for row, (begin, end) in enumerate(PLACES):
        np.testing.assert_array_equal(outputs[0][row, begin:end], outputs[1][row, begin:end])


@pytest.mark.slow
def test_more_padding_changes_nothing(params, config, tokens, partition):
    segments = jnp.ones((B, T), jnp.int32)
    longer = jnp.pad(tokens, ((0, 0), (0, 4)), constant_values=9)
    logits = learner_logits(params, config, longer, partition, segment_ids=jnp.pad(segments, ((0, 0), (0, 4))))
    np.testing.assert_allclose(logits[:, :T], learner_logits(params, config, tokens, partition), **ROUNDING)


@pytest.mark.slow
def test_padding_reaches_no_gradient(params, config, tokens, partition):
    """Of a loss over the real tokens: the same whatever the padding holds, and finite."""

    def loss(params, rows, segments):
        out = forward(params, config, rows, row_positions(rows), partition, segment_ids=segments, targets=tokens)
        return jnp.where(segments > 0, out.logprobs, 0.0).sum()

    gradient = jax.jit(jax.grad(loss))
    gradients = [gradient(params, *padded(tokens, seed)) for seed in (6, 7)]
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        assert np.isfinite(a).all()
        # Zeros are added in other places of the embedding's scatter; nothing else differs.
        np.testing.assert_allclose(a, b, atol=1e-6 * float(jnp.abs(b).max()), rtol=0)


@pytest.mark.slow
def test_packed_segments_equal_separate_rows(params, config, tokens, partition):
    """Rows of 12 = 5 + 3 + 4 tokens of three texts, positions restarting, against the texts alone."""
    lengths, ids = (5, 3, 4), (1, 2, 3)
    positions = jnp.broadcast_to(jnp.concatenate([jnp.arange(n, dtype=jnp.int32) for n in lengths]), (B, T))
    segments = jnp.broadcast_to(jnp.repeat(jnp.array(ids), jnp.array(lengths), total_repeat_length=T), (B, T))
    packed = learner_logits(params, config, tokens, partition, positions=positions, segment_ids=segments)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = learner_logits(params, config, tokens[:, part], partition)
        np.testing.assert_allclose(packed[:, part], alone, **ROUNDING)
        start += length


# Precision


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", [pytest.param(jnp.float32, marks=pytest.mark.long), jnp.bfloat16])
def test_bfloat16_rollout_stays_close_to_float32(cache_dtype, params, config, tokens, partition):
    rollout = decoder.inference_params(params, config, jnp.bfloat16)
    paged = empty_pages(config, dtype=cache_dtype)
    logits, paged = decode(rollout, config, tokens, (4, 4, 4), partition, paged, dtype=jnp.bfloat16)
    exact = learner_logits(params, config, tokens, partition)
    assert logits.dtype == jnp.float32
    assert {kept.dtype for kept in entries(paged)} == {jnp.dtype(cache_dtype)}
    # Weights and some eight activations a layer are rounded to 2^-9 of their size, 30 independent roundings in three
    # layers: sqrt(30) * 2^-9 = 1.1 % of the logits' spread; three times that on average, as attention amplifies.
    error = np.asarray(logits - exact)
    assert np.sqrt((error**2).mean()) < 0.03 * float(exact.std())
    assert np.abs(error).max() > 0


# Stretched positions


def test_stretched_positions_allow_longer_sequences():
    policy = decoder.preset("qwen3_8b")
    assert policy.longest == 40_960
    long = Rope(1e6, Yarn(4.0, 32_768))
    assert dataclasses.replace(policy, rope=long).longest == 131_072
    # A checkpoint that says its stretched length itself.
    assert dataclasses.replace(policy, rope=long, max_positions=131_072).longest == 131_072


# Sharded = unsharded


@pytest.mark.slow
@pytest.mark.parametrize("config", [SMALL, QWEN2], ids=["qwen3", "qwen2"])
@pytest.mark.parametrize("sizes", [(2, 2, 2), pytest.param((1, 4, 2), marks=pytest.mark.long)], ids=str)
def test_forward_on_a_mesh_is_the_forward_on_one_device(config, sizes, partition):
    data, fsdp, tensor = sizes
    mesh = make_mesh({"data": data, "fsdp": fsdp, "expert": 1, "tensor": tensor})
    spread = partitioner(mesh, LEARNER)
    params, tokens = random_params(config), draw_tokens(0, (8, T))
    placed = jax.device_put(params, spread.shardings(decoder.param_specs(config)))
    logits = compiled(config, spread)(placed, tokens, row_positions(tokens)).logits
    assert logits.sharding.is_equivalent_to(spread.sharding(("batch", "sequence", "vocab")), 3)
    np.testing.assert_allclose(logits, learner_logits(params, config, tokens, partition), **ROUNDING)
