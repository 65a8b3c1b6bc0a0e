"""Rows that have ended a turn: each waits for its environment and then goes on, or its rollout ends.

A waiting row keeps its pages and its slot while nothing else wants the slot. Where requests or answered rows wait for
slots, it is preempted after PATIENCE seconds: a slow environment holds no slot. Once there is an answer, its tokens are
appended and prefilled (turns.py). What a row draws depends on its own tokens and on the noise of its id alone, so
neither the order of the answers nor preemption changes a token under `coupled`.
"""

import dataclasses
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from specrl_jax.core import stand_in
from specrl_jax.decoding.compiled import CompiledFunctions
from specrl_jax.decoding.features.turns import Extension, SeveralTurns
from specrl_jax.decoding.preemption import PreemptedRow
from specrl_jax.decoding.rollout_buffer import how_ended
from specrl_jax.decoding.rollouts import Recorded, Rollouts
from specrl_jax.decoding.scheduler import FREE, Scheduler
from specrl_jax.decoding.state import EngineConfig, Slots
from specrl_jax.decoding.turns import Turn, Turns

# An environment that answers sooner than this keeps its slot: preemption and coming back take a few milliseconds.
PATIENCE = 0.02
# Seconds between two looks for an answer where nothing else is to be done, during which `on_progress` is not called.
POLL = 0.25


@dataclasses.dataclass
class _Waiting:
    """A request whose turn has ended: it waits for its environment, and then for room for the answer."""

    length: int  # tokens of prompt and response
    longest: int  # most of them, those of the environment included
    since: float  # when its environment was asked
    answer: Sequence[int] | None = None  # to be appended; None: none yet


