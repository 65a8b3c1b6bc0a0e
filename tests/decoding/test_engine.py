import dataclasses
import itertools
import types

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from kernels_pallas.verify.op import Verified
from lossless_certify.distributions import sequences
from specrl_jax.decoding import calibration
from specrl_jax.decoding.continuation import Continuation
from specrl_jax.decoding.controller import Controller
from specrl_jax.decoding.draft_lengths import FixedLength
from specrl_jax.decoding.engine import shares
from specrl_jax.decoding.requests import CallOptions, Requests
from specrl_jax.decoding.rollouts import WeightsVersion
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig, Slots
from specrl_jax.decoding.step import commit
from specrl_jax.drafts.lookup.lookup_draft import lookup_drafter
from specrl_jax.errors import InputError, Stopped
from tests.decoding.test_compiled import compilations
from tests.helpers import toys
from tests.helpers.distributions import observed, response_distribution
from tests.helpers.exact import log_softmax
from tests.helpers.long import long_but
from tests.helpers.rollouts import assert_positions_add_up
from tests.helpers.statistics import assert_drawn_from

PAD, EOS, V = 0, 3, 4
TABLE = toys.make_table(seed=0, V=V)
DRAFT_TABLE = 1.5 * np.random.default_rng(1).normal(size=(V, V)).astype(np.float32)
PROMPTS = [[1, 2], [2], [1, 1, 2, 0], [0, 1, 1], [2, 2, 2, 2]]


def limits(num_slots=10, max_prompt_tokens=4, max_response_tokens=8, chunk=3):
    return EngineConfig(num_slots, max_prompt_tokens, max_response_tokens, chunk=chunk)


def engine(sampling=Sampling(), drafter=toys.NO_DRAFTER, **sizes):  # noqa: B008 (frozen)
    return toys.toy_engine(limits(**sizes), sampling, (EOS,), PAD, drafter)


def responses(rollouts):
    """Rollout id -> the response's tokens, end-of-text included."""
    rows = zip(rollouts.rollout_id, rollouts.tokens, rollouts.prompt_length, rollouts.length, strict=True)
    return {int(i): tokens[first:last].tolist() for i, tokens, first, last in rows}


def response_logprobs(rollouts):
    rows = zip(rollouts.rollout_id, rollouts.logprobs, rollouts.prompt_length, rollouts.length, strict=True)
    return {int(i): row[first:last] for i, row, first, last in rows}


def greedy_by_hand(table, prompt, longest):
    """(response, log-probs) of the toy, token by token in plain Python."""
    tokens, logprobs = list(prompt), []
    while len(logprobs) < longest:
        row = log_softmax(toys.logits_after(table, tokens))
        tokens.append(int(row.argmax()))
        logprobs.append(row.max())
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :], logprobs


@pytest.mark.slow
@pytest.mark.parametrize("longest, chunk", [(0, 8), (3, 1)])
def test_a_lookup_drafter_without_tokens_to_replay_ends(longest, chunk):
    """If no draft fits into half a chunk nothing is replayed; a loop over no tokens would not end."""
    rollouts = engine(drafter=lookup_drafter(longest, 1, 4), chunk=chunk).generate(
        TABLE, PROMPTS, samples=2, seed=0, lengths=FixedLength(0)
    )
    assert len(rollouts.length) == 2 * len(PROMPTS)


@pytest.mark.slow
def test_the_cost_of_an_iteration_excludes_refills():
    """The clock of a chunk starts after its refill has finished, in calibration too."""

    def slow(table, tokens, paging, cache):
        x = jnp.full((300, 300), 1e-3) * (1 + 0 * tokens[0, 0])
        x = jax.lax.fori_loop(0, 100, lambda i, x: jnp.tanh(x @ x), x)
        return toys.prefill(table, tokens + (x[0, 0] > 1e9).astype(jnp.int32), paging, cache)

    run = toys.toy_engine(limits(chunk=16), Sampling(), (), PAD, toys.NO_DRAFTER, prefill=slow)
    run.compiled.compile_all(TABLE)
    ready, start = [], run.compiled.decode

    def watched(params, slots, k, *, inputs):
        ready.append(all(x.is_ready() for x in jax.tree.leaves(slots)))
        return start(params, slots, k, inputs=inputs)

    run.compiled.decode = watched
    run.generate(TABLE, PROMPTS, samples=2, seed=0, lengths=Controller((0,), (10,)))
    assert len(ready) > 1 + calibration.ROUNDS and all(ready)


@pytest.mark.slow
def test_chunks_say_how_many_tokens_a_row_held():
    """Before a chunk to `choose`, and halfway through it to `observe`; an empty row does not count."""

    class Asked(FixedLength):
        def choose(self, size, running, live):
            asked.append(live)
            return super().choose(size, running, live)

    asked: list[float] = []
    never = TABLE - 50 * np.eye(V, dtype=np.float32)[EOS]
    out = engine(num_slots=5).generate(never, [[1, 2], [1, 1, 2, 0]], samples=2, seed=0, lengths=Asked(0))
    assert asked == [3, 6, 9] and [chunk.live for chunk in out.chunks] == [4.5, 7.5, 10]


# --- plain decoding


@pytest.fixture(scope="module")
def greedy():
    """Every prompt of 1 to 3 tokens over several waves, with the expected responses; and the engine's answer."""
    prompts = [row.tolist() for n in (1, 2, 3) for row in sequences(V, n)]
    rollouts = engine(Sampling(0.0), num_slots=32).generate(TABLE, prompts, samples=1, seed=0)
    return prompts, [greedy_by_hand(TABLE, prompt, longest=8) for prompt in prompts], rollouts


