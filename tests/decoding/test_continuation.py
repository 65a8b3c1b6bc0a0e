"""Rollouts that outlive a call or their weights: every token is kept, and what follows is drawn by the weights at hand.

In float64 and under `coupled`, where a rollout is a function of its weights, its id and what it has so far.
"""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from specrl_jax.decoding import continuation
from specrl_jax.decoding.continuation import Continuation
from specrl_jax.decoding.features.reverify import Reverification
from specrl_jax.decoding.features.sampling_mask import SamplingMasks
from specrl_jax.decoding.requests import CallOptions
from specrl_jax.decoding.rollouts import Rollouts, WeightsVersion
from tests.decoding.test_reverify import FEWEST, LONGEST, NEW, PROMPTS, SAMPLES, SEED, assert_same, engine_of, old
from tests.helpers.long import long_but
from tests.helpers.toys import watched

KEEPS = Reverification(keeps=True)
RECORDED = {"features": (KEEPS, SamplingMasks(4)), "num_slots": 6}
VERSIONS = [WeightsVersion(version, version, 0) for version in range(3)]


def until(count):
    """End a call once so many of its rollouts are finished."""
    return lambda finished: finished.sum() >= count


def stopped_and_continued(engine, tables, counts):
    """Draw on under one table after the other, each up to so many finished rollouts; the last to the end."""
    begun, calls = None, []
    for table, count, version in itertools.zip_longest(tables, counts, VERSIONS[: len(tables)], fillvalue=10**6):
        how = Continuation(version, partial=begun, enough=until(count), versions=True)
        begun = engine.generate(table, PROMPTS, SAMPLES, seed=SEED, options=CallOptions(continuation=how))
        calls.append(begun)
    return calls


def assert_same_masks(found, expected):
    for name in ("mask_count", "mask_ids"):
        one, two = found.features[name], expected.features[name]
        np.testing.assert_array_equal(one.values, two.values)
        assert name == "mask_count" or one.lengths.tolist() == two.lengths.tolist()


def plain(engine, table, continuation=None):
    options = CallOptions(continuation=continuation or Continuation(versions=True))
    return engine.generate(table, PROMPTS, SAMPLES, seed=SEED, options=options)


LIMITS = {"": {}, "few pages": {"pages": 16, "page_tokens": 4}, "sizes": {"sizes": (2,)}, "parity": {"width": 4}}


@pytest.mark.slow
@pytest.mark.parametrize("drafter", long_but(["none", "stateful"], ["none", "table", "stateful", "suffix", "cascade"]))
@pytest.mark.parametrize("limits", long_but(["", "few pages"], list(LIMITS)))
def test_under_the_same_weights_they_are_those_of_one_call(drafter, limits):
    """Log-probs and sampling masks too; wherever the stops find them: running, parked, finished or not begun."""
    with jax.enable_x64(True):
        engine = engine_of(drafter, **RECORDED | LIMITS[limits])
        expected, parked = plain(engine, NEW), watched(engine)
        first, second, found = stopped_and_continued(engine, [NEW] * 3, [5, 40])
    assert 5 <= first.finished.sum() < second.finished.sum() < found.finished.sum() == len(found.length)
    assert (first.response_length == 0).any() and (first.response_length[~first.finished] > 0).any()
    assert parked or limits != "few pages" or drafter == "none"
    assert_same(found, expected)
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)
    assert_same_masks(found, expected)
    # Tokens that were kept count neither as verifications nor as drafts, those of earlier calls once.
    if drafter == "none":
        np.testing.assert_array_equal(found.verifications, found.response_length)
    assert (found.verifications <= found.response_length).all() and not found.total("reverified")


@pytest.mark.slow
@pytest.mark.parametrize("again", [0, 6])
def test_a_call_that_ends_before_it_comes_to_a_rollout_loses_nothing_of_it(again):
    """Rollouts that have begun do not start again, or are parked while their keys and values are computed."""
    with jax.enable_x64(True):
        engine = engine_of("stateful", **RECORDED | FEWEST | {"num_slots": 10})
        first, second, found = stopped_and_continued(engine, [NEW] * 3, [5, again])
        expected = plain(engine, NEW)
    in_first = first.in_response()
    np.testing.assert_array_equal(second.tokens[in_first], first.tokens[in_first])
    assert (second.length >= first.length).all()
    for rollouts in (second, found):
        count = rollouts.features["mask_count"].values
        np.testing.assert_array_equal(rollouts.features["mask_ids"].lengths, count.sum(axis=1))
    assert_same(found, expected)
    assert_same_masks(found, expected)


@pytest.mark.slow
def test_a_call_that_ends_before_it_begins_a_rollout_leaves_all_to_the_next():
    with jax.enable_x64(True):
        engine = engine_of("table", **RECORDED)
        first, found = stopped_and_continued(engine, [NEW] * 2, [0])
        expected = plain(engine, NEW)
    assert not first.response_length.any() and not first.take(np.arange(0)).features["mask_ids"].by_rollout()
    assert_same(found, expected)


