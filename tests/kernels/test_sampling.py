import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from kernels_pallas import noise
from kernels_pallas.verify.limits import MOST_KEPT
from kernels_pallas.verify.sampling import TILE, draw, final_logits, truncate
from lossless_certify.distributions import softmax
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.errors import InputError
from tests.helpers.exact import final_probs, kept
from tests.helpers.long import long_but
from tests.helpers.statistics import assert_drawn_from

ENDS = np.array([0.0, 2**-24, 0.5, 1 - 2**-23, 1 - 2**-24], np.float32)

# Few distinct values, so that ties are common, with far outliers; some rows are all equal or have impossible tokens.
# Each length is a program.
LENGTHS = st.sampled_from([1, 4, 9])
VALUES = st.sampled_from([-1e9, -60.0, -2.0, -0.5, 0.0, 0.25, 0.5, 3.0, 40.0])
FINE_VALUES = st.integers(-8000, 8000).map(lambda n: n / 1000)
LOGITS = LENGTHS.flatmap(lambda n: st.lists(VALUES, min_size=n, max_size=n))
FINE_LOGITS = LENGTHS.flatmap(lambda n: st.lists(FINE_VALUES, min_size=n, max_size=n))


def draws(weights, uniform, second=None):
    """`weights` [V] with every pair of uniforms given -> indices."""
    weights = jnp.array(np.asarray(weights, np.float32))
    first = jnp.array(np.asarray(uniform, np.float32))
    second = first if second is None else jnp.array(np.asarray(second, np.float32))
    return np.asarray(draw(jnp.broadcast_to(weights, (*first.shape, len(weights))), (first, second)))


def grid(points):
    """[points] float32 in (0, 1): midpoints of equal cells, exact in float32 for powers of two up to 2**23."""
    return ((np.arange(points) + 0.5) / points).astype(np.float32)


# --- the final distribution


@pytest.mark.slow
@given(
    logits=LOGITS | FINE_LOGITS,
    temperature=st.sampled_from([0.25, 0.7, 1.0, 1.5, 4.0]),
    top_k=st.integers(0, 11),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
)
@settings(max_examples=300)
def test_final_logits_equal_the_definition(logits, temperature, top_k, top_p):
    out = np.asarray(final_logits(jnp.array(logits, jnp.float32), Sampling(temperature, top_k, top_p)))
    keep = out > -np.inf
    # Nine float32 probabilities sum to within 9 * 2**-24 < 1e-6: mass that close to top_p may fall either way.
    slack = 0.0 if top_p == 1 else 1e-6
    fewest = kept(logits, temperature, top_k, max(top_p - slack, 1e-9))
    most = kept(logits, temperature, top_k, min(top_p + slack, 1.0))
    assert (fewest <= keep).all() and (keep <= most).all()
    # Those kept are the logits over the temperature and nothing else: one rounding.
    np.testing.assert_allclose(out[keep], np.array(logits)[keep] / temperature, rtol=2**-23)


@given(logits=LOGITS | FINE_LOGITS, top_k=st.integers(0, 11), top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.999, 1.0]))
def test_at_least_one_token_is_kept_and_the_best_always_is(logits, top_k, top_p):
    out = np.asarray(final_logits(jnp.array(logits, jnp.float32), Sampling(0.7, top_k, top_p)))
    assert out[np.argmax(logits)] > -np.inf


def test_a_worked_example():
    """Probabilities 0.4 0.3 0.2 0.1 by hand: top-k 3 leaves 4/9 3/9 2/9, of which top-p 0.7 needs the first two."""
    logits = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.3]))
    out = jnp.exp(jax.nn.log_softmax(final_logits(logits, Sampling(1.0, 3, 0.7))))
    np.testing.assert_allclose(out, [0, 4 / 7, 0, 3 / 7], rtol=1e-6)


def test_temperature_comes_before_top_p():
    """At T = 1 the best token has 0.52 of the mass and top-p 0.5 keeps it alone; at T = 4 it has 0.32 and the first of
    two equal ones is kept too."""
    logits = jnp.array([2.0, 1.0, 1.0, 0.0])
    assert np.isfinite(final_logits(logits, Sampling(1.0, 0, 0.5))).tolist() == [True, False, False, False]
    assert np.isfinite(final_logits(logits, Sampling(4.0, 0, 0.5))).tolist() == [True, True, False, False]


