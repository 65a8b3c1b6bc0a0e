import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from kernels_pallas import noise
from kernels_pallas.noise import ACCEPT, DRAFT, GUMBEL, RESIDUAL
from tests.helpers.statistics import assert_drawn_from

LARGEST = 1 - 2**-24
# One draw is a function of these five; the defaults are arbitrary.
ARGUMENTS = {"seed": 7, "rollout_id": 1234, "position": 56, "offset": 2, "stream": ACCEPT}


def words(*values):
    return tuple(jnp.uint32(value) for value in values)


def uniforms(**changes):
    """ARGUMENTS with `changes`, broadcast together -> two float32 arrays on the host."""
    given = ARGUMENTS | changes
    stream = given.pop("stream")
    seed, *rest = (jnp.asarray(np.asarray(given[k]), jnp.uint32) for k in ("seed", "rollout_id", "position", "offset"))
    return tuple(np.asarray(u) for u in noise.uniforms(seed, *rest, stream))


# Random123 1.14, kat_vectors, threefry2x32 with 20 rounds: counter, key, expected.
@pytest.mark.parametrize(
    "counter, key, expected",
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_known_answers(counter, key, expected):
    assert tuple(int(x) for x in noise.threefry(words(*key), words(*counter))) == expected


def test_threefry_equals_jax():
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**32, (20, 2), dtype=np.uint32)
    counters = jnp.array(rng.integers(0, 2**32, (2, 50), dtype=np.uint32))
    for key in jnp.array(keys):
        # jax takes the two counter words as the halves of one array.
        expected = threefry_2x32(key, counters.ravel())
        ours = noise.threefry((key[0], key[1]), (counters[0], counters[1]))
        np.testing.assert_array_equal(np.concatenate(ours), expected)


def test_a_draw_is_the_threefry_block_of_its_arguments():
    """Pins the layout: key (seed, rollout id), counter (position, stream << 28 | offset), top 24 bits of each word."""
    expected = noise.threefry(words(7, 1234), words(56, RESIDUAL << 28 | 2))
    for word, uniform in zip(expected, uniforms(stream=RESIDUAL), strict=True):
        assert uniform == (int(word) >> 8) / 2**24


def test_uniforms_are_multiples_of_2_to_minus_24_below_one():
    for u in uniforms(rollout_id=np.arange(2**18)):
        assert u.dtype == np.float32
        assert u.min() >= 0 and u.max() <= LARGEST
        steps = u.astype(np.float64) * 2**24
        np.testing.assert_array_equal(steps, np.round(steps))


@pytest.mark.parametrize("bits, expected", [(0, 0.0), (0xFF, 0.0), (0x100, 2**-24), (0xFFFFFFFF, LARGEST)])
def test_the_ends_of_the_range_are_reached_exactly(monkeypatch, bits, expected):
    def constant(_, counter):
        return (jnp.full(counter[0].shape, bits, jnp.uint32),) * 2

    monkeypatch.setattr(noise, "threefry", constant)
    with jax.disable_jit():
        assert [float(u) for u in uniforms()] == [expected] * 2


@pytest.mark.parametrize("name, other", [("seed", 8), ("rollout_id", 1235), ("position", 57), ("offset", 3)])
def test_every_argument_changes_both_words(name, other):
    before, after = uniforms(), uniforms(**{name: other})
    assert before[0] != after[0] and before[1] != after[1]


@pytest.mark.parametrize("name", ["rollout_id", "position", "seed"])
def test_the_top_bit_of_each_argument_counts(name):
    low, high = uniforms(**{name: 5}), uniforms(**{name: 5 + 2**31})
    assert low[0] != high[0] and low[1] != high[1]


def test_streams_differ_and_no_offset_reaches_into_another_stream():
    offsets = np.array([0, 1, 2, 2**28 - 1])
    draws = np.concatenate([uniforms(stream=stream, offset=offsets)[0] for stream in (DRAFT, ACCEPT, RESIDUAL)])
    assert len(set(draws.tolist())) == 12


def test_seed_and_rollout_id_do_not_commute():
    assert uniforms(seed=1, rollout_id=2)[0] != uniforms(seed=2, rollout_id=1)[0]
    assert uniforms(position=1, offset=2)[0] != uniforms(position=2, offset=1)[0]


@pytest.mark.slow
def test_a_draw_does_not_depend_on_row_or_batch():
    ids, positions = np.arange(100, 200), np.arange(100) % 7
    alone = [uniforms(rollout_id=[i], position=[p]) for i, p in zip(ids, positions, strict=True)]
    order = np.random.default_rng(1).permutation(100)
    together = uniforms(rollout_id=ids[order], position=positions[order])
    for word in range(2):
        np.testing.assert_array_equal(together[word], np.array([a[word][0] for a in alone])[order])


