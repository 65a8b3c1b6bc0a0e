"""The event model against a loop over single tokens and hand computation; bounds on speculation."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from experiments.simulator.cost import DecoderCost
from experiments.simulator.hardware import HARDWARE
from experiments.simulator.heads import head_config
from experiments.simulator.lengths import LogNormalLengths, sample
from experiments.simulator.rollout import (
    LENGTHS,
    Drafting,
    EngineSchedule,
    cumulative_acceptance,
    position_acceptance,
    profile,
    run,
    run_steady,
)
from specrl_jax.errors import InputError
from specrl_jax.models.decoder import PRESETS
from tests.experiments.simulator.cases import NANO, ideal

DENSE = PRESETS["qwen3_8b"]
DECODER = DecoderCost(DENSE, head_config(DENSE, 32_000), HARDWARE["gb200"])
AT_ONCE = EngineSchedule()


def drafting(k, acceptance):
    return Drafting(
        np.array([[float(k)]]), cumulative_acceptance(np.array([[float(acceptance)]]), k if k >= 0 else LENGTHS[-1])
    )


def one_by_one(lengths, slots, prompt, cost):
    """Seconds of a rollout phase, a token of every running row at a time."""
    waiting, running, seconds = list(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([waiting.pop(0), 0])
        seconds += cost(len(running), prompt + np.mean([done for _, done in running]))
        for row in running:
            row[1] += 1
        running = [row for row in running if row[1] < row[0]]
    return seconds


# ---- lengths


@pytest.mark.parametrize("mean, spread", [(500, 0.8), (3000, 0.8), (7000, 0.5), (7900, 1.1), (100, 1.5)])
def test_lengths_have_the_mean_that_is_asked_for(mean, spread):
    drawn = LogNormalLengths(mean, 8000, spread).quantile((np.arange(100_000) + 0.5) / 100_000)
    assert drawn.mean() == pytest.approx(mean, rel=2e-3) and drawn.max() <= 8000 and drawn.min() >= 1


def test_the_tail_grows_with_the_spread():
    tails = [LogNormalLengths(1000, 10_000, s).quantile(np.array(0.99)) for s in (0.0, 0.3, 0.8, 1.1)]
    assert tails == sorted(tails) and tails[0] == 1000


@pytest.mark.parametrize("mean", [0, 8001])
def test_a_mean_beyond_the_limit_is_refused(mean):
    with pytest.raises(InputError, match="mean_tokens"):
        LogNormalLengths(mean, 8000)


def test_a_replica_gets_the_longest_of_all():
    alone, one_of_many = sample(LogNormalLengths(1000, 1e6), 16, 16), sample(LogNormalLengths(1000, 1e6), 16, 1024)
    assert one_of_many.max() == LogNormalLengths(1000, 1e6).quantile(1 - 0.5 / 1024) > alone.max()
    assert sorted(one_of_many)[:-1] == sorted(alone)[:-1]


# ---- who runs when


def test_two_responses_by_hand():
    """2 and 4 tokens: two rows for two tokens, one for two more."""
    p = profile(np.array([2.0, 4.0]), 2, 10.0, schedule=AT_ONCE, tokens=1.0)
    assert p.tokens.sum() == pytest.approx(4) and p.refills == 1
    assert p.running[0, :32] == pytest.approx(2) and p.running[0, 32:] == pytest.approx(1)
    assert p.context[0, 0] == pytest.approx(10 + 2 / 64) and p.context[0, -1] == pytest.approx(14 - 2 / 64)


@hypothesis.given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    slots=st.integers(1, 12),
    refill=st.sampled_from([0.0, 0.25, 0.5]),
    chunk=st.sampled_from([0, 4]),
)
def test_every_token_runs_once(lengths, slots, refill, chunk):
    p = profile(np.array(lengths, float), slots, 0.0, schedule=EngineSchedule(refill, chunk), tokens=1.5)
    assert (p.running * p.tokens).sum() == pytest.approx(sum(lengths))
    assert (p.running <= slots + 1e-9).all()
    assert p.tokens.sum() >= max(max(lengths), sum(lengths) / slots) - 1e-9


@pytest.mark.parametrize("slots", [4, 7, 24])
def test_seconds_are_those_of_a_loop_over_tokens(slots):
    """Segments take batch and context as their means: within 1 % where an iteration's cost is smooth."""
    lengths = np.round(sample(LogNormalLengths(300, 900), 24, 24))
    machine = HARDWARE["gb200"]
    decoder = DecoderCost(DENSE, None, machine)
    expected = one_by_one(lengths, slots, 50.0, lambda B, context: float(decoder.plain(B, context)))
    found = run(decoder, profile(lengths, slots, 50.0, schedule=AT_ONCE, tokens=1.0), drafting(0, 1.0))
    assert found.seconds[0, 0] == pytest.approx(expected, rel=0.01)


