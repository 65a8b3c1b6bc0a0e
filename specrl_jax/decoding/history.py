"""Rollouts of earlier epochs on the host, for lookup drafters: answers to a prompt tend to repeat."""

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np

Tokens = Sequence[int] | np.ndarray


class History:
    """The newest rollouts of each prompt, by the prompt's tokens.

    Memory: 4 bytes a token; 65,536 prompts with 8 rollouts of 1,000 tokens take 2.1 GB.
    """

    def __init__(self, per_prompt: int, max_prompts: int) -> None:
        """
        Args:
          per_prompt: rollouts kept per prompt, the newest.
          max_prompts: prompts kept; beyond it the least recently used one is dropped.
        """
        self._per_prompt, self._max_prompts = per_prompt, max_prompts
        # Least recently used prompt first, oldest rollout first.
        self._rollouts: OrderedDict[bytes, deque[np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()  # one thread generates while another adds finished rollouts

    def add(self, prompt: Tokens, rollouts: Sequence[np.ndarray]) -> None:
        """Add rollouts (prompt and response) of a prompt; the last is the newest."""
        with self._lock:
            rollouts_of_prompt = self._rollouts.setdefault(_key(prompt), deque(maxlen=self._per_prompt))
            # Copied: a view would keep all rollouts of its batch alive.
            rollouts_of_prompt.extend(np.array(rollout, np.int32) for rollout in rollouts)
            self._rollouts.move_to_end(_key(prompt))
            while len(self._rollouts) > self._max_prompts:
                self._rollouts.popitem(last=False)

    def get(self, prompt: Tokens) -> list[np.ndarray]:
        """Return the int32 rollouts of a prompt, newest first; an unknown prompt has none."""
        with self._lock:
            if _key(prompt) not in self._rollouts:
                return []
            self._rollouts.move_to_end(_key(prompt))
            return list(reversed(self._rollouts[_key(prompt)]))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return all rollouts as flat arrays, for a checkpoint."""
        with self._lock:
            all_kept = [(np.frombuffer(key, np.int32), list(kept)) for key, kept in self._rollouts.items()]
        texts = [text for prompt, kept in all_kept for text in (prompt, *kept)]
        return {
            "tokens": np.concatenate([np.zeros(0, np.int32), *texts]),  # a prompt, its rollouts, the next prompt ...
            "lengths": np.array([len(text) for text in texts], np.int64),
            "rollouts": np.array([len(kept) for _, kept in all_kept], np.int64),  # of each prompt
        }

    @classmethod
    def from_arrays(cls, per_prompt: int, max_prompts: int, arrays: Mapping[str, np.ndarray]) -> Self:
        """Restore the result of `to_arrays`; drops the oldest rollouts if fewer are kept now."""
        history = cls(per_prompt, max_prompts)
        texts = iter(np.split(arrays["tokens"], np.cumsum(arrays["lengths"])[:-1]))
        for count in arrays["rollouts"]:
            history.add(next(texts), [next(texts) for _ in range(count)])
        return history


def _key(prompt: Tokens) -> bytes:
    return np.asarray(prompt, np.int32).tobytes()
