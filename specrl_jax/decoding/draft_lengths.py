"""Draft-length policies: what the engine asks them, and a fixed length."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specrl_jax.decoding.rollouts import DecodeChunk


class Choice(NamedTuple):
    """Draft length and iterations of the next chunk."""

    k: int  # tokens drafted per iteration
    iterations: int | None  # at most; None: a full chunk


class DraftLengthPolicy:
    """Chooses draft lengths, and learns nothing; `controller.Controller` documents the methods."""

    def first(self, size: int) -> int:
        raise NotImplementedError

    def choose(self, size: int, running: int, live: float) -> Choice:
        raise NotImplementedError

    def observe(self, chunk: DecodeChunk, accepted: np.ndarray) -> None:
        pass

    def replay(self, verifications: int, accepted: np.ndarray) -> None:
        pass

    def unmeasured(self, size: int) -> Sequence[int]:
        return ()

    def calibrate(self, size: int, k: int, seconds: float, *, live: float) -> None:
        pass

    def calibrate_calls(self, size: int, seconds: float) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class FixedLength(DraftLengthPolicy):
    """Always drafts k tokens."""

    k: int

    def first(self, size: int) -> int:
        return self.k

    def choose(self, size: int, running: int, live: float) -> Choice:
        return Choice(self.k, None)
