"""Host copies of a call's rollouts, by request, and the `Rollouts` that they become when the call ends."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from specrl_jax.decoding.continuation import Continuation
from specrl_jax.decoding.features.base import Feature
from specrl_jax.decoding.rollouts import DecodeChunk, Recorded, Rollouts
from specrl_jax.decoding.state import EngineConfig, Slots

# Fields of a slot that become fields of its rollout.
_COLLECTED = (
    *("rollout_id", "tokens", "logprobs", "draft_positions", "prompt_length", "length"),
    *("verifications", "drafted", "accepted"),
)


def how_ended(
    tokens: np.ndarray, start: np.ndarray, length: np.ndarray, *, eos_ids: Iterable[int], features: Iterable[Feature]
) -> tuple[np.ndarray, np.ndarray]:
    """Say which responses or turns [R] bool, columns `start` to `length` of tokens [R, S], end by an end-of-text token,
    and which by a feature.
    """
    eos = np.isin(tokens[np.arange(len(tokens)), length - 1], list(eos_ids)) & (length > start)
    stopped = np.zeros_like(eos)
    for feature in features:
        stopped |= feature.ended(tokens, start, length)
    return eos, stopped


class RolloutBuffer:
    """The rollouts of one call, by request.

    Args:
      requests: their number, those that the call does not wait for too.
      continuation: the call's.
    """

    def __init__(self, config: EngineConfig, requests: int, continuation: Continuation) -> None:
        self.values: dict[str, np.ndarray] = {}  # [requests, ...] each; empty until something is stored
        self.parked = np.zeros(requests, np.int32)  # times that a request was preempted
        self._features, self._requests, self._version = config.features, requests, continuation.version
        names = [name for feature in config.features for name in feature.parts]
        self._parts: dict[str, list[list[np.ndarray]]] = {name: [[] for _ in range(requests)] for name in names}
        self._token_version: np.ndarray | None = None
        if continuation.versions:
            first = self._version.weights_version
            self._token_version = np.full((requests, config.cache_length), first, np.int32)

    def fields(self, slots: Slots) -> dict[str, Any]:
        """Return what rollouts keep of their slots; of all slots, or of one row with no leading axis."""
        fields = {name: getattr(slots, name) for name in _COLLECTED}
        for feature in self._features:
            fields |= feature.columns(slots.features[feature.name])
        return fields

    def store(self, requests: np.ndarray, fields: dict[str, np.ndarray]) -> None:
        """Set what `fields` returned of the slots of some requests."""
        for name, values in fields.items():
            if name not in self.values:
                self.values[name] = np.zeros((self._requests, *values.shape[1:]), values.dtype)
            self.values[name][requests] = values

    def store_row(self, request: int, row: Slots) -> None:
        """Set what a request keeps of its row, which is on the host."""
        self.store(np.array([request]), {name: np.asarray(value)[None] for name, value in self.fields(row).items()})

    def store_prompt(self, request: int, rollout_id: int, prompt: Sequence[int], *, pad_id: int) -> None:
        """Set a request that has not begun: its prompt and no response."""
        self.values["tokens"][request] = pad_id
        self.values["tokens"][request, : len(prompt)] = prompt
        self.values["rollout_id"][request] = rollout_id
        self.values["length"][request] = self.values["prompt_length"][request] = len(prompt)

    def not_begun(self) -> list[int]:
        """Return the requests of which nothing has been stored."""
        return np.flatnonzero(self.values["length"] == 0).tolist()

    def append(self, name: str, request: int, values: np.ndarray) -> None:
        """Append to one of `Feature.parts` of a request."""
        self._parts[name][request].append(values)

    def drawn_by(self, version: int, length: dict[int, int]) -> None:
        """Set the version that draws what follows the first `length` tokens of each request."""
        if self._token_version is not None:
            for request, first in length.items():
                self._token_version[request, first:] = version

    def responses(self, requests: range) -> dict[int, np.ndarray]:
        """Return id -> int32 response so far, of those of the requests that have begun."""
        tokens, prompts, lengths = (self.values[name] for name in ("tokens", "prompt_length", "length"))
        ids, begun = self.values["rollout_id"], [i for i in requests if lengths[i] > prompts[i]]
        return {int(ids[i]): np.array(tokens[i, prompts[i] : lengths[i]], np.int32) for i in begun}

    def rollouts(
        self, finished: np.ndarray, samples: int, *, chunks: Iterable[DecodeChunk], eos_ids: Iterable[int]
    ) -> Rollouts:
        """Return the first R requests as rollouts, `samples` per prompt.

        Args:
          finished: [R] bool.
          chunks: that the call ran.
        """
        total = len(finished)
        values = {name: value[:total] for name, value in self.values.items()}
        features = {name: Recorded(values.pop(name)) for name in [*values] if name not in _COLLECTED}
        features |= {name: Recorded.of_parts(parts[:total]) for name, parts in self._parts.items()}
        eos, stopped = how_ended(
            values["tokens"], values["prompt_length"], values["length"], eos_ids=eos_ids, features=self._features
        )
        rollouts = Rollouts(
            **values,
            **{name: np.full(total, value) for name, value in self._version._asdict().items()},
            prompt_index=np.arange(total) // samples,
            ended=eos | stopped,
            eos=eos,
            finished=finished,
            parked=self.parked[:total],
            environment=np.zeros(values["tokens"].shape, bool),
            chunks=tuple(chunks),
            features=features,
        )
        if self._token_version is not None:
            drawn = np.where(rollouts.in_response(), self._token_version[:total], 0)
            features["token_version"] = Recorded(drawn)
        return rollouts
