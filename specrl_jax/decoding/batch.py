"""The sequences being decoded by one call of the engine: slots on the device, and the host's view of them."""

import time
from typing import Generic, Protocol

import jax
import numpy as np

from specrl_jax.decoding.compiled import CompiledFunctions
from specrl_jax.decoding.controller import Choice
from specrl_jax.decoding.decode import chunk_inputs
from specrl_jax.decoding.rollouts import DecodeChunk, Rollouts, WeightsVersion
from specrl_jax.decoding.scheduler import FREE, Scheduler
from specrl_jax.decoding.state import Cache, ChunkStatistics, EngineConfig, Params

# Fields of a finished slot that become fields of its rollout.
_COLLECTED = (
    *("rollout_id", "tokens", "logprobs", "draft_positions", "prompt_length", "length"),
    *("verifications", "drafted", "accepted"),
)


class EngineParts(Protocol[Params, Cache]):
    """What a batch reads of its engine."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def compiled(self) -> CompiledFunctions[Params, Cache]: ...


class ActiveBatch(Generic[Params, Cache]):
    """Refills slots, runs decode chunks, collects finished rollouts."""

    def __init__(self, engine: EngineParts[Params, Cache], params: Params, scheduler: Scheduler, seed: int) -> None:
        self.scheduler = scheduler
        self.finished = 0  # rollouts
        self._engine, self._params, self._seed = engine, params, seed
        self.slots, self._carried = engine.compiled.empty(params)
        self._behind = 0.0  # most committed tokens of a row that the drafter's cache misses; inf: unknown
        self._chunks: list[DecodeChunk] = []
        self._collected: dict[str, np.ndarray] = {}
        # Per request, the ids of its sampling mask, chunk by chunk.
        self._mask_ids: list[list[np.ndarray]] = [[] for _ in range(scheduler.total)]

    @property
    def size(self) -> int:
        """B, rows of the batch."""
        return len(self.scheduler.owner)

    @property
    def live(self) -> float:
        """Tokens that a running row holds, on average."""
        return float(np.asarray(self.slots.length)[self.scheduler.owner != FREE].mean())

    def prepare(self) -> bool:
        """Refill free slots, or compact the batch if nothing waits; return whether anything runs."""
        scheduler, compiled = self.scheduler, self._engine.compiled
        while scheduler.waiting and (scheduler.owner == FREE).any():
            batch = scheduler.schedule()
            self.slots, self._carried = compiled.refill(self._params, self.slots, self._carried, batch)
        for size in compiled.sizes:
            if not scheduler.waiting and scheduler.running <= size < self.size and scheduler.running:
                self.compact_to(size)
        return scheduler.running > 0

    def compact_to(self, size: int) -> None:
        """Compact the batch to `size` rows, through every compiled size on the way."""
        compiled = self._engine.compiled
        for smaller in compiled.sizes:
            if size <= smaller < self.size:
                self.slots = compiled.compact(self._params, self.slots, self.scheduler.keep_rows(smaller))

    def decode(self, choice: Choice) -> tuple[DecodeChunk, ChunkStatistics]:
        """Run one chunk; it ends early when slots can be refilled or the batch can be compacted."""
        k, config = choice.k, self._engine.config
        running, length = self.scheduler.owner != FREE, np.asarray(self.slots.length)
        iterations = min(choice.iterations or config.chunk, config.chunk)
        switch_seconds = 0.0
        # A draft itself processes the last k + 1 committed tokens.
        if k and self._behind > k + 1:
            switch_seconds = self._timed_decode(k, iterations=0, sync_cache=True)[1]
        statistics, seconds = self._timed_decode(k, iterations, sync_cache=False)
        self._behind = k + 1 if k else float("inf")
        self._collect_mask()
        self._collect(np.flatnonzero(running & statistics.done))
        iterations, verifications = int(statistics.iterations), int(statistics.verifications)
        live = float((length + statistics.length)[running].mean()) / 2
        chunk = DecodeChunk(self.size, k, seconds, iterations, verifications, switch_seconds, live)
        self._chunks.append(chunk)
        return chunk, statistics

    def _timed_decode(self, k: int, iterations: int, sync_cache: bool) -> tuple[ChunkStatistics, float]:
        # The cost of an iteration excludes a refill or compaction that is still running.
        jax.block_until_ready((self.slots, self._carried))
        start = time.perf_counter()
        inputs = chunk_inputs(self._seed, iterations, self._stop_at_rows(), sync_cache)
        self.slots, statistics = self._engine.compiled.decode(self._params, self.slots, k, inputs)
        statistics = jax.device_get(statistics)
        return statistics, time.perf_counter() - start

    def _stop_at_rows(self) -> int:
        """Return the running rows at which a chunk ends: enough slots are free to refill, or a smaller batch fits."""
        if self.scheduler.waiting:
            return self.size - self._engine.config.refill_rows
        return next((size for size in self._engine.compiled.sizes if size < self.scheduler.running), 0)

    def _collect_mask(self) -> None:
        """Copy the ids that the chunk recorded to the host."""
        if self.slots.mask is None:
            return
        ids, used = jax.device_get((self.slots.mask.ids, self.slots.mask.used))
        for row in np.flatnonzero((self.scheduler.owner != FREE) & (used > 0)):
            self._mask_ids[self.scheduler.owner[row]].append(ids[row, : used[row]].copy())

    def _collect(self, rows: np.ndarray) -> None:
        """Copy finished rollouts to the host and free their slots."""
        if not len(rows):
            return
        on_device = {name: getattr(self.slots, name) for name in _COLLECTED}
        if self.slots.mask is not None:
            on_device["mask_count"] = self.slots.mask.count
        found = jax.device_get(on_device)
        requests = self.scheduler.finish(rows)
        for name, values in found.items():
            if name not in self._collected:
                self._collected[name] = np.zeros((self.scheduler.total, *values.shape[1:]), values.dtype)
            self._collected[name][requests] = values[rows]
        self.finished += len(rows)

    def rollouts(self, samples: int) -> Rollouts:
        """Return all rollouts, once nothing runs; `samples` per prompt."""
        collected, total = self._collected, self.scheduler.total
        mask_ids = [ids for parts in self._mask_ids for ids in parts]
        last = collected["tokens"][np.arange(total), collected["length"] - 1]
        return Rollouts(
            prompt_index=np.arange(total) // samples,
            ended=np.isin(last, self._engine.eos_ids) & (collected["length"] > collected["prompt_length"]),
            **{"mask_count": np.zeros((total, 0), np.int32)} | collected,
            mask_ids=np.concatenate(mask_ids) if mask_ids else np.zeros(0, np.int32),
            **{name: np.full(total, value) for name, value in WeightsVersion()._asdict().items()},
            chunks=tuple(self._chunks),
        )