@pytest.mark.slow
def test_the_greedy_cases_hold_every_kind_of_ending(greedy):
    _, expected, _ = greedy
    lengths = {(len(tokens), tokens[-1] == EOS) for tokens, _ in expected}
    assert (1, True) in lengths, "end-of-text as the first token"
    assert (8, False) in lengths, "cut at the limit"
    assert any(1 < length < 8 for length, _ in lengths), "end-of-text in between"


def test_greedy_decoding_equals_a_plain_loop(greedy):
    prompts, expected, rollouts = greedy
    assert list(responses(rollouts).values()) == [tokens for tokens, _ in expected]
    np.testing.assert_array_equal(rollouts.prompt_length, [len(prompt) for prompt in prompts])
    np.testing.assert_array_equal(rollouts.response_length, [len(tokens) for tokens, _ in expected])


@pytest.mark.slow
def test_a_single_row_has_as_many_tokens_as_its_forward_needs(greedy):
    """As on a GPU; with more rows there are enough, and no token changes."""
    prompts, _, rollouts = greedy
    seen = []

    def decode(table, tokens, paging, cache):
        seen.append(tokens.shape)
        return toys.decode(table, tokens, paging, cache)

    for slots in (1, 3, 4):
        run = toys.toy_engine(
            limits(num_slots=slots), Sampling(0.0), (EOS,), PAD, decode=decode, least_tokens=4, devices=1
        )
        assert responses(run.generate(TABLE, prompts, samples=1, seed=0)) == responses(rollouts)
    assert list(dict.fromkeys(seen)) == [(1, 4), (3, 2), (4, 1)]


def test_ended_says_whether_end_of_text_was_reached(greedy):
    _, expected, rollouts = greedy
    np.testing.assert_array_equal(rollouts.ended, [tokens[-1] == EOS for tokens, _ in expected])


def test_response_leaves_the_end_of_text_out(greedy):
    _, expected, rollouts = greedy
    for row, (tokens, _) in enumerate(expected):
        assert rollouts.response(row) == [token for token in tokens if token != EOS]


