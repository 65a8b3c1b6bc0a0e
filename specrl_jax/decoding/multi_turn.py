"""A batch whose rollouts are conversations: a row that ends a turn waits for its environment, then goes on.

A waiting row keeps its pages and its slot while nothing else wants the slot. Where requests or answered rows wait for
slots, it is preempted after PATIENCE seconds: a slow environment holds no slot. Once there is an answer, its tokens are
appended and prefilled (extend.py). What a row draws depends on its own tokens and on the noise of its id alone, so
neither the order of the answers nor preemption changes a token under `coupled`.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from specrl_jax.core import stand_in
from specrl_jax.decoding.batch import ActiveBatch
from specrl_jax.decoding.compiled import CompiledFunctions
from specrl_jax.decoding.extend import Extension
from specrl_jax.decoding.preemption import PreemptedRow
from specrl_jax.decoding.rollout_buffer import how_ended
from specrl_jax.decoding.rollouts import Rollouts, WeightsVersion
from specrl_jax.decoding.scheduler import FREE, Scheduler
from specrl_jax.decoding.state import Cache, Params
from specrl_jax.decoding.turns import Turn, Turns

# An environment that answers sooner than this keeps its slot: preemption and coming back take a few milliseconds.
PATIENCE = 0.02
# Seconds between two looks for an answer where nothing else is to be done, during which `on_progress` is not called.
POLL = 0.25


@dataclasses.dataclass
class _Waiting:
    """A request whose turn has ended: it waits for its environment, and then for room for the answer."""

    prompt: int  # tokens
    length: int  # of prompt and response
    since: float  # when its environment was asked
    answer: Sequence[int] | None = None  # to be appended; None: none yet
    pages_lost: bool = False  # it is preempted, and its pages were not copied


class MultiTurnBatch(ActiveBatch[Params, Cache]):
    """Runs decode chunks, hands ended turns to their environments, and appends the answers.

    Args:
      on_progress: called with (finished rollouts, all rollouts) while only environments are at work.
    """

    def __init__(
        self,
        compiled: CompiledFunctions[Params, Cache],
        params: Params,
        scheduler: Scheduler,
        *,
        seed: int,
        version: WeightsVersion,
        turns: Turns,
        on_progress: Callable[[int, int], None],
    ) -> None:
        super().__init__(compiled, params, scheduler, seed=seed, version=version)
        self._turns, self._on_progress = turns, on_progress
        assert scheduler.requests.responses is not None
        self._longest = scheduler.requests.responses  # most response tokens, those of the environment included
        self._waiting: dict[int, _Waiting] = {}  # by request
        total = scheduler.requests.total
        self._written: list[list[slice]] = [[] for _ in range(total)]  # of each request, by its environment
        self._prefilled = np.zeros(total, np.int32)  # behind the prompt, or again
        self._ended = np.zeros(total, bool)  # a request's last turn, and its environment goes on no more

    @property
    def active(self) -> np.ndarray:
        """Return [B] bool, rows that decode: neither free nor waiting for an environment."""
        owner = self.scheduler.owner
        return (owner != FREE) & ~np.isin(owner, list(self._waiting))

    def prepare(self) -> bool:
        """Append answers, bring back preempted rows, refill, compact; wait for an environment if all rows wait."""
        while True:
            self._take_answers(0.0)
            self._append_answers()
            while (ready := self._ready()) and self._bring_back(ready[0], self._pages_to_add(ready[0])):
                pass
            self._append_answers()
            if not self._ready():  # a new request would take the pages that they wait for
                self._refill()
            slots_wanted = self.scheduler.waiting or bool(self._ready())
            if slots_wanted and self._preempt_waiting():
                continue
            if self.running or not self._waiting:
                break
            self._take_answers(PATIENCE if slots_wanted else POLL)
            self._on_progress(self.finished, self.scheduler.requests.asked)
        self._compact()
        return self.running > 0

    def rollouts(self, samples: int, version: WeightsVersion) -> Rollouts:
        """Return all rollouts; what their environments wrote is marked, and one that a limit ended has not `ended`."""
        rollouts = super().rollouts(samples, version)
        total = len(rollouts.length)
        for request, parts in enumerate(self._written[:total]):
            for part in parts:
                rollouts.environment[request, part] = True
        prefilled, ended = rollouts.prefilled + self._prefilled[:total], rollouts.finished & self._ended[:total]
        return dataclasses.replace(rollouts, prefilled=prefilled, ended=ended)

    def _end(self, rows: np.ndarray) -> None:
        """Ask the environments of rows that have ended a turn."""
        if not len(rows):
            return
        slots = self.slots
        found = self._fetch((slots.tokens, slots.prompt_length, slots.turn_start, slots.length))
        tokens, prompts, starts, lengths = found
        functions = self._compiled.functions
        eos, stopped = how_ended(tokens, starts, lengths, eos_ids=functions.eos_ids, stops=functions.stops)
        for row in rows:
            request, length = int(self.scheduler.owner[row]), int(lengths[row])
            turn = tokens[row, starts[row] : length].copy()
            self._waiting[request] = _Waiting(int(prompts[row]), length, time.monotonic())
            self._ended[request] = eos[row] | stopped[row]
            self._turns.ask(Turn(request, turn, bool(self._ended[request]), eos=bool(eos[row])))

    def _take_answers(self, seconds: float) -> None:
        """Take the answers of environments; wait up to `seconds` for the first."""
        for request, tokens, cut in self._turns.answers(seconds):
            waiting = self._waiting[request]
            # The policy needs a token more.
            if tokens is not None and waiting.length + len(tokens) < waiting.prompt + self._longest[request]:
                waiting.answer = tokens
                continue
            self._ended[request] &= tokens is None and not cut
            del self._waiting[request]
            self._finish(request)

    def _finish(self, request: int) -> None:
        """Collect a rollout that has ended, from its slot or from the host."""
        if len(rows := np.flatnonzero(self.scheduler.owner == request)):
            self._collect(rows)
            return
        row = next(preempted.row for preempted in self._preempted if preempted.request == request)
        self._preempted = [preempted for preempted in self._preempted if preempted.request != request]
        self.scheduler.settle(np.array([request]))
        self._buffer.store_row(request, row)
        self._finished[request] = True

    def _append_answers(self) -> None:
        """Append answers to rows in slots, the oldest first, as far as there are pages."""
        scheduler, config = self.scheduler, self._compiled.config
        waits = ((request, self._waiting.get(request)) for request in scheduler.owner.tolist())
        fresh = [(request, one, one.answer) for request, one in waits if one and one.answer is not None]
        if not fresh:
            return
        tokens = np.zeros((self.size, config.cache_length), np.int32)
        count, start, limit = (np.zeros(self.size, np.int32) for _ in range(3))
        held, per_shard = self._fetch(self.slots.held.count), self.size // config.shards
        free, others = self._free.copy(), self.active.reshape(config.shards, -1).sum(axis=1)
        for request, waiting, answer in sorted(fresh, key=lambda one: scheduler.order(one[0])):
            rows = np.flatnonzero(scheduler.owner == request)
            if not len(rows):  # preempted for another's pages
                continue
            row, shard = rows[0], rows[0] // per_shard
            need = self._more_pages(waiting, held[row])
            if not others[shard]:
                free[shard] += self._make_room_for(row, shard, need - free[shard])
            elif free[shard] < need + self._iteration_pages * (others[shard] + 1):
                continue
            free[shard], others[shard] = free[shard] - need, others[shard] + 1
            end = waiting.length + len(answer)
            tokens[row, waiting.length : end], count[row] = answer, len(answer)
            start[row] = 0 if waiting.pages_lost else waiting.length - 1
            limit[row] = min(end + self._turns.turn_tokens, waiting.prompt + self._longest[request])
        if not count.any():
            return
        new = Extension(stand_in(tokens), stand_in(count), stand_in(start), limit=stand_in(limit))
        self.slots = self._compiled.extend(self._params, self.slots, new)
        self._counted = None
        for row in np.flatnonzero(count):
            self._resume(int(scheduler.owner[row]), int(start[row]), int(count[row]))

    def _resume(self, request: int, start: int, count: int) -> None:
        """Record that a request continues after `count` tokens of its environment, prefilled from position `start`."""
        length = self._waiting.pop(request).length
        self._written[request].append(slice(length, length + count))
        self._prefilled[request] += length + count - 1 - start

    def _more_pages(self, waiting: _Waiting, held: int) -> int:
        """Return how many pages a request needs beside those that it holds, for its environment's answer."""
        tokens = waiting.length + len(waiting.answer or ())
        return max(0, -(-tokens // self._compiled.config.page_tokens) - int(held))

    def _make_room_for(self, row: int, shard: int, lacking: int) -> int:
        """Preempt other rows of a shard, the youngest first, until `lacking` pages more are free; return how many are.

        All of them wait: each would else hold the pages that another one needs.
        """
        scheduler, before = self.scheduler, self._free[shard]
        per_shard = self.size // self._compiled.config.shards
        while self._free[shard] - before < lacking:
            rows = shard * per_shard + np.flatnonzero(scheduler.owner.reshape(-1, per_shard)[shard] != FREE)
            others = set(rows.tolist()) - {row}
            self._preempt(max(others, key=lambda other: scheduler.order(int(scheduler.owner[other]))))
        return int(self._free[shard] - before)

    def _ready(self) -> list[PreemptedRow]:
        """Return the preempted rows that do not wait for an environment, the oldest first."""
        silent = {request for request, waiting in self._waiting.items() if waiting.answer is None}
        return [preempted for preempted in self._preempted if preempted.request not in silent]

    def _pages_to_add(self, preempted: PreemptedRow) -> int:
        waiting = self._waiting.get(preempted.request)
        return self._more_pages(waiting, int(preempted.row.held.count)) if waiting else 0

    def _preempt_waiting(self) -> bool:
        """Preempt the rows that have waited for their environments longer than PATIENCE; return whether any has."""
        now, any_preempted = time.monotonic(), False
        for row, request in enumerate(self.scheduler.owner):
            waiting = self._waiting.get(request)
            if waiting and waiting.answer is None and now - waiting.since >= PATIENCE:
                self._preempt(row)
                any_preempted = True
        return any_preempted

    def _preempt(self, row: int, copy: bool = True) -> None:
        """Preempt a row; what the pages of a waiting one hold is copied or lost, as the engine's config says."""
        if waiting := self._waiting.get(int(self.scheduler.owner[row])):
            copy = self._compiled.config.copies_pages and not waiting.pages_lost
            waiting.pages_lost = not copy
        super()._preempt(row, copy)

    def _stop_at_rows(self) -> np.ndarray:
        """Return of each shard [D] the running rows at which it stops: enough have ended a turn."""
        config = self._compiled.config
        ended = max(1, config.refill_rows // config.shards)
        return np.maximum(0, self.active.reshape(config.shards, -1).sum(axis=1) - ended)
