"""Which rollout runs in which slot: requests in order, prompt by prompt, and their groups in the corpus."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from specrl_jax.decoding.compiled import Limits, PrefillBatch
from specrl_jax.decoding.history import History

FREE = -1


class Scheduler:
    """Deals `samples` rollouts of each prompt to slots as they come free; request r is one of prompt r // samples.

    A prompt has a group of the corpus from its first rollout's start to its last one's end; where all are taken it goes
    without, and its rollouts copy from their own text only.
    """

    def __init__(
        self,
        limits: Limits,
        pad_id: int,
        prompts: Sequence[Sequence[int]],
        samples: int,
        first_id: int,
        history: History | None,
    ) -> None:
        self.total = len(prompts) * samples
        self.next = 0  # the first request that no slot has had
        self.owner = np.full(limits.num_slots, FREE)  # request of each row
        self._limits, self._pad_id, self._history = limits, pad_id, history
        self._prompts, self._samples, self._first_id = prompts, samples, first_id
        self._free_groups = list(range(limits.groups))
        self._group: dict[int, int] = {}  # of a prompt in flight
        self._unfinished = Counter(dict.fromkeys(range(len(prompts)), samples))

    @property
    def waiting(self) -> bool:
        return self.next < self.total

    @property
    def running(self) -> int:
        return int((self.owner != FREE).sum())

    def deal(self) -> PrefillBatch:
        """Gives free slots the next requests, as far as their prompts can be prefilled at once."""
        limits, samples = self._limits, self._samples
        carried = (self.next - 1) // samples  # the prompt of the last request dealt; -1 before the first
        rows = np.flatnonzero(self.owner == FREE)[: self.total - self.next]
        last = min((self.next + len(rows) - 1) // samples, carried + limits.prompts)
        rows = rows[: (last + 1) * samples - self.next]
        requests = np.arange(self.next, self.next + len(rows))
        prompt = requests // samples
        new = self._new_prompts(range(carried + 1, last + 1))

        def of_rows(values: np.ndarray, dtype: type) -> np.ndarray:
            out = np.zeros(limits.num_slots, dtype)
            out[rows] = values
            return out

        self.owner[rows] = requests
        self.next += len(rows)
        return PrefillBatch(
            count=np.int32(last - carried),
            keep=np.int32(last - carried),
            fresh=of_rows(True, bool),
            source=of_rows(prompt - carried, np.int32),
            rollout_id=of_rows(self._first_id + requests, np.uint32),
            group=of_rows([self._group[p] for p in prompt], np.int32),
            member=of_rows(requests % samples, np.int32),
            **new,
        )

    def _new_prompts(self, prompts: range) -> dict[str, np.ndarray | None]:
        """The part of an admission that describes prompts, which get their groups here."""
        limits, P = self._limits, self._limits.prompts
        tokens = np.full((P, limits.max_prompt_tokens), self._pad_id, np.int32)
        length = np.ones(P, np.int32)
        group = np.full(P, limits.groups, np.int32)
        texts = text_length = None
        if limits.groups:
            texts = np.zeros((P, limits.members, limits.cache_length), np.int32)
            text_length = np.zeros((P, limits.members), np.int32)
        for i, prompt in enumerate(prompts):
            own = self._prompts[prompt]
            tokens[i, : len(own)], length[i] = own, len(own)
            group[i] = self._group[prompt] = self._free_groups.pop() if self._free_groups else limits.groups
            if limits.groups and self._history is not None:
                earlier = self._history.get(np.asarray(own, np.int32))
                for member, text in zip(range(self._samples, limits.members), earlier):
                    # Kept under other limits, it may be longer.
                    text = text[: limits.cache_length]
                    texts[i, member, : len(text)], text_length[i, member] = text, len(text)
        return {"tokens": tokens, "length": length, "new_group": group, "texts": texts, "text_length": text_length}

    def finish(self, rows: np.ndarray) -> np.ndarray:
        """Frees the slots `rows`; the requests that they had."""
        requests = self.owner[rows]
        self.owner[rows] = FREE
        for prompt in requests // self._samples:
            self._unfinished[prompt] -= 1
            if not self._unfinished[prompt] and self._group[prompt] < self._limits.groups:
                self._free_groups.append(self._group[prompt])
        return requests

    def keep_rows(self, size: int) -> np.ndarray:
        """[size] int32: rows of a smaller batch, the running ones first; the owners move with them."""
        rows = np.argsort(self.owner == FREE, kind="stable")[:size]
        self.owner = self.owner[rows]
        return rows.astype(np.int32)
