"""Traces of speculative decoding: how many drafts each verification of a rollout accepted."""

import csv
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specrl_jax.decoding.rollouts import Rollouts

FIELDS = ("workload", "seed", "k", "rollout", "tokens", "accepted")


class Trace(NamedTuple):
    """One rollout as its verifications saw it."""

    workload: str
    seed: int
    k: int  # drafted tokens of a verification
    rollout: int
    tokens: int  # of the response, the end-of-text token included
    accepted: tuple[int, ...]  # drafts that each verification kept; empty for k = 0

    @property
    def iterations(self) -> int:
        """Return the forward passes of the policy after the prefill."""
        return len(self.accepted) if self.k else self.tokens


def accepted_counts(positions: Sequence[int]) -> tuple[int, ...]:
    """Return the accepted drafts of each verification from `Rollouts.draft_positions` of one response.

    A verification writes its accepted drafts, 1 to n, and a token of the policy, 0; the last one may end within its
    drafts.
    """
    counts, run = [], 0
    for position in positions:
        if position == 0:
            counts.append(run)
        run = int(position)
    return (*counts, run) if run else tuple(counts)


def traces_of(rollouts: Rollouts, workload: str, seed: int, k: int) -> list[Trace]:
    """Return the trace of each rollout, all of which drafted `k` tokens per verification (0: none).

    Raises ValueError where the tokens do not add up to the verifications that the engine counted.
    """
    found = []
    for row, length in enumerate(rollouts.response_length):
        part = rollouts.draft_positions[row, rollouts.response_part(row)]
        counts = accepted_counts(np.abs(part).tolist()) if k else ()
        trace = Trace(workload, seed, k, row, int(length), counts)
        if trace.iterations != rollouts.verifications[row]:
            raise ValueError(
                f"rollout {row}: {trace.iterations} verifications, the engine {rollouts.verifications[row]}"
            )
        found.append(trace)
    return found


def write_traces(path: pathlib.Path, traces: Iterable[Trace]) -> None:
    """Write one row per rollout; its counts are a text of digits."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        writer.writerows([*t[:-1], "".join(map(str, t.accepted))] for t in traces)


def read_traces(path: pathlib.Path) -> list[Trace]:
    """Read what `write_traces` wrote."""

    def trace(row: dict[str, Any]) -> Trace:
        seed, k, rollout, tokens = (int(row[name]) for name in ("seed", "k", "rollout", "tokens"))
        return Trace(row["workload"], seed, k, rollout, tokens, tuple(map(int, row["accepted"])))

    with open(path, newline="") as file:
        return [trace(row) for row in csv.DictReader(file)]