def test_logprobs_stand_at_the_positions_of_their_tokens(greedy):
    prompts, expected, rollouts = greedy
    whole = np.zeros_like(rollouts.logprobs)
    for row, (prompt, (_, logprobs)) in enumerate(zip(prompts, expected, strict=True)):
        whole[row, len(prompt) : len(prompt) + len(logprobs)] = logprobs
    # Logits below 8 and a sum of 4: a few float32 roundings, each below 2**-21. Elsewhere exactly 0.
    np.testing.assert_allclose(rollouts.logprobs, whole, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(rollouts.logprobs[whole == 0], 0)


def test_the_prompt_comes_first_and_pad_after_the_response(greedy):
    prompts, expected, rollouts = greedy
    for row, (prompt, (tokens, _)) in enumerate(zip(prompts, expected, strict=True)):
        filled = prompt + tokens
        assert rollouts.tokens[row].tolist() == filled + [PAD] * (12 - len(filled))


def test_plain_decoding_verifies_once_per_token(greedy):
    *_, rollouts = greedy
    np.testing.assert_array_equal(rollouts.verifications, rollouts.response_length)


@pytest.mark.slow
def test_an_end_of_text_in_the_prompt_ends_nothing():
    """`ended` looks at the last token: a prompt's own end-of-text is not it, not even where nothing was generated."""
    out = engine(max_response_tokens=3).generate(TABLE, [[1, EOS]], samples=10, seed=0)
    assert (out.response_length > 0).all() and out.response_length.max() == 3
    none = engine(max_response_tokens=0).generate(TABLE, [[1, EOS]], samples=1, seed=0)
    assert none.response_length.tolist() == [0] and none.ended.tolist() == [False]


@pytest.mark.slow
def test_any_of_several_end_of_text_ids_ends_a_rollout():
    both = toys.toy_engine(limits(), Sampling(), (EOS, 2), PAD).generate(TABLE, PROMPTS[:1], samples=200, seed=0)
    last = [tokens[-1] for tokens in responses(both).values()]
    assert {2, EOS} <= set(last)
    for tokens in responses(both).values():
        assert not {2, EOS} & set(tokens[:-1])


# --- joint distributions


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, 2, 0.9)], ids=["plain", "all three"])
def test_the_joint_distribution_of_plain_rollouts_is_the_targets(sampling):
    """Three tokens of three, the third ends: 27 outcomes, 41,000 rollouts, error rates 1e-6 at 0.02 against 0.04."""
    table, N = toys.make_table(seed=3, V=3), 41_000
    sizes = limits(num_slots=N, max_prompt_tokens=2, max_response_tokens=3)
    rollouts = toys.toy_engine(sizes, sampling, (2,)).generate(table, [[1, 0]], samples=N, seed=5)
    distribution = response_distribution(table, [1, 0], 3, eos=2, sampling=sampling)
    assert_drawn_from(observed(rollouts, 3, 2, 3), distribution, at_most=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("eos, temperature", long_but([(2, 0.6)], [None, 2], [1.0, 0.6]))
def test_the_joint_distribution_over_successive_blocks_is_the_targets(eos, temperature):
    """Four tokens by blocks of one to three: noise of one block used again by the next would couple them.

    81 outcomes, 2**17 rollouts, error rates 1e-6 at 0.0165 against 0.033.
    """
    table, N, sampling = toys.make_table(seed=4, V=3), 2**17, Sampling(temperature)
    drafter = toys.toy_drafter(DRAFT_TABLE[:3, :3], k=2, temperature=temperature)
    sizes = limits(num_slots=N, max_prompt_tokens=2, max_response_tokens=4)
    eos_ids = (99,) if eos is None else (eos,)
    rollouts = toys.toy_engine(sizes, sampling, eos_ids, drafter=drafter).generate(table, [[1, 0]], N, seed=6)
    # Blocks of several sizes were committed.
    assert {2, 3} <= set(rollouts.verifications[rollouts.response_length == 4].tolist())
    distribution = response_distribution(table, [1, 0], 4, eos, sampling)
    assert_drawn_from(observed(rollouts, 4, eos, 3), distribution, at_most=0.0165)


# --- what results may not depend on


@pytest.fixture(scope="module")
def expected():
    return engine(Sampling(0.8, 0, 0.95)).generate(TABLE, PROMPTS, samples=2, seed=3, options=CallOptions(first_id=70))


def assert_same_rollouts(got, wanted):
    """Each rollout of `got`, by its id, is in `wanted`: bit for bit in tokens."""
    got_tokens, wanted_tokens = responses(got), responses(wanted)
    assert len(got_tokens) == len(got.rollout_id), "an id was used twice"
    assert got_tokens == {i: wanted_tokens[i] for i in got_tokens}
    got_logprobs, wanted_logprobs = response_logprobs(got), response_logprobs(wanted)
    for i in got_tokens:
        # Another batch is another compiled shape: float32 sums of 4 may be ordered otherwise.
        np.testing.assert_allclose(got_logprobs[i], wanted_logprobs[i], rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"num_slots": 1},
        {"num_slots": 3},  # groups of two straddle waves
        {"num_slots": 4},
        {"num_slots": 64},
        {"chunk": 1},
        {"chunk": 100},
        {"max_prompt_tokens": 9},
    ],
    ids=str,
)
def test_rollouts_do_not_depend_on_slots_waves_chunks_or_padding(expected, sizes):
    out = engine(Sampling(0.8, 0, 0.95), **sizes).generate(
        TABLE, PROMPTS, samples=2, seed=3, options=CallOptions(first_id=70)
    )
    np.testing.assert_array_equal(out.rollout_id, 70 + np.arange(10))
    np.testing.assert_array_equal(out.prompt_index, np.arange(10) // 2)
    assert_same_rollouts(out, expected)
    for name in ("prompt_length", "length", "ended", "verifications"):
        np.testing.assert_array_equal(getattr(out, name), getattr(expected, name))


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 2])
def test_rollouts_do_not_depend_on_the_number_of_devices(k):
    sampling = Sampling(0.8, 0, 0.95)
    drafter = toys.toy_drafter(DRAFT_TABLE, k, temperature=0.8) if k else toys.NO_DRAFTER
    one, eight = (
        toys.toy_engine(limits(num_slots=16), sampling, (EOS,), PAD, drafter, devices=devices) for devices in (1, 8)
    )
    wanted = one.generate(TABLE, PROMPTS, samples=4, seed=3)
    out = eight.generate(TABLE, PROMPTS, samples=4, seed=3)
    assert_same_rollouts(out, wanted)
    np.testing.assert_array_equal(out.verifications, wanted.verifications)


def test_rollouts_do_not_depend_on_the_other_prompts(expected):
    run = engine(Sampling(0.8, 0, 0.95))
    alone = run.generate(TABLE, PROMPTS[2:3], samples=2, seed=3, options=CallOptions(first_id=74))
    assert_same_rollouts(alone, expected)
    changed = [[2, 0, 2, 1] if i != 2 else prompt for i, prompt in enumerate(PROMPTS)]
    among_others = responses(run.generate(TABLE, changed, samples=2, seed=3, options=CallOptions(first_id=70)))
    assert {i: among_others[i] for i in (74, 75)} == responses(alone)


def test_rollouts_do_not_depend_on_how_samples_are_grouped(expected):
    repeated = [prompt for prompt in PROMPTS for _ in range(2)]
    assert_same_rollouts(
        engine(Sampling(0.8, 0, 0.95)).generate(TABLE, repeated, 1, seed=3, options=CallOptions(first_id=70)), expected
    )


def test_the_same_seed_and_ids_repeat_and_others_do_not():
    run = engine()
    first = run.generate(TABLE, PROMPTS[:1], samples=50, seed=3)
    assert responses(run.generate(TABLE, PROMPTS[:1], samples=50, seed=3)) == responses(first)
    other_seed = responses(run.generate(TABLE, PROMPTS[:1], samples=50, seed=4))
    other_ids = responses(run.generate(TABLE, PROMPTS[:1], samples=50, seed=3, options=CallOptions(first_id=50)))
    for other in (other_seed.values(), other_ids.values()):
        # Fifty pairs of independent responses: few agree, and here fewer than half do.
        assert np.mean([a == b for a, b in zip(other, responses(first).values(), strict=True)]) < 0.5


def test_the_samples_of_a_group_differ():
    out = engine().generate(TABLE, PROMPTS[:1], samples=30, seed=0)
    assert len({tuple(tokens) for tokens in responses(out).values()}) > 10


