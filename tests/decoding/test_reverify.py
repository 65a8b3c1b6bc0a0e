"""Rollouts that begin under earlier weights and end as samples of the present ones: the same tokens as without.

In float64 and under `coupled`, so that rounding hides no difference.
"""

import functools
import itertools

import jax
import numpy as np
import pytest

from lossless_certify.distributions import sequences
from specrl_jax.decoding.continuation import Continuation
from specrl_jax.decoding.features.reverify import AT_ONCE, Reverification
from specrl_jax.decoding.features.sampling_mask import SamplingMasks
from specrl_jax.decoding.lookahead import Lookahead
from specrl_jax.decoding.requests import CallOptions
from specrl_jax.decoding.state import EngineConfig
from tests.helpers.cells import COPIES_OTHERS, TARGET, Cell, V, make_engine
from tests.helpers.long import long_but
from tests.helpers.toys import watched

VERIFIES = Reverification()
MASKS = {"features": (VERIFIES, SamplingMasks(4)), "chunk": 1}  # fewer than those of the tokens verified at once
FEWEST = {"pages": 9, "page_tokens": 4}
PROMPTS = [row.tolist() for n in (2, 3) for row in sequences(V, n)]
SAMPLES, LONGEST, SEED = 2, 24, 5
END = np.eye(V, dtype=np.float32)[V - 1]
NEW = (TARGET - 2.5 * END).astype(np.float64)  # the end-of-text comes seldom


@functools.cache
def old(scale):
    """Weights that are off by a random matrix, and by another tendency to end."""
    return (NEW + scale * np.random.default_rng(3).normal(size=NEW.shape)).astype(np.float64)


def engine_of(drafter="none", temperature=1.0, devices=1, **limits):
    cell = Cell(drafter, "coupled" if temperature else "rejection", temperature, 0, 0.9, "may end", "inside")
    lookup = {"groups": 40, "sequences": SAMPLES + 1} if drafter in COPIES_OTHERS else {}
    config = EngineConfig(
        **{"num_slots": 10, "max_prompt_tokens": 3, "max_response_tokens": LONGEST, "chunk": 5} | limits, **lookup
    )
    more = {} if drafter in ("stateful", "cascade") else {"devices": devices}
    return make_engine(cell, config, 3, np.float64, **more)


def run(table, drafter="none", temperature=1.0, devices=1, limits=(), prompts=PROMPTS, first_id=0, **more):
    with jax.enable_x64(True):
        engine = engine_of(drafter, temperature, devices, **({"features": (VERIFIES,)} if more else {}) | dict(limits))
        return engine.generate(
            table,
            prompts,
            SAMPLES,
            seed=SEED,
            options=CallOptions(first_id=first_id, continuation=Continuation(**more)),
        )


@functools.cache
def plain(temperature=1.0):
    return run(NEW, temperature=temperature)


@functools.cache
def texts(scale, temperature=1.0, cut=LONGEST):
    """What earlier weights drew, by id; some of it cut, as where a publish finds it unfinished."""
    found = run(old(scale), temperature=temperature)
    responses = [found.tokens[i, found.response_part(i)] for i in range(len(found.length))]
    return {i: response[: 1 + (7 * i) % cut] for i, response in enumerate(responses)}


def same_beginning(one, two):
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two)))


def assert_same(found, expected):
    for name in ("rollout_id", "tokens", "length", "ended", "eos", "prompt_length"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=2**-22)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("drafter", long_but(["none", "stateful"], ["none", "table", "stateful", "suffix", "cascade"]))
def test_rollouts_are_those_of_the_present_weights(drafter, scale):
    """Also where nothing of the earlier ones is kept, and where all of it is; drafts afterwards are right."""
    earlier = texts(scale)
    found = run(NEW, drafter, earlier=earlier)
    assert_same(found, plain())
    kept = [same_beginning(earlier[i], found.tokens[i, found.response_part(i)]) for i in range(len(found.length))]
    np.testing.assert_array_equal(found.features["reverified"].values, kept)
    share = sum(kept) / sum(map(len, earlier.values()))
    assert share == 1 if not scale else 0.02 < share < (0.99 if scale == 0.1 else 0.6)
    assert max(kept) > AT_ONCE or scale == 1, "more than one call verifies at once"
    # What was kept counts neither as verifications nor as drafts.
    assert (found.verifications <= found.response_length - found.features["reverified"].values).all()


@pytest.mark.slow
def test_greedy_rollouts_too():
    assert_same(run(NEW, "table", 0.0, earlier=texts(1.0, 0.0)), plain(0.0))


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{"num_slots": 3}, {"sizes": (4,)}, FEWEST, {"width": 4}, MASKS])
def test_nor_do_they_depend_on_slots_sizes_pages_or_shapes(limits):
    assert_same(run(NEW, "table", limits=limits.items(), earlier=texts(0.1)), plain())


