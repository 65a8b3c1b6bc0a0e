"""Writing texts into the lookup cache, against plain loops over numpy arrays."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given

from specrl_jax.decoding.lookup_cache import LookupCache, append, empty_lookup_cache, insert

C, M, S = 3, 2, 6
B, Q, P = 4, 3, 3
seeds = st.integers(0, 2**31)


def some_corpus(rng):
    return LookupCache(rng.integers(0, 9, (C, M, S)).astype(np.int32), rng.integers(0, S + 1, (C, M)).astype(np.int32))


def on_device(lookup_cache):
    return LookupCache(*map(jnp.array, lookup_cache))


def assert_equal(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == jnp.int32
        np.testing.assert_array_equal(a, b)


def test_an_empty_lookup_cache_holds_no_text():
    lookup_cache = empty_lookup_cache(C, M, S)
    assert lookup_cache.tokens.shape == (C, M, S)
    assert_equal(lookup_cache, (lookup_cache.tokens, np.zeros((C, M))))


@given(seeds)
def test_inserting_replaces_whole_groups_and_drops_those_of_no_number(seed):
    rng = np.random.default_rng(seed)
    lookup_cache, wanted = (some_corpus(np.random.default_rng(seed)) for _ in range(2))
    # Groups C and C + 1 do not exist; C comes more than once.
    group = rng.permutation([*range(C), C, C, C + 1])[:P].astype(np.int32)
    tokens, length = rng.integers(10, 19, (P, M, S)), rng.integers(0, S + 1, (P, M))
    for i in range(P):
        if group[i] < C:
            wanted.tokens[group[i]], wanted.length[group[i]] = tokens[i], length[i]
    assert_equal(insert(on_device(lookup_cache), group, jnp.array(tokens), length=jnp.array(length)), wanted)


@given(seeds)
def test_appending_equals_a_loop_over_tokens(seed):
    rng = np.random.default_rng(seed)
    lookup_cache, wanted = (some_corpus(np.random.default_rng(seed)) for _ in range(2))
    # Distinct texts, and some rows that have none.
    group, sequence = np.divmod(rng.permutation(C * M)[:B], M)
    group = np.where(rng.random(B) < 0.3, C, group)
    start, count = rng.integers(0, S, B), rng.integers(0, Q + 1, B)
    positions = start[:, None] + np.arange(Q)
    positions = np.where(np.arange(Q) < count[:, None], np.minimum(positions, S), S)
    tokens, length = rng.integers(10, 19, (B, Q)), rng.integers(0, S + 1, B)
    for b in range(B):
        if group[b] == C:
            continue
        wanted.length[group[b], sequence[b]] = length[b]
        for position, token in zip(positions[b], tokens[b], strict=True):
            if position < S:
                wanted.tokens[group[b], sequence[b], position] = token
    group, sequence, positions, tokens, length = (
        jnp.array(x, jnp.int32) for x in (group, sequence, positions, tokens, length)
    )
    found = append(on_device(lookup_cache), group, sequence, positions=positions, tokens=tokens, length=length)
    assert_equal(found, wanted)


def test_recording_in_a_loop_writes_in_place():
    """The donated lookup_cache is the result; nothing of its size is allocated on the way."""
    large = jax.eval_shape(lambda: empty_lookup_cache(64, 8, 128))
    bytes_of_corpus = sum(x.size * x.dtype.itemsize for x in large)

    def body(i, lookup_cache):
        rows = jnp.arange(2)
        return append(
            lookup_cache,
            rows,
            rows,
            positions=jnp.broadcast_to(i, (2, 1)),
            tokens=jnp.broadcast_to(i, (2, 1)),
            length=rows + i,
        )

    loop = jax.jit(lambda lookup_cache, n: jax.lax.fori_loop(0, n, body, lookup_cache), donate_argnums=0)
    memory = loop.lower(large, jnp.int32(5)).compile().memory_analysis()
    assert memory.alias_size_in_bytes == bytes_of_corpus
    assert memory.temp_size_in_bytes < bytes_of_corpus / 10
