"""Finished rollouts on the host."""

import dataclasses
from collections.abc import Sequence
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


NO_EXPERTS = np.zeros((0, 0), np.uint8)


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
    environment: np.ndarray  # [R, S] bool, tokens of the response that an environment wrote
    prefilled: np.ndarray  # [R] int32, tokens of the prompt and of the environment; those prefilled again count again
    verifications: np.ndarray  # [R] int32, target forwards after the prefill
    drafted: np.ndarray  # [R, longest draft] int32, verifications that drafted at least i + 1 tokens
    accepted: np.ndarray  # [R, longest draft] int32, those of them that kept draft i and all before it
    parked: np.ndarray  # [R] int32, times that it waited on the host for pages
    reverified: np.ndarray  # [R] int32, response tokens that earlier weights drew and that were kept
    weights_version: np.ndarray  # [R] int64, of the weights that a rollout began with, as the next two
    draft_version: np.ndarray  # [R] int64
    checksum: np.ndarray  # [R] int64
    # [R, S] int32, the weights_version that drew each response token, by absolute position, 0 elsewhere; [R, 0] where
    # all tokens of a rollout are of one version
    token_version: np.ndarray
    chunks: tuple[DecodeChunk, ...]  # in the order they ran; the verification of earlier tokens is none of them
    # The sampling mask: ids that top-k and top-p kept at each response token, rollout by rollout, token by token.
    mask_ids: np.ndarray  # [N] int32; [0] where it is not recorded
    mask_count: np.ndarray  # [R, S] int32, how many of them belong to each token; [R, 0] where it is not recorded
    # The experts of each token of a finished rollout but its last, joined (models/decoder/expert_record.py).
    experts: np.ndarray  # [N, L k] uint8 or int16; NO_EXPERTS where they are not recorded

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

    def masks(self) -> list[np.ndarray]:
        """Return the `mask_ids` of each rollout."""
        return _split(self.mask_ids, self.mask_count.sum(axis=1))

    def experts_by_rollout(self) -> list[np.ndarray]:
        """Return the `experts` of each rollout; none of those that are not finished."""
        # Of one that an earlier call finished, what a call returns has no response (continuation.py).
        has_some = self.finished & (self.response_length > 0)
        return _split(self.experts, np.where(has_some, self.length - 1, 0))

    def take(self, rows: np.ndarray) -> Self:
        """Return selected rows; `chunks` stays that of all rows."""
        masks, experts = self.masks(), self.experts_by_rollout()
        numbers = np.arange(len(masks))[rows]
        return dataclasses.replace(
            self,
            **{name: getattr(self, name)[rows] for name in _PER_ROW},
            mask_ids=np.concatenate([masks[row] for row in numbers] or [self.mask_ids[:0]]),
            experts=stack_experts([experts[row] for row in numbers]),
        )

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


_NOT_PER_ROW = ("chunks", "mask_ids", "experts")
_PER_ROW = tuple(field.name for field in dataclasses.fields(Rollouts) if field.name not in _NOT_PER_ROW)


def _split(values: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Split values into so many of each rollout; np.split would make one part of no rollouts."""
    return np.split(values, np.cumsum(counts)[:-1]) if len(counts) else []


def stack_experts(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join the experts of several rollouts or calls, of which some may have none."""
    return np.concatenate([part for part in parts if len(part)] or [NO_EXPERTS])


def group_rows(groups: np.ndarray, group_size: int) -> np.ndarray:
    """Return the rows of groups, group by group."""
    return (groups[:, None] * group_size + np.arange(group_size)).reshape(-1)


def concatenate(parts: Sequence[Rollouts]) -> Rollouts:
    """Join the rollouts of several calls of one engine; `prompt_index` counts the prompts of all."""
    if len(parts) == 1:
        return parts[0]
    values = {name: np.concatenate([getattr(part, name) for part in parts]) for name in (*_PER_ROW, "mask_ids")}
    values["experts"] = stack_experts([part.experts for part in parts])
    prompts = np.cumsum([0] + [part.prompt_index.max() + 1 for part in parts[:-1]])
    values["prompt_index"] = np.concatenate([part.prompt_index + n for part, n in zip(parts, prompts)])
    return Rollouts(**values, chunks=tuple(chunk for part in parts for chunk in part.chunks))
