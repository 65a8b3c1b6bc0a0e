"""Host copies of a call's rollouts, by request, and the `Rollouts` that they become when the call ends."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from specrl_jax.decoding.rollouts import DecodeChunk, Rollouts, WeightsVersion, stack_experts
from specrl_jax.decoding.state import Slots
from specrl_jax.decoding.stop_texts import StopTexts

# Fields of a slot that become fields of its rollout.
_COLLECTED = (
    *("rollout_id", "tokens", "logprobs", "draft_positions", "prompt_length", "length"),
    *("verifications", "drafted", "accepted"),
)


def rollout_fields(slots: Slots) -> dict[str, Any]:
    """Return what a rollout keeps of its slot; of all slots, or of one row with no leading axis."""
    fields = {name: getattr(slots, name) for name in _COLLECTED}
    if slots.mask is not None:
        fields["mask_count"] = slots.mask.count
    if slots.earlier is not None:
        fields["reverified"] = slots.earlier.num_kept
    return fields


def how_ended(
    tokens: np.ndarray, start: np.ndarray, length: np.ndarray, *, eos_ids: Iterable[int], stops: StopTexts | None
) -> tuple[np.ndarray, np.ndarray]:
    """Say which responses or turns [R] bool, columns `start` to `length` of tokens [R, S], end by an end-of-text token,
    and which by a stop text.
    """
    eos = np.isin(tokens[np.arange(len(tokens)), length - 1], list(eos_ids)) & (length > start)
    return eos, np.zeros_like(eos) if stops is None else stops.end(tokens, start, length)


class RolloutBuffer:
    """The rollouts of one call, by request.

    Args:
      requests: their number, those that the call does not wait for too.
      tokens: columns of a rollout.
      version: that drew each token unless `drawn_by` says otherwise; None: versions are not recorded.
    """

    def __init__(self, requests: int, tokens: int, version: int | None = None) -> None:
        self.values: dict[str, np.ndarray] = {}  # [requests, ...] each; empty until something is stored
        self.parked = np.zeros(requests, np.int32)  # times that a request was preempted
        self._requests = requests
        self._records: dict[int, np.ndarray] = {}  # of a request's tokens
        self._mask_ids: list[list[np.ndarray]] = [[] for _ in range(requests)]  # of each request, chunk by chunk
        self._token_version = None if version is None else np.full((requests, tokens), version, np.int32)

    def store(self, requests: np.ndarray, fields: dict[str, np.ndarray]) -> None:
        """Set what `rollout_fields` returned of the slots of some requests."""
        for name, values in fields.items():
            if name not in self.values:
                self.values[name] = np.zeros((self._requests, *values.shape[1:]), values.dtype)
            self.values[name][requests] = values

    def store_row(self, request: int, row: Slots) -> None:
        """Set what a request keeps of its row, which is on the host."""
        self.store(np.array([request]), {name: np.asarray(value)[None] for name, value in rollout_fields(row).items()})

    def store_prompt(self, request: int, rollout_id: int, prompt: Sequence[int], *, pad_id: int) -> None:
        """Set a request that has not begun: its prompt and no response."""
        self.values["tokens"][request] = pad_id
        self.values["tokens"][request, : len(prompt)] = prompt
        self.values["rollout_id"][request] = rollout_id
        self.values["length"][request] = self.values["prompt_length"][request] = len(prompt)

    def not_begun(self) -> list[int]:
        """Return the requests of which nothing has been stored."""
        return np.flatnonzero(self.values["length"] == 0).tolist()

    def add_mask_ids(self, request: int, ids: np.ndarray) -> None:
        """Append the ids that a chunk recorded of a request's sampling masks."""
        self._mask_ids[request].append(ids)

    def add_records(self, requests: np.ndarray, records: list[np.ndarray]) -> None:
        """Set the records of the tokens of finished requests."""
        self._records |= dict(zip(requests.tolist(), records, strict=True))

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
        self,
        finished: np.ndarray,
        samples: int,
        version: WeightsVersion,
        *,
        chunks: Iterable[DecodeChunk],
        eos_ids: Iterable[int],
        stops: StopTexts | None,
    ) -> Rollouts:
        """Return the first R requests as rollouts, `samples` per prompt.

        Args:
          finished: [R] bool.
          version: of the weights that the call began with.
          chunks: that the call ran.
        """
        total = len(finished)
        values = {name: value[:total] for name, value in self.values.items()}
        eos, stopped = how_ended(
            values["tokens"], values["prompt_length"], values["length"], eos_ids=eos_ids, stops=stops
        )
        none = np.zeros((total, 0), np.int32)
        # Not every engine collects these.
        values = {"mask_count": none, "reverified": np.zeros(total, np.int32)} | values
        mask_ids = [ids for parts in self._mask_ids[:total] for ids in parts]
        rollouts = Rollouts(
            **values,
            **{name: np.full(total, value) for name, value in version._asdict().items()},
            prompt_index=np.arange(total) // samples,
            ended=eos | stopped,
            eos=eos,
            finished=finished,
            parked=self.parked[:total],
            environment=np.zeros(values["tokens"].shape, bool),
            prefilled=values["prompt_length"],
            mask_ids=np.concatenate(mask_ids) if mask_ids else np.zeros(0, np.int32),
            experts=stack_experts([self._records[i] for i in range(total) if i in self._records]),
            token_version=none if self._token_version is None else self._token_version[:total],
            chunks=tuple(chunks),
        )
        if self._token_version is not None:
            rollouts.token_version[~rollouts.in_response()] = 0
        return rollouts