def test_rollout_ids_use_all_32_bits():
    run = engine()
    high = run.generate(TABLE, PROMPTS[:1], samples=10, seed=0, options=CallOptions(first_id=2**32 - 10))
    assert high.rollout_id.tolist() == list(range(2**32 - 10, 2**32))
    low = run.generate(TABLE, PROMPTS[:1], samples=10, seed=0, options=CallOptions(first_id=2**31 - 10))
    assert list(responses(high).values()) != list(responses(low).values())


# --- the host's side


def never_compiled(run):
    """Return an engine whose programs cannot be compiled: any work fails."""
    parts = types.SimpleNamespace(config=run.config, functions=run.compiled.functions)
    return dataclasses.replace(run, compiled=parts)


@pytest.mark.parametrize("length, word", [(5, "5 tokens"), (0, "0 tokens")])
def test_a_prompt_that_does_not_fit_is_refused_before_any_work(length, word):
    run = never_compiled(engine(max_prompt_tokens=4))
    with pytest.raises(InputError, match=rf"prompt 1 has {word}.*max_prompt_tokens=4"):
        run.generate(TABLE, [[1], [1] * length], samples=1, seed=0)


@pytest.mark.parametrize(
    "given, word", [([9, 1], "9 tokens for rollout 0.*=8"), ([1, 0], "0 tokens"), ([1], "1 lengths for 2")]
)
def test_lengths_of_responses_that_cannot_be_are_refused_before_any_work(given, word):
    run = never_compiled(engine(max_response_tokens=8))
    with pytest.raises(InputError, match=word):
        run.generate(TABLE, [[1]], samples=2, seed=0, options=CallOptions(responses=given))


def test_a_prompt_of_exactly_the_longest_length_fits():
    out = engine(max_prompt_tokens=4).generate(TABLE, [[1, 2, 0, 1]], samples=1, seed=0)
    assert out.prompt_length.tolist() == [4]


def test_no_prompts_at_all_are_refused():
    with pytest.raises(InputError, match="no prompts"):
        engine().generate(TABLE, [], samples=2, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [4, 7, 10])
def test_progress_never_goes_back_and_reaches_the_total(num_slots):
    calls = []
    engine(num_slots=num_slots, chunk=1).generate(
        TABLE, PROMPTS, samples=2, seed=0, on_progress=lambda *call: calls.append(call)
    )
    done = [done for done, _ in calls]
    assert {total for _, total in calls} == {10}
    assert done == sorted(done) and done[-1] == 10
    assert len(set(done)) > 3, "the bar moves on the way"


@pytest.mark.parametrize("looks", [1, 2, 5])
def test_a_stop_ends_it_after_the_chunk_under_way(looks):
    """And leaves nothing behind: the next call is that of a new engine."""
    calls, run = [], engine(num_slots=4, chunk=1)

    def on_progress(done, total):
        calls.append(done)
        if len(calls) == looks:
            raise Stopped

    with pytest.raises(Stopped):
        run.generate(TABLE, PROMPTS, samples=2, seed=0, on_progress=on_progress)
    assert len(calls) == looks
    expected = engine(num_slots=4, chunk=1).generate(TABLE, PROMPTS, samples=2, seed=0)
    assert responses(run.generate(TABLE, PROMPTS, samples=2, seed=0)) == responses(expected)


def test_a_stop_ends_the_calibration():
    def on_progress(done, total):
        calls.append(done)
        if len(calls) == 3:
            raise Stopped

    calls, lengths = [], Controller((0,), (10,))
    with pytest.raises(Stopped):
        engine(num_slots=10).generate(TABLE, PROMPTS, samples=2, seed=0, on_progress=on_progress, lengths=lengths)
    assert calls == [0, 0, 0] and list(lengths.unmeasured(10)) == [0]


@pytest.mark.slow
@pytest.mark.parametrize("longest", long_but([8], [8, 300]))  # rows end; no row ends
def test_calibration_holds_one_cache_and_refills_only_where_rows_end(longest):
    sizes = EngineConfig(4, 4, longest, chunk=16, sizes=(2,))
    run = toys.toy_engine(sizes, Sampling(), (), PAD, toys.toy_drafter(DRAFT_TABLE, 1, 1.0))
    make, refill, held, prefilled = run.compiled.empty, run.compiled.refill, [], []

    def buffers():
        return sum(x.shape == (4, sizes.cache_length) for x in jax.live_arrays())

    def empty(params):
        held.append(buffers())
        return make(params)

    def refilled(params, slots, carried, batch):
        prefilled.append(int((batch.length > 0).sum()))
        return refill(params, slots, carried, batch=batch)

    run.compiled.empty, run.compiled.refill = empty, refilled
    before, lengths = buffers(), Controller((0, 1), (4, 2))
    run.prepare(TABLE, Requests(PROMPTS, 2), lengths, seed=0, look=lambda: None)
    assert not lengths.unmeasured(4) and not lengths.unmeasured(2)
    assert set(held) == {before} and set(prefilled) == {2}, "one batch at a time, of two groups of two"
    assert len(held) == len(prefilled) and (len(held) == 1) == (longest == 300)


@pytest.mark.slow
def test_calibration_counts_the_tokens_of_rows_that_run():
    """Four slots, and pages for one or two rows: these hold no more tokens than there are places for."""

    class Told(Controller):
        def calibrate(self, size, k, seconds, live):
            told.append(size * live)
            super().calibrate(size, k, seconds, live=live)

    told: list[float] = []
    sizes = EngineConfig(4, 8, 8, chunk=16, page_tokens=2)
    sizes = dataclasses.replace(sizes, pages=sizes.fewest_pages)
    run = toys.toy_engine(sizes, Sampling(), (), PAD, toys.toy_drafter(DRAFT_TABLE, 1, 1.0))
    run.prepare(TABLE, Requests([[1, 2] * 4], 1), Told((0, 1), (4,)), seed=0, look=lambda: None)
    assert len(told) == 2 and all(8 <= tokens <= sizes.pages * sizes.page_tokens for tokens in told)


