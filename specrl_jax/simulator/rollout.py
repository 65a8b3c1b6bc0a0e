"""A rollout phase as a model of events: slots are refilled, the batch thins out, long responses end alone.

The clock counts tokens a row. All running rows advance alike, whatever k is, so who runs when does not depend on
seconds; these follow as the sum over segments of tokens / E[tokens](k) x seconds of an iteration. E and the best k are
the controller's own (`decoding.controller`).

Arrays have configurations along their first axis and segments, or ways to admit responses, along the second.
"""

import dataclasses
import functools
import heapq
import math
from typing import NamedTuple

import numpy as np

from specrl_jax.decoding.controller import best_length, expected_tokens
from specrl_jax.simulator.cost import DecoderCost
from specrl_jax.simulator.hardware import Array
from specrl_jax.simulator.lengths import ResponseLengths, sample

SEGMENTS = 64  # of the clock, in which batch and context are taken as their means
# Draft lengths that are compared, as in training.
LENGTHS = (0, 1, 2, 3, 5, 7)
ADMISSIONS = 24  # numbers of sequences at once that steady generation chooses from


@dataclasses.dataclass(frozen=True)
class EngineSchedule:
    """How an engine keeps its slots busy. The default looks after every token and runs any batch, as vLLM does."""

    # Share of the slots that must be free before the host looks in and refills them; 0: any.
    refill_share: float = 0.0
    # Iterations after which it looks in anyway; 0: never before.
    chunk: int = 0
    # Batches there are programs for, as shares of the slots; (): any.
    sizes: tuple[float, ...] = ()
    # Tokens of the cache that attention reads whatever the context, masked; 0: the context.
    cache_length: int = 0


AT_ONCE = EngineSchedule()


class BatchProfile(NamedTuple):
    """Replicas' rollouts on the clock: [N, G], the last [N, 1]."""

    tokens: np.ndarray  # length of a segment
    running: np.ndarray  # mean rows that run
    batch: np.ndarray  # mean rows of the program that runs them
    context: np.ndarray  # mean keys that a running row reads
    looks: np.ndarray  # of the host, that started something


class Drafting(NamedTuple):
    """What is drafted: always k [N, 1], or the best of LENGTHS where k < 0; and what is kept of it."""

    k: np.ndarray
    accepted: np.ndarray  # [N, 1, K] a_1, a_2, ...: verifications that keep draft i and all before it, of all

    def drafted(self) -> np.ndarray:
        """[N, 1, K] of the positions that are drafted, 0 for the others; of all where k varies."""
        positions = np.arange(self.accepted.shape[-1])
        inside = (positions < self.k[..., None]) | (self.k[..., None] < 0)
        return np.where(inside, self.accepted, 0.0)

    def jitter(self, tokens: float) -> np.ndarray:
        """[N, 1] relative standard deviation of the verifications that a response of so many tokens takes.

        With A drafts kept, E[A] = sum a_i and E[A^2] = sum (2 i - 1) a_i; a response takes tokens / (1 + E[A])
        verifications, independent ones.
        """
        a = self.drafted()
        mean = a.sum(-1)
        variance = ((2 * np.arange(1, a.shape[-1] + 1) - 1) * a).sum(-1) - mean**2
        return np.sqrt(np.maximum(variance, 0.0) / (1 + mean) / tokens)


class Rollout(NamedTuple):
    """Seconds of one batch of responses and what it was made of, [N, 1] each."""

    seconds: np.ndarray
    length: np.ndarray  # k, weighted by time
    iterations: np.ndarray
    tail: np.ndarray  # share of the seconds in which less than a quarter of the most rows run
    batch: np.ndarray  # mean rows, weighted by time


class Steady(NamedTuple):
    """Generation without a gap between batches, by how many sequences are admitted at once: [N, ADMISSIONS]."""

    seconds: np.ndarray  # a batch
    delay: np.ndarray  # from a batch's first token to its last


# ---- who runs when


def profile(lengths: np.ndarray, slots: int, prompt: float, schedule: EngineSchedule, tokens: float) -> BatchProfile:
    """Of one replica's responses `lengths` [R], dealt in this order to `slots` slots; N = 1.

    Args:
      prompt: tokens before each response.
      tokens: that an iteration commits, which sets how far a chunk goes.
    """
    start, end, looks = _deal(lengths, slots, schedule, tokens)
    edges = np.linspace(0.0, end.max(), SEGMENTS + 1)
    low, high = edges[:-1, None], edges[1:, None]
    overlap = np.clip(np.minimum(end, high) - np.maximum(start, low), 0.0, None)  # [G, R] tokens
    middle = (np.minimum(end, high) + np.maximum(start, low)) / 2 - start
    alive = overlap.sum(1)
    running = alive / (edges[1] - edges[0])
    context = (overlap * (prompt + middle)).sum(1) / np.maximum(alive, 1e-9)
    if schedule.cache_length:
        context = np.full(SEGMENTS, float(schedule.cache_length))
    batch = _programs(running, edges[1:] <= start.max(), slots, schedule)
    rows = (np.full(SEGMENTS, edges[1] - edges[0]), running, batch, context, [looks])
    return BatchProfile(*(np.asarray(x, float)[None] for x in rows))


