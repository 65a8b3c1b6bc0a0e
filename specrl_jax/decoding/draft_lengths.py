"""Draft-length policies: the protocol, and a fixed length."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from specrl_jax.decoding.controller import Choice
from specrl_jax.decoding.rollouts import DecodeChunk


class DraftLengthPolicy(Protocol):
    """Chooses draft lengths; `controller.Controller` documents the methods."""

    def first(self, size: int) -> int: ...
    def choose(self, size: int, running: int, live: float) -> Choice: ...
    def observe(self, chunk: DecodeChunk, accepted: np.ndarray) -> None: ...
    def replay(self, verifications: int, accepted: np.ndarray) -> None: ...
    def unmeasured(self, size: int) -> Sequence[int]: ...
    def calibrate(self, size: int, k: int, seconds: float, *, live: float) -> None: ...
    def calibrate_calls(self, size: int, seconds: float) -> None: ...


@dataclasses.dataclass(frozen=True)
class FixedLength:
    """Always drafts k tokens."""

    k: int

    def first(self, size: int) -> int:
        return self.k

    def choose(self, size: int, running: int, live: float) -> Choice:
        return Choice(self.k, None)

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
