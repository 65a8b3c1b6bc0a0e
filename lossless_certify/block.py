"""Inputs of a verification, and the interface of a sampler.

Letters: B rows, k drafted tokens, V the target's vocabulary, Vd the draft's.
"""

import dataclasses
from typing import Any, Protocol, TypeVar

import numpy as np

from lossless_certify.distributions import sampling_probs, spread


@dataclasses.dataclass(frozen=True)
class Block:
    """One verification of k drafted tokens in each of B rows."""

    draft_tokens: np.ndarray  # [B, k] int32 ids of the target's vocabulary; any beyond num_drafted
    num_drafted: np.ndarray  # [B] int32 in 0..k
    target_logits: np.ndarray  # [B, k + 1, V] float32 before temperature; entry i follows the first i drafted tokens
    draft_logits: np.ndarray | None  # [B, k, Vd] float32 before temperature; None: drafts have no probabilities
    vocab_map: np.ndarray | None  # [Vd] int32 target id of each draft id; None: Vd = V
    temperature: np.ndarray  # [B] float32; 0: greedy
    top_k: np.ndarray  # [B] int32 of the target; 0: off
    top_p: np.ndarray  # [B] float32 of the target; 1: off
    request: np.ndarray  # [B] uint32, the request that a row belongs to
    seed: int  # of the run
    position: np.ndarray  # [B] int32, absolute position of the first token that this verification emits
    number: np.ndarray  # [B] int32, how many blocks the request had before

    @property
    def target_probs(self) -> np.ndarray:
        """Return p [B, k + 1, V] float64: temperature, then top-k, then top-p; one-hot of greedy rows."""
        temperature, top_k, top_p = (x[:, None, None] for x in (self.temperature, self.top_k, self.top_p))
        return sampling_probs(self.target_logits, temperature, top_k=top_k, top_p=top_p)

    @property
    def draft_probs(self) -> np.ndarray | None:
        """Return q [B, k, V] float64, softmax(draft_logits / temperature) on the target's vocabulary, or None."""
        if self.draft_logits is None:
            return None
        probs = sampling_probs(self.draft_logits, self.temperature[:, None, None])
        return spread(probs, self.vocab_map, self.target_logits.shape[-1])


@dataclasses.dataclass(frozen=True)
class DraftRows:
    """One drafted token to be drawn in each of B rows; fields as in `Block`."""

    draft_logits: np.ndarray  # [B, Vd] float32 before temperature
    vocab_map: np.ndarray | None
    vocabulary: int  # V
    temperature: np.ndarray
    top_k: np.ndarray  # the target's, for an engine that truncates its drafts, too
    top_p: np.ndarray
    request: np.ndarray
    seed: int
    position: np.ndarray  # of the first token that the verification of this draft emits
    number: np.ndarray
    offset: int  # place of the drafted token in its block, from 0

    @property
    def probs(self) -> np.ndarray:
        """Return q [B, V] float64, softmax(draft_logits / temperature) on the target's vocabulary."""
        probs = sampling_probs(self.draft_logits, self.temperature[:, None])
        return spread(probs, self.vocab_map, self.vocabulary)


Rows = TypeVar("Rows", Block, DraftRows)


def take_rows(rows: Rows, index: np.ndarray) -> Rows:
    """Return some rows, in the order of `index`."""
    columns: dict[str, Any] = {
        name: column[index]
        for name, column in vars(rows).items()
        if isinstance(column, np.ndarray) and name != "vocab_map"
    }
    return dataclasses.replace(rows, **columns)


class Sampler(Protocol):
    """A verification to certify. All but `verify` is optional.

    `draft(rows: DraftRows) -> tokens [B]` draws drafted tokens by the engine's own noise. Without it the certifier
    draws them from q by noise of its own, and whether draft and verification are independent stays untested.

    `rule`: "rejection" or "block" if it is that rule: the number of accepted tokens has a known distribution, too; or
    "coupled".
    `skips`: a set of `cases.TAGS` that the sampler has no interface for; the report names them.
    `max_rows`: the most rows of a block; None: any number.
    """

    def verify(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens [B, k + 1], count [B]): the first `count` tokens of a row are emitted."""