def test_top_p_counts_the_mass_that_top_k_left():
    """0.4 of everything but 0.51 of the two best: top-p 0.5 is reached by the first only after top-k."""
    logits = jnp.log(jnp.array([0.4, 0.385, 0.115, 0.1]))
    assert np.isfinite(final_logits(logits, Sampling(1.0, 0, 0.5))).tolist() == [True, True, False, False]
    assert np.isfinite(final_logits(logits, Sampling(1.0, 2, 0.5))).tolist() == [True, False, False, False]


def test_top_p_next_to_one_keeps_none_that_top_k_cut():
    """Float32 sums of 50 probabilities end below 0.9999999 for some rows; what top-k cut has none to reach it with."""
    rows = jax.random.normal(jax.random.key(0), (200, 2000)) * 2
    kept = np.isfinite(final_logits(rows, Sampling(1.0, 50, 0.9999999))).sum(axis=-1)
    assert kept.max() <= 50


@pytest.mark.parametrize("sampling", [Sampling(1.0, 3, 1.0), Sampling(1.0, 0, 0.85)], ids=["top_k", "top_p"])
@pytest.mark.parametrize("ties", [(1.0, 1.0, 1.0, 1.0), (-0.0, 0.0, -0.0, 0.0), (-0.0, -0.0, 0.0, 0.0)])
def test_of_equally_likely_tokens_the_lowest_ids_are_kept(ties, sampling):
    """Zero and minus zero are equally likely."""
    logits = jnp.array([ties[0], ties[0] + 2.5, ties[1], -9.0, ties[2], ties[3]])
    cut, mask = truncate(logits, sampling)
    assert np.flatnonzero(np.isfinite(cut)).tolist() == [0, 1, 2]
    assert mask.ids[: mask.count].tolist() == [1, 0, 2]


@given(
    logits=LOGITS | FINE_LOGITS,
    temperature=st.sampled_from([0.25, 1.0, 4.0]),
    top_k=st.integers(0, 11),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
)
def test_the_ids_returned_are_those_kept(logits, temperature, top_k, top_p):
    logits = np.array(logits, np.float32)
    cut, mask = truncate(jnp.array(logits), Sampling(temperature, top_k, top_p))
    if mask is None:
        assert (top_k, top_p) == (0, 1.0)
        np.testing.assert_array_equal(cut, logits)
        return
    ids = np.asarray(mask.ids)[: int(mask.count)]
    assert len(ids) <= min(top_k or MOST_KEPT, len(logits))
    np.testing.assert_array_equal(np.sort(ids), np.flatnonzero(np.isfinite(cut)))
    np.testing.assert_array_equal(ids, sorted(ids, key=lambda i: (-logits[i], i)))


def test_impossible_tokens_are_not_kept():
    cut, mask = truncate(jnp.array([-jnp.inf, 1.0, -jnp.inf]), Sampling(1.0, 2, 1.0))
    assert mask.ids[: mask.count].tolist() == [1] and np.isfinite(cut).tolist() == [False, True, False]


def test_top_p_alone_keeps_at_most_512_tokens_and_those_are_part_of_p():
    """The mass that top-p counts is that of the 512 likeliest tokens."""
    logits = jnp.zeros(2000)
    assert truncate(logits, Sampling(1.0, 0, 0.999999))[1].count == MOST_KEPT == 512
    assert truncate(logits, Sampling(1.0, 0, 0.5))[1].count == 256


@pytest.mark.parametrize("top_k", [0, 5, 6, 512])
def test_top_k_of_the_whole_vocabulary_is_off(top_k):
    logits = jnp.array([1.0, 3.0, -1.0, 0.0, 1.0])
    np.testing.assert_array_equal(final_logits(logits, Sampling(1.0, top_k, 1.0)), logits)


def test_rows_are_cut_one_by_one():
    rng = np.random.default_rng(0)
    logits = jnp.array(rng.normal(size=(3, 4, 9)), jnp.float32)
    sampling = Sampling(0.8, 5, 0.7)
    together = final_logits(logits, sampling)
    for b in range(3):
        for t in range(4):
            np.testing.assert_array_equal(together[b, t], final_logits(logits[b, t], sampling))


def test_float64_logits_stay_float64():
    """Two logits that differ beyond float32 are cut apart."""
    with jax.enable_x64(True):
        out = final_logits(jnp.array([1.0, 1.0 + 1e-12, 0.0], jnp.float64), Sampling(1.0, 1))
        assert out.dtype == jnp.float64
        assert np.isfinite(out).tolist() == [False, True, False]


