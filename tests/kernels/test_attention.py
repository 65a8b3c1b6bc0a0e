"""Attention in blocks of positions against its definition, and what its bits must not depend on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.attention import blocks, op, reference
from tests.helpers.long import long_but
from tests.helpers.paged import draw, scattered

attend, defined = jax.jit(blocks.attend), jax.jit(reference.attend)

LENGTHS = [1, 16, 63, 64, 65, 0, 128, 200]  # a row each: one token, at borders of pages and blocks, empty


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield np.float64


SHAPES = long_but([(16, 2, 4, 64)], [1, 16, 64, 128], [1, 2], [1, 2, 4, 8], [64, 128])


@pytest.mark.parametrize("T, K, group, H", SHAPES)
def test_is_the_definition(float64, T, K, group, H):
    case = draw(LENGTHS, Q=3, K=K, N=K * group, H=H, T=T, dtype=float64)
    np.testing.assert_allclose(attend(*case), defined(*case), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "lengths", long_but([[700] * 3 + [2] * 6], [[5], [0], [300], [0, 0], list(range(0, 40, 3)), [700] * 3 + [2] * 6])
)
def test_is_the_definition_for_every_number_of_rows(float64, lengths):
    """Of which the longest go on alone."""
    case = draw(lengths, Q=2, K=2, N=4, H=64, T=16, dtype=float64)
    np.testing.assert_allclose(attend(*case), defined(*case), rtol=1e-12, atol=1e-13)


# Of sums of 200 products of unit normals: rounding of the operands to 8 bits, of the sums to 24.
BOUNDS = {"float32": 2e-6, "bfloat16": 2e-2, "uint16": 2e-2}


@pytest.mark.parametrize("dtype", long_but(["uint16"], BOUNDS))
def test_rounds_as_its_dtype(dtype):
    q, pages, table, positions = draw(LENGTHS, Q=3, K=2, N=8, H=64, T=16)
    kept = blocks.stored(pages, jnp.dtype(dtype))
    exact = blocks.loaded(kept).astype(jnp.float32)
    found = attend(q, kept, table, positions)
    assert found.dtype == q.dtype
    np.testing.assert_allclose(found, defined(q, exact, table, positions), atol=BOUNDS[dtype])


@pytest.mark.slow
def test_a_query_without_position_has_the_result_0_and_changes_no_other():
    q, pages, table, positions = draw([70, 40], Q=3, K=2, N=4, H=64, T=16)
    found = attend(q, pages, table, positions.at[:, 0].set(-1))
    assert not found[:, 0].any()
    np.testing.assert_array_equal(found[:, 1:], attend(q, pages, table, positions)[:, 1:])


@pytest.mark.slow
def test_a_query_beyond_the_pages_of_its_row_sees_what_they_hold(float64):
    q, pages, table, positions = draw([64, 30], Q=3, K=2, N=4, H=64, T=16, dtype=float64)
    found = attend(q, pages, table, positions + 200)
    np.testing.assert_allclose(found, defined(q, pages, table, positions + 200), rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(found, attend(q, pages, table, positions * 0 + 199))


@pytest.mark.parametrize("T", long_but([16], [16, 128]))
def test_pages_of_no_row_may_hold_anything(T):
    q, pages, table, positions = draw(LENGTHS, Q=2, K=2, N=4, H=64, T=T)
    free = np.setdiff1d(np.arange(len(pages)), np.asarray(table))
    assert len(free) and 0 in free and len(pages) - 1 in free  # where a clipped number would point
    spoilt = pages.at[free].set(jnp.nan)
    np.testing.assert_array_equal(attend(q, spoilt, table, positions), attend(q, pages, table, positions))


# --- bits


@pytest.mark.slow
@pytest.mark.parametrize("H", [64, 128])
def test_bits_depend_neither_on_page_numbers_nor_on_the_page_size(H):
    found = [
        attend(*draw(LENGTHS, Q=3, K=2, N=8, H=H, T=T, pages_seed=seed)) for T, seed in [(16, 0), (16, 1), (64, 0)]
    ]
    found += [attend(*draw(LENGTHS, Q=3, K=2, N=8, H=H, T=T)) for T in (1, 128)]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize("Q", long_but([1], [1, 3]))
def test_bits_of_a_row_do_not_depend_on_the_other_rows(Q):
    """Which decide with how many others, and in which place, a row goes on."""
    q, pages, table, positions = draw([300, 129, 64, 20, 5, 700, 0, 90], Q=Q, K=2, N=8, H=64, T=16)
    whole = attend(q, pages, table, positions)
    few = positions.at[jnp.array([0, 3, 5])].set(-1)
    np.testing.assert_array_equal(attend(q, pages, table, few)[1], whole[1])
    order = jnp.array([5, 2, 0, 1, 7, 6, 4, 3])
    np.testing.assert_array_equal(attend(q[order], pages, table[order], positions[order]), whole[order])
    longer = positions.at[2].set(jnp.arange(Q) + 200).at[4].add(2)
    np.testing.assert_array_equal(
        attend(q, pages, table, longer)[jnp.array([0, 1, 3, 5])], whole[jnp.array([0, 1, 3, 5])]
    )


@pytest.mark.slow
def test_what_lies_beyond_a_query_changes_no_bit():
    q, pages, table, positions = draw([64, 70, 1, 129], Q=1, K=2, N=8, H=64, T=16)
    more = draw([64, 70, 1, 129], Q=1, K=2, N=8, H=64, T=16, spare=40)  # the same with room for more
    changed = scattered(more[1], more[2], positions[:, -1] + 1, 7.0)
    np.testing.assert_array_equal(attend(q, changed, more[2], positions), attend(q, pages, table, positions))


# --- sharded, and written


def sharded(fn):
    """Return fn on four devices: rows with their pages over two, heads over two."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    return jax.jit(functools.partial(fn, shards=op.Shards(mesh, "data", "tensor")))