class TurnBatch(Protocol):
    """The part of an `ActiveBatch` that its ended turns use."""

    scheduler: Scheduler
    compiled: CompiledFunctions[Any, Any]
    config: EngineConfig
    params: Any
    slots: Slots[Any]
    counted: np.ndarray | None
    iteration_pages: int
    preempted: list[PreemptedRow]

    @property
    def finished(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def active(self) -> np.ndarray: ...
    @property
    def ready(self) -> list[PreemptedRow]: ...
    @property
    def running(self) -> int: ...
    @property
    def free(self) -> np.ndarray: ...
    def fetch(self, tree: object) -> Any: ...
    def run(self, kind: str, *arguments: object) -> Any: ...
    def preempt(self, row: int) -> None: ...
    def collect(self, rows: np.ndarray) -> None: ...
    def collect_preempted(self, request: int) -> None: ...


class EndedTurns:
    """Hands ended turns to their environments, and appends the answers; without environments a rollout is one turn.

    Args:
      on_progress: called with (finished rollouts, all rollouts) while only environments are at work.
    """

    def __init__(self, batch: TurnBatch, turns: Turns | None, on_progress: Callable[[int, int], None]) -> None:
        # A circle would keep weights and pages until the garbage collector runs.
        self._batch: TurnBatch = weakref.proxy(batch)
        self._turns, self._on_progress = turns, on_progress
        self.waiting: dict[int, _Waiting] = {}  # by request; their rows hold still
        total = batch.scheduler.requests.total
        self._written: list[list[slice]] = [[] for _ in range(total)]  # of each request, by its environment
        self._prefilled = np.zeros(total, np.int32)  # behind the prompt
        self._ended = np.zeros(total, bool)  # a request's last turn, and its environment goes on no more

    def holds(self, request: int) -> bool:
        """Return whether a request waits for its environment."""
        return request in self.waiting and self.waiting[request].answer is None

    def wait(self) -> bool:
        """Wait for an environment if nothing else is to be done; return whether to look anew what can run."""
        batch = self._batch
        slots_wanted = batch.scheduler.waiting or bool(batch.ready)
        if slots_wanted and self._preempt_waiting():
            return True
        if batch.running or not self.waiting:
            return False
        self.take_answers(PATIENCE if slots_wanted else POLL)
        self._on_progress(batch.finished, batch.scheduler.requests.asked)
        return True

    def finish(self, rollouts: Rollouts) -> Rollouts:
        """Mark what environments wrote; a rollout that a limit ended has not `ended`."""
        if self._turns is None:
            return rollouts
        total = len(rollouts.length)
        for request, parts in enumerate(self._written[:total]):
            for part in parts:
                rollouts.environment[request, part] = True
        prefilled = Recorded(rollouts.prompt_length + self._prefilled[:total])
        ended = rollouts.finished & self._ended[:total]
        return dataclasses.replace(rollouts, ended=ended, features={**rollouts.features, "prefilled": prefilled})

    def end(self, rows: np.ndarray) -> None:
        """Ask the environments of rows that have ended a turn."""
        batch, slots = self._batch, self._batch.slots
        if self._turns is None or not len(rows):
            batch.collect(rows)
            return
        found = batch.fetch((slots.tokens, slots.prompt_length, slots.features[SeveralTurns.name], slots.length))
        tokens, prompts, starts, lengths = found
        most = batch.scheduler.requests.responses
        assert most is not None, "a call says how long its rollouts may be"
        eos_ids, features = batch.compiled.functions.eos_ids, batch.config.features
        eos, stopped = how_ended(tokens, starts, lengths, eos_ids=eos_ids, features=features)
        for row in rows:
            request, length = int(batch.scheduler.owner[row]), int(lengths[row])
            turn = tokens[row, starts[row] : length].copy()
            self.waiting[request] = _Waiting(length, int(prompts[row]) + most[request], time.monotonic())
            self._ended[request] = eos[row] | stopped[row]
            self._turns.ask(Turn(request, turn, bool(self._ended[request]), eos=bool(eos[row])))

    def take_answers(self, seconds: float) -> None:
        """Take the answers of environments; wait up to `seconds` for the first."""
        for request, tokens, cut in self._turns.answers(seconds) if self._turns else ():
            waiting = self.waiting[request]
            # The policy needs a token more.
            if tokens is not None and waiting.length + len(tokens) < waiting.longest:
                waiting.answer = tokens
                continue
            self._ended[request] &= tokens is None and not cut
            del self.waiting[request]
            if len(rows := np.flatnonzero(self._batch.scheduler.owner == request)):
                self._batch.collect(rows)
            else:
                self._batch.collect_preempted(request)

    def go_on(self) -> None:
        """Append answers to rows in slots, the oldest first, as far as there are pages."""
        batch, scheduler, config = self._batch, self._batch.scheduler, self._batch.config
        waits = ((request, self.waiting.get(request)) for request in scheduler.owner.tolist())
        fresh = [(request, one, one.answer) for request, one in waits if one and one.answer is not None]
        if self._turns is None or not fresh:
            return
        turn_tokens = self._turns.turn_tokens
        tokens = np.zeros((batch.size, config.cache_length), np.int32)
        count, start, limit = (np.zeros(batch.size, np.int32) for _ in range(3))
        held, per_shard = batch.fetch(batch.slots.held.count), batch.size // config.shards
        free, others = batch.free.copy(), batch.active.reshape(config.shards, -1).sum(axis=1)
        for request, waiting, answer in sorted(fresh, key=lambda one: scheduler.order(one[0])):
            rows = np.flatnonzero(scheduler.owner == request)
            if not len(rows):  # preempted for another's pages
                continue
            row, shard = rows[0], rows[0] // per_shard
            need = self.more_pages(request, held[row])
            if not others[shard]:
                free[shard] += self._make_room_for(row, shard, need - free[shard])
            elif free[shard] < need + batch.iteration_pages * (others[shard] + 1):
                continue
            free[shard], others[shard] = free[shard] - need, others[shard] + 1
            end = waiting.length + len(answer)
            tokens[row, waiting.length : end], count[row] = answer, len(answer)
            start[row] = waiting.length - 1
            limit[row] = min(end + turn_tokens, waiting.longest)
        if not count.any():
            return
        new = Extension(stand_in(tokens), stand_in(count), stand_in(start), limit=stand_in(limit))
        batch.slots = batch.run("extend", batch.params, batch.slots, new)
        batch.counted = None
        for row in np.flatnonzero(count):
            request = int(scheduler.owner[row])
            length = self.waiting.pop(request).length
            self._written[request].append(slice(length, length + count[row]))
            self._prefilled[request] += length + count[row] - 1 - start[row]

    def more_pages(self, request: int, held: int) -> int:
        """Return how many pages a request needs beside those that it holds, to go on."""
        if (waiting := self.waiting.get(request)) is None:
            return 0
        tokens = waiting.length + len(waiting.answer or ())
        return max(0, -(-tokens // self._batch.config.page_tokens) - int(held))

    def _make_room_for(self, row: int, shard: int, lacking: int) -> int:
        """Preempt other rows of a shard, the youngest first, until `lacking` pages more are free; return how many are.

        All of them wait: each would else hold the pages that another one needs.
        """
        batch, scheduler, before = self._batch, self._batch.scheduler, self._batch.free[shard]
        per_shard = batch.size // batch.config.shards
        while batch.free[shard] - before < lacking:
            rows = shard * per_shard + np.flatnonzero(scheduler.owner.reshape(-1, per_shard)[shard] != FREE)
            others = set(rows.tolist()) - {row}
            batch.preempt(max(others, key=lambda other: scheduler.order(int(scheduler.owner[other]))))
        return int(batch.free[shard] - before)

    def _preempt_waiting(self) -> bool:
        """Preempt the rows that have waited for their environments longer than PATIENCE; return whether any has."""
        begin, owner = time.monotonic() - PATIENCE, self._batch.scheduler.owner.tolist()
        rows = [row for row, one in enumerate(owner) if self.holds(one) and self.waiting[one].since <= begin]
        for row in rows:
            self._batch.preempt(row)
        return bool(rows)

    def stop_at_rows(self) -> np.ndarray:
        """Return of each shard [D] the running rows at which it stops: enough have ended a turn, or for a refill or a
        smaller batch.
        """
        batch, scheduler, config = self._batch, self._batch.scheduler, self._batch.config
        free = max(1, config.refill_rows // config.shards)
        if self._turns is not None:
            return np.maximum(0, batch.active.reshape(config.shards, -1).sum(axis=1) - free)
        running = np.asarray(scheduler.running_by_shard)
        if scheduler.waiting or batch.preempted:
            # Where pages, not slots, are what is short, fewer rows run than there are slots.
            return np.maximum(0, np.minimum(batch.size // config.shards - free, running - 1))
        smaller = next((size for size in batch.compiled.sizes if size < scheduler.running), 0)
        # A shard that would fit already goes on: it would wait for those that do not.
        return np.where(running > smaller // config.shards, smaller // config.shards, 0)