def test_late_refills_take_longer():
    lengths = sample(LogNormalLengths(300, 900), 64, 64)
    ends = [
        profile(lengths, 8, 0.0, schedule=EngineSchedule(share), tokens=1.0).tokens.sum() for share in (0.0, 0.5, 1.0)
    ]
    assert ends[0] < ends[1] < ends[2]
    # The end of a chunk is a synchronisation too.
    assert profile(lengths, 8, 0.0, schedule=EngineSchedule(1.0, chunk=16), tokens=2.0).tokens.sum() < ends[2]


def test_batches_take_the_compiled_sizes():
    p = profile(
        np.arange(1.0, 17.0), 16, 0.0, schedule=EngineSchedule(sizes=(0.25, 0.125), cache_length=99), tokens=1.0
    )
    assert set(np.unique(p.batch)) == {16.0, 4.0, 2.0} and (p.batch >= p.running - 1e-9).all()
    assert (p.context == 99).all()
    # While responses wait, the rows of all slots run, however few are still under way.
    late = profile(
        np.array([1.0, 1.0, 1.0, 50.0] * 2),
        4,
        0.0,
        schedule=EngineSchedule(refill_share=1.0, sizes=(0.25,)),
        tokens=1.0,
    )
    assert late.running[0, 20] == 1 and late.batch[0, 20] == 4 and late.batch[0, -1] == 1


# ---- acceptance


@hypothesis.given(k=st.integers(1, 7), r=st.floats(0.01, 0.999))
def test_position_acceptance_reproduces_the_acceptance_length(k, r):
    acceptance = sum(r**i for i in range(k + 1))
    assert position_acceptance(acceptance, k) == pytest.approx(r, abs=1e-6)
    assert 1 + cumulative_acceptance(acceptance, k)[:k].sum() == pytest.approx(acceptance)


def test_the_papers_three_lengths_have_nearly_one_position_acceptance():
    """arXiv 2604.26779, Table 4: the loss at k >= 5 is cost, not acceptance."""
    zero = [float(position_acceptance(a, k)) for k, a in ((3, 3.32), (5, 4.35), (7, 5.06))]
    assert max(zero) - min(zero) < 0.04


def test_jitter_is_the_standard_deviation_of_the_number_of_verifications():
    """4,000 responses of 60 tokens, drafts kept independently: within 6 %, of which rounding up is a part."""
    rng, k, tokens = np.random.default_rng(0), 3, 60
    d = drafting(k, 2.8)
    r = float(position_acceptance(2.8, k))
    counts = []
    for _ in range(4000):
        left, verifications = tokens, 0
        while left > 0:
            left -= 1 + int(np.cumprod(rng.random(k) < r).sum())
            verifications += 1
        counts.append(verifications)
    assert float(d.jitter(tokens)[0, 0]) == pytest.approx(np.std(counts) / np.mean(counts), rel=0.06)


# ---- seconds


