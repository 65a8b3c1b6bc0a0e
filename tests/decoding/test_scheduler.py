"""The scheduler against a host that keeps book: who gets which slot, prompt and group, for any order of finishing."""

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given

from specrl_jax.decoding.history import History
from specrl_jax.decoding.programs import abstract_prefill_batch
from specrl_jax.decoding.requests import Requests
from specrl_jax.decoding.scheduler import FREE, Scheduler
from specrl_jax.decoding.state import EngineConfig

PAD = 9
PLENTY = np.array([10_000])  # free pages


def make(num_slots=4, prompts=5, samples=2, new_prompts=2, groups=3, sequences=3, history=None, first_id=70):
    """(scheduler, its limits, prompts); prompt p is p + 1 times the token p."""
    limits = EngineConfig(num_slots, 6, 4, chunk=1, new_prompts=new_prompts, groups=groups, sequences=sequences)
    texts = [[p] * (p % 6 + 1) for p in range(prompts)]
    return Scheduler(limits, PAD, Requests(texts, samples, first_id), history=history), limits, texts


class Book:
    """What a scheduler does, checked batch by batch; holds what the device would: prompts by source."""

    def __init__(self, scheduler, limits, prompts, samples, first_id=70):
        self.scheduler, self.limits, self.prompts, self.samples, self.first_id = (
            scheduler,
            limits,
            prompts,
            samples,
            first_id,
        )
        self.carried = None  # the prompt at source 0
        self.groups = {}  # group -> prompt that holds it
        self.had_group = {}  # prompt -> group, or the number of groups
        self.started, self.finished = [], []

    def schedule(self):
        before = self.scheduler.owner.copy()
        batch = self.scheduler.schedule(PLENTY)
        same = jax.tree.map(
            lambda found, wanted: (found.shape, found.dtype) == (wanted.shape, wanted.dtype),
            batch,
            abstract_prefill_batch(self.limits),
        )
        assert all(jax.tree.leaves(same))
        pool = self._pool(batch)
        rows = np.flatnonzero(batch.fresh)
        assert (before[rows] == FREE).all(), "a running slot was scheduled again"
        for row in rows:
            request = self.scheduler.owner[row]
            self.started.append(request)
            prompt = request // self.samples
            assert pool[batch.source[row]] == prompt
            assert batch.rollout_id[row] == self.first_id + request
            assert batch.group[row] == self.had_group[prompt]
            assert batch.sequence[row] == request % self.samples
        unchanged = np.setdiff1d(np.arange(len(before)), rows)
        np.testing.assert_array_equal(self.scheduler.owner[unchanged], before[unchanged])
        [carry] = batch.carried_source
        self.carried = None if carry < 0 else pool[carry]
        return batch

    def _pool(self, batch):
        """Prompts by source: the one carried over, then the new ones, each found by its tokens."""
        pool = [self.carried]
        for i in range(self.limits.prompts):
            tokens, length = batch.tokens[i], batch.length[i]
            assert (tokens[length:] == PAD).all()
            prompt = self.prompts.index(tokens[:length].tolist()) if length else None
            pool.append(prompt)
            group = batch.new_group[i]
            if prompt is None:
                assert group == self.limits.groups
                continue
            assert prompt not in self.had_group, "a prompt was prefilled twice"
            self.had_group[prompt] = group
            if group < self.limits.groups:
                assert group not in self.groups, "a group has two prompts"
                self.groups[group] = prompt
            else:
                assert len(self.groups) == self.limits.groups, "a prompt went without, though a group was free"
        return pool

    def finish(self, rows):
        requests = self.scheduler.finish(np.asarray(rows))
        self.finished += requests.tolist()
        for group, prompt in list(self.groups.items()):
            if sum(request // self.samples == prompt for request in self.finished) == self.samples:
                del self.groups[group]
        return requests

    def running(self):
        return np.flatnonzero(self.scheduler.owner != FREE)


@given(
    num_slots=st.integers(1, 7),
    prompts=st.integers(1, 6),
    samples=st.integers(1, 5),
    new_prompts=st.integers(0, 4),
    groups=st.integers(0, 4),
    seed=st.integers(0, 9),
)
def test_every_request_starts_once_in_order_with_its_own_prompt(num_slots, prompts, samples, new_prompts, groups, seed):
    """Schedule as the engine does while requests wait and slots are free; then running rows finish in any order."""
    sequences = samples + 1 if groups else 0
    scheduler, limits, texts = make(num_slots, prompts, samples, new_prompts, groups, sequences)
    book, rng = Book(scheduler, limits, texts, samples), np.random.default_rng(seed)
    assert scheduler.requests.total == prompts * samples
    while scheduler.waiting or scheduler.running:
        while scheduler.waiting and (scheduler.owner == FREE).any():
            before = len(book.started)
            book.schedule()
            assert len(book.started) > before, "a batch starts nothing, so the engine would never end"
        assert scheduler.running == min(num_slots, prompts * samples - len(book.finished))
        running = book.running()
        book.finish(rng.choice(running, rng.integers(1, len(running) + 1), replace=False))
    assert book.started == sorted(book.finished) == list(range(prompts * samples))
    assert not book.groups


def test_a_prefill_batch_takes_no_more_new_prompts_than_fit():
    """Six slots, one answer each, two prompts at once: three prefill batches; slots stay free until then."""
    scheduler, limits, texts = make(num_slots=6, prompts=6, samples=1)
    book = Book(scheduler, limits, texts, 1)
    assert [int(book.schedule().fresh.sum()) for _ in range(3)] == [2, 2, 2]
    assert not scheduler.waiting


def test_the_rest_of_a_group_comes_from_the_prompt_carried_over():
    """Four slots, six answers: the second batch prefills nothing."""
    scheduler, limits, texts = make(num_slots=4, prompts=1, samples=6)
    book = Book(scheduler, limits, texts, 6)
    first = book.schedule()
    assert (
        (first.length > 0).sum() == 1 and first.source[first.fresh].tolist() == [1] * 4 and first.carried_source == [1]
    )
    book.finish([1, 3])
    second = book.schedule()
    assert not second.length.any() and second.fresh.tolist() == [False, True, False, True]
    assert second.source[second.fresh].tolist() == [0, 0] and second.carried_source == [-1]
    assert second.sequence[second.fresh].tolist() == [4, 5]


def test_a_group_is_free_again_only_after_its_last_rollout():
    scheduler, limits, texts = make(num_slots=4, prompts=5, samples=2, new_prompts=4, groups=2)
    book = Book(scheduler, limits, texts, 2)
    book.schedule()
    assert set(book.groups.values()) == {0, 1}
    book.finish([0])
    # Prompt 2 starts while prompts 0 and 1 hold both groups: it goes without, all its life.
    batch = book.schedule()
    assert batch.group[0] == limits.groups
    book.finish([1, 0])
    batch = book.schedule()
    assert set(book.groups.values()) == {1, 3}
    assert sorted(batch.group[batch.fresh].tolist()) == sorted([limits.groups, book.had_group[3]])


def test_a_prompts_earlier_rollouts_come_after_this_calls_members_newest_first():
    history = History(per_prompt=4, max_prompts=9)
    rollouts = [np.full(length, 50 + length, np.int32) for length in (3, 5, 99)]
    history.add([1, 1], rollouts)
    scheduler, limits, _ = make(num_slots=4, prompts=2, samples=2, sequences=4, history=history)
    batch = scheduler.schedule(PLENTY)
    S = limits.cache_length
    # Two of four sequences are this call's; the newest was kept under longer limits, and the oldest has no place.
    assert batch.text_length.tolist() == [[0, 0, 0, 0], [0, 0, S, 5]]
    assert batch.texts[1, 2].tolist() == [149] * S
    assert batch.texts[1, 3].tolist() == [55] * 5 + [0] * (S - 5)
    assert not batch.texts[0].any() and not batch.texts[1, :2].any()


def test_more_samples_than_members_leave_history_no_place():
    history = History(per_prompt=4, max_prompts=9)
    history.add([0], [np.ones(3, np.int32)])
    scheduler, *_ = make(num_slots=4, prompts=1, samples=5, sequences=4, history=history)
    assert not scheduler.schedule(PLENTY).text_length.any()


def test_without_a_corpus_there_are_no_texts():
    scheduler, limits, _ = make(groups=0, sequences=0, history=History(2, 2))
    batch = scheduler.schedule(PLENTY)
    assert batch.texts is None and batch.text_length is None
    assert (batch.new_group == 0).all() and (batch.group == 0).all() and limits.groups == 0


@pytest.mark.parametrize("size", [2, 3])
def test_a_smaller_batch_keeps_the_running_rows_and_their_owners(size):
    scheduler, *_ = make(num_slots=5, prompts=5, samples=1, new_prompts=5)
    scheduler.schedule(PLENTY)
    scheduler.finish(np.array([0, 1, 3]))
    [rows] = scheduler.keep_rows(size)
    assert rows.dtype == np.int32 and rows[:2].tolist() == [2, 4]
    assert scheduler.owner.tolist() == [2, 4, FREE][:size]
    assert scheduler.finish(np.array([1])).tolist() == [4]


# --- pages


def test_rollouts_start_only_where_there_are_pages():
    """A prompt of 40 tokens has 3 pages, each rollout one of its own, and a running row may take one an iteration."""
    limits = EngineConfig(8, 48, 4, chunk=1, page_tokens=16)
    prompts = [[1] * 40, [2] * 40]
    scheduler = Scheduler(limits, PAD, Requests(prompts, 4))
    batch = scheduler.schedule(np.array([3 + 2 * 2 + 1]))
    assert batch.fresh.sum() == 2 and batch.carried_source == [1], "3 + 2 pages, and 2 for the next iteration"
    assert scheduler.schedule(np.array([3])) is None
    # The rest of the group needs no prompt; the other prompt would need 3 + 1 and an iteration of five rows.
    batch = scheduler.schedule(np.array([10]))
    assert batch.fresh.sum() == 2 and batch.source[batch.fresh].tolist() == [0, 0] and batch.carried_source == [-1]
    assert scheduler.schedule(np.array([3 + 1 + 4])) is None
    assert scheduler.schedule(np.array([3 + 1 + 5])).fresh.sum() == 1


def test_a_shard_where_nothing_runs_starts_one_whatever_the_pages():
    scheduler = Scheduler(EngineConfig(8, 48, 4, chunk=1), PAD, Requests([[1] * 40], 4))
    assert scheduler.schedule(np.array([4])).fresh.sum() == 1


def test_siblings_stay_on_one_shard_and_shards_fill_alike():
    limits = EngineConfig(8, 6, 4, chunk=1, shards=2, prefill_rows=2)
    scheduler = Scheduler(limits, PAD, Requests([[p] for p in range(4)], 3))
    batch = scheduler.schedule(np.array([100, 100]))
    assert scheduler.owner.tolist() == [0, 1, 2, 6, 3, 4, 5, 9]
    assert batch.carried_source.tolist() == [2, 2] and batch.source.tolist() == [1, 1, 1, 2] * 2
    assert batch.tokens[:, 0].tolist() == [0, 2, PAD, PAD, 1, 3, PAD, PAD]
    scheduler.finish(np.array([1, 2, 4]))
    batch = scheduler.schedule(np.array([100, 100]))
    assert scheduler.owner.tolist() == [0, 7, 8, 6, 10, 3 + 1, 5, 9] and batch.carried_source.tolist() == [-1, 0]
    assert not scheduler.fits(4) and scheduler.youngest(0) == 2
    scheduler.finish(np.array([0, 1, 3, 4, 5]))
    assert scheduler.fits(4) and scheduler.keep_rows(4).tolist() == [[2, 0], [2, 3]]
    assert scheduler.owner.tolist() == [8, FREE, 5, 9]
