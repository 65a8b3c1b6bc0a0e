"""Gated delta nets: a plain loop over tokens, packed rows, and decoding that takes drafts back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.models import cache as kv
from specrl_jax.models import decoder
from specrl_jax.models.delta_net import DeltaNet, Mixed, PackedRows, Tokens, chunked, sequential
from specrl_jax.models.delta_rows import (
    Advance,
    Recurrence,
    Remembered,
    RowState,
    _advanced,
    advance,
    empty_rows,
    next_base,
)
from specrl_jax.sharding import ROLLOUT, make_mesh, partitioner
from tests.helpers.policies import HYBRID, compiled, random_params, row_positions

NET = DeltaNet((0,), key_heads=2, value_heads=4, key_dim=5, value_dim=3)
WAITING = 4
# Segments of a packed row: as short as the convolution, one beyond a chunk, and one that two chunks share.
LENGTHS = (1, 2, 5, 70, 3, 60)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def mixed(B, T, seed=0, dtype=jnp.float64):
    rng = np.random.default_rng(seed)
    parts = tuple(jnp.asarray(rng.normal(size=(B, T, *part)), dtype) for part in NET.parts)
    decay, rate = -rng.exponential(0.3, (B, T, 4)), rng.uniform(size=(B, T, 4))
    return Mixed(parts, jnp.asarray(decay, dtype), jnp.asarray(rate, dtype))


def kernels(dtype=jnp.float64):
    rng = np.random.default_rng(9)
    return tuple(jnp.asarray(rng.normal(size=(*part, NET.window)), dtype) for part in NET.parts)


def cut(tokens, part):
    return jax.tree.map(lambda x: x[:, part], tokens)


def numpy_net(tokens, weights):
    """Return o [T, N, dv] of one sequence, token by token and head by head, written from the paper."""
    q, k, v = (np.asarray(x[0], np.float64) for x in tokens.parts)

    def convolve(x, kernel):
        padded = np.concatenate([np.zeros((NET.window - 1, *x.shape[1:])), x])
        y = sum(padded[j : j + len(x)] * np.asarray(kernel)[..., j] for j in range(NET.window))
        return y / (1 + np.exp(-y))

    q, k, v = (convolve(x, kernel) for x, kernel in zip((q, k, v), weights, strict=True))
    out = np.zeros_like(v)
    for head in range(NET.value_heads):
        state, shared = np.zeros((NET.key_dim, NET.value_dim)), head // (NET.value_heads // NET.key_heads)
        for t in range(len(v)):
            query, key = (x[t, shared] / np.sqrt(x[t, shared] @ x[t, shared] + 1e-6) for x in (q, k))
            state = state * np.exp(tokens.decay[0, t, head])
            state = state + np.outer(key, tokens.rate[0, t, head] * (v[t, head] - state.T @ key))
            out[t, head] = state.T @ query / np.sqrt(NET.key_dim)
    return out


def packed_row():
    return np.repeat(np.arange(len(LENGTHS)), LENGTHS)[None]


def test_chunks_are_a_loop_over_tokens(float64):
    tokens = mixed(1, 150)
    np.testing.assert_allclose(PackedRows(None)(tokens, kernels())[0], numpy_net(tokens, kernels()), rtol=0, atol=1e-12)


def test_a_packed_row_has_the_outputs_and_gradients_of_its_segments(float64):
    tokens, segments, weight = mixed(1, sum(LENGTHS)), packed_row(), kernels()
    target = jnp.asarray(np.random.default_rng(4).normal(size=(1, sum(LENGTHS), 4, 3)))

    def together(tokens, weight):
        return (PackedRows(jnp.asarray(segments))(tokens, weight) * target).sum()

    def apart(tokens, weight):
        ends = np.cumsum(LENGTHS)
        parts = [slice(end - length, end) for end, length in zip(ends, LENGTHS, strict=True)]
        return sum((PackedRows(None)(cut(tokens, part), weight) * target[:, part]).sum() for part in parts)

    found, wanted = (jax.value_and_grad(loss, argnums=(0, 1))(tokens, weight) for loss in (together, apart))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12), found, wanted)


def test_a_decay_to_nothing_has_a_derivative(float64):
    """exp(-1000) is 0; a mask that adds -inf to exponents would give NaN here."""
    tokens, segments = mixed(1, sum(LENGTHS)), jnp.asarray(packed_row())
    tokens = tokens._replace(decay=tokens.decay * 1000)
    gradient = jax.grad(lambda tokens: PackedRows(segments)(tokens, kernels()).sum())(tokens)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_a_block_has_the_bits_of_single_steps():
    """Outputs and the state, float32, for every k."""
    rng = np.random.default_rng(2)

    def random(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    B, N, dk, dv = 3, 4, 16, 12
    run, advanced = jax.jit(sequential), jax.jit(_advanced)
    for Q in range(1, 9):
        rate = jax.nn.sigmoid(random(B, Q, N))
        tokens = Tokens(random(B, Q, N, dk), random(B, Q, N, dk), random(B, Q, N, dv), -abs(random(B, Q, N)), rate)
        first = state = random(B, N, dk, dv)
        block = run(tokens, first)
        for i in range(Q):
            at = Advance(jnp.full(B, i), jnp.int32(i), jnp.full(B, Q))
            np.testing.assert_array_equal(advanced(RowState(first, (), tokens), at), state)
            one = cut(tokens, slice(i, i + 1))
            np.testing.assert_array_equal(run(one, state)[:, 0], block[:, i])
            state = advanced(RowState(state, (), one), Advance(jnp.ones(B, jnp.int32), jnp.int32(1), jnp.ones(B)))


def test_rows_forget_refused_drafts_and_hold_still_where_they_do_not_run(float64):
    """Prompts of several lengths in pieces, then blocks of which some tokens are accepted, wrong ones behind them."""
    B, T, rng = 3, 90, np.random.default_rng(3)
    tokens, strangers, weight = mixed(B, T), mixed(B, T, seed=8), kernels()
    wanted = np.asarray(PackedRows(None)(tokens, weight))
    rows = empty_rows(NET, B, waiting=WAITING, dtype=jnp.float64)

    def step(positions, given, prefills):
        nonlocal rows
        at = advance(rows, jnp.asarray(positions))
        memory = Recurrence(rows.layers[0], at, prefills=prefills)
        out = memory(given, weight)
        rows = Remembered(next_base(rows, at, prefills), (memory.rows,))
        return np.asarray(out)

    def at(positions, given):
        return jax.tree.map(lambda x: jnp.stack([row[p] for row, p in zip(x, positions, strict=True)]), given)

    length = np.array([41, 1, 33])
    for first in range(0, 48, 16):
        positions = np.broadcast_to(first + np.arange(16), (B, 16))
        here = positions < length[:, None]
        out = step(np.where(here, positions, -1), at(positions, tokens), prefills=True)
        for row in range(B):
            np.testing.assert_allclose(out[row][here[row]], wanted[row, positions[row][here[row]]], rtol=0, atol=1e-12)
    while length.max() < T - WAITING:
        Q = int(rng.integers(1, WAITING + 1))
        runs, accepted = rng.random(B) < 0.8, rng.integers(0, Q, B)
        positions = length[:, None] - 1 + np.arange(Q)
        right = np.arange(Q) <= accepted[:, None]
        given = jax.tree.map(
            lambda x, y, right=right: jnp.where(right.reshape(B, -1, *[1] * (x.ndim - 2)), x, y),
            at(positions, tokens),
            at(positions, strangers),
        )
        out = step(np.where(runs[:, None], positions, -1), given, prefills=False)
        for row in np.flatnonzero(runs):
            kept = positions[row][right[row]]
            np.testing.assert_allclose(out[row][right[row]], wanted[row, kept], rtol=0, atol=1e-12)
            length[row] += accepted[row] + 1


def test_a_state_goes_on_where_chunks_left_it(float64):
    tokens = Tokens(*(jnp.asarray(x) for x in np.random.default_rng(1).normal(size=(3, 2, 100, 4, 3))), 0, 0)
    gates = np.random.default_rng(2).uniform(size=(2, 2, 100, 4))
    tokens = tokens._replace(decay=-jnp.asarray(gates[0]), rate=jnp.asarray(gates[1]), k=tokens.k / 3)
    nothing = jnp.zeros((2, 4, 3, 3))
    out, state = chunked(tokens, nothing)
    first, middle = chunked(cut(tokens, slice(37)), nothing)
    then, last = chunked(cut(tokens, slice(37, None)), middle)
    np.testing.assert_allclose(jnp.concatenate([first, then], axis=1), out, rtol=0, atol=1e-12)
    np.testing.assert_allclose(last, state, rtol=0, atol=1e-12)


def test_a_decoder_reads_its_caches_as_the_learner_reads_a_row():
    """HYBRID in float32: the prompt in two pieces, then blocks with refused drafts."""
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1, "sequence": 1}, jax.devices()[:1])
    params, partition = random_params(HYBRID), partitioner(mesh, ROLLOUT)
    B, T, rng = 2, 40, np.random.default_rng(0)
    tokens = rng.integers(0, HYBRID.vocab, (B, T)).astype(np.int32)
    wanted = np.asarray(compiled(HYBRID, partition)(params, tokens, row_positions(tokens)).logits)
    own = decoder.inference_params(params, HYBRID, jnp.float32)
    shape = kv.PageShape(2 * B, 32, jnp.float32, platform="cpu")
    cache = kv.init_cache(len(HYBRID.attention_layers), HYBRID.kv_heads, HYBRID.head_dim, shape=shape)
    rows, table = (
        empty_rows(HYBRID.delta, B, waiting=WAITING, dtype=jnp.float32),
        kv.Table(*[jnp.arange(2 * B).reshape(B, 2)] * 2),
    )

    @functools.partial(jax.jit, static_argnames="prefills")
    def run(tokens, positions, cache, rows, prefills):
        inputs, options = decoder.ModelInputs(tokens, positions), decoder.Options(prefills=prefills)
        out = decoder.forward(
            own, HYBRID, inputs, partition=partition, options=options, cache=cache, table=table, rows=rows
        )
        return out.logits, out.cache, out.rows

    for first in (0, 6):
        positions = np.broadcast_to(first + np.arange(6), (B, 6))
        _, cache, rows = run(tokens[:, first : first + 6], positions, cache, rows, prefills=True)
    length = 12
    while length + WAITING < T:
        accepted = int(rng.integers(WAITING))
        positions = np.broadcast_to(length - 1 + np.arange(WAITING), (B, WAITING))
        given = tokens[:, length - 1 :][:, :WAITING].copy()
        given[:, accepted + 1 :] = 7
        logits, cache, rows = run(given, positions, cache, rows, prefills=False)
        here = slice(length - 1, length + accepted)
        np.testing.assert_allclose(logits[:, : accepted + 1], wanted[:, here], rtol=0, atol=1e-4)
        length += accepted + 1
