"""Times an iteration of every batch size and draft length before real work, on throwaway rollouts."""

import itertools
import statistics
from collections.abc import Callable, Sequence

from specrl_jax.decoding.batch import ActiveBatch
from specrl_jax.decoding.broadcast import Broadcast
from specrl_jax.decoding.draft_lengths import Choice, DraftLengthPolicy
from specrl_jax.decoding.rollouts import DecodeChunk

# Every length is timed for so many iterations, so often; no further round begins after so many seconds at a batch size.
# The minimum counts: disturbances only add time, and matter where iterations are short.
ITERATIONS, ROUNDS, SECONDS = 4, 5, 0.5


def calibrate(
    make_batch: Callable[[], ActiveBatch],
    sizes: Sequence[int],
    lengths: DraftLengthPolicy,
    *,
    agree: Broadcast,
    after_chunk: Callable[[], None],
) -> None:
    """Time an iteration of every (batch size, draft length) that `lengths` has no cost for, and pass the times to it.

    The fixed seconds of a call, which a short chunk shows, are measured apart. All slots run. One batch serves all
    sizes, the largest first, until rows of it end.

    Args:
      make_batch: makes a batch of throwaway rollouts, enough for all slots.
      after_chunk: called after each chunk; what it raises ends the calibration.
    """
    throwaway = _Throwaway(make_batch)
    for size in sizes:
        if not (unmeasured := lengths.unmeasured(size)):
            continue
        calls = []
        for k, chunks in _timed(throwaway, size, unmeasured, agree, after_chunk).items():
            call, seconds, live = call_and_iteration(chunks)
            lengths.calibrate(size, k, seconds, live=live)
            calls.append(call)
        lengths.calibrate_calls(size, statistics.median(calls))


class _Throwaway:
    """A batch of rollouts that nobody asked for, made anew where too few of them still run."""

    def __init__(self, make_batch: Callable[[], ActiveBatch]) -> None:
        self._make_batch = make_batch
        self._batch: ActiveBatch | None = None

    def decode(self, size: int, choice: Choice) -> DecodeChunk:
        """Run one chunk of `size` rows."""
        if self._batch is None or (self._batch.finished and self._batch.scheduler.running < size):
            self._batch = None  # with its cache, before another one is made
            self._batch = self._make_batch()
            self._batch.prepare()
        self._batch.compact_to(size)
        return self._batch.decode(choice)[0]


def _timed(
    throwaway: _Throwaway, size: int, lengths: Sequence[int], agree: Broadcast, after_chunk: Callable[[], None]
) -> dict[int, list[DecodeChunk]]:
    """Return chunks of each draft length, of one iteration and of several in turn."""
    timed: dict[int, list[DecodeChunk]] = {k: [] for k in lengths}
    spent = 0.0
    for i in range(1 + ROUNDS):  # the first, of one iteration, is not counted
        if i > 1 and agree(spent > SECONDS)[0]:
            break
        # All lengths in each round: other load on the machine then slows them alike.
        for k, iterations in itertools.product(lengths, (1, ITERATIONS) if i else (1,)):
            chunk = throwaway.decode(size, Choice(k, iterations))
            if i and chunk.iterations:
                spent += chunk.seconds
                timed[k].append(chunk)
            after_chunk()
    return timed


def call_and_iteration(chunks: Sequence[DecodeChunk]) -> tuple[float, float, float]:
    """Return seconds of a call without its iterations, seconds of an iteration, and live tokens, of one draft length.

    Both times are minima. Live tokens are those of the running rows, divided by all rows of the batch. Where no chunk
    has more than one iteration, a call takes no time of its own.
    """
    fewest = min(chunk.iterations for chunk in chunks)
    least = min(chunk.seconds for chunk in chunks if chunk.iterations == fewest)
    more = [((c.seconds - least) / (c.iterations - fewest), _live(c)) for c in chunks if c.iterations > fewest]
    seconds, live = min(more, default=(0.0, 0.0))
    if not 0 < fewest * seconds < least:  # disturbed
        return 0.0, *min((c.seconds / c.iterations, _live(c)) for c in chunks)
    return least - fewest * seconds, seconds, live


def _live(chunk: DecodeChunk) -> float:
    return chunk.tokens_read / chunk.size
