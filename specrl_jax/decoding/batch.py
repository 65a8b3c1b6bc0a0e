"""The sequences being decoded by one call of the engine: slots on the device, and the host's view of them."""

import time
from typing import Any, Generic

import jax
import numpy as np

from specrl_jax.decoding.compiled import CompiledFunctions
from specrl_jax.decoding.decode import chunk_inputs
from specrl_jax.decoding.draft_lengths import Choice
from specrl_jax.decoding.preemption import PreemptedRow, first_columns
from specrl_jax.decoding.records import joined_records, start_reading
from specrl_jax.decoding.rollout_buffer import RolloutBuffer, rollout_fields
from specrl_jax.decoding.rollouts import NO_VERSION, DecodeChunk, Rollouts, WeightsVersion
from specrl_jax.decoding.scheduler import FREE, Scheduler
from specrl_jax.decoding.state import Cache, ChunkStatistics, Params


class ActiveBatch(Generic[Params, Cache]):
    """Refills slots, runs decode chunks, collects finished rollouts."""

    def __init__(
        self,
        compiled: CompiledFunctions[Params, Cache],
        params: Params,
        scheduler: Scheduler,
        *,
        seed: int,
        version: WeightsVersion = NO_VERSION,
    ) -> None:
        self.scheduler = scheduler
        self._finished = scheduler.finished.copy()  # [requests] bool
        self.reverify_seconds = 0.0
        self._compiled, self._params, self._seed = compiled, params, seed
        self.slots, self._carried = compiled.empty(params)
        self._behind = 0.0  # most committed tokens of a row that the drafter's cache misses; inf: unknown
        self._chunks: list[DecodeChunk] = []
        first = version.weights_version if compiled.config.versions else None
        self._buffer = RolloutBuffer(scheduler.requests.total, compiled.config.cache_length, first)
        self._counted: np.ndarray | None = None  # [D] free pages, as far as they are known
        # Pages that an iteration of a row takes at most.
        self._iteration_pages = -(-(compiled.uncommitted + 1) // compiled.config.page_tokens)
        self._preempted: list[PreemptedRow] = []  # the oldest first

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
        """Return [B] bool, rows that decode."""
        return self.scheduler.owner != FREE

    @property
    def running(self) -> int:
        """Return the number of rows that decode."""
        return int(self.active.sum())

    @property
    def live(self) -> float:
        """Return the tokens that a running row holds, on average."""
        return float(self._fetch(self.slots.length)[self.active].mean())

    def prepare(self) -> bool:
        """Bring back preempted rows, refill free slots, or compact the batch; return whether anything runs."""
        while True:
            while self._preempted and self._bring_back(self._preempted[0]):
                pass
            # A new request would take the pages that preempted rows wait for.
            if not self._preempted:
                self._refill()
            # All that ran may have been verified to its end, and have left preempted rows behind.
            if self.running or not self._preempted:
                break
        self._compact()
        return self.running > 0

    def _refill(self) -> None:
        """Start as many requests as there are slots and pages for, until one of them is preempted."""
        while (batch := self.scheduler.schedule(self._free, self._iteration_pages)) is not None:
            refill = self._compiled.refill
            self.slots, self._carried = refill(self._params, self.slots, self._carried, batch=batch)
            self._counted = None
            if batch.earlier_length is not None and np.any(batch.earlier_length):
                self._reverify()
                if self._preempted:
                    return

    def _compact(self) -> None:
        """Compact the batch where nothing waits for its slots."""
        scheduler = self.scheduler
        all_run = scheduler.running > 0 and not (scheduler.waiting or self._preempted)
        for size in self._compiled.sizes:
            if all_run and scheduler.fits(size) and size < self.size and not self._compiled.postponed(size):
                self.compact_to(size)

    def _reverify(self) -> None:
        """Verify what earlier weights drew of the rows that have begun."""
        start, config, unverified = time.perf_counter(), self._compiled.config, True
        while unverified:
            inputs = chunk_inputs(self._seed, config.chunk, config.shards)
            self.slots, statistics = self._compiled.reverify(self._params, self.slots, inputs)
            statistics = self._fetch(statistics)
            self._counted, unverified = np.asarray(statistics.free), bool(statistics.unverified)
            self._collect_mask()
            self._collect(np.flatnonzero((self.scheduler.owner != FREE) & statistics.done))
            if statistics.short:
                self._make_room()
        self._behind = float("inf")  # the drafter has not seen these tokens
        self.reverify_seconds += time.perf_counter() - start

    @property
    def _free(self) -> np.ndarray:
        """Return [D] free pages; waits for what the device still does to them."""
        if self._counted is None:
            self._counted = np.asarray(self._fetch(self.slots.pool.count))
        return self._counted

    def _fetch(self, tree: object) -> Any:
        return self._compiled.fetch(tree)

    def _make_room(self) -> None:
        """Preempt the youngest rows of shards whose next iteration might lack pages, until it has them."""
        scheduler, pages = self.scheduler, self._iteration_pages
        for shard in range(len(self._free)):
            while self._free[shard] < pages * (running := scheduler.running_by_shard[shard]) and running > 1:
                self._preempt(scheduler.youngest(shard))

    def _call(self, name: str, *arguments: object) -> Any:
        return self._compiled.preempt(name, self._params, self.slots, *arguments)

    def _preempt(self, row: int, copy: bool = True) -> None:
        """Copy a row to the host and free its pages; without `copy` what they hold is lost."""
        number, call = np.int32(row), self._call
        # Asked for together: most rows have no more pages than are read at once.
        some = [call("read_pages", number, first) for first in first_columns(1) if copy]
        values, *pages = self._fetch([call("read_row", number), *some])
        others = first_columns(int(values.held.count))[1:] if copy else []
        pages += [self._fetch(call("read_pages", number, first)) for first in others]
        self.slots = call("drop_row", number)
        self._preempted.append(PreemptedRow(self.scheduler.preempt(row), values, pages))
        self._buffer.parked[self._preempted[-1].request] += 1
        self._preempted.sort(key=lambda preempted: self.scheduler.order(preempted.request))
        self._counted = None

    def _bring_back(self, preempted: PreemptedRow, more: int = 0) -> bool:
        """Put a preempted row into a free slot if there are pages for it, and `more`; return whether."""
        pages = int(preempted.row.held.count)
        for shard, running in enumerate(self.scheduler.running_by_shard):
            rows = self.scheduler.free_rows(shard)
            if not len(rows) or (running and self._free[shard] < pages + more + self._iteration_pages * (running + 1)):
                continue
            number = np.int32(rows[0])
            self.slots = self._call("restore_row", number, preempted.row)
            # No pages were copied where they are lost.
            for first, contents in zip(first_columns(pages), preempted.pages):
                self.slots = self._call("write_pages", number, first, contents)
            self._preempted = [other for other in self._preempted if other is not preempted]
            self.scheduler.assign(rows[:1], np.array([preempted.request]))
            self._counted = None
            # It may have been preempted after a chunk without drafts.
            self._behind = float("inf")
            # Only rows of a full batch: it is compacted when none has anything left to verify.
            if preempted.row.earlier is not None and preempted.row.earlier.length > preempted.row.length:
                self._reverify()
            return True
        return False

    def compact_to(self, size: int) -> None:
        """Compact the batch to `size` rows, through every compiled size on the way."""
        for smaller in self._compiled.sizes:
            if size <= smaller < self.size:
                self.slots = self._compiled.compact(self._params, self.slots, self.scheduler.keep_rows(smaller))

    def decode(self, choice: Choice) -> tuple[DecodeChunk, ChunkStatistics]:
        """Run one chunk; it ends early when slots can be refilled or the batch can be compacted."""
        k, config = choice.k, self._compiled.config
        running, length = self.active, self._fetch(self.slots.length)
        iterations = min(choice.iterations or config.chunk, config.chunk)
        switch_seconds = 0.0
        # A draft itself processes the last k + 1 committed tokens.
        if k and self._behind > k + 1:
            switch_seconds = self._timed_decode(k, iterations=0, sync_cache=True)[1]
        statistics, seconds = self._timed_decode(k, iterations, sync_cache=False)
        self._behind = k + 1 if k else float("inf")
        self._counted = np.asarray(statistics.free)
        self._collect_mask()
        finished = np.flatnonzero(running & statistics.done)
        self._end(finished)
        if statistics.short:
            self._make_room()
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

    def _timed_decode(self, k: int, iterations: int, sync_cache: bool) -> tuple[ChunkStatistics, float]:
        # The cost of an iteration excludes a refill or compaction that is still running.
        jax.block_until_ready((self.slots, self._carried))
        start = time.perf_counter()
        inputs = chunk_inputs(
            self._seed,
            iterations,
            self._compiled.config.shards,
            stop_at_rows=self._stop_at_rows(),
            sync_cache=sync_cache,
        )
        self.slots, statistics = self._compiled.decode(self._params, self.slots, k, inputs=inputs)
        statistics = self._fetch(statistics)
        return statistics, time.perf_counter() - start

    def _stop_at_rows(self) -> np.ndarray:
        """Return of each shard [D] the running rows at which it stops: enough for a refill, or for a smaller batch."""
        config, running = self._compiled.config, np.asarray(self.scheduler.running_by_shard)
        if self.scheduler.waiting or self._preempted:
            # Where pages, not slots, are what is short, fewer rows run than there are slots.
            free = max(1, config.refill_rows // config.shards)
            return np.maximum(0, np.minimum(self.size // config.shards - free, running - 1))
        smaller = next((size for size in self._compiled.sizes if size < self.scheduler.running), 0)
        # A shard that would fit already goes on: it would wait for those that do not.
        return np.where(running > smaller // config.shards, smaller // config.shards, 0)

    def _collect_mask(self) -> None:
        """Copy the ids that the chunk recorded to the host."""
        if self.slots.mask is None:
            return
        ids, used = self._fetch((self.slots.mask.ids, self.slots.mask.used))
        for row in np.flatnonzero((self.scheduler.owner != FREE) & (used > 0)):
            self._buffer.add_mask_ids(self.scheduler.owner[row], ids[row, : used[row]].copy())

    def _end(self, rows: np.ndarray) -> None:
        """Take rows that have ended."""
        self._collect(rows)

    def _collect(self, rows: np.ndarray) -> None:
        """Copy finished rollouts to the host and free their slots."""
        if not len(rows):
            return
        self._copy(rows)
        self._collect_records(rows)
        if self._compiled.config.turns:  # the device keeps the pages of rows that end
            for row in rows:
                self.slots = self._call("drop_row", np.int32(row))
            self._counted = None
        self._finished[self.scheduler.finish(rows)] = True

    def _copy(self, rows: np.ndarray) -> None:
        """Copy the rollouts of some rows to the host."""
        fields = self._fetch(rollout_fields(self.slots))
        self._buffer.store(self.scheduler.owner[rows], {name: values[rows] for name, values in fields.items()})

    def take_weights(self, params: Params, version: WeightsVersion) -> None:
        """Go on with other weights; keys and values of earlier tokens stay those of the weights that made them."""
        self._params = params
        if self._compiled.config.versions:
            self._buffer.drawn_by(version.weights_version, self._lengths())

    def _lengths(self) -> dict[int, int]:
        """Return the committed tokens of the requests that are not finished; 0 of those that have not begun."""
        lengths = dict.fromkeys(np.flatnonzero(~self._finished).tolist(), 0)
        length = self._fetch(self.slots.length)
        lengths |= {int(self.scheduler.owner[row]): int(length[row]) for row in self._running_rows()}
        return lengths | {preempted.request: int(preempted.row.length) for preempted in self._preempted}

    def _running_rows(self) -> np.ndarray:
        return np.flatnonzero(self.scheduler.owner != FREE)

    def _collect_records(self, rows: np.ndarray) -> None:
        """Copy what was recorded of finished rollouts to the host; of those that the call waits for."""
        rows = rows[self.scheduler.owner[rows] < self.scheduler.requests.asked]
        if self.slots.last_pages is None or not len(rows):
            return
        requests, config, pages = self.scheduler.owner[rows], self._compiled.config, self._fetch(self.slots.last_pages)
        shard = (rows // (self.size // config.shards)).astype(np.int32)

        def read(shard: np.ndarray, pages: np.ndarray) -> jax.Array:
            return self._compiled.read_records(self._params, self.slots, shard, pages=pages)

        length = self._buffer.values["length"][requests]
        parts = start_reading(read, shard, pages[rows], length=length, config=config)
        self._buffer.add_records(requests, joined_records(self._fetch(parts), length))

    def collect_unfinished(self) -> None:
        """Copy the rollouts that have begun, and the prompts of those that have not, to where finished ones are."""
        running = self._running_rows()
        if len(running) or not self._buffer.values:
            self._copy(running)
        for request, row, _ in self._preempted:
            self._buffer.store_row(request, row)
        for request in self._buffer.not_begun():
            number = int(self.scheduler.requests.ids(np.array(request)))
            self._buffer.store_prompt(
                request, number, self.scheduler.requests.prompt(request), pad_id=self._compiled.functions.pad_id
            )

    def rollouts(self, samples: int, version: WeightsVersion) -> Rollouts:
        """Return the rollouts that the call waits for, `samples` per prompt; call `collect_unfinished` before.

        Args:
          version: of the weights that the call began with.
        """
        functions = self._compiled.functions
        return self._buffer.rollouts(
            self.is_finished, samples, version, chunks=self._chunks, eos_ids=functions.eos_ids, stops=functions.stops
        )

    def lookahead_texts(self) -> dict[int, np.ndarray]:
        """Return id -> int32 response so far, of rollouts that the call does not wait for; as `rollouts` does."""
        return self._buffer.responses(range(self.scheduler.requests.asked, self.scheduler.requests.total))
