"""Recurrent heads: what a pair of the unrolled pass may read, long rows in parts, cache writes beyond the end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.attention.types import KEYS, VALUES
from specrl_jax.drafts import eagle3, mtp
from specrl_jax.drafts.eagle3 import Eagle3Draft
from specrl_jax.drafts.mtp import MTPDraft
from specrl_jax.models import attention, decoder
from specrl_jax.models.cache import Paging, Table
from specrl_jax.models.layers import init_params
from specrl_jax.sharding import LEARNER, ROLLOUT, make_mesh, partitioner
from tests.drafts.paged import by_position, own_pages
from tests.helpers.policies import row_positions
from tests.helpers.unrolled import unrolled

TARGET = decoder.DecoderConfig(40, 24, 7, heads=4, kv_heads=2, head_dim=8, mlp=32, tied=True, max_positions=64)
DRAFTS = {"eagle3": Eagle3Draft(eagle3.eagle3_config(TARGET, 16)), "mtp": MTPDraft(mtp.mtp_config(TARGET))}
FEATURES = {"eagle3": (3, 24), "mtp": (24,)}
CONFIG = DRAFTS["eagle3"].config
ONE = partitioner(make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1]), ROLLOUT)
B, T = 2, 9
kinds = pytest.mark.parametrize("kind", DRAFTS)


def params_of(kind):
    return init_params(jax.random.key(0), DRAFTS[kind].specs)


def inputs_of(kind, T=T):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=(B, T, *shape)), jnp.float32) for shape in (FEATURES[kind], (24,)))


@pytest.mark.slow
@kinds
def test_a_pair_reads_nothing_that_serving_would_not_have_yet(kind):
    (features, embedded), t, steps = inputs_of(kind), 3, 3

    @jax.jit
    def run(features, embedded):
        positions = row_positions(embedded[..., 0])
        return unrolled(DRAFTS[kind], params_of(kind), features, embedded, steps, positions)[:, :, t]

    before = run(features, embedded)
    # Step i takes the token at t + 1 + i; those after the last step's are unknown.
    after = run(features.at[:, t + 1 :].add(1.0), embedded.at[:, t + 1 + steps :].add(1.0))
    np.testing.assert_array_equal(before, after)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packed", "T"),
    [
        (True, 8),
        *(pytest.param(packed, T, marks=pytest.mark.long) for packed, T in ((True, 9), (False, 8), (False, 9))),
    ],
)
def test_long_rows_go_in_parts_to_the_same_outputs_and_gradient(packed, T, monkeypatch):
    """Nine pairs in three parts, or eight, whose last part is not full, on two devices that share each row."""
    params, (features, embedded) = params_of("eagle3"), inputs_of("eagle3", T)
    if T % 2 == 0:
        rows = partitioner(make_mesh({"sequence": 2}, jax.devices()[:2]), LEARNER).sharding(("batch", "sequence"))
        features, embedded = jax.device_put((features, embedded), rows)
    positions = row_positions(embedded[..., 0])
    segments = (positions // 5) if packed else None

    def values():
        def loss(params, features):
            out = unrolled(DRAFTS["eagle3"], params, features, embedded, 3, positions, segments)
            return jnp.sin(out).sum(), out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, features)

    (_, expected), whole = values()
    monkeypatch.setattr(attention, "SCORES", 3 * T)
    (_, found), parts = values()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for a, b in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, float(jnp.abs(b).max())), rtol=0)


@pytest.mark.slow
def test_the_scores_of_a_long_row_are_never_all_in_memory(monkeypatch):
    T, steps = 4096, 3
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), eagle3.Eagle3Draft(CONFIG).specs)
    rows = [jax.ShapeDtypeStruct((1, T, *width, CONFIG.embed), jnp.float32) for width in ((3,), ())]
    positions = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def temporaries():
        def loss(params, features, embedded, positions):
            return unrolled(DRAFTS["eagle3"], params, features, embedded, steps, positions).sum()

        return jax.jit(jax.grad(loss)).lower(shapes, *rows, positions).compile().memory_analysis().temp_size_in_bytes

    parts = temporaries()
    monkeypatch.setattr(attention, "SCORES", T * T)
    # An eighth of the scores of one step, instead of those of three.
    assert parts < temporaries() / 4


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("columns", ["none", "no page"])
def test_pairs_beyond_the_pages_are_dropped_and_true_pairs_replace_provisional_ones(kind, columns):
    """Four positions a row in two pages; the table ends there, or goes on without a page."""
    draft = DRAFTS[kind]
    params = draft.inference_params(params_of(kind), jnp.float32)
    _, embedded = inputs_of(kind)
    pairs = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
    shape, table = own_pages(B, 4, page_tokens=2)
    if columns == "no page":
        table = Table(*(jnp.pad(x, ((0, 0), (0, 1)), constant_values=shape.pages) for x in table))

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def write(first, last, cache):
        at = Paging(table, pairs[:, first:last])
        hidden, following = embedded[:, first:last], embedded[:, first + 1 : last + 1]
        return draft.extend(params, hidden, following, pairs=at, cache=cache, partition=ONE)[1]

    def entries(cache):
        return [by_position(cache.layers[0][:, :, which], table.read, 4) for which in (KEYS, VALUES)]

    empty = draft.init_cache(shape)
    whole = write(0, 4, empty)
    assert all(x.any(axis=(2, 3)).all() for x in entries(whole))
    jax.tree.map(np.testing.assert_array_equal, write(4, 6, whole), whole)
    dirty = empty._replace(layers=(empty.layers[0] + 3.0,))
    over = write(0, 4, dirty)
    for a, b in zip(entries(over), entries(whole), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    # The last page is no row's.
    np.testing.assert_array_equal(over.layers[0][-1], dirty.layers[0][-1])
    kept = write(0, 2, dirty)
    for a, b in zip(entries(kept), entries(dirty), strict=True):
        np.testing.assert_array_equal(a[:, 2:], b[:, 2:])