def _deal(
    lengths: np.ndarray, slots: int, schedule: EngineSchedule, tokens: float
) -> tuple[np.ndarray, np.ndarray, int]:
    """(start [R], end [R], looks) on the clock, the next response always to a free slot."""
    count = len(lengths)
    start, end = np.zeros(count), np.array(lengths, float)
    if count <= slots:
        return start, end, 1
    worth, period = max(1, int(schedule.refill_share * slots)), schedule.chunk * tokens or math.inf
    heap = end[:slots].tolist()
    heapq.heapify(heap)
    given, looks, now = slots, 1, 0.0
    while given < count:
        # Enough are free, or the chunk is over and at least one is.
        ripe = heap[0] if worth == 1 else heapq.nsmallest(worth, heap)[-1]
        now = max(min(ripe, now + period), heap[0])
        looks += 1
        while given < count and heap[0] <= now:
            start[given], end[given] = now, now + lengths[given]
            heapq.heapreplace(heap, end[given])
            given += 1
    return start, end, looks


def _programs(running: np.ndarray, waiting: np.ndarray, slots: int, schedule: EngineSchedule) -> np.ndarray:
    """[G] rows of the programs: all slots while responses wait, then the smallest size that holds the running ones."""
    if not schedule.sizes:
        return running
    sizes = np.array(sorted({1.0, *schedule.sizes})) * slots
    fitting = sizes[np.minimum(np.searchsorted(sizes, running - 1e-9), len(sizes) - 1)]
    return np.where(waiting, float(slots), fitting)


@functools.lru_cache(maxsize=4096)
def replica_profile(
    lengths: ResponseLengths,
    count: int,
    of: int,
    slots: int,
    prompt: float,
    schedule: EngineSchedule,
    tokens: float,
    jitter: float,
) -> BatchProfile:
    """Of `count` of a step's `of` responses. Remembered, since configurations share them."""
    return profile(sample(lengths, count, of, jitter), slots, prompt, schedule, tokens)


def stack(profiles: list[BatchProfile]) -> BatchProfile:
    return BatchProfile(*(np.concatenate(field) for field in zip(*profiles)))


# ---- what is kept of drafts


def position_acceptance(acceptance: Array, k: Array) -> np.ndarray:
    """[...] r in 0..1 with 1 + r + ... + r^k = acceptance length: what each draft is kept with, given those before it.

    Flat in the position, as the paper's three lengths are nearly (arXiv 2604.26779, Table 4: 0.88, 0.85, 0.84 for
    Zero); by bisection.
    """
    acceptance, k = np.broadcast_arrays(np.asarray(acceptance, float), k)
    powers = np.arange(LENGTHS[-1] + 1)
    low, high = np.zeros(k.shape), np.ones(k.shape)
    for _ in range(50):
        middle = (low + high) / 2
        short = (middle[..., None] ** powers * (powers <= k[..., None])).sum(-1) < acceptance
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    return (low + high) / 2


def cumulative_acceptance(acceptance: Array, k: Array) -> np.ndarray:
    """[..., K] a_1, a_2, ... of the flat ratio with this acceptance length at k, to the longest of LENGTHS."""
    return position_acceptance(acceptance, k)[..., None] ** np.arange(1, LENGTHS[-1] + 1)


# ---- seconds


def run(decoder: DecoderCost, p: BatchProfile, drafting: Drafting) -> Rollout:
    """One batch alone, from its first token to its last."""
    k, tokens, cost = _choose(decoder, p.batch, p.context, drafting)
    iterations = p.tokens / tokens
    looks = p.looks * decoder.hardware.attained.chunk_seconds
    seconds = (iterations * cost).sum(-1, keepdims=True) + looks
    share = iterations * cost / seconds
    thin = p.running < 0.25 * p.running.max(-1, keepdims=True)
    parts = (share * k, iterations, share * thin, share * p.running)
    return Rollout(seconds, *(x.sum(-1, keepdims=True) for x in parts))


def run_steady(
    decoder: DecoderCost,
    lengths: ResponseLengths,
    prompt: float,
    each: np.ndarray,
    most: np.ndarray,
    drafting: Drafting,
) -> Steady:
    """Batches of `each` [N, 1] responses a replica in a row, with up to `most` [N, 1] of them running."""
    shares = (np.arange(512) + 0.5) / 512
    drawn = lengths.quantile(shares)
    mean = drawn.mean()
    context = np.array([[prompt + (drawn**2).mean() / mean / 2]])
    sequences = np.exp(np.linspace(0.0, 1.0, ADMISSIONS) * np.log(np.maximum(most, 1.0)))
    _, tokens, cost = _choose(decoder, sequences, context, drafting)
    longest = lengths.quantile(1 - 0.5 / np.maximum(each, 1.0))
    return Steady(each * mean / tokens / sequences * cost, longest / tokens * cost)


def _choose(
    decoder: DecoderCost, batch: np.ndarray, context: np.ndarray, drafting: Drafting
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(k, tokens, seconds) of an iteration, [N, G] each."""
    adaptive = drafting.k[..., 0] < 0
    if not adaptive.any():
        tokens = _kept(drafting)
        return drafting.k, tokens, decoder.speculative(batch, drafting.k, context)
    costs = np.stack(
        np.broadcast_arrays(*(decoder.speculative(batch, np.array([[k]]), context) for k in LENGTHS)), axis=-1
    )
    tokens = np.stack([expected_tokens(drafting.accepted, k) for k in LENGTHS], axis=-1)  # [N, 1, n]
    tokens = np.broadcast_to(tokens, costs.shape)
    fixed = [LENGTHS.index(int(k)) if k >= 0 else 0 for k in drafting.k[..., 0]]
    best = np.where(adaptive[:, None], best_length(tokens, costs), np.array(fixed)[:, None])[..., None]
    chosen = (np.broadcast_to(np.asarray(LENGTHS, float), costs.shape), tokens, costs)
    return tuple(np.take_along_axis(x, best, -1)[..., 0] for x in chosen)


def _kept(drafting: Drafting) -> np.ndarray:
    """[N, 1] tokens of a verification, by each configuration's own k."""
    return expected_tokens(drafting.drafted(), drafting.accepted.shape[-1])
