"""Finished rollouts on the host."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np


class WeightsVersion(NamedTuple):
    """Identifies the weights that generated a rollout."""

    weights_version: int = 0  # RL steps of the policy
    draft_version: int = 0  # updates of the draft
    checksum: int = 0  # of every bit of both


NO_VERSION = WeightsVersion()


class DecodeChunk(NamedTuple):
    """Cost and counts of one call of the decode loop."""

    size: int  # B, rows of the batch
    k: int  # drafted tokens
    seconds: float  # of the iterations
    iterations: int
    verifications: int  # by running rows
    switch_seconds: float  # of updating the drafter's cache before them
    live: float  # tokens that a running row held, on average over rows and over the chunk's start and end
    tokens: int = 0  # committed
    finished: int = 0  # rows

    @property
    def tokens_read(self) -> float:
        """Return the live tokens of all rows that ran, on average over the iterations."""
        return self.live * self.verifications / self.iterations


class Recorded(NamedTuple):
    """Values that a feature recorded of R rollouts: one of each, or several, rollout by rollout."""

    values: np.ndarray  # [R, ...] or [N, ...]
    lengths: np.ndarray | None = None  # [R] int64, values of each rollout; None: one

    @classmethod
    def of_parts(cls, parts: Sequence[Sequence[np.ndarray]]) -> Self:
        """Join what was recorded of each rollout part by part."""
        found = [part for some in parts for part in some if len(part)] or [np.zeros(0, np.int32)]
        return cls(np.concatenate(found), np.array([sum(map(len, some)) for some in parts], np.int64))

    def by_rollout(self) -> list[np.ndarray]:
        """Return the values of each rollout."""
        assert self.lengths is not None, "one each"
        # np.split would make one part of no rollouts.
        return np.split(self.values, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []

    def take(self, rows: np.ndarray) -> Self:
        """Return those of selected rollouts."""
        if self.lengths is None:
            return self._replace(values=self.values[rows])
        parts = self.by_rollout()
        return self.of_parts([[parts[row]] for row in np.arange(len(parts))[rows]])


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Finished rollouts, in the order of their requests. R = prompts x samples."""

    rollout_id: np.ndarray  # [R] uint32
    prompt_index: np.ndarray  # [R] int64, into the prompts given
    tokens: np.ndarray  # [R, S] int32, prompt then response; pad beyond `length`
    logprobs: np.ndarray  # [R, S] float32, nats, of response tokens under the distribution they were sampled from
    # [R, S] int8, which draft of its verification each response token is, 1 the first; negative where a lookup had
    # replaced the draft of a head or model (draft.cascade); 0: drawn by the policy itself, and beyond the response
    draft_positions: np.ndarray
    prompt_length: np.ndarray  # [R] int32, tokens
    length: np.ndarray  # [R] int32, prompt + response, the end-of-text token included
    # [R] bool, by end-of-text or a stop text, and the environment of a conversation went on no more; else cut by a
    # limit, or not finished
    ended: np.ndarray
    eos: np.ndarray  # [R] bool, the last token is an end-of-text token
    finished: np.ndarray  # [R] bool; False where the call ended before the rollout did
    environment: np.ndarray  # [R, S] bool, tokens that an environment wrote; here, since no learner counts them
    verifications: np.ndarray  # [R] int32, target forwards after the prefill
    drafted: np.ndarray  # [R, longest draft] int32, verifications that drafted at least i + 1 tokens
    accepted: np.ndarray  # [R, longest draft] int32, those of them that kept draft i and all before it
    parked: np.ndarray  # [R] int32, times that it waited on the host for pages
    weights_version: np.ndarray  # [R] int64, of the weights that a rollout began with, as the next two
    draft_version: np.ndarray  # [R] int64
    checksum: np.ndarray  # [R] int64
    chunks: tuple[DecodeChunk, ...]  # in the order they ran; the verification of earlier tokens is none of them
    # Where they are recorded:
    #   reverified     [R] int32, response tokens that earlier weights drew and that were kept (reverify.py)
    #   prefilled      [R] int32, tokens of the prompt and of the environment; those prefilled again count again
    #   token_version  [R, S] int32, the weights_version that drew each response token, by absolute position
    #   mask_count     [R, S] int32, how many ids top-k and top-p kept at each response token (sampling_mask.py)
    #   mask_ids       int32, these ids, token by token
    #   experts        [.., L k] uint8 or int16, of each token of a finished rollout but its last (router_records.py)
    features: Mapping[str, Recorded] = dataclasses.field(default_factory=dict)

    @property
    def response_length(self) -> np.ndarray:
        """Return [R] int32, tokens."""
        return self.length - self.prompt_length

    @property
    def policy_tokens(self) -> np.ndarray:
        """Return [R] int32, response tokens that the policy wrote."""
        return self.response_length - self.environment.sum(axis=1, dtype=np.int32)

    def response(self, row: int) -> list[int]:
        """Return the tokens of one response, without its end-of-text."""
        return self.tokens[row, self.prompt_length[row] : self.length[row] - int(self.eos[row])].tolist()

    def response_part(self, row: int) -> slice:
        """Return the columns of one response, its end-of-text included."""
        return slice(self.prompt_length[row], self.length[row])

    def sequence(self, row: int) -> np.ndarray:
        """Return prompt and response of one rollout, int32."""
        return self.tokens[row, : self.length[row]]

    def total(self, name: str) -> int:
        """Return the sum of what a feature counted; 0 where it is off."""
        return int(self.features[name].values.sum()) if name in self.features else 0

    def take(self, rows: np.ndarray) -> Self:
        """Return selected rows; `chunks` stays that of all rows."""
        values = {name: getattr(self, name)[rows] for name in _PER_ROW}
        return dataclasses.replace(self, **values, features={k: one.take(rows) for k, one in self.features.items()})

    def take_groups(self, groups: np.ndarray, group_size: int) -> Self:
        """Return selected groups, whose prompts `prompt_index` then counts."""
        index = np.repeat(np.arange(len(groups)), group_size)
        return dataclasses.replace(self.take(group_rows(groups, group_size)), prompt_index=index)

    def of_prompts(self, prompts: slice) -> Self:
        """Return the rollouts of some prompts, which `prompt_index` then counts."""
        part = self.take(np.flatnonzero((self.prompt_index >= prompts.start) & (self.prompt_index < prompts.stop)))
        return dataclasses.replace(part, prompt_index=part.prompt_index - prompts.start)

    def in_response(self) -> np.ndarray:
        """Return [R, S] bool: the columns of the responses."""
        columns = np.arange(self.tokens.shape[1])
        return (columns >= self.prompt_length[:, None]) & (columns < self.length[:, None])