def test_half_precision_logits_are_cut_in_float32():
    out = final_logits(jnp.array([1.0, 2.0, 3.0], jnp.bfloat16), Sampling(0.7, 0, 0.9))
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, final_logits(jnp.array([1.0, 2.0, 3.0]), Sampling(0.7, 0, 0.9)))


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_k": 513},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": -0.5},
        {"top_p": float("nan")},
    ],
)
def test_nonsense_is_refused_and_named(bad):
    (name,) = bad
    with pytest.raises(InputError, match=f"{name}={bad[name]}"):
        Sampling(**bad)


def test_an_unknown_rule_is_refused_and_named():
    with pytest.raises(InputError, match=r"rollout\.rule='blok': it is one of rejection, block, coupled"):
        Sampling(rule="blok")


@pytest.mark.parametrize("good", [{"temperature": 0.0}, {"top_k": 0}, {"top_p": 1.0}, {"top_p": 1e-9}])
def test_the_ends_of_the_allowed_range_are_allowed(good):
    ((name, value),) = good.items()
    assert getattr(Sampling(**good), name) == value


# --- one draw


@given(
    weights=st.lists(
        st.sampled_from([0.0, 1e-6, 0.1, 0.3, 1.0, 7.0]) | st.floats(2**-10, 5, width=32), min_size=1, max_size=12
    ).filter(any)
)
@settings(max_examples=100)
def test_a_fine_grid_of_uniforms_reproduces_the_probabilities(weights):
    """The exact inverse-CDF property: an interval of length p holds p * N grid points, give or take one.

    Twelve float32 sums move an end of the interval by less than 1e-6, a hundredth of a grid cell; two ends, two cells.
    """
    weights = weights + [0.0] * (12 - len(weights))
    N = 2**13
    counts = np.bincount(draws(weights, grid(N)), minlength=12)
    probs = np.array(weights) / np.sum(weights)
    assert np.abs(counts - probs * N).max() <= 1.02


def test_a_draw_is_monotone_in_its_uniform():
    weights = np.random.default_rng(0).random(TILE)
    indices = draws(weights, grid(2**12))
    assert (np.diff(indices) >= 0).all() and indices[0] == 0 and indices[-1] == TILE - 1


@pytest.mark.slow
@pytest.mark.parametrize("V", [TILE + 1, 2 * TILE, 3 * TILE - 7])
def test_beyond_one_tile_the_first_uniform_picks_the_tile_and_the_second_the_entry(V):
    """Each by its own inverse CDF; the last tile of V = 513 has one entry, of 1529 all but seven."""
    rng = np.random.default_rng(V)
    weights = rng.random(V) * (rng.random(V) < 0.7)
    weights[-1] = 0.5
    N = 128
    first, second = (u.ravel() for u in np.meshgrid(grid(N), grid(4 * N), indexing="ij"))
    indices = draws(weights, first, second)
    tiles = np.pad(weights, (0, -V % TILE)).reshape(-1, TILE)
    counts = np.bincount(indices, minlength=tiles.size).reshape(tiles.shape)
    # Sums of 512 float32 are within 512 * 2**-24 = 3e-5 of the total: 0.004 and 0.016 of a grid cell.
    tile_counts = counts.sum(axis=1) / (4 * N)
    assert np.abs(tile_counts - tiles.sum(axis=1) / weights.sum() * N).max() <= 1.01
    for tile, times in zip(range(len(tiles)), tile_counts, strict=True):
        expected = tiles[tile] / tiles[tile].sum() * 4 * N
        assert np.abs(counts[tile] - expected * times).max() <= 1.04 * times


