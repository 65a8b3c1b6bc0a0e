"""A discrete-event model of the rollout phase: slots are refilled, the batch thins out, long responses end alone.

The clock counts tokens per row. All running rows advance alike for any k, so the schedule does not depend on seconds;
seconds are the sum over segments of tokens / E[tokens](k) x seconds of an iteration. E and the best k are the
controller's own functions (`decoding.controller`).

Arrays have configurations along their first axis and segments, or admission levels, along the second.
"""

import dataclasses
import functools
import heapq
import math
from typing import NamedTuple

import numpy as np

from experiments.simulator.cost import DecoderCost
from experiments.simulator.lengths import ResponseLengths, sample
from specrl_jax.decoding.acceptance import expected_tokens
from specrl_jax.decoding.controller import best_length
from specrl_jax.models.flops import Array

SEGMENTS = 64  # of the clock, in each of which batch and context are replaced by their means
# Draft lengths that the controller compares, as in training.
LENGTHS = (0, 1, 2, 3, 5, 7)
ADMISSIONS = 24  # numbers of concurrent sequences that steady generation chooses from


@dataclasses.dataclass(frozen=True)
class EngineSchedule:
    """When an engine refills its slots. The default refills after every token and runs any batch size, as vLLM does."""

    # Share of the slots that must be free before the host synchronises and refills them; 0: any.
    refill_share: float = 0.0
    # Iterations after which the host synchronises anyway; 0: never before.
    chunk: int = 0
    # Compiled batch sizes, as shares of the slots; (): any.
    sizes: tuple[float, ...] = ()
    # Tokens of the cache that attention reads for any context, masked; 0: the context.
    cache_length: int = 0


AT_ONCE = EngineSchedule()


class BatchProfile(NamedTuple):
    """Running rows of replicas over the clock: [N, G], the last [N, 1]."""

    tokens: np.ndarray  # length of a segment
    running: np.ndarray  # mean running rows
    batch: np.ndarray  # mean compiled batch size
    context: np.ndarray  # mean keys read by a running row
    refills: np.ndarray  # host synchronisations that started a response


class Drafting(NamedTuple):
    """Draft length, k [N, 1], or the best of LENGTHS where k < 0; and the acceptance."""

    k: np.ndarray
    accepted: np.ndarray  # [N, 1, K] a_1, a_2, ...: share of verifications that accept draft i and all before it

    def drafted(self) -> np.ndarray:
        """Return [N, 1, K] acceptance of the drafted positions, 0 for the others; of all positions where k varies."""
        positions = np.arange(self.accepted.shape[-1])
        inside = (positions < self.k[..., None]) | (self.k[..., None] < 0)
        return np.where(inside, self.accepted, 0.0)

    def jitter(self, tokens: float) -> np.ndarray:
        """Return [N, 1] relative standard deviation of the number of verifications of a response of `tokens` tokens.

        With A accepted drafts, E[A] = sum a_i and E[A^2] = sum (2 i - 1) a_i; a response takes tokens / (1 + E[A])
        independent verifications.
        """
        a = self.drafted()
        mean = a.sum(-1)
        variance = ((2 * np.arange(1, a.shape[-1] + 1) - 1) * a).sum(-1) - mean**2
        return np.sqrt(np.maximum(variance, 0.0) / (1 + mean) / tokens)


class Rollout(NamedTuple):
    """One batch of responses, [N, 1] each."""

    seconds: np.ndarray
    length: np.ndarray  # mean k, weighted by time
    iterations: np.ndarray
    tail: np.ndarray  # share of the seconds with less than a quarter of the peak number of running rows
    batch: np.ndarray  # mean running rows, weighted by time


class Steady(NamedTuple):
    """Generation without a gap between batches, by the number of concurrent sequences: [N, ADMISSIONS]."""

    seconds: np.ndarray  # per batch
    delay: np.ndarray  # from a batch's first token to its last


# ---- schedule


def profile(lengths: np.ndarray, slots: int, prompt: float, *, schedule: EngineSchedule, tokens: float) -> BatchProfile:
    """Simulate one replica's responses of `lengths` [R], started in this order in `slots` slots; N = 1.

    Args:
      prompt: tokens before each response.
      tokens: committed per iteration, which sets the length of a chunk on the clock.
    """
    start, end, refills = _assign_slots(lengths, slots, schedule, tokens)
    edges = np.linspace(0.0, end.max(), SEGMENTS + 1)
    low, high = edges[:-1, None], edges[1:, None]
    overlap = np.clip(np.minimum(end, high) - np.maximum(start, low), 0.0, None)  # [G, R] tokens
    middle = (np.minimum(end, high) + np.maximum(start, low)) / 2 - start
    alive = overlap.sum(1)
    running = alive / (edges[1] - edges[0])
    context = (overlap * (prompt + middle)).sum(1) / np.maximum(alive, 1e-9)
    if schedule.cache_length:
        context = np.full(SEGMENTS, float(schedule.cache_length))
    batch = _compiled_sizes(running, edges[1:] <= start.max(), slots, schedule)
    rows = (np.full(SEGMENTS, edges[1] - edges[0]), running, batch, context, [refills])
    return BatchProfile(*(np.asarray(x, float)[None] for x in rows))


