"""Generates rollouts for many prompts over a fixed number of slots: continuous batching around the fused iteration.

Everything on the device happens in the few programs of `programs.py`. The host looks in between chunks only: to collect
finished rollouts, to give their slots to the next ones, to shrink the batch once nothing waits, to choose the next
draft length, to move a progress bar. k = 0 is plain autoregressive decoding through the same code.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from specrl_jax.core import InputError
from specrl_jax.decoding.compiled import ChunkStatistics, Limits, Model, Programs, Prompts
from specrl_jax.decoding.controller import Choice
from specrl_jax.decoding.history import History
from specrl_jax.decoding.rollouts import Chunk, Rollouts, WeightsVersion
from specrl_jax.decoding.scheduler import FREE, Scheduler
from specrl_jax.decoding.step import Slots

# Iterations that one calibration times, and how often: the least counts, since a pause of the machine only adds time.
CALIBRATED_ITERATIONS, CALIBRATED_ROUNDS = 4, 5


class Lengths(Protocol):
    """Chooses draft lengths; `controller.Controller` is one."""

    def choose(self, size: int, running: int) -> Choice: ...
    def observe(
        self,
        size: int,
        k: int,
        seconds: float,
        iterations: int,
        verifications: int,
        accepted: np.ndarray,
        switch_seconds: float,
    ) -> None: ...
    def replay(self, verifications: int, accepted: np.ndarray) -> None: ...
    def unmeasured(self, size: int) -> Sequence[int]: ...
    def calibrate(self, size: int, k: int, seconds: float) -> None: ...


@dataclasses.dataclass(frozen=True)
class FixedLength:
    """Always k."""

    k: int

    def choose(self, size: int, running: int) -> Choice:
        return Choice(self.k, None)

    def observe(self, *chunk: Any) -> None:
        pass

    def replay(self, verifications: int, accepted: np.ndarray) -> None:
        pass

    def unmeasured(self, size: int) -> Sequence[int]:
        return ()

    def calibrate(self, size: int, k: int, seconds: float) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Engine:
    """The programs of one (model, drafter, sampling, limits); `params` and `seed` are arguments of each call."""

    limits: Limits
    eos_ids: tuple[int, ...]
    pad_id: int
    draft_length: int  # the one used unless the call says otherwise
    programs: Programs

    def generate(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        samples: int,
        seed: int,
        first_id: int = 0,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        stamp: WeightsVersion = WeightsVersion(),  # noqa: B008 (a tuple of numbers)
        lengths: Lengths | None = None,
        history: History | None = None,
    ) -> Rollouts:
        """`samples` rollouts of each prompt; rollout i has id first_id + i, prompt-major.

        Args:
          on_progress: called between chunks with (rollouts finished, rollouts in all).
          stamp: recorded in every rollout.
          lengths: chooses the draft length of every chunk; None: always `draft_length`.
          history: rollouts of earlier calls, for drafters that copy.
        Raises:
          InputError: a prompt is empty or longer than max_prompt_tokens.
        """
        check_prompts(prompts, self.limits.max_prompt_tokens)
        if not len(prompts) * samples:
            raise InputError(f"no prompts to answer: {len(prompts)} prompts, {samples} samples of each")
        lengths = lengths or FixedLength(self.draft_length)
        self.calibrate(params, prompts, lengths, seed)
        batch = Batch(self, params, Scheduler(self.limits, self.pad_id, prompts, samples, first_id, history), seed)
        while batch.prepare():
            choice = lengths.choose(batch.size, batch.scheduler.running)
            chunk, tally = batch.run(choice)
            lengths.observe(*chunk[:5], tally.accepted, chunk.switch_seconds)
            if tally.replayed is not None:
                lengths.replay(int(tally.replayed[0]), tally.replayed[1:])
            on_progress(batch.finished, batch.scheduler.total)
        return batch.rollouts(samples, stamp)

    def calibrate(self, params: Any, prompts: Sequence[Sequence[int]], lengths: Lengths, seed: int) -> None:
        """Times an iteration of every (batch size, draft length) whose cost `lengths` does not know yet.

        On rollouts of these prompts that are thrown away: all slots run, so the times are those of a full batch.
        """
        cycled = [prompts[j % len(prompts)] for j in range(self.limits.num_slots)]
        for size in self.programs.sizes:
            unmeasured = lengths.unmeasured(size)
            timed: dict[int, list[float]] = {k: [] for k in unmeasured}
            # All lengths once a round: while the machine is busy with something else, it slows them alike.
            for i in range(1 + CALIBRATED_ROUNDS):
                for k in unmeasured:
                    batch = Batch(self, params, Scheduler(self.limits, self.pad_id, cycled, 1, 0, None), seed + i)
                    batch.prepare()
                    batch.shrink_to(size)
                    chunk, _ = batch.run(Choice(k, CALIBRATED_ITERATIONS))
                    timed[k].append(chunk.seconds / chunk.iterations)
            for k in unmeasured:
                lengths.calibrate(size, k, min(timed[k][1:]))


class Batch:
    """One call of `generate` while it goes on: the slots on the device and what the host knows of them."""

    def __init__(self, engine: Engine, params: Any, scheduler: Scheduler, seed: int) -> None:
        self.scheduler = scheduler
        self.finished = 0  # rollouts
        self._engine, self._params, self._seed = engine, params, seed
        self._programs = engine.programs
        self._slots, self._carried = self._programs.empty(params)
        self._behind = 0  # most committed tokens of a row that the drafter has not gone over; inf: unknown
        self._chunks: list[Chunk] = []
        self._kept: dict[str, np.ndarray] = {}

    @property
    def size(self) -> int:
        """B, rows of the batch."""
        return len(self.scheduler.owner)

    def prepare(self) -> bool:
        """Fills free slots, or lets go of those that will stay free; False when nothing is left to run."""
        while self.scheduler.waiting and (self.scheduler.owner == FREE).any():
            admission = self.scheduler.deal()
            self._slots, self._carried = self._programs.refill(self._params, self._slots, self._carried, admission)
        for size in self._programs.sizes:
            if not self.scheduler.waiting and self.scheduler.running <= size < self.size and self.scheduler.running:
                self.shrink_to(size)
        return self.scheduler.running > 0

    def shrink_to(self, size: int) -> None:
        """Through every compiled size on the way."""
        for smaller in self._programs.sizes:
            if size <= smaller < self.size:
                self._slots = self._programs.shrink(self._params, self._slots, self.scheduler.keep_rows(smaller))

    def run(self, choice: Choice) -> tuple[Chunk, ChunkStatistics]:
        """One chunk; it ends early where the host has something better to do with the slots."""
        k, limits = choice.k, self._engine.limits
        iterations = min(choice.iterations or limits.chunk, limits.chunk)
        switch_seconds = 0.0
        # A draft goes over the last k + 1 committed tokens by itself.
        if k and self._behind > k + 1:
            switch_seconds = self._timed_run(k, iterations=0, stale=True)[1]
        tally, seconds = self._timed_run(k, iterations, stale=False)
        self._behind = k + 1 if k else float("inf")
        self._collect(np.flatnonzero((self.scheduler.owner != FREE) & tally.done))
        chunk = Chunk(self.size, k, seconds, int(tally.iterations), int(tally.verifications), switch_seconds)
        self._chunks.append(chunk)
        return chunk, tally

    def _timed_run(self, k: int, iterations: int, stale: bool) -> tuple[ChunkStatistics, float]:
        # A refill or a shrink that is still at work is no part of what an iteration costs.
        jax.block_until_ready((self._slots, self._carried))
        start = time.perf_counter()
        self._slots, tally = self._programs.run(
            self._params, self._slots, k, self._seed, iterations, self._floor(), stale
        )
        tally = jax.device_get(tally)
        return tally, time.perf_counter() - start

    def _floor(self) -> int:
        """Rows still running at which a chunk ends: enough are free to be worth a refill, or a smaller batch fits."""
        if self.scheduler.waiting:
            return self.size - self._engine.limits.refill_rows
        return next((size for size in self._programs.sizes if size < self.scheduler.running), 0)

    def _collect(self, rows: np.ndarray) -> None:
        """Takes finished rollouts to the host and frees their slots."""
        if not len(rows):
            return
        found = jax.device_get({name: getattr(self._slots, name) for name in _KEPT})
        requests = self.scheduler.finish(rows)
        for name, values in found.items():
            if name not in self._kept:
                self._kept[name] = np.zeros((self.scheduler.total, *values.shape[1:]), values.dtype)
            self._kept[name][requests] = values[rows]
        self.finished += len(rows)

    def rollouts(self, samples: int, stamp: WeightsVersion) -> Rollouts:
        kept, total = self._kept, self.scheduler.total
        last = kept["tokens"][np.arange(total), kept["length"] - 1]
        return Rollouts(
            prompt_index=np.arange(total) // samples,
            ended=np.isin(last, self._engine.eos_ids) & (kept["length"] > kept["prompt_length"]),
            **kept,
            **{name: np.full(total, value) for name, value in stamp._asdict().items()},
            chunks=tuple(self._chunks),
        )


# What a finished slot hands to its rollout.
_KEPT = (
    "rollout_id",
    "tokens",
    "logprobs",
    "prompt_length",
    "length",
    "verifications",
    "drafted",
    "accepted",
)


def check_prompts(prompts: Sequence[Sequence[int]], longest: int) -> None:
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= longest:
            raise InputError(
                f"prompt {index} has {len(prompt)} tokens; rollout.max_prompt_tokens={longest} allows 1 to {longest}"
            )


def make_engine(
    model: Model, limits: Limits, shardings: Slots, prompt_shardings: Prompts, lengths: tuple[int, ...] | None = None
) -> Engine:
    """An engine whose programs are compiled when they are first needed, or all at once by `programs.compile_all`.

    Args:
      shardings: of the slots; they are donated from chunk to chunk and stay where they are.
      prompt_shardings: of one prefilled prompt.
      lengths: the draft lengths that a call may choose from; None: the drafter's longest only.
    """
    longest = model.drafter.length
    programs = Programs(model, limits, lengths or (longest,), shardings, prompt_shardings)
    return Engine(limits, model.eos_ids, model.pad_id, longest, programs)