_NOT_PER_ROW = ("chunks", "features")
_PER_ROW = tuple(field.name for field in dataclasses.fields(Rollouts) if field.name not in _NOT_PER_ROW)


def _joined(parts: Sequence[Recorded]) -> Recorded:
    if parts[0].lengths is None:
        return Recorded(np.concatenate([part.values for part in parts]))
    return Recorded.of_parts([[one] for part in parts for one in part.by_rollout()])


def group_rows(groups: np.ndarray, group_size: int) -> np.ndarray:
    """Return the rows of groups, group by group."""
    return (groups[:, None] * group_size + np.arange(group_size)).reshape(-1)


def concatenate(parts: Sequence[Rollouts]) -> Rollouts:
    """Join the rollouts of several calls of one engine; `prompt_index` counts the prompts of all."""
    if len(parts) == 1:
        return parts[0]
    values = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _PER_ROW}
    features = {name: _joined([part.features[name] for part in parts]) for name in parts[0].features}
    prompts = np.cumsum([0] + [part.prompt_index.max() + 1 for part in parts[:-1]])
    values["prompt_index"] = np.concatenate([part.prompt_index + n for part, n in zip(parts, prompts)])
    return Rollouts(**values, features=features, chunks=tuple(chunk for part in parts for chunk in part.chunks))
