"""Replay of lookup drafts after plain decoding: its drafts, its counts, and the controller's use of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.verify.op import Draft
from specrl_jax.decoding.batch import ActiveBatch
from specrl_jax.decoding.controller import Controller
from specrl_jax.decoding.draft_lengths import Choice
from specrl_jax.decoding.replay import replay
from specrl_jax.decoding.requests import Requests
from specrl_jax.decoding.rollouts import DecodeChunk
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.scheduler import Scheduler
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts.lookup.lookup_draft import lookup_drafter
from tests.drafts.lookup.test_lookup import make_slots
from tests.helpers import toys

TABLE = toys.make_table(seed=0, V=4, scale=2.0)
PROMPTS = [[1, 2], [2], [1, 1, 2, 0]]
SAMPLES, K, CHUNK = 4, 3, 8


def engine(drafter, groups=0):
    limits = EngineConfig(6, 4, 16, chunk=CHUNK, groups=groups, sequences=SAMPLES if groups else 0)
    return toys.toy_engine(limits, Sampling(1.0), (3,), 0, drafter)


def copied(drafter, slots):
    return np.asarray(drafter.draft(None, slots, jnp.uint32(0), K)[0].tokens)


def slots_of(texts, length):
    tokens = np.array([[int(c) for c in text] for text in texts], np.int32)
    zeros = np.zeros(len(texts), np.int32)
    return make_slots(tokens, np.array(length, np.int32), zeros, zeros, None)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [0, 2], ids=["ngram", "suffix"])
def test_every_replayed_draft_is_the_draft_of_that_moment(groups):
    """At every iteration of a chunk, with the siblings' texts at their length then."""
    drafter = lookup_drafter(K, 1, 4)
    engine_ = engine(drafter, groups)

    def slots_after(*chunks):
        batch = ActiveBatch(engine_.compiled, TABLE, Scheduler(engine_.config, 0, Requests(PROMPTS, 2)), seed=1)
        batch.prepare()
        for n in chunks:
            batch.decode(Choice(0, n))
        return jax.tree.map(jnp.copy, batch.slots)

    before, after = slots_after(1), slots_after(1, CHUNK)
    assert (after.done & ~before.done).any() and not after.done.all(), "some rows ended"
    lengths, drafts = [], []

    def one_token_a_turn(then):
        """Nothing is ever accepted, so every moment is visited."""
        lengths.append(np.asarray(then.length))
        draft = copied(drafter, then)
        drafts.append(draft)
        return Draft(draft, None, jnp.ones(6, bool), num_drafted=jnp.zeros(6, jnp.int32))

    with jax.disable_jit():
        replay(before, after, one_token_a_turn, k=K)
    assert len(lengths) == CHUNK - K + 1
    for moment, (length, draft) in enumerate(zip(lengths, drafts)):
        then = slots_after(1, moment) if moment else before
        np.testing.assert_array_equal(length, then.length)
        np.testing.assert_array_equal(draft, copied(drafter, then))


def test_counts_are_of_verifications_after_the_first():
    """By hand, k = 3: drafts right at positions 4 and 5 of the first row only, nothing drafted in the second.

    The third did not run. From 2 nothing is kept: to 3, where nothing is: to 4, where two are: to 7, which is too near
    the end.
    """
    before = slots_of(["00123456"] * 3, [2] * 3).replace(done=jnp.array([False, False, True]))
    after = before.replace(length=jnp.array([8, 6, 8]))

    def draft(then):
        right = jnp.take_along_axis(after.tokens, then.length[:, None] + jnp.arange(3)[None], axis=1, mode="clip")
        num_drafted = jnp.where((then.length == 4) & (jnp.arange(3) != 1), 2, 0)
        return Draft(right, None, jnp.ones(3, bool), num_drafted=num_drafted)

    found = replay(before, after, draft, k=3)
    # Row 0 counts 3 and 4; row 1 counts 3 (4 has too few tokens after it).
    np.testing.assert_array_equal(found, [3, 1, 1, 0])


@pytest.mark.slow
def test_only_plain_chunks_of_replayable_drafters_are_replayed():
    drafter = lookup_drafter(K, 1, 4)
    for drafts, k, replays in (
        (drafter, 0, True),
        (drafter, 2, False),
        (dataclasses.replace(drafter, replayable=False), 0, False),
    ):
        engine_ = engine(drafts)
        batch = ActiveBatch(engine_.compiled, TABLE, Scheduler(engine_.config, 0, Requests(PROMPTS, SAMPLES)), seed=0)
        batch.prepare()
        _, statistics = batch.decode(Choice(k, None))
        assert (statistics.replayed is not None) == replays


class Recorder:
    """Always k; adds up acceptance counts, of real drafts and of replays."""

    def __init__(self, k):
        self.k, self.real, self.replayed = k, np.zeros(1 + K), np.zeros(1 + K)

    def first(self, size):
        return self.k

    def choose(self, size, running, live):
        return Choice(self.k, None)

    def observe(self, chunk, accepted):
        self.real += [chunk.verifications, *accepted]

    def replay(self, verifications, accepted):
        self.replayed += [verifications, *accepted]

    def unmeasured(self, size):
        return ()


@pytest.mark.slow
def test_replays_foretell_the_tokens_a_verification():
    """Text in which copies and surprises alternate: the mean over all positions is another number."""
    # After 0 mostly one of three letters, after those the way back to 0 is nearly certain.
    step = np.full((4, 4), -6.0, np.float32)
    step[0, :3] = 0.0
    step[1, 2] = step[2, 0] = step[3, 0] = 6.0
    table = np.broadcast_to(step, (toys.HASHES, 4, 4))
    drafter = lookup_drafter(K, 1, 4)
    limits = EngineConfig(6, 4, 64, chunk=CHUNK, groups=0, sequences=0)
    engine_ = toys.toy_engine(limits, Sampling(1.0), (), 0, drafter, lengths=(0, K))
    recorders = [Recorder(0), Recorder(K)]
    for recorder in recorders:
        engine_.generate(table, PROMPTS, 100, seed=0, lengths=recorder)
    foretold, real = recorders[0].replayed, recorders[1].real
    assert not recorders[1].replayed.any() and foretold[0] > 300
    foretold, real = (counts.sum() / counts[0] for counts in (foretold, real))
    assert 1.5 < real < K + 0.5
    assert foretold == pytest.approx(real, rel=0.05)


def test_a_controller_that_drafts_nothing_acts_on_replays(monkeypatch):
    """Without a probe: copies that were never right begin to be."""
    for budget in ("PROBE_BUDGET", "INITIAL_BUDGET"):
        monkeypatch.setattr(f"specrl_jax.decoding.controller.{budget}", 0.0)
    controller = Controller((0, 1, 3), (8,))
    for k, seconds in ((0, 1.0), (1, 1.1), (3, 1.3)):
        controller.calibrate(8, k, seconds, live=10.0)
    controller.observe(
        DecodeChunk(8, 3, 1.3, iterations=1, verifications=2000, switch_seconds=0.0, live=10.0), [0, 0, 0]
    )
    assert controller.choose(8, 8, 10.0) == Choice(0, None)
    for _ in range(100):
        controller.observe(
            DecodeChunk(8, 0, 16.0, iterations=16, verifications=128, switch_seconds=0.0, live=10.0), [0, 0, 0]
        )
        controller.replay(6.0, [4.0, 3.5, 3.0])
    assert controller.choose(8, 8, 10.0) == Choice(3, None)
