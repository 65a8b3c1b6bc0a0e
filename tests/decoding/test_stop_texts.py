"""Texts that end a response: the search of the automaton, and rollouts that end with the token that completes one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lossless_certify.distributions import sequences
from specrl_jax.decoding.features.stop_texts import make_stop_texts
from specrl_jax.decoding.requests import CallOptions
from specrl_jax.decoding.state import EngineConfig
from tests.helpers.cells import COPIES_OTHERS, TARGET, Cell, V, history_of, make_engine
from tests.helpers.long import long_but

TOKENS = [b"", b"a", b"b", b"ab", b"ba", b"aab", b"bb", b"c", b"\xc3", b"\xa9", b"abcab"]
TEXTS = [[b"ab"], [b"aab", b"bba"], [b"abab", b"b"], ["é".encode(), b"cc"], [b"aaa"]]


def ends(texts, written):
    """Say of each token whether it completes a text in what follows the last empty token."""
    text, found = b"", []
    for token in written:
        before, text = len(text), text + token if token else b""
        found.append(any(text.find(stop, max(0, before - len(stop) + 1)) >= 0 for stop in texts))
    return found


@pytest.mark.parametrize("texts", TEXTS)
def test_a_text_is_found_however_tokens_spell_it(texts):
    stops = make_stop_texts(texts, TOKENS)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, len(TOKENS), (200, 12))
    state, found = stops.run(jnp.zeros(200, jnp.int32), jnp.asarray(ids))
    expected = [ends(texts, [TOKENS[i] for i in row]) for row in ids]
    assert np.sum(expected) > 10
    np.testing.assert_array_equal(found, expected)
    # In two pieces, and from the host: the last token alone says whether a response has ended.
    middle, _ = stops.run(jnp.zeros(200, jnp.int32), jnp.asarray(ids[:, :5]))
    rest, again = stops.run(middle[:, -1], jnp.asarray(ids[:, 5:]))
    np.testing.assert_array_equal(again, found[:, 5:])
    np.testing.assert_array_equal(rest, state[:, 5:])
    for length in (1, 4, 12):
        end = stops.ended(ids, np.zeros(200, int), np.full(200, length))
        np.testing.assert_array_equal(end, np.asarray(found)[:, length - 1])


CONTROL = {0: b"<e>", 11: b"<end>"}
SIGNS = [*TOKENS, b"", b"<", b"e", b">"]


def with_names(texts, written):
    """As `ends`, where a control token in its place in a text spells its name, and elsewhere ends what went before."""
    found = []
    for i in range(len(written)):
        starts = range(i + 1)
        spelled = ([(CONTROL.get(t) or SIGNS[t], t in CONTROL) for t in written[start : i + 1]] for start in starts)
        found.append(any(_is_end(text, parts) for parts in spelled for text in texts))
    return found


def _is_end(text, parts):
    """Say whether a text ends in the last of some tokens and begins in the first."""
    whole, (first, control), (last, at_end) = b"".join(one for one, _ in parts), parts[0], parts[-1]
    begins = [0] if control else range(len(first))
    ends = [len(whole)] if at_end else range(len(whole) - len(last) + 1, len(whole) + 1)
    return any(whole[begin:end] == text for begin in begins for end in ends)


@pytest.mark.parametrize("texts", [[b"<end>"], [b"ab<e>", b"<end>"], [b"<e><end>a", b"bb"], [b"b<e>b"], [b"e>", b"<"]])
def test_a_control_token_stands_for_its_name_where_a_text_has_it_whole(texts):
    """In `e>` and `<` it has no part: its name is not in what a response says."""
    stops = make_stop_texts(texts, SIGNS, CONTROL)
    ids = np.random.default_rng(0).choice([0, 1, 2, 3, 6, 11, 12, 13, 14], (300, 8))
    _, found = stops.run(jnp.zeros(300, jnp.int32), jnp.asarray(ids))
    named = any(name in text for name in CONTROL.values() for text in texts)
    expected = [
        [any(one) for one in zip(ends(texts, [SIGNS[i] for i in row]), names)]
        for row, names in ((row, with_names(texts, row) if named else [False] * 8) for row in ids.tolist())
    ]
    assert np.sum(expected) > 3
    np.testing.assert_array_equal(found, expected)


PROMPTS = [row.tolist() for n in (2, 3) for row in sequences(V, n)][:20]
SAMPLES, LONGEST = 2, 20
SPELLED = [b"x", b"yx", b"y"]
STOPS = [(b"xyxy",), (b"xxx", b"yyy")]
assert len(SPELLED) == V


def run(stop=(), drafter="none", k=2, devices=1, **sizes):
    cell = Cell(drafter, "coupled", 1.0, 0, 1.0, "never ends", "inside")
    lookup = {"groups": len(PROMPTS), "sequences": SAMPLES + 1} if drafter in COPIES_OTHERS else {}
    sizes = {"num_slots": 16, "sizes": (4,), "chunk": 3, "page_tokens": 4} | sizes
    features = (make_stop_texts(stop, SPELLED),) if stop else ()
    limits = EngineConfig(max_prompt_tokens=3, max_response_tokens=LONGEST, features=features, **lookup, **sizes)
    more = {"devices": devices} if devices > 1 else {}
    with jax.enable_x64(True):
        engine = make_engine(cell, limits, k, dtype=np.float64, **more)
        return engine.generate(
            TARGET.astype(np.float64),
            PROMPTS,
            SAMPLES,
            seed=5,
            options=CallOptions(history=history_of(PROMPTS, LONGEST, None)),
        )


@functools.cache
def whole():
    return run(k=0)


def assert_cut(found, stop):
    """Rollouts are those without stop texts, up to the token that completes one."""
    without, cut = whole(), 0
    for row in range(len(found.length)):
        response = without.response(row)
        hits = ends(stop, [SPELLED[i] for i in response])
        length = hits.index(True) + 1 if True in hits else len(response)
        cut += length < len(response)
        np.testing.assert_array_equal(found.response(row), response[:length])
        assert found.ended[row] == (True in hits)
    assert cut > len(found.length) // 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter, stop",
    long_but(
        [("none", STOPS[0]), ("stateful", STOPS[1]), ("suffix", STOPS[0])],
        ["none", "table", "stateful", "suffix", "cascade"],
        STOPS,
    ),
)
def test_rollouts_end_where_a_text_does(drafter, stop):
    found = run(stop, drafter)
    assert_cut(found, stop)
    assert drafter == "none" or found.accepted.sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    long_but([{"chunk": 1}, {"pages": 9}], [{"chunk": 1}, {"num_slots": 3, "sizes": ()}, {"devices": 2}, {"pages": 9}]),
)
def test_wherever_chunks_end_and_rows_go(sizes):
    assert_cut(run((b"xyxy",), "stateful", **sizes), (b"xyxy",))


@pytest.mark.slow
def test_a_text_that_begins_in_the_prompt_is_none():
    """Where a prompt's end and the first token spell a text together, the response goes on."""
    found, together = run((b"xy",)), 0
    for row in range(len(found.length)):
        prompt, response = found.tokens[row, : found.prompt_length[row]], found.response(row)
        if SPELLED[prompt[-1]][-1:] == b"x" and SPELLED[response[0]][:1] == b"y":
            together += 1
            assert len(response) > 1
    assert together > 3
