"""Options for rollouts that span several calls of the engine or several versions of the weights.

Partial rollouts go on where an earlier call stopped them. Their tokens are kept whatever the weights at hand would
draw; keys and values are computed anew, by a prefill of the prompt and of the tokens (reverify.py). Every token keeps
its log-prob and the version of the weights that drew it, so a rollout may be of several versions.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Generic

import numpy as np

from specrl_jax.decoding.lookahead import Lookahead
from specrl_jax.decoding.rollouts import NO_VERSION, Recorded, Rollouts, WeightsVersion
from specrl_jax.decoding.state import Params

# What a call counts from zero, and what it writes from the first new token on.
_COUNTS = ("verifications", "drafted", "accepted", "parked")
_BY_TOKEN = ("logprobs", "draft_positions", "token_version", "mask_count")
_OF_THE_START = ("weights_version", "draft_version", "checksum", "reverified")
_OF_THE_LONGER = ("tokens", "length", "ended", "eos", "finished")


@dataclasses.dataclass(frozen=True)
class Continuation(Generic[Params]):
    """Options for rollouts that span several calls."""

    version: WeightsVersion = NO_VERSION  # of the call's weights
    # Responses, or their beginnings, that earlier weights drew with the noise of the same ids; verified before anything
    # is drafted. Needs `Reverification`, and `coupled` or greedy decoding.
    earlier: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    # Rollouts of later calls, begun in free slots; its texts are set. Needs `Reverification`.
    lookahead: Lookahead | None = None
    # Rollouts of earlier calls to go on with, or finished ones, each with an id of this call's; their tokens are kept.
    # Needs `Reverification` that keeps them.
    partial: Rollouts | None = None
    versions: bool = False  # the version of the weights that drew it is recorded of each token
    # Asked after each chunk for weights to go on with, and their version; None: those at hand.
    newest: Callable[[], tuple[Params, WeightsVersion] | None] = lambda: None
    # Asked before each chunk, with [R] bool, whether the call may end before all rollouts are finished.
    enough: Callable[[np.ndarray], bool] = lambda finished: False

    def earlier_tokens(self) -> Mapping[int, np.ndarray]:
        """Return id -> int32 response so far, of rollouts that are not finished."""
        if (partial := self.partial) is None:
            return self.earlier
        rows = np.flatnonzero(~partial.finished & (partial.response_length > 0)).tolist()
        return {int(partial.rollout_id[row]): partial.tokens[row, partial.response_part(row)] for row in rows}

    def finished_ids(self) -> list[int]:
        """Return the ids of the rollouts that earlier calls finished."""
        return [] if self.partial is None else self.partial.rollout_id[self.partial.finished].tolist()


def join(partial: Rollouts, new: Rollouts) -> Rollouts:
    """Return the rollouts of a call, `new`, with what earlier calls drew of those that were `partial`.

    Args:
      partial: rollouts of earlier calls, each one of `new` by its id.
      new: rollouts of this call. A finished one has nothing new. The others have this call's counts, and those of their
        earlier tokens that the call reached: it may have ended before one started, or while its keys and values were
        computed.
    """
    partial = partial.take(partial.finished | (partial.response_length > 0))  # those that have begun
    row_of = {number: row for row, number in enumerate(new.rollout_id.tolist())}
    rows = np.array([row_of[number] for number in partial.rollout_id.tolist()], int)
    values, before = _by_row(new), _by_row(partial)
    for name in values.keys() & _OF_THE_START:
        values[name][rows] = before[name]
    for name in _COUNTS:
        values[name][rows] += before[name]
    earlier = partial.in_response()
    for name in values.keys() & _BY_TOKEN:
        values[name][rows] = np.where(earlier, before[name], values[name][rows])
    longer = partial.finished | (partial.length > new.length[rows])
    for name in _OF_THE_LONGER:
        values[name][rows[longer]] = before[name][longer]
    features = {}
    for name, one in new.features.items():
        if one.lengths is None:
            features[name] = Recorded(values.pop(name))
            continue
        # Of a finished one this call has recorded nothing, of one that went on all experts.
        parts = [[part] for part in one.by_rollout()]
        for row, part in zip(rows, partial.features[name].by_rollout(), strict=True):
            parts[row].insert(0, part)
        features[name] = Recorded.of_parts(parts)
    return Rollouts(**values, features=features, chunks=partial.chunks + new.chunks)


def _by_row(rollouts: Rollouts) -> dict[str, np.ndarray]:
    """Return copies of all that has one value of each rollout."""
    fields = {name: value for name, value in vars(rollouts).items() if name not in ("chunks", "features")}
    recorded = {name: one.values for name, one in rollouts.features.items() if one.lengths is None}
    return {name: value.copy() for name, value in (fields | recorded).items()}