def test_plain_decoding_by_hand():
    """One row that is bound by arithmetic alone: the forward's operations at every context."""
    decoder = DecoderCost(NANO, None, ideal(flops=1e9))
    found = run(decoder, profile(np.array([100.0]), 1, 20.0, schedule=AT_ONCE, tokens=1.0), drafting(0, 1.0))
    expected = sum(float(decoder.plain(1, 20 + t)) for t in np.arange(100) + 0.5)
    assert found.seconds[0, 0] == pytest.approx(expected) and found.iterations[0, 0] == pytest.approx(100)


CASE = {
    "count": st.integers(1, 64),
    "slots": st.integers(1, 64),
    "k": st.integers(1, 7),
    "kept": st.floats(0.0, 1.0),
    "spread": st.sampled_from([0.0, 0.5, 1.0]),
    "machine": st.sampled_from(["gb200", "h100", "tpu_v6e"]),
}


@hypothesis.given(**CASE)
def test_no_speedup_above_the_acceptance_length(count, slots, k, kept, spread, machine):
    acceptance = 1 + kept * k
    decoder = DecoderCost(DENSE, head_config(DENSE, 32_000), HARDWARE[machine])
    p = profile(sample(LogNormalLengths(2000, 8000, spread), count, count), slots, 100.0, schedule=AT_ONCE, tokens=1.0)
    plain, fast = (run(decoder, p, drafting(*x)).seconds[0, 0] for x in ((0, 1.0), (k, acceptance)))
    assert plain / fast <= acceptance


@hypothesis.given(**CASE)
def test_adaptive_is_no_slower_than_any_length(count, slots, k, kept, spread, machine):
    decoder = DecoderCost(DENSE, head_config(DENSE, 32_000), HARDWARE[machine])
    p = profile(sample(LogNormalLengths(2000, 8000, spread), count, count), slots, 100.0, schedule=AT_ONCE, tokens=1.0)
    accepted = cumulative_acceptance(np.array([[1 + 7 * kept]]), 7)
    adaptive = run(decoder, p, Drafting(np.array([[-1.0]]), accepted))
    fixed = [run(decoder, p, Drafting(np.array([[float(j)]]), accepted)).seconds[0, 0] for j in LENGTHS]
    assert adaptive.seconds[0, 0] <= min(fixed) * (1 + 1e-9)
    assert 0 <= adaptive.length[0, 0] < 7 + 1e-9 and 0 <= adaptive.tail[0, 0] < 1 + 1e-9


def test_the_best_length_grows_as_the_batch_thins():
    """Where verification is bound by arithmetic at a full batch, and by memory at the end."""
    decoder = DecoderCost(DENSE, head_config(DENSE, 32_000), HARDWARE["tpu_v6e"])
    accepted = cumulative_acceptance(np.array([[4.0]]), 7)
    alone, full = (
        run(
            decoder,
            profile(np.full(n, 500.0), n, 10.0, schedule=AT_ONCE, tokens=1.0),
            Drafting(np.array([[-1.0]]), accepted),
        )
        for n in (1, 512)
    )
    assert alone.length[0, 0] > full.length[0, 0]


def test_without_gaps_a_batch_takes_its_share_of_a_full_device():
    """All equally long, as many as fit: batches in a row take what one takes alone."""
    lengths, each = LogNormalLengths(1000, 8000, 0.0), np.array([[32.0]])
    steady = run_steady(DECODER, lengths, 100.0, each=each, most=each, drafting=drafting(0, 1.0))
    alone = run(DECODER, profile(np.full(32, 1000.0), 32, 100.0, schedule=AT_ONCE, tokens=1.0), drafting(0, 1.0))
    assert steady.seconds[0, -1] == pytest.approx(alone.seconds[0, 0], rel=1e-3)
    assert steady.delay[0, -1] == pytest.approx(alone.seconds[0, 0], rel=1e-3)


def test_more_at_once_is_more_throughput_and_more_delay():
    steady = run_steady(
        DECODER,
        LogNormalLengths(1000, 8000),
        100.0,
        each=np.array([[32.0]]),
        most=np.array([[128.0]]),
        drafting=drafting(3, 2.5),
    )
    assert (np.diff(steady.seconds) < 0).all() and (np.diff(steady.delay) > 0).all()