def _assign_slots(
    lengths: np.ndarray, slots: int, schedule: EngineSchedule, tokens: float
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (start [R], end [R], refills) on the clock; the next response always takes the first free slot."""
    count = len(lengths)
    start, end = np.zeros(count), np.array(lengths, float)
    if count <= slots:
        return start, end, 1
    least, period = max(1, int(schedule.refill_share * slots)), schedule.chunk * tokens or math.inf
    ends = end[:slots].tolist()
    heapq.heapify(ends)
    started, refills, now = slots, 1, 0.0
    while started < count:
        # Enough slots are free, or the chunk is over and at least one is.
        enough = ends[0] if least == 1 else heapq.nsmallest(least, ends)[-1]
        now = max(min(enough, now + period), ends[0])
        refills += 1
        while started < count and ends[0] <= now:
            start[started], end[started] = now, now + lengths[started]
            heapq.heapreplace(ends, end[started])
            started += 1
    return start, end, refills


def _compiled_sizes(running: np.ndarray, waiting: np.ndarray, slots: int, schedule: EngineSchedule) -> np.ndarray:
    """Return [G] batch sizes: all slots while responses wait, then the smallest compiled size that fits."""
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
    *,
    slots: int,
    prompt: float,
    schedule: EngineSchedule,
    tokens: float,
    jitter: float,
) -> BatchProfile:
    """Return the profile of `count` of a step's `of` responses. Cached, since configurations share profiles."""
    return profile(sample(lengths, count, of, jitter=jitter), slots, prompt, schedule=schedule, tokens=tokens)


# ---- acceptance


def position_acceptance(acceptance: Array, k: Array) -> np.ndarray:
    """Return [...] r in 0..1 with 1 + r + ... + r^k = acceptance length: each draft's acceptance given those before it.

    The same at every position, as nearly holds for the paper's three lengths (arXiv 2604.26779, Table 4: 0.88, 0.85,
    0.84 for Zero). Solved by bisection.
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
    """Return [..., K] a_1, a_2, ... up to the longest of LENGTHS, for an acceptance length measured at k."""
    return position_acceptance(acceptance, k)[..., None] ** np.arange(1, LENGTHS[-1] + 1)


# ---- seconds


def run(decoder: DecoderCost, p: BatchProfile, drafting: Drafting) -> Rollout:
    """Return the cost of one batch by itself, from its first token to its last."""
    k, tokens, cost = choose(decoder, p.batch, p.context, drafting=drafting)
    iterations = p.tokens / tokens
    host = p.refills * decoder.hardware.attained.chunk_seconds
    seconds = (iterations * cost).sum(-1, keepdims=True) + host
    share = iterations * cost / seconds
    thin = p.running < 0.25 * p.running.max(-1, keepdims=True)
    parts = (share * k, iterations, share * thin, share * p.running)
    return Rollout(seconds, *(x.sum(-1, keepdims=True) for x in parts))


def run_steady(
    decoder: DecoderCost,
    lengths: ResponseLengths,
    prompt: float,
    *,
    each: np.ndarray,
    most: np.ndarray,
    drafting: Drafting,
) -> Steady:
    """Return the cost of consecutive batches of `each` [N, 1] responses a replica, up to `most` [N, 1] concurrently."""
    shares = (np.arange(512) + 0.5) / 512
    drawn = lengths.quantile(shares)
    mean = drawn.mean()
    context = np.array([[prompt + (drawn**2).mean() / mean / 2]])
    sequences = np.exp(np.linspace(0.0, 1.0, ADMISSIONS) * np.log(np.maximum(most, 1.0)))
    _, tokens, cost = choose(decoder, sequences, context, drafting=drafting)
    longest = lengths.quantile(1 - 0.5 / np.maximum(each, 1.0))
    return Steady(each * mean / tokens / sequences * cost, longest / tokens * cost)


def choose(
    decoder: DecoderCost, batch: np.ndarray, context: np.ndarray, *, drafting: Drafting
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (k, committed tokens, seconds) of an iteration, [N, G] each."""
    adaptive = drafting.k[..., 0] < 0
    if not adaptive.any():
        tokens = expected_tokens(drafting.drafted(), drafting.accepted.shape[-1])
        return drafting.k, tokens, np.asarray(decoder.speculative(batch, drafting.k, context))
    costs = np.stack(
        np.broadcast_arrays(*(decoder.speculative(batch, np.array([[k]]), context) for k in LENGTHS)), axis=-1
    )
    tokens = np.stack([expected_tokens(drafting.accepted, k) for k in LENGTHS], axis=-1)  # [N, 1, n]
    tokens = np.broadcast_to(tokens, costs.shape)
    fixed = [LENGTHS.index(int(k)) if k >= 0 else 0 for k in drafting.k[..., 0]]
    best = np.where(adaptive[:, None], best_length(tokens, costs), np.array(fixed)[:, None])[..., None]
    lengths = np.broadcast_to(np.asarray(LENGTHS, float), costs.shape)
    k, committed, seconds = (np.take_along_axis(x, best, -1)[..., 0] for x in (lengths, tokens, costs))
    return k, committed, seconds