def test_a_group_shares_one_prefill_of_its_prompt():
    """Rows through the model in prefill: each prompt once, however its group is scheduled, and rows of padding."""
    rows = []

    def counting(table, tokens, paging, cache):
        jax.debug.callback(lambda tokens: rows.extend(tokens.tolist()), tokens)
        return toys.prefill(table, tokens, paging, cache)

    run = toys.toy_engine(limits(num_slots=8), Sampling(), (EOS,), PAD, prefill=counting)
    prompts = [[1, 2], [2], [0, 1, 1], [2, 2, 2, 2]]
    out = run.generate(TABLE, prompts, samples=6, seed=0)
    jax.effects_barrier()
    assert len(out.length) == 24
    assert [row for row in rows if set(row) != {PAD}] == [prompt + [PAD] * (4 - len(prompt)) for prompt in prompts]


# --- commit


def commit_by_hand(tokens, logprobs, row, length, limit, done, count, new, new_logprobs, eos_ids):
    """One row, one token at a time; the last token of a whole block is no draft."""
    tokens, logprobs, positions = tokens[row].tolist(), logprobs[row].tolist(), [0] * len(tokens[row])
    if done:
        return tokens, logprobs, positions, length, True
    ended = False
    for i, (token, logprob) in enumerate(zip(new[:count], new_logprobs[:count], strict=True), start=1):
        if length == limit or ended:
            break
        tokens[length], logprobs[length], positions[length] = token, logprob, i if i < count else 0
        length += 1
        ended = token in eos_ids
    return tokens, logprobs, positions, length, ended or length == limit


@pytest.mark.slow
@given(data=st.data(), Q=st.integers(1, 4), eos_ids=st.sampled_from([(3,), (2, 3), (9,)]))
@settings(max_examples=80)
def test_commit_equals_a_plain_loop(data, Q, eos_ids):
    """Blocks with an end-of-text anywhere, also past `count`; limits inside and at the end of a block; done rows."""
    B, S = 6, 9
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, 8, (B, S)).astype(np.int32)
    logprobs = rng.normal(size=(B, S)).astype(np.float32)
    new_logprobs = rng.normal(size=(B, Q)).astype(np.float32)

    def column(values):
        return np.array(data.draw(st.lists(values, min_size=B, max_size=B)))

    length = column(st.integers(1, S - 1))
    limit = np.minimum(length + column(st.integers(1, 5)), S)
    done, count = column(st.booleans()), column(st.integers(1, Q))
    new = np.stack([column(st.integers(0, 3)) for _ in range(Q)], axis=1)
    slots = Slots(
        tokens=jnp.array(tokens),
        logprobs=jnp.array(logprobs),
        draft_positions=jnp.zeros((B, S), jnp.int8),
        prompt_length=jnp.ones(B, jnp.int32),
        length=jnp.array(length, jnp.int32),
        limit=jnp.array(limit, jnp.int32),
        done=jnp.array(done),
        rollout_id=jnp.arange(B, dtype=jnp.uint32),
        verifications=jnp.full(B, 5, jnp.int32),
        drafted=jnp.zeros((B, 0), jnp.int32),
        accepted=jnp.zeros((B, 0), jnp.int32),
        group=jnp.zeros(B, jnp.int32),
        sequence=jnp.zeros(B, jnp.int32),
        lookup_cache=None,
        cache=(),
        pool=None,
        held=None,
        sampling=None,
    )
    verified = Verified(jnp.array(new, jnp.int32), jnp.array(count, jnp.int32) - 1, jnp.array(new_logprobs))
    place = np.arange(1, Q + 1)
    positions = jnp.array(np.where(place < count[:, None], place, 0), jnp.int8)
    out = jax.jit(commit, static_argnums=2)(slots, verified, eos_ids, positions)
    for b in range(B):
        by_hand = commit_by_hand(
            tokens, logprobs, b, length[b], limit[b], done[b], count[b], new[b], new_logprobs[b], eos_ids
        )
        columns = [x[b].tolist() for x in (out.tokens, out.logprobs, out.draft_positions)]
        assert (*columns, int(out.length[b]), bool(out.done[b])) == by_hand
    np.testing.assert_array_equal(out.verifications, np.where(done, 5, 6))


# --- speculation


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 5])
def test_greedy_speculation_equals_greedy_plain_decoding(greedy, k):
    """Token for token, also where a block runs over an end-of-text, the limit, or the end of the cache."""
    prompts, _, plain = greedy
    drafter = toys.toy_drafter(DRAFT_TABLE, k, temperature=0)
    out = engine(Sampling(0.0), drafter, num_slots=32).generate(TABLE, prompts, samples=1, seed=0)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    np.testing.assert_array_equal(out.length, plain.length)
    np.testing.assert_array_equal(out.ended, plain.ended)
    np.testing.assert_allclose(out.logprobs, plain.logprobs, rtol=0, atol=2e-6)
    # Some drafts were right: fewer forwards than tokens, and no row with fewer than it could have.
    assert out.verifications.sum() < plain.verifications.sum()
    assert (out.verifications * (k + 1) >= out.response_length).all()