def test_each_field_of_a_rollout_is_joined():
    """A new field needs a decision: whether it is of the call, or of what a rollout had before."""
    of_the_call = {"rollout_id", "prompt_index", "prompt_length", "environment"}
    together = {"features", "chunks"}
    groups = [getattr(continuation, f"_{name}") for name in ("COUNTS", "BY_TOKEN", "OF_THE_START", "OF_THE_LONGER")]
    found = {name for group in (*groups, of_the_call, together) for name in group}
    found -= {"token_version", "mask_count", "reverified"}  # features with a value of each rollout
    assert sorted(found) == sorted(field.name for field in dataclasses.fields(Rollouts))


@pytest.mark.slow
def test_on_two_devices():
    with jax.enable_x64(True):
        engine = engine_of("table", devices=2, **RECORDED)
        assert_same(stopped_and_continued(engine, [NEW] * 3, [5, 40])[-1], plain(engine, NEW))


@pytest.mark.slow
def test_greedy_rollouts_too():
    with jax.enable_x64(True):
        engine = engine_of("table", 0.0, **RECORDED | {"features": (KEEPS,)})
        assert_same(stopped_and_continued(engine, [NEW] * 3, [5, 40])[-1], plain(engine, NEW))


def assert_pieces(found, tables):
    """Each token is what its version's weights draw after those before it: found by a call with these as prompt."""
    with jax.enable_x64(True):
        engine = engine_of(max_prompt_tokens=3 + LONGEST)
        token_version = found.features["token_version"].values
        for version, table in enumerate(tables):
            begins = [(token_version[row, part] < version).sum() for row, part in parts(found)]
            ends = [part.start + n for (_, part), n in zip(parts(found), begins, strict=True)]
            prompts = [found.tokens[row, :end].tolist() for row, end in enumerate(ends)]
            drawn = engine.generate(table, prompts, 1, seed=SEED)
            for (row, part), n, prompt in zip(parts(found), begins, prompts, strict=True):
                own = part.start + n + (token_version[row, part] == version).sum() - len(prompt)
                np.testing.assert_array_equal(
                    drawn.tokens[row, len(prompt) :][:own], found.tokens[row, len(prompt) :][:own]
                )
                np.testing.assert_allclose(
                    drawn.logprobs[row, len(prompt) :][:own], found.logprobs[row, len(prompt) :][:own], atol=2**-22
                )


def parts(rollouts):
    return [(row, rollouts.response_part(row)) for row in range(len(rollouts.length))]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "stateful"])
def test_under_other_weights_each_token_is_of_those_that_drew_it(drafter):
    tables = [old(0.1), old(1.0), NEW]
    with jax.enable_x64(True):
        first, second, found = stopped_and_continued(engine_of(drafter, **RECORDED), tables, [5, 40])
    for earlier, later in itertools.pairwise((first, second, found)):
        np.testing.assert_array_equal(later.tokens[earlier.in_response()], earlier.tokens[earlier.in_response()])
        had_begun = earlier.response_length > 0
        np.testing.assert_array_equal(later.weights_version[had_begun], earlier.weights_version[had_begun])
    token_version = found.features["token_version"].values
    versions = [set(token_version[row, part].tolist()) for row, part in parts(found)]
    assert {0, 1, 2} in versions or {0, 1} in versions
    assert {0} in versions and {2} in versions and not token_version[~found.in_response()].any()
    assert_pieces(found, tables)


@pytest.mark.slow
@pytest.mark.parametrize("limits", ["", "few pages"])
def test_weights_that_arrive_within_a_call_draw_what_follows(limits):
    """The toys' keys and values hold nothing of the weights: nothing is stale."""
    tables, chunks = [old(0.1), old(1.0), NEW], itertools.count(1)

    def newest():
        version = {4: 1, 9: 2}.get(next(chunks))
        return version and (tables[version], VERSIONS[version])

    with jax.enable_x64(True):
        engine = engine_of("table", **RECORDED | LIMITS[limits])
        found = plain(engine, tables[0], continuation=Continuation(VERSIONS[0], newest=newest, versions=True))
    drawn = found.features["token_version"].values[found.in_response()]
    assert found.finished.all() and set(drawn.tolist()) == {0, 1, 2}
    assert_pieces(dataclasses.replace(found), tables)


@pytest.mark.slow
def test_a_call_of_finished_rollouts_draws_nothing():
    with jax.enable_x64(True):
        engine = engine_of(**RECORDED)
        expected = plain(engine, NEW)
        found = plain(engine, old(1.0), continuation=Continuation(VERSIONS[1], partial=expected, versions=True))
    assert_same(found, expected)
    assert found.chunks == expected.chunks and not found.weights_version.any()
