"""Assignment of rollouts to slots: requests in order, prompt by prompt, and their groups in the lookup cache."""

from collections import Counter
from typing import NamedTuple

import jax
import numpy as np

from kernels_pallas.verify.types import RowSampling
from specrl_jax.core import stand_in
from specrl_jax.decoding.history import History
from specrl_jax.decoding.requests import Requests
from specrl_jax.decoding.state import EngineConfig, PrefillBatch

FREE = -1


class _Group(NamedTuple):
    """A prompt whose rollouts have started in part."""

    prompt: int
    started: int  # of its samples that are to start


class _Start(NamedTuple):
    """Rollouts of one prompt that a refill starts."""

    rows: np.ndarray
    requests: np.ndarray
    source: int  # of the prompt, as in PrefillBatch


class Scheduler:
    """Assigns requests to slots as they come free.

    A data shard finishes the rollouts of a prompt before it starts another, so that they share the prompt's pages; the
    shard with most free slots starts next. A rollout starts where its shard has the pages of its prompt and those of
    the next iteration of every running row.

    A prompt holds a group of the lookup cache from its first rollout's start to its last one's end. If all groups are
    taken it has none, and its rollouts copy from their own text only.
    """

    def __init__(
        self, config: EngineConfig, pad_id: int, requests: Requests, *, history: History | None = None
    ) -> None:
        self.requests = requests
        self.owner = np.full(config.num_slots, FREE)  # request of each row
        self._config, self._pad_id, self._history = config, pad_id, history
        self._prompts, self._samples = requests.all_prompts, requests.samples
        self._next_prompt = 0
        self._current: list[_Group | None] = [None] * config.shards
        self._started = 0
        self._order = np.full(requests.total, -1)  # of each request that has started: how many had before it
        self._free_groups = list(range(config.groups))
        self._group: dict[int, int] = {}  # of a prompt in flight
        ids = requests.ids(np.arange(requests.total))
        self.finished = np.isin(ids, list(requests.finished))  # [requests] bool, before the call
        starts = ~self.finished.reshape(-1, requests.samples)
        # Of each prompt, the samples that start, in their order.
        self._to_start = [np.flatnonzero(row) for row in starts]
        self._unfinished = Counter({prompt: len(some) for prompt, some in enumerate(self._to_start)})
        self._skip_finished()

    @property
    def waiting(self) -> bool:
        """Return whether some requests have not started yet."""
        return self._next_prompt < len(self._prompts) or any(self._current)

    @property
    def running(self) -> int:
        """Return the number of rows with a request."""
        return int((self.owner != FREE).sum())

    @property
    def running_by_shard(self) -> np.ndarray:
        """Return [D] rows with a request."""
        return (self._by_shard(self.owner) != FREE).sum(axis=1)

    def free_rows(self, shard: int) -> np.ndarray:
        """Return the free rows of a shard."""
        return np.flatnonzero(self._by_shard(self.owner)[shard] == FREE) + shard * self._rows_per_shard

    def schedule(self, free_pages: np.ndarray, iteration_pages: int = 1) -> PrefillBatch | None:
        """Assign the next requests to free slots, as many as one refill can prefill prompts and find pages for.

        Args:
          free_pages: [D] of each shard.
          iteration_pages: pages that an iteration of a row takes at most.
        Returns:
          None where nothing can start.
        """
        config, free_pages = self._config, free_pages.copy()
        new: list[list[int]] = [[] for _ in range(config.shards)]  # prompts to prefill in each shard
        carried = [group.prompt if group else None for group in self._current]
        free_rows = [self.free_rows(shard) for shard in range(config.shards)]
        starts: list[_Start] = []
        open_shards = set(range(config.shards))
        while open_shards:
            shard = max(open_shards, key=lambda d: (len(free_rows[d]), -d))
            group, prefill = self._current[shard], 0
            if group is None:
                group, prefill = self._next_group(len(new[shard])), 1
            room = self._room(group, prefill, len(free_rows[shard]), int(free_pages[shard]), iteration_pages)
            if group is None or not room:
                open_shards.remove(shard)
                continue
            if prefill:
                self._open(group.prompt, new[shard])
            rows, free_rows[shard] = free_rows[shard][:room], free_rows[shard][room:]
            free_pages[shard] -= prefill * self._prompt_pages(group.prompt) + room
            source = 0 if group.prompt == carried[shard] else len(new[shard])
            samples = self._to_start[group.prompt]
            requests = group.prompt * self._samples + samples[group.started : group.started + room]
            starts.append(_Start(rows, requests, source))
            self.assign(rows, requests)
            remaining = _Group(group.prompt, group.started + room)
            self._current[shard] = remaining if remaining.started < len(samples) else None
        return self._batch(starts, new, carried) if starts else None

    def _next_group(self, taken: int) -> _Group | None:
        """Return the next prompt's, if there is one and a refill that prefills `taken` of a shard has room for it."""
        if self._next_prompt == len(self._prompts) or taken == self._config.prompts // self._config.shards:
            return None
        return _Group(self._next_prompt, 0)

    def _open(self, prompt: int, new: list[int]) -> None:
        """Let a refill prefill a prompt; it gets a group of the lookup cache if one is free."""
        new.append(prompt)
        self._next_prompt += 1
        self._skip_finished()
        self._group[prompt] = self._free_groups.pop() if self._free_groups else self._config.groups

    def _skip_finished(self) -> None:
        """Go on to the next prompt that has rollouts to start."""
        while self._next_prompt < len(self._prompts) and not len(self._to_start[self._next_prompt]):
            self._next_prompt += 1

    def _prompt_pages(self, prompt: int) -> int:
        return -(-len(self._prompts[prompt]) // self._config.page_tokens)

    def _room(self, group: _Group | None, prefill: int, rows: int, pages: int, iteration_pages: int) -> int:
        """Return how many rollouts of a group can start in a shard with free `rows` and `pages`."""
        if group is None or not rows:
            return 0
        running = self._rows_per_shard - rows
        # Each takes a page, and leaves every running row those of its next iteration.
        fit = (pages - prefill * self._prompt_pages(group.prompt) - iteration_pages * running) // (1 + iteration_pages)
        # A shard where nothing runs has room for any rollout (EngineConfig.fewest_pages).
        unstarted = len(self._to_start[group.prompt]) - group.started
        return min(rows, unstarted, max(fit, 0 if running else 1))

    def _batch(self, starts: list[_Start], new: list[list[int]], carried: list[int | None]) -> PrefillBatch:
        config, asked = self._config, self.requests
        rows, requests = (np.concatenate(parts) for parts in list(zip(*starts))[:2])
        source = np.concatenate([np.full(len(start.rows), start.source) for start in starts])

        def of_rows(values: np.ndarray | list[int] | float, dtype: type) -> jax.Array:
            out: np.ndarray = np.zeros(config.num_slots, dtype)
            out[rows] = values
            return stand_in(out)

        carried_source = np.full(config.shards, -1, np.int32)
        for shard, group in enumerate(self._current):
            if group:
                carried_source[shard] = 0 if group.prompt == carried[shard] else len(new[shard])
        begun = dict(zip(rows.tolist(), requests.tolist(), strict=True))
        longest: np.ndarray | int = config.max_response_tokens
        if asked.responses is not None:
            longest = np.asarray(asked.responses)[requests]
        if asked.turn_tokens is not None:
            longest = np.minimum(asked.turn_tokens, longest)
        return PrefillBatch(
            carried_source=stand_in(carried_source),
            fresh=of_rows(True, bool),
            source=of_rows(source, np.int32),
            rollout_id=of_rows(asked.ids(requests), np.uint32),
            response=of_rows(longest, np.int32),
            group=of_rows([self._group[int(p)] for p in requests // self._samples], np.int32),
            sequence=of_rows(requests % self._samples, np.int32),
            sampling=RowSampling(
                temperature=of_rows(np.where(asked.is_greedy(requests), 0, asked.sampling.temperature), np.float32),
                top_k=of_rows(asked.sampling.top_k, np.int32),
                top_p=of_rows(asked.sampling.top_p, np.float32),
            ),
            features={one.name: one.refill_input(config, asked, begun) for one in config.features},
            **self._new_prompts(new),
        )

    def _new_prompts(self, new: list[list[int]]) -> dict[str, jax.Array]:
        """Return the part of a prefill batch that describes prompts, those of each shard together."""
        config, P = self._config, self._config.prompts
        tokens = np.full((P, config.max_prompt_tokens), self._pad_id, np.int32)
        length = np.zeros(P, np.int32)
        group = np.full(P, config.groups, np.int32)
        prompts_by_place = {
            shard * (P // config.shards) + i: p for shard, prompts in enumerate(new) for i, p in enumerate(prompts)
        }
        for i, prompt in prompts_by_place.items():
            ids = self._prompts[prompt]
            tokens[i, : len(ids)], length[i], group[i] = ids, len(ids), self._group[prompt]
        fields = {"tokens": tokens, "length": length, "new_group": group} | self._earlier_rollouts(prompts_by_place)
        return {name: stand_in(x) for name, x in fields.items()}

    def _earlier_rollouts(self, places: dict[int, int]) -> dict[str, np.ndarray]:
        """Return the texts of new prompts for the sequences that this call leaves free; none without a lookup cache."""
        config, P = self._config, self._config.prompts
        if not config.groups:
            return {}
        texts = np.zeros((P, config.sequences, config.cache_length), np.int32)
        text_length = np.zeros((P, config.sequences), np.int32)
        for i, prompt in places.items():
            earlier = self._history.get(self._prompts[prompt]) if self._history is not None else ()
            for sequence, text in zip(range(self._samples, config.sequences), earlier):
                # A text kept under another config may be longer.
                text = text[: config.cache_length]
                texts[i, sequence, : len(text)], text_length[i, sequence] = text, len(text)
        return {"texts": texts, "text_length": text_length}

    def finish(self, rows: np.ndarray) -> np.ndarray:
        """Free the slots `rows`; return their requests."""
        requests = self.owner[rows]
        self.owner[rows] = FREE
        self.settle(requests)
        return requests

    def settle(self, requests: np.ndarray) -> None:
        """Note that requests have ended."""
        for prompt in requests // self._samples:
            self._unfinished[prompt] -= 1
            if not self._unfinished[prompt] and self._group[prompt] < self._config.groups:
                self._free_groups.append(self._group[prompt])

    def order(self, request: int) -> int:
        """Return how many requests had started before this one."""
        return int(self._order[request])

    def youngest(self, shard: int) -> int:
        """Return the row of a shard whose request started last."""
        order = np.where(self.owner == FREE, -1, self._order[self.owner])
        return int(self._by_shard(order)[shard].argmax()) + shard * self._rows_per_shard

    def preempt(self, row: int) -> int:
        """Free a row whose request will be placed again; return the request."""
        request, self.owner[row] = int(self.owner[row]), FREE
        return request

    def assign(self, rows: np.ndarray, requests: np.ndarray) -> None:
        """Give free rows to requests, new or preempted."""
        self.owner[rows] = requests
        new = requests[self._order[requests] < 0]
        self._order[new] = self._started + np.arange(len(new))
        self._started += len(new)

    def fits(self, size: int) -> bool:
        """Return whether the running rows of every shard fit into a batch of `size`."""
        return bool(self.running_by_shard.max() <= size // self._config.shards)

    def keep_rows(self, size: int) -> np.ndarray:
        """Return [D, size / D] int32 rows of a smaller batch, numbers within their shard, the running ones first.

        The owners move with them.
        """
        D = self._config.shards
        rows = np.argsort(self._by_shard(self.owner) == FREE, axis=1, kind="stable")[:, : size // D]
        self.owner = np.take_along_axis(self._by_shard(self.owner), rows, axis=1).reshape(-1)
        return rows.astype(np.int32)

    @property
    def _rows_per_shard(self) -> int:
        return len(self.owner) // self._config.shards

    def _by_shard(self, values: np.ndarray) -> np.ndarray:
        return values.reshape(self._config.shards, -1)
