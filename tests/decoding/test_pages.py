"""Pages: no page has two owners who write it, none is lost, and what a rollout holds does not show in its tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrl_jax.decoding import pages
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from tests.helpers import toys
from tests.helpers.slow import slow_but

D, B, P, C = 2, 6, 4, 12  # shards, rows, pages of a row, pages of a shard
take = jax.jit(pages.take, static_argnums=3)
release, share = jax.jit(pages.release), jax.jit(pages.share)


def holders(state, prompts):
    """Return, of each page of each shard, how often a table names it."""
    count = np.zeros((D, C), int)
    for held in (state, prompts):
        table, number = np.asarray(held.table), np.asarray(held.count)
        for row in range(len(number)):
            own = table[row, : number[row]]
            assert (own < C).all() and (table[row, number[row] :] == C).all()
            np.add.at(count[row // (len(number) // D)], own, 1)
    return count


def choose(rows, new, old):
    return jnp.where(jnp.expand_dims(rows, range(1, old.ndim)), new, old)


def check(pool, held, prompts):
    count = holders(held, prompts)
    np.testing.assert_array_equal(pool.references, count)
    for shard in range(D):
        free = np.asarray(pool.free)[shard, : pool.count[shard]]
        assert sorted(free) == np.flatnonzero(count[shard] == 0).tolist(), "free pages are those that nobody holds"
    # A page that a row may write has one holder.
    table = np.asarray(pages.tables(held, C).write)
    for row in range(B):
        for page in table[row][table[row] < C]:
            assert count[row // (B // D), page] == 1


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_no_page_is_lost_or_held_twice(data):
    """Random deals: rows grow, end, start from prompts that are prefilled, carried and let go."""
    pool, held, prompts = pages.empty_pool(D, C), pages.no_pages(B, P, C), pages.no_pages(D, P, C)
    some = st.lists(st.integers(0, 2), min_size=B, max_size=B)
    flags = st.lists(st.booleans(), min_size=B, max_size=B)
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["grow", "end", "prompt", "start"]))
        if action == "grow":
            wanted = jnp.minimum(held.count + jnp.array(data.draw(some)), P)
            need, enough = pages.missing(pool, held, wanted)
            if enough.all():
                pool, held = take(pool, held, need, 2)
        elif action == "end":
            pool, held = release(pool, held, jnp.array(data.draw(flags)))
        elif action == "prompt":
            pool, prompts = release(pool, prompts, jnp.ones(D, bool))
            if (pool.count >= 2).all():
                pool, prompts = take(pool, prompts, jnp.array([1, 2]), 2)
        else:
            fresh = (held.count == 0) & jnp.array(data.draw(flags))
            full = jnp.where(fresh, jnp.repeat(prompts.count, B // D), 0)
            pool, shared = share(pool, prompts, jnp.zeros(B, jnp.int32), full)
            held = jax.tree.map(functools.partial(choose, fresh), shared, held)
        check(pool, held, prompts)
    pool, held = release(pool, held, jnp.ones(B, bool))
    pool, prompts = release(pool, prompts, jnp.ones(D, bool))
    assert pool.count.tolist() == [C] * D and not np.asarray(pool.references).any()


# --- in the engine

V, LONGEST = 4, 30
TABLE = toys.make_table(seed=0, V=V)
NEARLY = TABLE + toys.make_table(seed=5, V=V, scale=0.7)
ENDLESS = TABLE - 50 * np.eye(V, dtype=np.float32)[3]
PROMPTS = [[1, 2], [2], [1, 1, 2, 0], [0, 1, 1], [2, 2, 2, 2]]
SAMPLES = 3


def run(num_slots=15, rule="coupled", table=ENDLESS, **sizes):
    """Return the rollouts, and the names of the parking programs that ran."""
    limits = EngineConfig(num_slots, 4, LONGEST, 3, **sizes)
    drafter = toys.stateful_drafter(NEARLY, 2, 0.8, rule=rule)
    engine, parked = toys.stateful_engine(limits, Sampling(0.8, rule=rule), (3,), drafter), []
    inner = engine.compiled.park
    engine.compiled.park = lambda name, *rest: (parked.append(name), inner(name, *rest))[1]
    return engine.generate(table, PROMPTS, SAMPLES, seed=3), parked


@functools.cache
def with_room(rule):
    rollouts, parked = run(rule=rule, page_tokens=128)
    assert parked == []
    return rollouts


def wanted(page_tokens):
    """Return the pages that all rows hold at their longest."""
    return 15 * -(-(4 + LONGEST) // page_tokens)


EACH = [(1, 0.2), (16, 0.5)]


@pytest.mark.parametrize("page_tokens, part", slow_but(EACH, [1, 2, 16, 128], [1.0, 0.5, 0.2]))
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_rollouts_are_the_same_with_fewer_pages_than_they_want(rule, page_tokens, part):
    """Rows are parked on the host and come back bit for bit: even under `rejection` the tokens are the same."""
    fewest = EngineConfig(15, 4, LONGEST, 3, page_tokens=page_tokens).fewest_pages
    pages_there = max(int(part * wanted(page_tokens)), fewest)
    out, parked = run(rule=rule, page_tokens=page_tokens, pages=pages_there)
    for field in dataclasses.fields(out):
        if field.name not in ("chunks", "parked"):
            np.testing.assert_array_equal(getattr(out, field.name), getattr(with_room(rule), field.name))
    if part == 0.2 and page_tokens < 16:
        assert out.parked.sum() == parked.count("drop_row") == parked.count("restore_row") > 0


def test_a_row_is_parked_at_every_batch_size():
    """Pages run out in a batch that has been compacted, too."""
    out, parked = run(page_tokens=1, pages=60, sizes=(8, 4))
    np.testing.assert_array_equal(out.tokens, with_room("coupled").tokens)
    assert "drop_row" in parked
