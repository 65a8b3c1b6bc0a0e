"""A discrete-event model of rollouts that outlive a step: all replicas, in seconds, from one event to the next.

Rollouts of several steps stand in line in every replica, and the first unfinished ones run, one in each slot. All
running rows of a replica draw a token at the same pace, which depends on how many they are and on what they hold; an
event is the end of a row, or a time at which something else happens. simulator/updates.py says what happens then.

Letters: R replicas, M rollouts in line in the one that has most.
"""

import dataclasses
from typing import NamedTuple, Self

import numpy as np

from experiments.simulator.cost import DecoderCost
from experiments.simulator.rollout import Drafting, choose

ROWS, CONTEXTS = 40, 9  # entries of a table of paces
NEARLY = 1e-6  # tokens; less than this is none


@dataclasses.dataclass(frozen=True)
class Pace:
    """Seconds in which each running row of a replica draws one token, interpolated in a table."""

    rows: np.ndarray  # [n] running rows, ascending from 1
    contexts: np.ndarray  # [m] keys read by a row, evenly from 0
    seconds: np.ndarray  # [n, m]

    def __call__(self, running: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Return [R] seconds; of a replica where nothing runs those of one row."""
        x = np.interp(running, self.rows, np.arange(len(self.rows)))
        y = np.minimum(context / self.contexts[-1], 1.0) * (len(self.contexts) - 1)
        i, j = (np.minimum(z.astype(int), n - 2) for z, n in zip((x, y), self.seconds.shape))
        a, b = x - i, y - j
        low, high = ((1 - b) * self.seconds[k, j] + b * self.seconds[k, j + 1] for k in (i, i + 1))
        return (1 - a) * low + a * high


def make_pace(decoder: DecoderCost, drafting: Drafting, most: int, *, longest: float) -> Pace:
    """Tabulate a decoder's pace up to `most` rows (at least two) of at most `longest` tokens; drafting of N = 1."""
    rows = np.unique(np.round(np.geomspace(1, max(most, 2), ROWS)))
    contexts = np.linspace(0.0, longest, CONTEXTS)
    batch, context = (x.reshape(1, -1) for x in np.meshgrid(rows, contexts, indexing="ij"))
    _, tokens, cost = choose(decoder, batch, context, drafting=drafting)
    return Pace(rows, contexts, (cost / tokens).reshape(len(rows), CONTEXTS))


class Line(NamedTuple):
    """The rollouts in line of each replica, [R, M] each; what is no rollout has length 0."""

    length: np.ndarray  # tokens of the whole response
    drawn: np.ndarray  # of it so far
    stale: np.ndarray  # of these by weights older than the newest
    step: np.ndarray  # int, the step that learns from it
    group: np.ndarray  # int, of its siblings

    @property
    def unfinished(self) -> np.ndarray:
        """[R, M] bool."""
        return self.drawn < self.length

    def then(self, other: Self) -> Self:
        """Return the line with others behind it."""
        return type(self)(*(np.concatenate(parts, axis=1) for parts in zip(self, other)))

    def only(self, kept: np.ndarray) -> Self:
        """Return the line of those `kept` [R, M], in their order; replicas that keep fewer are filled up."""
        order = np.argsort(~kept, axis=1, kind="stable")[:, : max(1, int(kept.sum(1).max()))]
        moved = type(self)(*(np.take_along_axis(x, order, axis=1) for x in self))
        empty = ~np.take_along_axis(kept, order, axis=1)
        return type(self)(*(np.where(empty, 0, x) for x in moved))


def new_line(lengths: np.ndarray, replicas: int, step: int, *, group: int) -> Line:
    """Deal the responses of a step, `lengths` [N] in this order, to replicas, in groups of siblings."""
    each = -(-len(lengths) // replicas)
    dealt = np.pad(lengths, (0, replicas * each - len(lengths))).reshape(replicas, each)
    groups = np.arange(replicas * each).reshape(replicas, each) % each // group
    return Line(dealt, 0.0 * dealt, 0.0 * dealt, step=np.full(dealt.shape, step), group=groups)


def advance(
    line: Line,
    clock: np.ndarray,
    pace: Pace,
    *,
    slots: int,
    prompt: float,
    until: float = np.inf,
    wanted: np.ndarray | None = None,
    runs: np.ndarray | None = None,
    left: float = 0.0,
) -> tuple[Line, np.ndarray]:
    """Draw in every replica until its clock shows `until`, or no more than `left` of those `wanted` are unfinished.

    Args:
      clock: [R] seconds.
      slots: of a replica.
      prompt: tokens before each response.
      wanted, runs: [R, M] bool, the rollouts that are waited for and those that may run; None: all.
    Returns:
      The line and the clocks; a clock stands still where nothing is left to do.
    """
    length, drawn, clock = line.length, line.drawn.copy(), clock.copy()
    wanted, runs = (np.ones(length.shape, bool) if x is None else x for x in (wanted, runs))
    while True:
        unfinished = (drawn < length) & runs
        active = ((unfinished & wanted).sum(1) > left) & (clock < until)
        if not active.any():
            return line._replace(drawn=drawn), clock
        running = unfinished & (np.cumsum(unfinished, axis=1) <= slots)
        count = np.maximum(running.sum(1), 1)
        rest = np.where(running, length - drawn, np.inf).min(1)
        # A row holds on average what it holds in the middle of the time until the next event.
        seconds = pace(count, prompt + (drawn * running).sum(1) / count + np.where(active, rest, 0.0) / 2)
        most = (until - clock) / seconds
        tokens = np.where(active, np.minimum(rest, most), 0.0)
        drawn += running * tokens[:, None]
        drawn = np.where(length - drawn < NEARLY, length, drawn)
        clock = np.where(active & (most <= rest), until, clock + tokens * seconds)


def verified(line: Line, first: np.ndarray) -> tuple[Line, np.ndarray]:
    """Return the line after new weights verified it, and the tokens of it that they keep, [R, M].

    Args:
      first: [R, M] the place, from 1, at which each would first disagree. What is drawn beyond it is lost; the token
        there is the new weights' own, which verification draws.
    """
    drawn = np.minimum(line.drawn, first)
    return line._replace(drawn=drawn), np.minimum(line.drawn, first - 1)