@pytest.mark.slow
def test_a_perfect_draft_is_always_accepted():
    """Drafts of the target itself: blocks of k + 1 tokens until the end, one forward each."""
    table = toys.make_table(seed=0, V=V)
    table[:] = table[0]  # the last token alone decides, so the toy drafter can know it all
    table[:, :, EOS] = -50
    drafter = toys.toy_drafter(table[0], k=2, temperature=1.0)
    out = engine(Sampling(), drafter, max_response_tokens=9).generate(table, PROMPTS, samples=2, seed=0)
    assert out.response_length.tolist() == [9] * 10
    assert out.verifications.tolist() == [3] * 10


@pytest.mark.slow
def test_speculative_rollouts_do_not_depend_on_slots_or_chunks():
    drafter = toys.toy_drafter(DRAFT_TABLE, k=2, temperature=0.8)
    wanted = engine(Sampling(0.8), drafter).generate(TABLE, PROMPTS, samples=2, seed=3)
    out = engine(Sampling(0.8), drafter, num_slots=3, chunk=1).generate(TABLE, PROMPTS, samples=2, seed=3)
    assert_same_rollouts(out, wanted)
    np.testing.assert_array_equal(out.verifications, wanted.verifications)


# --- speculation with a drafter that has a state

# Neither sorted nor dense; never proposed is the end-of-text, or a token that is none.
VOCAB_MAP = jnp.array([2, 0], jnp.int32)
WITH_EOS = jnp.array([EOS, 1, 0], jnp.int32)
# Right often enough for blocks of every size, wrong often enough to leave wrong tokens in the drafter's buffer.
NEARLY = TABLE + toys.make_table(seed=5, V=V, scale=0.7)
ENDLESS = TABLE - 50 * np.eye(V, dtype=np.float32)[EOS]
LENGTHS = (3, 0, 0, 3, 1, 0, 2, 3, 2, 2, 0, 1, 3)


def stateful(drafter, sampling=Sampling(0.0), **sizes):  # noqa: B008 (frozen)
    return toys.stateful_engine(limits(**sizes), sampling, (EOS,), drafter, PAD)


def changing(lengths=LENGTHS):
    """Cycle through draft lengths; return the policy and the list of its choices."""
    chosen = []

    def choose(running):
        chosen.append(lengths[len(chosen) % len(lengths)])
        return chosen[-1]

    return toys.Choosing(choose, lengths[0]), chosen


@pytest.mark.slow
@pytest.mark.parametrize("temperature, eos", [(1.0, None), (0.6, 2)], ids=["no end", "may end"])
@pytest.mark.parametrize("lengths", [(2,), (2, 0, 1, 2)], ids=str)
def test_the_joint_distribution_with_a_draft_of_the_whole_prefix_on_a_reduced_vocabulary_is_the_targets(
    temperature, eos, lengths
):
    """Two of three tokens are drafted, by what came before. 81 outcomes, 2**17 rollouts, 1e-6 at 0.0165 against 0.033.

    One draft length throughout, and one that changes after every iteration.
    """
    table, N = toys.make_table(seed=4, V=3), 2**17
    drafter = toys.stateful_drafter(toys.make_table(seed=6, V=3, out=2), 2, temperature, VOCAB_MAP)
    sizes = limits(num_slots=N, max_prompt_tokens=2, max_response_tokens=4, chunk=1)
    eos_ids = (99,) if eos is None else (eos,)
    run = toys.stateful_engine(sizes, Sampling(temperature), eos_ids, drafter)
    rollouts = run.generate(table, [[1, 0]], N, seed=6, lengths=changing(lengths)[0])
    # Drafts were kept and drafts were not, at both places.
    drafted, accepted = rollouts.drafted.sum(axis=0), rollouts.accepted.sum(axis=0)
    assert (accepted > 0).all() and (accepted < drafted).all()
    distribution = response_distribution(table, [1, 0], 4, eos, Sampling(temperature))
    assert_drawn_from(observed(rollouts, 4, eos, 3), distribution, at_most=0.0165)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths, vocab_map", [((1,), None), ((3,), None), (LENGTHS, None), (LENGTHS, WITH_EOS)], ids=str
)
def test_greedy_speculation_with_a_state_equals_greedy_plain_decoding(greedy, lengths, vocab_map):
    """Token for token, with the same cut at an end-of-text inside a block and at the limit."""
    prompts, *_ = greedy
    seldom = -1.5 * np.eye(V, dtype=np.float32)[EOS]
    table, draft_table = TABLE + seldom, NEARLY + seldom
    if vocab_map is not None:
        draft_table = draft_table[:, :, np.asarray(vocab_map)]
    plain = engine(Sampling(0.0), num_slots=32).generate(table, prompts, samples=1, seed=0)
    drafter = toys.stateful_drafter(draft_table, max(lengths), temperature=0, vocab_map=vocab_map)
    run = stateful(drafter, num_slots=32, chunk=1)
    out = run.generate(table, prompts, samples=1, seed=0, lengths=changing(lengths)[0])
    for name in ("tokens", "length", "ended"):
        np.testing.assert_array_equal(getattr(out, name), getattr(plain, name))
    np.testing.assert_allclose(out.logprobs, plain.logprobs, rtol=0, atol=2e-6)
    # Each verification adds a token to those it accepted: fewer in the response were cut off.
    cut = out.accepted.sum(axis=1) + out.verifications > out.response_length
    assert cut[out.ended].any(), "no end-of-text inside a block"
    assert cut[~out.ended].any(), "no limit inside a block"


