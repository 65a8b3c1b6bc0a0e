"""Pages: no page has two owners who write it, none is lost, and what a rollout holds does not show in its tokens."""

import collections
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
from tests.helpers.long import long_but, slow_but
from tests.helpers.toys import watched

B, P, C = 12, 4, 14  # rows, pages of a row, pages of a shard
take = jax.jit(pages.take, static_argnums=3)
release, share = jax.jit(pages.release), jax.jit(pages.share)
ACTIONS = ("grow", "end", "prompt", "start", "park", "restore")


class Deals:
    """Rows of D shards that grow, end, start from shared prompts, are parked and come back, and what must hold then.

    `draw(low, high, size)` returns numbers; what has no pages is not done.
    """

    def __init__(self, shards, draw):
        self.shards, self.draw = shards, draw
        self.pool, self.held = pages.empty_pool(shards, C), pages.no_pages(B, P, C)
        self.prompts = pages.no_pages(shards, P, C)
        self.parked = []  # pages that each held
        self.done = collections.Counter()

    def rows(self, *chosen):
        return jnp.isin(jnp.arange(B), jnp.array(chosen))

    def grow(self):
        wanted = jnp.minimum(self.held.count + jnp.array(self.draw(0, 2, B)), P)
        need, enough = pages.missing(self.pool, self.held, wanted)
        if enough.all():
            self.pool, self.held = take(self.pool, self.held, need, 2)
        return enough.all()

    def end(self):
        self.pool, self.held = release(self.pool, self.held, jnp.array(self.draw(0, 1, B), bool))
        return True

    def prompt(self):
        self.pool, self.prompts = release(self.pool, self.prompts, jnp.ones(self.shards, bool))
        if (enough := self.pool.count >= 2).all():
            self.pool, self.prompts = take(self.pool, self.prompts, jnp.array(self.draw(1, 2, self.shards)), 2)
        return enough.all()

    def start(self):
        fresh = (self.held.count == 0) & jnp.array(self.draw(0, 1, B), bool)
        full = jnp.where(fresh, jnp.repeat(self.prompts.count, B // self.shards), 0)
        self.pool, shared = share(self.pool, self.prompts, jnp.zeros(B, jnp.int32), full)
        self.held = jax.tree.map(functools.partial(choose, fresh), shared, self.held)
        return full.any()

    def park(self):
        """As `preemption.drop_row`."""
        row = self.draw(0, B - 1, 1)[0]
        if found := int(self.held.count[row]):
            self.parked.append(found)
            self.pool, self.held = release(self.pool, self.held, self.rows(row))
        return found

    def restore(self):
        """As `preemption.restore_row`: the pages that it held, all of them its own, in whichever shard has them."""
        row = self.draw(0, B - 1, 1)[0]
        free = self.pool.count[row // (B // self.shards)]
        if fits := bool(self.parked and not self.held.count[row] and free >= self.parked[0]):
            count = self.parked.pop(0)
            self.held = self.held._replace(num_shared=jnp.where(self.rows(row), 0, self.held.num_shared))
            self.pool, self.held = take(self.pool, self.held, jnp.where(self.rows(row), count, 0), P)
            assert self.held.count[row] == count
        return fits

    def act(self, action):
        self.done[action] += bool(getattr(self, action)())
        self.check()

    def check(self):
        count = self.holders()
        np.testing.assert_array_equal(self.pool.references, count)
        free, number = np.asarray(self.pool.free), np.asarray(self.pool.count)
        for shard in range(self.shards):
            nobodys = np.flatnonzero(count[shard] == 0).tolist()
            assert sorted(free[shard, : number[shard]]) == nobodys, "free pages are those that nobody holds"
        # A page that a row may write has one holder.
        table = np.asarray(pages.tables(self.held, C).write)
        for row in range(B):
            assert (count[row // (B // self.shards), table[row][table[row] < C]] == 1).all()

    def holders(self):
        """Return, of each page of each shard, how often a table names it."""
        count = np.zeros((self.shards, C), int)
        for held in (self.held, self.prompts):
            table, number = np.asarray(held.table), np.asarray(held.count)
            for row in range(len(number)):
                own = table[row, : number[row]]
                assert (own < C).all() and (table[row, number[row] :] == C).all()
                np.add.at(count[row // (len(number) // self.shards)], own, 1)
        return count

    def finish(self):
        self.pool, self.held = release(self.pool, self.held, jnp.ones(B, bool))
        self.pool, self.prompts = release(self.pool, self.prompts, jnp.ones(self.shards, bool))
        self.check()
        assert self.pool.count.tolist() == [C] * self.shards and not np.asarray(self.pool.references).any()


def choose(rows, new, old):
    return jnp.where(jnp.expand_dims(rows, range(1, old.ndim)), new, old)


@given(st.data())
@settings(max_examples=40)
def test_no_page_is_lost_or_held_twice(data):
    def draw(low, high, size):
        return data.draw(st.lists(st.integers(low, high), min_size=size, max_size=size))

    deals = Deals(2, draw)
    for action in data.draw(st.lists(st.sampled_from(ACTIONS), max_size=30)):
        deals.act(action)
    deals.finish()


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 3])
def test_nor_in_10000_random_deals(shards):
    rng = np.random.default_rng(shards)
    deals = Deals(shards, lambda low, high, size: rng.integers(low, high + 1, size))
    for action in rng.choice(ACTIONS, 10_000, p=[0.4, 0.1, 0.1, 0.2, 0.1, 0.1]):
        deals.act(action)
    assert set(deals.done) == set(ACTIONS) and min(deals.done.values()) > 100, deals.done
    deals.finish()


# --- in the engine

V, LONGEST = 4, 30
TABLE = toys.make_table(seed=0, V=V)
NEARLY = TABLE + toys.make_table(seed=5, V=V, scale=0.7)
LAST = 1.5 * np.random.default_rng(1).normal(size=(V, V)).astype(np.float32)
ENDLESS = TABLE - 50 * np.eye(V, dtype=np.float32)[3]
PROMPTS = [[1, 2], [2], [1, 1, 2, 0], [0, 1, 1], [2, 2, 2, 2]]
SAMPLES = 3


def run(num_slots=15, rule="coupled", table=ENDLESS, **sizes):
    """Return the rollouts, and the names of the parking programs that ran."""
    limits = EngineConfig(num_slots, 4, LONGEST, chunk=3, **sizes)
    drafter = toys.stateful_drafter(NEARLY, 2, 0.8, rule=rule)
    engine = toys.stateful_engine(limits, Sampling(0.8, rule=rule), (3,), drafter)
    parked = watched(engine)
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


@pytest.mark.parametrize("page_tokens, part", long_but(EACH[1:], [1, 2, 16, 128], [1.0, 0.5, 0.2], slow=EACH[:1]))
@pytest.mark.parametrize("rule", slow_but(["coupled"], ["coupled", "rejection"]))
def test_rollouts_are_the_same_with_fewer_pages_than_they_want(rule, page_tokens, part):
    """Rows are parked on the host and come back bit for bit: even under `rejection` the tokens are the same."""
    fewest = EngineConfig(15, 4, LONGEST, chunk=3, page_tokens=page_tokens).fewest_pages
    pages_there = max(int(part * wanted(page_tokens)), fewest)
    out, parked = run(rule=rule, page_tokens=page_tokens, pages=pages_there)
    for field in dataclasses.fields(out):
        if field.name not in ("chunks", "parked"):
            np.testing.assert_array_equal(getattr(out, field.name), getattr(with_room(rule), field.name))
    if part == 0.2 and page_tokens < 16:
        assert out.parked.sum() == parked.count("drop_row") == parked.count("restore_row") > 0


@pytest.mark.slow
def test_a_row_is_parked_at_every_batch_size():
    """Pages run out in a batch that has been compacted, too."""
    out, parked = run(page_tokens=1, pages=60, sizes=(8, 4))
    np.testing.assert_array_equal(out.tokens, with_room("coupled").tokens)
    assert "drop_row" in parked


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 2])
def test_shards_with_few_pages_each_decode_what_one_with_room_does(k):
    drafter = toys.toy_drafter(LAST, k, 0.8, "coupled") if k else toys.NO_DRAFTER
    found = []
    for devices, sizes in ((1, {}), (8, {"page_tokens": 1, "pages": 45})):
        limits = EngineConfig(32, 4, LONGEST, chunk=3, **sizes)
        engine = toys.toy_engine(limits, Sampling(0.8, rule="coupled"), (3,), drafter=drafter, devices=devices)
        parked = watched(engine)
        found.append(engine.generate(ENDLESS, PROMPTS, 8, seed=3))
        assert bool(parked) == (devices > 1)
    for name in ("rollout_id", "tokens", "length", "verifications", "accepted"):
        np.testing.assert_array_equal(getattr(found[1], name), getattr(found[0], name))