# Prompts whose rollouts are long, and so few pages that rows of them are parked.
LONG, FEW = (7, 10), {"pages": 12, "page_tokens": 4}
LONG_IDS = np.add.outer(2 * np.array(LONG), range(SAMPLES)).ravel()


def long_ones(limits, earlier=None):
    how = {} if earlier is None else {"earlier": earlier}
    return run(NEW, limits=limits.items(), prompts=[PROMPTS[p] for p in LONG], first_id=LONG_IDS, **how)


@pytest.mark.slow
def test_a_call_ends_with_no_row_parked():
    """One of two rows is parked while both are verified, and the other one's text is all of its rollout."""
    expected = long_ones({})
    whole = {int(n): expected.tokens[i, expected.response_part(i)] for i, n in enumerate(LONG_IDS)}
    found = long_ones(FEW | {"num_slots": 2}, whole)
    assert found.parked.any() and found.finished.all()
    assert_same(found, expected)


@pytest.mark.slow
def test_rows_of_a_smaller_batch_are_parked():
    found = long_ones(FEW | {"sizes": (4,)}, {})
    assert found.parked.any() and 4 in {chunk.size for chunk in found.chunks}
    assert_same(found, long_ones({}))


@pytest.mark.slow
def test_on_two_devices():
    assert_same(run(NEW, "table", devices=2, earlier=texts(0.1)), plain())


@pytest.mark.slow
def test_a_wrong_verification_is_seen(monkeypatch):
    """Negative control: tokens that are kept although the present weights draw others."""
    with pytest.raises(AssertionError):
        assert_same(run(NEW, earlier=texts(1.0)), run(old(1.0)))


# --- later rollouts in free slots

FIRST, LATER = PROMPTS[:20], PROMPTS[20:]
LATER_IDS = 100 + np.arange(len(LATER) * SAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "stateful"])
@pytest.mark.parametrize("limits", [{}, {"pages": 20, "page_tokens": 4}, {"sizes": (4,)}])
def test_later_rollouts_begin_in_free_slots_and_change_nothing(drafter, limits):
    lookahead = Lookahead(LATER, LATER_IDS)
    with jax.enable_x64(True):
        engine = engine_of(drafter, features=(VERIFIES,), **limits)
        parked = watched(engine)
        first = engine.generate(
            old(0.1), FIRST, SAMPLES, seed=SEED, options=CallOptions(continuation=Continuation(lookahead=lookahead))
        )
        second = engine.generate(
            NEW,
            LATER,
            SAMPLES,
            seed=SEED,
            options=CallOptions(first_id=100, continuation=Continuation(earlier=lookahead.texts)),
        )
    assert_same(first, run(old(0.1), prompts=FIRST))
    assert_same(second, run(NEW, prompts=LATER, first_id=100))
    assert set(lookahead.texts) <= set(LATER_IDS.tolist()) and lookahead.texts and second.total("reverified") > 0
    # What was begun is what those weights draw of these ids.
    whole = run(old(0.1), prompts=LATER, first_id=100)
    for number, text in lookahead.texts.items():
        i = number - 100
        np.testing.assert_array_equal(text, whole.tokens[i, whole.response_part(i)][: len(text)])
    assert bool(parked) == ("pages" in limits)


@pytest.mark.slow
def test_rollouts_that_begin_alone_go_on_from_call_to_call():
    """Under three weights, each stopped after some chunks; then under the last, to the end."""
    lookahead, drawn = Lookahead(PROMPTS, np.arange(len(PROMPTS) * SAMPLES)), []
    with jax.enable_x64(True):
        engine = engine_of("table", features=(VERIFIES,))
        for scale, chunks in ((1.0, 3), (0.1, 6), (0.05, 2)):
            looks = iter([False] * chunks + [True])
            assert not engine.begin(old(scale), lookahead, SAMPLES, seed=SEED, until=looks.__next__)
            drawn.append(len(lookahead.texts))
        found = engine.generate(
            NEW, PROMPTS, SAMPLES, seed=SEED, options=CallOptions(continuation=Continuation(earlier=lookahead.texts))
        )
        assert 0 < drawn[0] <= drawn[1] <= len(PROMPTS) * SAMPLES
        assert engine.begin(NEW, lookahead, SAMPLES, seed=SEED, until=lambda: False)
    assert_same(found, plain())
    for i, text in lookahead.texts.items():
        np.testing.assert_array_equal(text, found.tokens[i, found.response_part(i)])