@pytest.mark.slow
@pytest.mark.parametrize("rule", long_but(["rejection"], ["rejection", "block", "coupled"]))
def test_a_greedy_rollout_of_each_prompt_beside_its_samples(rule):
    """It is that of plain Python, whatever is drafted, and changes no sample."""
    drafter, sampling = toys.stateful_drafter(NEARLY, 2, None, rule=rule), Sampling(0.8, 3, rule=rule)
    run = toys.stateful_engine(limits(num_slots=7), sampling, (EOS,), drafter, PAD, lengths=(2,))
    engines = run, run.sampled_as(sampling, run.response_tokens, greedy=True)
    alone, both = (
        engine.generate(TABLE, PROMPTS, samples=2, seed=3, options=CallOptions(first_id=70)) for engine in engines
    )
    greedily = np.arange(15) % 3 == 2
    assert_same_rollouts(both.take(~greedily), alone)
    by_hand = [greedy_by_hand(TABLE, prompt, longest=8)[0] for prompt in PROMPTS]
    assert responses(both.take(greedily)) == dict(enumerate(by_hand, start=80))


@pytest.mark.slow
def test_drafts_after_any_pause_or_change_of_length_are_those_of_a_state_made_anew():
    """Blocks longer than the next draft's window, tokens that k = 0 went past, waves that begin without drafting."""
    found = []
    for make in (toys.stateful_drafter, toys.rebuilding_drafter):
        choose, _ = changing()
        run = stateful(make(NEARLY, 3, 0.8), Sampling(0.8), num_slots=4, chunk=2, max_response_tokens=24)
        found.append(run.generate(ENDLESS, PROMPTS, samples=2, seed=3, lengths=choose))
    state, anew = found
    assert responses(state) == responses(anew)
    for name in ("verifications", "drafted", "accepted"):
        np.testing.assert_array_equal(getattr(state, name), getattr(anew, name))
    # Every place was drafted, kept and rejected.
    drafted, accepted = state.drafted.sum(axis=0), state.accepted.sum(axis=0)
    assert (accepted > 0).all() and (accepted < drafted).all()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_perfect_draft_with_a_state_is_always_accepted_whatever_the_lengths(temperature):
    """It is perfect only while its state holds every token, those of the iterations that drafted nothing too."""
    drafter = toys.stateful_drafter(ENDLESS, 3, temperature)
    choose, chosen = changing()
    run = stateful(drafter, Sampling(temperature), chunk=1, max_response_tokens=30)
    out = run.generate(ENDLESS, PROMPTS, samples=2, seed=0, lengths=choose)
    np.testing.assert_array_equal(out.accepted, out.drafted)
    # Rows go in step: each iteration commits its k + 1 tokens, the last one is cut at the limit.
    count = np.searchsorted(np.cumsum(np.array(chosen) + 1), 30) + 1
    assert out.verifications.tolist() == [count] * 10
    assert out.drafted.tolist() == [[sum(k > i for k in chosen[:count]) for i in range(3)]] * 10


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(3,), (0, 3), (3, 3, 0, 0), (3, 1), (1, 3, 0, 2)], ids=str)
def test_a_drafters_cache_is_updated_only_after_missed_tokens(lengths, monkeypatch):
    """After k = 0, and after blocks that may be longer than the next draft's window."""
    run = stateful(toys.stateful_drafter(NEARLY, 3, 0), chunk=1, max_response_tokens=20)
    chunks, synced, inner = [], [], run.compiled.decode

    def spy(params, slots, k, inputs):
        # A call of its own, without iterations, before the chunk that needs it.
        assert inputs.sync_cache == (inputs.max_iterations == 0)
        if inputs.sync_cache:
            synced.append(len(chunks))
        else:
            chunks.append(k)
        return inner(params, slots, k, inputs=inputs)

    monkeypatch.setattr(run.compiled, "decode", spy)
    choose, chosen = changing(lengths)
    run.generate(ENDLESS, PROMPTS, samples=2, seed=0, lengths=choose)
    missed = [after > 0 and (before == 0 or after < before) for before, after in itertools.pairwise(chosen)]
    assert synced == [1 + i for i, after_gap in enumerate(missed) if after_gap]
    assert chunks == chosen
    assert any(missed) or lengths == (3,)


@pytest.mark.slow
def test_where_nothing_is_drafted_no_drafter_is_called(greedy):
    def called(*_):
        pytest.fail("the drafter was called")

    prompts, _, plain = greedy
    for drafter, choose in (
        (toys.Drafter(0, called, called), None),
        (toys.Drafter(3, called, lambda params, text, cache: cache), toys.Choosing(lambda running: 0)),
    ):
        run = stateful(drafter, num_slots=32)
        out = run.generate(TABLE, prompts, samples=1, seed=0, lengths=choose)
        np.testing.assert_array_equal(out.tokens, plain.tokens)
        assert out.drafted.shape == (len(prompts), drafter.length) and not out.drafted.any()


@pytest.mark.slow
def test_the_length_is_chosen_by_the_rows_still_running():
    seen = []
    run = stateful(toys.stateful_drafter(NEARLY, 2, 1.0), Sampling(), num_slots=10, chunk=1)
    choose = toys.Choosing(lambda running: seen.append(running) or 1)
    out = run.generate(TABLE, PROMPTS, samples=2, seed=0, lengths=choose)
    # One iteration a chunk: before iteration i, the rows that take part in more than i are running.
    assert seen == [int((out.verifications > i).sum()) for i in range(out.verifications.max())]
    assert len(set(seen)) > 3


# --- counters


