"""Engines of several processes in lock-step: the first one's clock and signals decide, and nobody else's."""

import dataclasses
import struct

import numpy as np
import pytest

from specrl_jax.coordinator import _CODES
from specrl_jax.decoding.draft_lengths import Choice
from specrl_jax.decoding.lookahead import Lookahead
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.errors import Stopped
from tests.helpers import toys

TABLE, DRAFTS = toys.make_table(0, 4), np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)
PROMPTS = [[1, 2], [2], [1, 1, 2, 0], [0, 1, 1]]


class Messages:
    """What the first process sends, and the bytes of it."""

    def __init__(self):
        self.sent, self.bytes, self.read = [], 0, 0

    def send(self, *values):
        self.sent.append(values)
        self.bytes += struct.calcsize("<" + "".join(_CODES[type(value)] for value in values))
        return values

    def receive(self, *values):
        self.read += 1
        return self.sent[self.read - 1]


class Erratic:
    """A controller that chooses and measures by a clock of its own."""

    def __init__(self, seed):
        self.clock, self.chunks, self.new = np.random.default_rng(seed), [], True

    def first(self, size):
        return 0

    def choose(self, size, running, live):
        return Choice(int(self.clock.integers(3)), int(self.clock.integers(1, 4)))

    def observe(self, chunk, accepted):
        self.chunks.append((chunk.size, chunk.k, chunk.iterations))

    def replay(self, verifications, accepted):
        pass

    def unmeasured(self, size):
        return (0, 2) if self.new and size == 4 else ()

    def calibrate(self, size, k, seconds, live):
        self.new = False

    def calibrate_calls(self, size, seconds):
        pass


@pytest.fixture(scope="module")
def run():
    limits = EngineConfig(4, 4, 8, chunk=3, sizes=(2,), page_tokens=2, pages=16, earlier="verify")
    drafter = toys.toy_drafter(DRAFTS, 2, 1.0)
    return toys.toy_engine(limits, Sampling(rule="coupled"), (3,), 0, drafter, lengths=(0, 1, 2))


@pytest.mark.slow
def test_all_run_the_chunks_that_the_first_one_chose(run):
    messages, lengths = Messages(), [Erratic(1), Erratic(2)]
    found = [
        dataclasses.replace(run, agree=agree).generate(TABLE, PROMPTS, 3, seed=0, lengths=chooses)
        for agree, chooses in zip((messages.send, messages.receive), lengths)
    ]
    assert lengths[0].chunks == lengths[1].chunks and len({k for _, k, _ in lengths[0].chunks}) > 1
    assert messages.read == len(messages.sent)
    np.testing.assert_array_equal(found[0].tokens, found[1].tokens)


@pytest.mark.slow
def test_a_chunk_takes_about_ten_bytes(run):
    """Eight say what is drafted, one each before and after whether to stop; more where rows only wait for pages."""
    messages = Messages()
    found = dataclasses.replace(run, agree=messages.send).generate(TABLE, PROMPTS, 3, seed=0)
    chosen = [values for values in messages.sent if len(values) == 2]
    assert len(chosen) == len(found.chunks)
    assert messages.bytes == 8 * len(chosen) + len(messages.sent) - len(chosen) <= 12 * len(found.chunks)


def test_only_the_first_ones_stop_ends_a_call(run):
    def stops_after(looks, seen):
        def on_progress(done, total):
            seen.append(done)
            if len(seen) >= looks:
                raise Stopped

        return on_progress

    messages, seen = Messages(), ([], [])
    for agree, looks, of in zip((messages.send, messages.receive), (5, 2), seen):
        with pytest.raises(Stopped):
            dataclasses.replace(run, agree=agree).generate(
                TABLE, PROMPTS, 3, seed=0, on_progress=stops_after(looks, of)
            )
    assert seen[0] == seen[1] and len(seen[0]) == 5


def test_rollouts_that_begin_early_give_way_where_the_first_one_does(run):
    texts, messages = [], Messages()
    for agree, chunks in zip((messages.send, messages.receive), (2, 9)):
        asked, later = iter(range(chunks)), Lookahead(PROMPTS, np.arange(4 * 3))
        until = lambda asked=asked: next(asked, None) is None  # noqa: E731
        assert not dataclasses.replace(run, agree=agree).begin(TABLE, later, 3, seed=0, until=until)
        texts.append({number: text.tolist() for number, text in later.texts.items()})
    assert texts[0] == texts[1] and texts[0]