def test_a_draw_does_not_depend_on_jit_or_on_how_arguments_broadcast():
    ids, offsets = jnp.arange(6, dtype=jnp.uint32), jnp.arange(3)
    positions = jnp.arange(10, 16)
    jitted = jax.jit(noise.uniforms, static_argnums=4)
    table = jitted(jnp.uint32(3), ids[:, None], positions[:, None], offsets[None], DRAFT)
    for offset in range(3):
        column = noise.uniforms(jnp.uint32(3), ids, positions, offset, DRAFT)
        for word in range(2):
            np.testing.assert_array_equal(table[word][:, offset], column[word])


# Pairs of draws that one rollout, or two neighbours, make use of together.
IDS = np.arange(2**17)
PAIRS = {
    "draft and accept": ({"stream": DRAFT}, {"stream": ACCEPT}),
    "draft and residual": ({"stream": DRAFT}, {"stream": RESIDUAL}),
    "accept and residual": ({"stream": ACCEPT}, {"stream": RESIDUAL}),
    "neighbouring positions": ({"position": 9}, {"position": 10}),
    "neighbouring offsets": ({"offset": 0}, {"offset": 1}),
    "neighbouring seeds": ({"seed": 0}, {"seed": 1}),
    "neighbouring rollouts": ({"rollout_id": IDS}, {"rollout_id": IDS + 1}),
    "position against rollout": ({"rollout_id": IDS, "position": 0}, {"rollout_id": 0, "position": IDS}),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("word", [0, 1])
def test_two_draws_are_jointly_uniform(name, word):
    """64 cells of the unit square, 2**17 pairs: both error rates are 1e-6 at total variation 0.015 against 0.03."""
    first, second = PAIRS[name]
    a, b = (uniforms(**({"rollout_id": IDS} | changes))[word] for changes in (first, second))
    cells = (a * 8).astype(int) * 8 + (b * 8).astype(int)
    assert_drawn_from(cells, np.full(64, 1 / 64), at_most=0.015)


def test_the_two_words_of_a_draw_are_jointly_uniform():
    """The first picks the tile and the second the entry. Error rates as above."""
    a, b = uniforms(rollout_id=IDS)
    assert_drawn_from((a * 8).astype(int) * 8 + (b * 8).astype(int), np.full(64, 1 / 64), at_most=0.015)


def test_consecutive_positions_of_one_rollout_are_uniform():
    """Along one sequence rather than across rollouts. Error rates as above."""
    u, _ = uniforms(position=np.arange(2**17))
    assert_drawn_from((u * 64).astype(int), np.full(64, 1 / 64), at_most=0.015)


# --- Gumbel noise

PLACE = {"seed": 7, "rollout_id": 1234, "position": 56, "token": 9}


def gumbel(**changes):
    """PLACE with `changes`, broadcast together -> float32 array on the host."""
    seed, *rest = (jnp.asarray(np.asarray(value), jnp.uint32) for value in (PLACE | changes).values())
    return np.asarray(noise.gumbel(seed, *rest))


def exact_gumbel(bits):
    return -np.log(-np.log1p(-(np.asarray(bits, np.float64) + 0.5) / 2**32))


def test_a_gumbel_is_one_word_of_the_block_of_its_pair_of_tokens():
    """Pins the layout: counter (position, GUMBEL << 28 | token // 512 * 256 + token % 256), word token // 256 % 2."""
    for token in (0, 1, 9, 255, 256, 511, 512, 1000, 2**29 - 1):
        block = noise.threefry(words(7, 1234), words(56, GUMBEL << 28 | token // 512 * 256 + token % 256))
        np.testing.assert_allclose(
            gumbel(token=token), exact_gumbel(int(block[token // 256 % 2])), rtol=1e-6, atol=1e-6
        )


@pytest.mark.slow
@pytest.mark.parametrize("V", [1, 2, 7, 256, 257, 700, 1000, 1024])
def test_rows_of_a_vocabulary_are_its_tokens_one_by_one(V):
    """Bit for bit, whatever the shape. Jitted: alone on 3 or 7 numbers, XLA's log on a CPU rounds otherwise."""
    rows, single = jax.jit(noise.gumbel_rows, static_argnums=3), jax.jit(noise.gumbel)
    ids, positions = jnp.arange(3, dtype=jnp.uint32)[:, None], jnp.arange(20, 25)[None]
    table = rows(jnp.uint32(3), ids, positions, V)
    assert table.shape == (3, 5, V) and table.dtype == jnp.float32
    tokens = jnp.arange(V)[None, None]
    np.testing.assert_array_equal(table, single(jnp.uint32(3), ids[..., None], positions[..., None], tokens))
    np.testing.assert_array_equal(table[1, 2], rows(jnp.uint32(3), jnp.uint32(1), jnp.int32(22), V))
    np.testing.assert_array_equal(table[1, 2, V - 1], single(jnp.uint32(3), jnp.uint32(1), jnp.int32(22), V - 1))


def test_rows_cost_one_block_for_two_tokens(monkeypatch):
    sizes, right = [], noise.threefry

    def counted(key, counter):
        sizes.append(counter[1].size)
        return right(key, counter)

    monkeypatch.setattr(noise, "threefry", counted)
    noise.gumbel_rows(jnp.uint32(3), jnp.arange(4, dtype=jnp.uint32), jnp.arange(4), 512)
    assert sizes == [4 * 256]


BITS = [0, 1, 2, 127, 255, 256, 2**23, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 2**20, 2**32 - 257]


def test_a_gumbel_is_exact_to_float32_where_it_is_large(monkeypatch):
    """Bits from both ends and between: 1e-6 is eight roundings of a number below two, and few of one near 22."""
    monkeypatch.setattr(noise, "threefry", lambda key, counter: (jnp.array(BITS, jnp.uint32),) * 2)
    np.testing.assert_allclose(gumbel()[:-2], exact_gumbel(BITS)[:-2], rtol=3e-7, atol=1e-6)
    # Near u = 1 float32 has steps of 2**-24: of no matter, such noise hardly ever wins.
    np.testing.assert_allclose(gumbel(), exact_gumbel(BITS), rtol=0.02)
    # No two of the largest values are one float32.
    assert (np.diff(gumbel()[:3]) < -0.1).all()


@pytest.mark.parametrize("bits", [0, 1, 2**32 - 129, 2**32 - 128, 2**32 - 2, 2**32 - 1])
def test_no_bits_give_an_infinite_gumbel(monkeypatch, bits):
    monkeypatch.setattr(noise, "threefry", lambda key, counter: (jnp.full((1,), bits, jnp.uint32),) * 2)
    assert -2.9 < gumbel()[0] < 22.9


GUMBEL_PAIRS = {
    "the two tokens of a block": ({"token": 8}, {"token": 8 + 256}),
    "neighbouring blocks": ({"token": 9}, {"token": 10}),
    "tokens a power of two apart": ({"token": 9}, {"token": 9 + 2**17}),
    "neighbouring positions": ({"position": 9}, {"position": 10}),
    "neighbouring seeds": ({"seed": 0}, {"seed": 1}),
    "neighbouring rollouts": ({"rollout_id": IDS}, {"rollout_id": IDS + 1}),
    "token against position": ({"rollout_id": 0, "token": 2 * IDS}, {"rollout_id": 0, "token": 8, "position": IDS}),
}


def cell(g):
    """0 to 7, each with chance 1/8."""
    return np.minimum((np.exp(-np.exp(-np.asarray(g, np.float64))) * 8).astype(int), 7)


@pytest.mark.slow
@pytest.mark.parametrize("name", GUMBEL_PAIRS)
def test_two_gumbels_have_the_joint_distribution_of_independent_ones(name):
    """64 cells, 2**17 pairs: both error rates are 1e-6 at total variation 0.015 against 0.03."""
    a, b = (cell(gumbel(**({"rollout_id": IDS} | changes))) for changes in GUMBEL_PAIRS[name])
    assert_drawn_from(a * 8 + b, np.full(64, 1 / 64), at_most=0.015)


@pytest.mark.parametrize("stream", [DRAFT, ACCEPT, RESIDUAL])
@pytest.mark.parametrize("word", [0, 1])
def test_gumbels_are_independent_of_the_other_streams(stream, word):
    """At the offset that would be the same block but for the stream. Error rates as above."""
    a = cell(gumbel(rollout_id=IDS, token=4 + 256 * word))
    u = uniforms(rollout_id=IDS, stream=stream, offset=4)[word]
    assert_drawn_from(a * 8 + (u * 8).astype(int), np.full(64, 1 / 64), at_most=0.015)


def test_gumbels_of_one_vocabulary_have_the_distribution_of_a_gumbel():
    """2**18 tokens of one position: Kolmogorov's distance is above 0.006 with chance 2 exp(-2 N 0.006**2) < 2e-8."""
    g = np.sort(np.asarray(noise.gumbel_rows(jnp.uint32(7), jnp.uint32(1), jnp.int32(3), 2**18), np.float64))
    distribution, steps = np.exp(-np.exp(-g)), np.arange(2**18 + 1) / 2**18
    assert max(np.abs(distribution - steps[1:]).max(), np.abs(distribution - steps[:-1]).max()) < 0.006
    # The mean has standard error 1.2825 / 512 = 0.0025; five of them.
    assert abs(g.mean() - 0.57722) < 0.0125


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACE)
def test_the_top_bit_and_the_bottom_bit_of_each_argument_count(name):
    top = 2**28 if name == "token" else 2**31
    assert len({float(gumbel(**{name: value})) for value in (4, 5, 4 + top, 5 + top)}) == 4