@pytest.mark.slow
def test_sharded_is_unsharded():
    parts = [draw(lengths, Q=2, K=2, N=8, H=64, T=16, seed=i) for i, lengths in enumerate([[5, 100], [64, 0]])]
    columns = max(part[2].shape[1] for part in parts)
    parts = [(q, p, jnp.pad(t, ((0, 0), (0, columns - t.shape[1])), constant_values=len(p)), x) for q, p, t, x in parts]
    most = max(len(part[1]) for part in parts)
    parts = [with_pages(most, *part) for part in parts]
    q, pages, table, positions = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    found = sharded(op.attend)(q, pages, table, positions)
    np.testing.assert_array_equal(found, jnp.concatenate([attend(*part) for part in parts]))
    new = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 2, 64)), jnp.float32)
    new = jnp.stack([new, -new], axis=3)
    written = sharded(op.write_pool)(pages, table, positions, new=new)
    halves = [jax.jit(op.write_pool)(*part[1:], new=new[i : i + 2]) for i, part in zip((0, 2), parts)]
    jax.tree.map(np.testing.assert_array_equal, written, jax.tree.map(lambda *x: jnp.concatenate(x), *halves))


def with_pages(C, q, pages, table, positions):
    """Return a case whose pool has C pages."""
    old = len(pages)
    pages = jnp.pad(pages, ((0, C - old), *[(0, 0)] * 4))
    return q, pages, jnp.where(table == old, C, table), positions


@pytest.mark.parametrize("T, dtype", long_but([(16, "uint16")], [1, 16, 128], ["float32", "uint16"]))
def test_what_is_written_is_read_and_nothing_else_changes(T, dtype):
    _, pages, table, positions = draw([3, 64, 0, 129], Q=3, K=2, N=4, H=64, T=T)
    dtype, rng = jnp.dtype(dtype), np.random.default_rng(1)
    new = jnp.asarray(rng.normal(size=(4, 3, 2, 64)), jnp.float32)
    pages = blocks.stored(pages, dtype)
    positions = positions.at[1].set(jnp.array([-1, 62, 999]))  # no query, a position of the row, one without a page
    written = jax.jit(op.write_pool)(pages, table, positions, new=jnp.stack([new, -new], axis=3))
    expected = np.array(pages)
    for b, p in enumerate(np.asarray(positions)):
        for i, position in enumerate(p):
            if 0 <= position < table.shape[1] * T and table[b, position // T] < len(expected):
                for which, x in enumerate((new, -new)):
                    expected[table[b, position // T], :, which, position % T] = blocks.stored(x[b, i], dtype)
    np.testing.assert_array_equal(written, expected)


def test_a_pool_without_heads_is_written_too():
    pool, table = jnp.zeros((4, 16)), jnp.array([[2, 4], [1, 3]], jnp.int32)
    found = op.write_pool(
        pool, table, jnp.array([[3, 16], [15, 16]], jnp.int32), new=jnp.array([[1.0, 2.0], [3.0, 4.0]])
    )
    assert [tuple(x) for x in np.argwhere(found)] == [(1, 15), (2, 3), (3, 0)]
    assert [found[1, 15], found[2, 3], found[3, 0]] == [3.0, 1.0, 4.0]


@pytest.mark.slow
def test_a_loop_writes_its_pools_in_place():
    """Also in bfloat16, of which XLA on a CPU would convert the whole pool at each write."""
    q, pages, table, positions = draw([40, 5], Q=1, K=2, N=4, H=64, T=16, C=4000)
    pages = blocks.stored(pages, jnp.uint16)

    def run(pages, q, table, positions):
        def body(_, state):
            q, pages = state
            pages = op.write_pool(pages, table, positions, new=jnp.stack([q[:, :, :2], q[:, :, 2:]], axis=3))
            return op.attend(q, pages, table, positions), pages

        return jax.lax.fori_loop(0, 3, body, (q, pages))

    compiled = jax.jit(run, donate_argnums=0).lower(pages, q, table, positions).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pages.nbytes / 8
