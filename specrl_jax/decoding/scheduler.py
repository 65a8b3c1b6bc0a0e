"""Assignment of rollouts to slots: requests in order, prompt by prompt, and their groups in the lookup cache."""

from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np

from specrl_jax.core import stand_in
from specrl_jax.decoding.history import History
from specrl_jax.decoding.state import EngineConfig, PrefillBatch

FREE = -1


class Scheduler:
    """Assigns `samples` rollouts of each prompt to slots as they come free; request r belongs to prompt r // samples.

    A prompt holds a group of the lookup cache from its first rollout's start to its last one's end. If all groups are
    taken it has none, and its rollouts copy from their own text only.
    """

    def __init__(
        self,
        config: EngineConfig,
        pad_id: int,
        prompts: Sequence[Sequence[int]],
        samples: int,
        first_id: int,
        history: History | None,
    ) -> None:
        self.total = len(prompts) * samples
        self.next = 0  # the first request that has not started
        self.owner = np.full(config.num_slots, FREE)  # request of each row
        self._config, self._pad_id, self._history = config, pad_id, history
        self._prompts, self._samples, self._first_id = prompts, samples, first_id
        self._free_groups = list(range(config.groups))
        self._group: dict[int, int] = {}  # of a prompt in flight
        self._unfinished = Counter(dict.fromkeys(range(len(prompts)), samples))

    @property
    def waiting(self) -> bool:
        """Whether some requests have not started yet."""
        return self.next < self.total

    @property
    def running(self) -> int:
        """Number of rows with a request."""
        return int((self.owner != FREE).sum())

    def schedule(self) -> PrefillBatch:
        """Assign the next requests to free slots, as many as one refill can prefill prompts for."""
        config, samples = self._config, self._samples
        carried = (self.next - 1) // samples  # the prompt of the last request started; -1 before the first
        rows = np.flatnonzero(self.owner == FREE)[: self.total - self.next]
        last = min((self.next + len(rows) - 1) // samples, carried + config.prompts)
        rows = rows[: (last + 1) * samples - self.next]
        requests = np.arange(self.next, self.next + len(rows))
        prompt = requests // samples
        new = self._new_prompts(range(carried + 1, last + 1))

        def of_rows(values: np.ndarray | list[int] | bool, dtype: type) -> jax.Array:
            out: np.ndarray = np.zeros(config.num_slots, dtype)
            out[rows] = values
            return stand_in(out)

        self.owner[rows] = requests
        self.next += len(rows)
        return PrefillBatch(
            num_prompts=stand_in(np.int32(last - carried)),
            carry=stand_in(np.int32(last - carried)),
            fresh=of_rows(True, bool),
            source=of_rows(prompt - carried, np.int32),
            rollout_id=of_rows(self._first_id + requests, np.uint32),
            group=of_rows([self._group[int(p)] for p in prompt], np.int32),
            sequence=of_rows(requests % samples, np.int32),
            **new,
        )

    def _new_prompts(self, prompts: range) -> dict[str, jax.Array]:
        """Return the part of a prefill batch that describes prompts; assigns their groups."""
        config, P = self._config, self._config.prompts
        tokens = np.full((P, config.max_prompt_tokens), self._pad_id, np.int32)
        length = np.ones(P, np.int32)
        group = np.full(P, config.groups, np.int32)
        for i, prompt in enumerate(prompts):
            own = self._prompts[prompt]
            tokens[i, : len(own)], length[i] = own, len(own)
            group[i] = self._group[prompt] = self._free_groups.pop() if self._free_groups else config.groups
        found = {"tokens": tokens, "length": length, "new_group": group} | self._earlier_rollouts(prompts)
        return {name: stand_in(x) for name, x in found.items()}

    def _earlier_rollouts(self, prompts: range) -> dict[str, np.ndarray]:
        """Return the texts of new prompts for the sequences that this call leaves free; none without a lookup cache."""
        config, P = self._config, self._config.prompts
        if not config.groups:
            return {}
        texts = np.zeros((P, config.sequences, config.cache_length), np.int32)
        text_length = np.zeros((P, config.sequences), np.int32)
        for i, prompt in enumerate(prompts):
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
        for prompt in requests // self._samples:
            self._unfinished[prompt] -= 1
            if not self._unfinished[prompt] and self._group[prompt] < self._config.groups:
                self._free_groups.append(self._group[prompt])
        return requests

    def keep_rows(self, size: int) -> np.ndarray:
        """Return [size] int32 rows of a smaller batch, the running ones first; the owners move with them."""
        rows = np.argsort(self.owner == FREE, kind="stable")[:size]
        self.owner = self.owner[rows]
        return rows.astype(np.int32)