def awkward_weights():
    rng = np.random.default_rng(5)
    sparse = rng.random(TILE) * (rng.random(TILE) < 0.05)
    sparse[[0, -1]] = 0
    lone = np.zeros(3 * TILE + 5)
    lone[2 * TILE] = 1e-30
    last = np.zeros(2 * TILE + 1)
    last[-1] = 1.0
    wide = 10.0 ** rng.uniform(-30, 30, 700) * (rng.random(700) < 0.5)
    nearly_one = np.append(np.full(TILE - 2, 1 / 3), [1e-12, 0.0])
    return {
        "one entry": [2.0],
        "zeros at both ends": [0, 0, 1, 0, 3, 0, 0],
        "last entry only": [0, 0, 0, 1e-30],
        "tiny among huge": [0, 1e-30, 0, 1e30, 0, 1e-30, 0],
        "huge total": [0, 1e38, 1e38, 0],
        "smallest normal": [0, 1.2e-38, 0],
        "sums that round": [0.1] * 7 + [0.0],
        "sparse tile": sparse,
        "tile of thirds": nearly_one,
        "one entry in the third of four tiles": lone,
        "one entry in a tile of its own": last,
        "sixty orders of magnitude": wide,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", awkward_weights())
def test_an_entry_of_weight_zero_is_never_drawn(name):
    weights = np.asarray(awkward_weights()[name], np.float32)
    uniform = np.concatenate([ENDS, grid(64)])
    first, second = (u.ravel() for u in np.meshgrid(uniform, uniform))
    assert (weights[draws(weights, first, second)] > 0).all()


@pytest.mark.slow
@given(data=st.data(), V=st.sampled_from([1, 2, 5, TILE - 1, TILE, TILE + 1, 2 * TILE + 3]))
def test_an_entry_of_weight_zero_is_never_drawn_whatever_the_weights(data, V):
    """Drawn weights at drawn places; the uniforms are the ends of the range, where rounding decides."""
    values = st.sampled_from([1e-38 * 2, 1e-30, 1e-7, 1 / 3, 1.0, 1e7, 1e30])
    places = data.draw(st.dictionaries(st.integers(0, V - 1), values, min_size=1, max_size=8))
    weights = np.zeros(V, np.float32)
    weights[list(places)] = list(places.values())
    first, second = (u.ravel() for u in np.meshgrid(ENDS, ENDS))
    assert (weights[draws(weights, first, second)] > 0).all()


def test_the_largest_uniform_draws_the_last_positive_entry():
    """u = 1 - 2**-24 may not run past the end for any total: the product must stay below it."""
    totals = np.random.default_rng(2).uniform(1, 2, 2000).astype(np.float32)
    weights = jnp.stack([jnp.array(totals), jnp.zeros(2000)], axis=1)
    u = jnp.full(2000, 1 - 2**-24, jnp.float32)
    np.testing.assert_array_equal(draw(weights, (u, u)), 0)
    np.testing.assert_array_equal(draw(weights[:, ::-1], (u, u)), 1)


@pytest.mark.parametrize("V", long_but([40], [40, TILE + 88, 5 * TILE - 1]))
def test_draws_with_the_noise_follow_the_weights(V):
    """Entries dealt to 40 groups across tiles, 200,000 draws: error rates 1e-6 at total variation 0.0103 and 0.0206."""
    N = 200_000
    weights = softmax(np.random.default_rng(V).normal(size=V) * 2)
    u = noise.uniforms(jnp.uint32(3), jnp.arange(N, dtype=jnp.uint32), jnp.zeros(1, jnp.int32), 0, noise.RESIDUAL)
    indices = jax.lax.map(lambda pair: draw(jnp.array(weights, jnp.float32), pair), u, batch_size=4000)
    groups = np.arange(V) % 40
    assert_drawn_from(groups[np.asarray(indices)], np.bincount(groups, weights), at_most=0.0103)


@pytest.mark.slow
@pytest.mark.parametrize("V", [7, 2 * TILE + 9])
def test_a_draw_does_not_depend_on_its_batch(V):
    rng = np.random.default_rng(1)
    weights = jnp.array(rng.random((24, V)), jnp.float32)
    u = tuple(jnp.array(rng.random(24), jnp.float32) for _ in range(2))
    together = draw(weights, u)
    order = rng.permutation(24)
    np.testing.assert_array_equal(draw(weights[order], tuple(x[order] for x in u)), together[order])
    for row in range(24):
        assert draw(weights[row], tuple(x[row] for x in u)) == together[row]


@pytest.mark.slow
def test_the_whole_path_from_logits_follows_the_definition():
    """Temperature, top-k and top-p together, 100,000 draws of 8 tokens: error rates 1e-6 at 0.01 and 0.02."""
    N, sampling = 100_000, Sampling(0.8, 6, 0.85)
    logits = np.random.default_rng(9).normal(size=8) * 1.5
    weights = jax.nn.softmax(final_logits(jnp.array(logits, jnp.float32), sampling))
    u = noise.uniforms(jnp.uint32(0), jnp.arange(N, dtype=jnp.uint32), jnp.zeros(1, jnp.int32), 0, noise.RESIDUAL)
    assert_drawn_from(draw(jnp.broadcast_to(weights, (N, 8)), u), final_probs(logits, sampling), at_most=0.0101)