def speculate_by_hand(prompt, k, longest):
    """(response, draft positions, verifications, drafted [k], accepted [k]) of greedy speculation, in plain Python."""
    tokens, positions, drafted, accepted, verifications = list(prompt), [], [0] * k, [0] * k, 0
    while len(tokens) < len(prompt) + longest and EOS not in tokens[len(prompt) :]:
        verifications += 1
        ahead, kept = list(tokens), 0
        for i in range(k):
            best = int(toys.logits_after(TABLE, ahead).argmax())
            ahead.append(int(toys.logits_after(NEARLY, ahead).argmax()))
            kept += kept == i and ahead[-1] == best
            drafted[i] += 1
            accepted[i] += kept > i
        ahead = ahead[: len(tokens) + kept]
        ahead.append(int(toys.logits_after(TABLE, ahead).argmax()))
        new = ahead[len(tokens) : len(prompt) + longest]
        new = new[: new.index(EOS) + 1] if EOS in new else new
        tokens += new
        positions += [*range(1, kept + 1), 0][: len(new)]
    return tokens[len(prompt) :], positions, verifications, drafted, accepted


@pytest.mark.parametrize("chunk", [1, 100])
def test_counters_equal_a_plain_loop_over_each_row_alone(greedy, chunk):
    """Rows end at different times: what goes on in those that are done is counted nowhere. Drafts count uncut."""
    prompts, _, _ = greedy
    run = stateful(toys.stateful_drafter(NEARLY, 3, 0), num_slots=32, chunk=chunk)
    out = run.generate(TABLE, prompts, samples=1, seed=0)
    by_hand = [speculate_by_hand(prompt, 3, longest=8) for prompt in prompts]
    assert list(responses(out).values()) == [tokens for tokens, *_ in by_hand]
    found = [out.draft_positions[row, out.response_part(row)].tolist() for row in range(len(prompts))]
    assert found == [positions for _, positions, *_ in by_hand]
    assert_positions_add_up(out)
    assert out.verifications.tolist() == [count for _, _, count, _, _ in by_hand]
    assert out.drafted.tolist() == [drafted for *_, drafted, _ in by_hand]
    assert out.accepted.tolist() == [accepted for *_, accepted in by_hand]
    acceptance_length = sum(len(tokens) for tokens, *_ in by_hand) / sum(count for _, _, count, _, _ in by_hand)
    assert out.response_length.sum() / out.verifications.sum() == acceptance_length
    assert 1 < acceptance_length < 4 and len(set(out.verifications.tolist())) > 2


def test_every_rollout_carries_the_version_of_its_weights():
    version = WeightsVersion(weights_version=7, draft_version=5, checksum=2**32 - 1)
    out = engine(num_slots=4).generate(
        TABLE, PROMPTS, samples=2, seed=0, options=CallOptions(continuation=Continuation(version))
    )
    for name, value in version._asdict().items():
        assert getattr(out, name).tolist() == [value] * 10


@pytest.mark.slow
@pytest.mark.parametrize("k", [-1, 3])
def test_a_length_that_the_drafter_does_not_have_is_refused(k):
    run = engine(drafter=toys.toy_drafter(DRAFT_TABLE, k=2, temperature=1.0))
    with pytest.raises(ValueError, match=rf"no program .* k={k}.* \(0, 1, 2\)"):
        run.generate(TABLE, PROMPTS, samples=1, seed=0, lengths=toys.Choosing(lambda running: k))


# --- engines that sample otherwise by the same programs


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("truncated", [{}, {"top_k": 4}], ids=["whole", "truncated"])
def test_another_temperature_compiles_nothing_and_draws_what_an_engine_of_its_own_draws(rule, truncated):
    """Of the same noise, to the last bit; with top-k up to the engine's and with top-p. Greedy rows too."""
    drafter = toys.stateful_drafter(toys.make_table(6, V), 3, None, rule=rule)
    config, prompts = EngineConfig(6, 3, 8, chunk=4), [[1, 2], [3], [2, 5]]

    def engine(sampling):
        own = toys.stateful_drafter(toys.make_table(6, V), 3, sampling.temperature, rule=rule)
        return toys.stateful_engine(config, sampling, (99,), own)

    others = [Sampling(0.5, rule=rule, **truncated), Sampling(0.0, rule=rule)]
    if truncated:
        others.append(Sampling(1.0, 2, 0.7, rule=rule))
    shared = toys.stateful_engine(config, Sampling(1.0, rule=rule, **truncated), (99,), drafter)
    shared.generate(TABLE, prompts, 2, seed=7)
    for other in others:
        with compilations() as seen:
            found = shared.sampled_as(other, response_tokens=5).generate(TABLE, prompts, 2, seed=7)
        assert seen == [] and found.response_length.max() <= 5
        alone = engine(other).generate(TABLE, prompts, 2, seed=7, options=CallOptions(responses=[5] * 6))
        np.testing.assert_array_equal(found.tokens, alone.tokens)
        np.testing.assert_array_equal(found.logprobs, alone.logprobs)


@pytest.mark.parametrize(
    ("other", "can"),
    [
        (Sampling(0.3), (True, False)),
        (Sampling(0.0), (True, True)),
        (Sampling(1.0, 3, 0.5), (False, True)),
        (Sampling(1.0, 5), (False, False)),
        (Sampling(1.0, rule="block"), (False, False)),
    ],
)
def test_which_samplings_share_programs(other, can):
    assert (shares(Sampling(), other), shares(Sampling(1.0, 4), other)) == can
