"""The sequences being decoded by one call of the engine: slots on the device, and the host's view of them."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Generic

import jax
import numpy as np

from specrl_jax.decoding.compiled import CompiledFunctions
from specrl_jax.decoding.continuation import Continuation
from specrl_jax.decoding.decode import chunk_inputs
from specrl_jax.decoding.draft_lengths import Choice
from specrl_jax.decoding.features.ended_turns import EndedTurns
from specrl_jax.decoding.preemption import PreemptedRow, first_columns
from specrl_jax.decoding.rollout_buffer import RolloutBuffer
from specrl_jax.decoding.rollouts import DecodeChunk, Rollouts, WeightsVersion
from specrl_jax.decoding.scheduler import FREE, Scheduler
from specrl_jax.decoding.state import Cache, ChunkStatistics, Params
from specrl_jax.decoding.turns import Turns


class ActiveBatch(Generic[Params, Cache]):
    """Refills slots, runs decode chunks, collects finished rollouts.

    Args:
      turns: environments that answer the turns of its rollouts, and `on_progress` as of `EndedTurns`.
    """

    def __init__(
        self,
        compiled: CompiledFunctions[Params, Cache],
        params: Params,
        scheduler: Scheduler,
        *,
        seed: int,
        continuation: Continuation[Params] | None = None,
        turns: Turns | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.scheduler = scheduler
        self._finished = scheduler.finished.copy()  # [requests] bool
        self.compiled, self.config, self.params, self.seed = compiled, compiled.config, params, seed
        self.slots, self._carried = compiled.empty(params)
        self.behind = 0.0  # most committed tokens of a row that the drafter's cache misses; inf: unknown
        self._chunks: list[DecodeChunk] = []
        self.buffer = RolloutBuffer(self.config, scheduler.requests.total, continuation or Continuation())
        self.counted: np.ndarray | None = None  # [D] free pages, as far as they are known
        # Pages that an iteration of a row takes at most.
        self.iteration_pages = -(-(compiled.uncommitted + 1) // self.config.page_tokens)
        self.preempted: list[PreemptedRow] = []  # the oldest first
        self.turns = EndedTurns(self, turns, on_progress)

    @property
    def is_finished(self) -> np.ndarray:
        """Return [R] bool: which of the rollouts that the call waits for are finished."""
        return self._finished[: self.scheduler.requests.asked]

    @property
    def finished(self) -> int:
        """Return how many of the rollouts that the call waits for are finished."""
        return int(self.is_finished.sum())

    @property
    def size(self) -> int:
        """Return B, the rows of the batch."""
        return len(self.scheduler.owner)

    @property
    def active(self) -> np.ndarray:
        """Return [B] bool, rows that decode: neither free nor at the end of a turn."""
        owner = self.scheduler.owner
        return (owner != FREE) & ~np.isin(owner, list(self.turns.waiting))

    @property
    def rows(self) -> np.ndarray:
        """Return the rows that have a request."""
        return np.flatnonzero(self.scheduler.owner != FREE)

    @property
    def ready(self) -> list[PreemptedRow]:
        """Return the preempted rows that only lack room, the oldest first."""
        return [preempted for preempted in self.preempted if not self.turns.holds(preempted.request)]

    @property
    def running(self) -> int:
        """Return the number of rows that decode."""
        return int(self.active.sum())

    @property
    def live(self) -> float:
        """Return the tokens that a running row holds, on average."""
        return float(self.fetch(self.slots.length)[self.active].mean())

    def prepare(self) -> bool:
        """Bring back preempted rows, refill free slots, or compact the batch; return whether anything runs."""
        while True:
            self.turns.take_answers(0.0)
            self.turns.go_on()
            while (ready := self.ready) and self._bring_back(ready[0]):
                pass
            self.turns.go_on()
            # A new request would take the pages that preempted rows wait for.
            if not self.ready:
                self._refill()
            # All that ran may have been verified to its end, and have left preempted rows behind.
            if not self.turns.wait() and (self.running or not self.ready):
                break
        self._compact()
        return self.running > 0

    def _refill(self) -> None:
        """Start as many requests as there are slots and pages for, until one of them is preempted."""
        while (batch := self.scheduler.schedule(self.free, self.iteration_pages)) is not None:
            self.slots, self._carried = self.compiled.refill(self.params, self.slots, self._carried, batch=batch)
            self.counted = None
            self._entered(batch.features, 0)
            if self.ready:
                return

    def _entered(self, states: Mapping[str, Any], length: Any) -> None:
        """Tell features of rows that have entered the slots."""
        for feature in self.config.features:
            feature.entered(self, states[feature.name], length)

    def _compact(self) -> None:
        """Compact the batch where nothing waits for its slots."""
        scheduler = self.scheduler
        all_run = scheduler.running > 0 and not (scheduler.waiting or self.preempted)
        for size in self.compiled.sizes:
            if all_run and scheduler.fits(size) and size < self.size and not self.compiled.postponed(size):
                self.compact_to(size)

    @property
    def free(self) -> np.ndarray:
        """Return [D] free pages; waits for what the device still does to them."""
        if self.counted is None:
            self.counted = np.asarray(self.fetch(self.slots.pool.count))
        return self.counted

    def fetch(self, tree: object) -> Any:
        """Return arrays on the host."""
        return self.compiled.fetch(tree)

    def run(self, kind: str, *arguments: object) -> Any:
        """Call a program of this batch size."""
        return self.compiled.run(kind, self.params, self.size, *arguments)

    def _make_room(self) -> None:
        """Preempt the youngest rows of shards whose next iteration might lack pages, until it has them."""
        scheduler, pages = self.scheduler, self.iteration_pages
        for shard in range(len(self.free)):
            while self.free[shard] < pages * (running := scheduler.running_by_shard[shard]) and running > 1:
                self.preempt(scheduler.youngest(shard))

    def preempt(self, row: int) -> None:
        """Copy a row to the host and free its pages."""
        number, run, slots = np.int32(row), self.run, self.slots
        # Asked for together: most rows have no more pages than are read at once.
        some = [run("read_pages", slots, number, first) for first in first_columns(1)]
        values, *pages = self.fetch([run("read_row", slots, number), *some])
        others = first_columns(int(values.held.count))[1:]
        pages += [self.fetch(run("read_pages", slots, number, first)) for first in others]
        self.slots = run("drop_row", slots, number)
        self.preempted.append(PreemptedRow(self.scheduler.preempt(row), values, pages))
        self.buffer.parked[self.preempted[-1].request] += 1
        self.preempted.sort(key=lambda preempted: self.scheduler.order(preempted.request))
        self.counted = None

    def _bring_back(self, preempted: PreemptedRow) -> bool:
        """Put a preempted row into a free slot if there are pages for it and what it goes on with; return whether."""
        pages = int(preempted.row.held.count)
        needed = pages + self.turns.more_pages(preempted.request, pages)
        for shard, running in enumerate(self.scheduler.running_by_shard):
            rows = self.scheduler.free_rows(shard)
            if not len(rows) or (running and self.free[shard] < needed + self.iteration_pages * (running + 1)):
                continue
            number = np.int32(rows[0])
            self.slots = self.run("restore_row", self.slots, number, preempted.row)
            for first, contents in zip(first_columns(pages), preempted.pages):
                self.slots = self.run("write_pages", self.slots, number, first, contents)
            self.preempted = [other for other in self.preempted if other is not preempted]
            self.scheduler.assign(rows[:1], np.array([preempted.request]))
            self.counted = None
            # It may have been preempted after a chunk without drafts.
            self.behind = float("inf")
            # Only rows of a full batch have something to verify: it is compacted when none has anything left.
            self._entered(preempted.row.features, preempted.row.length)
            return True
        return False

    def compact_to(self, size: int) -> None:
        """Compact the batch to `size` rows, through every compiled size on the way."""
        for smaller in self.compiled.sizes:
            if size <= smaller < self.size:
                self.slots = self.compiled.compact(self.params, self.slots, self.scheduler.keep_rows(smaller))

    def decode(self, choice: Choice) -> tuple[DecodeChunk, ChunkStatistics]:
        """Run one chunk; it ends early when slots can be refilled or the batch can be compacted."""
        k, config = choice.k, self.config
        running, length = self.active, self.fetch(self.slots.length)
        iterations = min(choice.iterations or config.chunk, config.chunk)
        switch_seconds = 0.0
        # A draft itself processes the last k + 1 committed tokens.
        if k and self.behind > k + 1:
            switch_seconds = self._timed_decode(k, iterations=0, sync_cache=True)[1]
        statistics, seconds = self._timed_decode(k, iterations, sync_cache=False)
        self.behind = k + 1 if k else float("inf")
        finished = self.take_chunk(running, statistics)
        iterations, verifications = int(statistics.iterations), int(statistics.verifications)
        live = float((length + statistics.length)[running].mean()) / 2
        chunk = DecodeChunk(
            self.size,
            k,
            seconds,
            iterations=iterations,
            verifications=verifications,
            switch_seconds=switch_seconds,
            live=live,
            tokens=int((statistics.length - length)[running].sum()),
            finished=len(finished),
        )
        if iterations:
            self._chunks.append(chunk)
        return chunk, statistics

    def take_chunk(self, running: np.ndarray, statistics: Any) -> np.ndarray:
        """Take what a chunk of rows `running` [B] bool has left; return the rows that have ended."""
        self.counted = np.asarray(statistics.free)
        for feature in self.config.features:
            feature.after_chunk(self)
        ended = np.flatnonzero(running & statistics.done)
        self.turns.end(ended)
        if statistics.short:
            self._make_room()
        return ended

    def _timed_decode(self, k: int, iterations: int, sync_cache: bool) -> tuple[ChunkStatistics, float]:
        # The cost of an iteration excludes a refill or compaction that is still running.
        jax.block_until_ready((self.slots, self._carried))
        start = time.perf_counter()
        inputs = chunk_inputs(
            self.seed,
            iterations,
            self.config.shards,
            stop_at_rows=self.turns.stop_at_rows(),
            sync_cache=sync_cache,
        )
        self.slots, statistics = self.compiled.decode(self.params, self.slots, k, inputs=inputs)
        statistics = self.fetch(statistics)
        return statistics, time.perf_counter() - start

    def collect(self, rows: np.ndarray) -> None:
        """Copy finished rollouts to the host and free their slots."""
        if not len(rows):
            return
        self._copy(rows)
        for feature in self.config.features:
            feature.collect(self, rows)
        if any(feature.keeps_pages for feature in self.config.features):
            for row in rows:
                self.slots = self.run("drop_row", self.slots, np.int32(row))
            self.counted = None
        self._finished[self.scheduler.finish(rows)] = True

    def collect_preempted(self, request: int) -> None:
        """Take a finished rollout from the host's copy of its row."""
        row = next(preempted.row for preempted in self.preempted if preempted.request == request)
        self.preempted = [preempted for preempted in self.preempted if preempted.request != request]
        self.scheduler.settle(np.array([request]))
        self.buffer.store_row(request, row)
        self._finished[request] = True

    def _copy(self, rows: np.ndarray) -> None:
        """Copy the rollouts of some rows to the host."""
        fields = self.fetch(self.buffer.fields(self.slots))
        self.buffer.store(self.scheduler.owner[rows], {name: values[rows] for name, values in fields.items()})

    def take_weights(self, params: Params, version: WeightsVersion) -> None:
        """Go on with other weights; keys and values of earlier tokens stay those of the weights that made them."""
        self.params = params
        self.buffer.drawn_by(version.weights_version, self._lengths())

    def _lengths(self) -> dict[int, int]:
        """Return the committed tokens of the requests that are not finished; 0 of those that have not begun."""
        lengths = dict.fromkeys(np.flatnonzero(~self._finished).tolist(), 0)
        length = self.fetch(self.slots.length)
        lengths |= {int(self.scheduler.owner[row]): int(length[row]) for row in self.rows}
        return lengths | {preempted.request: int(preempted.row.length) for preempted in self.preempted}

    def collect_unfinished(self) -> None:
        """Copy the rollouts that have begun, and the prompts of those that have not, to where finished ones are."""
        if len(self.rows) or not self.buffer.values:
            self._copy(self.rows)
        for request, row, _ in self.preempted:
            self.buffer.store_row(request, row)
        for request in self.buffer.not_begun():
            number = int(self.scheduler.requests.ids(np.array(request)))
            self.buffer.store_prompt(
                request, number, self.scheduler.requests.prompt(request), pad_id=self.compiled.functions.pad_id
            )

    def rollouts(self) -> Rollouts:
        """Return the rollouts that the call waits for; call `collect_unfinished` before."""
        samples, eos_ids = self.scheduler.requests.samples, self.compiled.functions.eos_ids
        return self.turns.finish(self.buffer.rollouts(self.is_finished, samples, chunks=self._chunks, eos_ids=eos_ids))

    def lookahead_texts(self) -> dict[int, np.ndarray]:
        """Return id -> int32 response so far, of rollouts that the call does not wait for; as `rollouts` does."""
        return self.buffer.responses(range(self.scheduler.requests.asked, self.scheduler.requests.total))
