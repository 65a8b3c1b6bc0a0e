"""Rollouts of several turns: what an environment says is appended to the tokens, and nothing is computed twice.

In float64, so that rounding hides no difference. The toy's logits depend on all tokens in the cache: one that is
missing, stale or at a wrong position changes them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lossless_certify.distributions import sequences
from specrl_jax.core import stand_in
from specrl_jax.decoding.features import ended_turns
from specrl_jax.decoding.features.stop_texts import make_stop_texts
from specrl_jax.decoding.features.turns import Extension, SeveralTurns
from specrl_jax.decoding.requests import CallOptions
from specrl_jax.decoding.state import EngineConfig
from tests.helpers.cells import COPIES_OTHERS, TARGET, Cell, V, history_of, make_engine
from tests.helpers.conversations import MOST_TURNS, Talk, said
from tests.helpers.toys import logits_after, watched

PROMPTS = [row.tolist() for n in (2, 3) for row in sequences(V, n)][:20]
SAMPLES, LONGEST, EOS = 2, 26, V - 1
SPELLED = [b"x", b"yx", b""]
TURNS = SeveralTurns()
TABLE = TARGET.astype(np.float64)


def run(drafter="none", k=2, temperature=1.0, talk=(), devices=1, seen=None, stop=(), longest=LONGEST, **sizes):
    cell = Cell(drafter, "coupled", temperature, 0, 0.9 if temperature else 1.0, "may end", "inside")
    lookup = {"groups": len(PROMPTS), "sequences": SAMPLES + 1} if drafter in COPIES_OTHERS else {}
    sizes = {"num_slots": 40, "chunk": 5, "page_tokens": 4, "prefill_tokens": 3} | sizes
    features = (TURNS, make_stop_texts(stop, SPELLED)) if stop else (TURNS,)
    limits = EngineConfig(max_prompt_tokens=3, max_response_tokens=longest, features=features, **lookup, **sizes)
    more = {"devices": devices} if devices > 1 else {}
    talk = Talk(V, **dict(talk))
    with jax.enable_x64(True):
        engine = make_engine(cell, limits, k, dtype=np.float64, **more)
        names = watched(engine)
        history = history_of(PROMPTS, longest, EOS)
        found = engine.generate(TABLE, PROMPTS, SAMPLES, seed=5, options=CallOptions(history=history, turns=talk))
    if seen is not None:
        seen += names
    return found, talk


@functools.cache
def plain():
    return run(k=0)[0]


def assert_same(found):
    for name in ("rollout_id", "tokens", "length", "ended", "environment"):
        np.testing.assert_array_equal(getattr(found, name), getattr(plain(), name))
    np.testing.assert_allclose(found.logprobs, plain().logprobs, rtol=0, atol=2**-22)


@pytest.mark.slow
def test_the_rollouts_compared_have_one_to_three_turns():
    found, talk = run(k=0)
    turns = np.array([sum(turn.request == i for turn in talk.asked) for i in range(len(found.length))])
    assert set(turns) == {1, 2, 3}
    assert found.environment.sum() > 60
    assert not all(turn.ended for turn in talk.asked)
    last = {turn.request: turn for turn in talk.asked}
    by_environment = [last[i].ended and turns[i] < MOST_TURNS for i in range(len(turns))]
    np.testing.assert_array_equal(found.ended, by_environment)
    assert 0 < found.ended.sum() < np.sum([turn.ended for turn in last.values()])


def by_hand(prompt, stop, longest):
    """Return the greedy conversation in plain Python: tokens, which of them the environment wrote, and whether it ended
    before any limit.
    """
    tokens, marks, number = list(prompt), [False] * len(prompt), 0
    limit = len(prompt) + longest
    while True:
        number, begin = number + 1, len(tokens)
        while len(tokens) < min(begin + 5, limit):
            tokens.append(int(np.argmax(logits_after(TABLE, tokens))))
            marks.append(False)
            spelled = [SPELLED[token] or b"|" for token in tokens[begin:]]  # no text goes on behind b""
            text, before = b"".join(spelled), len(b"".join(spelled[:-1]))
            stopped = bool(stop) and text.find(stop, max(0, before - len(stop) + 1)) >= 0
            if ended := tokens[-1] == EOS or stopped:
                break
        answer = said(tokens[begin:], number, V) if ended else None
        if answer is None or len(tokens) + len(answer) >= limit:
            return tokens, marks, ended and answer is None and number < MOST_TURNS
        tokens, marks = tokens + answer, marks + [True] * len(answer)


@pytest.mark.slow
@pytest.mark.parametrize("stop, longest", [(b"", LONGEST), (b"xx", LONGEST), (b"", 11)])
@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_greedy_rollouts_are_those_of_plain_python(drafter, stop, longest):
    """A turn ends with an end-of-text token or a stop text; one that begins in what the environment wrote is none.

    A rollout that a limit ends between its turns, or for which an answer leaves no room, has not ended by itself.
    """
    found, talk = run(drafter, temperature=0.0, stop=[stop] if stop else (), longest=longest, chunk=2)
    assert any(turn.ended and not turn.eos for turn in talk.asked) == bool(stop)
    for row, index in enumerate(found.prompt_index):
        tokens, marks, ended = by_hand(PROMPTS[index], stop, longest)
        assert found.sequence(row).tolist() == tokens
        assert found.environment[row, : found.length[row]].tolist() == marks
        assert found.ended[row] == ended


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["table", "stateful", "ngram", "suffix", "cascade"])
def test_tokens_do_not_depend_on_the_drafter(drafter):
    found, _ = run(drafter)
    assert_same(found)
    assert found.accepted.sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("talk", [{"order": "last", "looks": 1}, {"order": "random", "each": 1}, {"looks": 3}])
@pytest.mark.parametrize("drafter", ["none", "cascade"])
def test_nor_on_the_order_of_answers_nor_on_rows_that_wait_on_the_host(talk, drafter, monkeypatch):
    monkeypatch.setattr(ended_turns, "PATIENCE", 0.0)
    found, _ = run(drafter, talk=talk, num_slots=8, seen=(seen := []))
    assert_same(found)
    assert found.parked.sum() > 20
    assert "read_pages" in seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"num_slots": 1},
        {"num_slots": 6, "pages": 19},
        {"num_slots": 16, "sizes": (4, 1), "chunk": 2},
        {"num_slots": 12, "prefill_rows": 3, "prefill_tokens": 8, "new_prompts": 3},
    ],
)
def test_nor_on_slots_pages_or_pieces(sizes):
    assert_same(run("suffix", **sizes)[0])


@pytest.mark.slow
@pytest.mark.parametrize("slots", [6, 10])
def test_nor_where_an_answer_is_of_several_pages(slots):
    """A row that comes back may wait once more, for the pages of its answer."""
    found, _ = run("suffix", talk={"looks": 2}, num_slots=slots, pages=40, page_tokens=1)
    assert_same(found)
    assert found.parked.sum() > 5


@pytest.mark.slow
def test_nor_on_two_devices():
    assert_same(run(devices=2, num_slots=8, talk={"looks": 2})[0])


@pytest.mark.slow
def test_no_token_is_computed_twice():
    found, _ = run("suffix", num_slots=6, talk={"looks": 2})
    written = found.environment.sum(axis=1)
    np.testing.assert_array_equal(found.features["prefilled"].values, found.prompt_length + written)
    np.testing.assert_array_equal(found.features["prefilled"].values + found.policy_tokens, found.length)


@pytest.mark.slow
def test_environment_tokens_have_no_logprob_and_are_no_drafts():
    found, _ = run("suffix")
    assert not found.logprobs[found.environment].any()
    assert not found.draft_positions[found.environment].any()


@pytest.mark.slow
def test_lookup_drafts_see_what_environments_wrote():
    cell = Cell("suffix", "coupled", 1.0, 0, 1.0, "may end", "inside")
    limits = EngineConfig(4, 3, LONGEST, chunk=5, features=(TURNS,), groups=2, sequences=2, page_tokens=4)
    compiled = make_engine(cell, limits, 2).compiled
    slots, _ = compiled.empty(TARGET)
    rows = np.arange(4)
    slots = dataclasses.replace(slots, group=jnp.array([0, 1, 0, 2]), sequence=jnp.array([0, 0, 1, 0]))
    tokens, count = np.zeros((4, 3 + LONGEST), np.int32), np.array([2, 3, 0, 1], np.int32)
    tokens[:, 1:4] = 1 + rows[:, None]
    numbers = (stand_in(jnp.asarray(x)) for x in (tokens, count, np.zeros(4, np.int32), np.full(4, 9, np.int32)))
    after = compiled.run("extend", TARGET, 4, TARGET, slots, Extension(*numbers))
    cache = after.lookup_cache
    np.testing.assert_array_equal(cache.length, [[3, 0], [4, 0]])
    np.testing.assert_array_equal(cache.tokens[:, 0, 1:4], [[1, 1, 0], [2, 2, 2]])
    np.testing.assert_array_equal(after.length, [3, 4, 1, 2])
    np.testing.assert_array_equal(after.done, [False, False, True, False])
