"""Lengths of the last responses to each prompt: where rollouts outnumber slots, the longest ones start first."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specrl_jax.data.problem import Problem

# Prompts whose lengths are kept; beyond it the one seen longest ago is dropped. 100 bytes each.
MOST_PROMPTS = 1 << 20


class SeenLengths(NamedTuple):
    """Prompt lengths as a checkpoint stores them, the prompt seen longest ago first."""

    prompts: np.ndarray  # [n] uint64, hashes of their texts
    lengths: np.ndarray  # [n] float32, mean tokens of the last responses


NONE_SEEN = SeenLengths(np.zeros(0, np.uint64), np.zeros(0, np.float32))


class PromptLengths:
    """The mean response length of each prompt's last group."""

    def __init__(self, seen: SeenLengths = NONE_SEEN) -> None:
        self._lengths = OrderedDict(zip(seen.prompts.tolist(), seen.lengths.tolist(), strict=True))

    def observe(self, problems: Sequence[Problem], lengths: np.ndarray) -> None:
        """Note the response lengths [P x G] of the groups of P problems."""
        for problem, group in zip(problems, lengths.reshape(len(problems), -1), strict=True):
            key = _key(problem)
            self._lengths[key] = float(group.mean())
            self._lengths.move_to_end(key)
        while len(self._lengths) > MOST_PROMPTS:
            self._lengths.popitem(last=False)

    def longest_first(self, problems: Sequence[Problem]) -> np.ndarray:
        """Return [P] places of problems in the order in which they should start.

        One that was not seen yet counts as the median of the others.
        """
        lengths = [self._lengths.get(_key(problem)) for problem in problems]
        seen = [length for length in lengths if length is not None]
        usual = float(np.median(seen)) if seen else 0.0
        return np.argsort([-(usual if length is None else length) for length in lengths], kind="stable")

    def seen(self) -> SeenLengths:
        """Return what a checkpoint keeps."""
        prompts, lengths = list(self._lengths), list(self._lengths.values())
        return SeenLengths(np.array(prompts, np.uint64), np.array(lengths, np.float32))


def _key(problem: Problem) -> int:
    return int.from_bytes(hashlib.blake2b(problem.prompt.encode(), digest_size=8).digest(), "little")
