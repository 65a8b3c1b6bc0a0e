"""The training batch: rollouts with advantages, packed into rows for the learner's jitted steps.

Rows are as long as the step's longest rollout needs, or somewhat longer where that leaves less of them empty, and as
many as hold the rollouts, both rounded up: the learner's programs are compiled anew for each shape.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import numpy as np

from specrl_jax.core import stand_in
from specrl_jax.data.rows import KeptTokens, Places, Rows, pack, packed, packed_rows, rows_of
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.learner.microbatches import fitting_rows

# Tokens of the shortest row: attention over fewer saves nothing that could be measured.
SHORTEST = 128
# A row has room for two of the longest rollouts up to so many tokens, so that it fills whatever they are; a longer one
# only for one, since memory and attention grow with its length.
ROOM_FOR_TWO = 1024
# Longer rows, by as many times, where they hold the rollouts in less than WORTH of the tokens: rollouts of one length
# may leave a third of each row empty.
LONGER = (1.5, 2)
WORTH = 7 / 8
# Numbers of rows between a power of two and the next: one in 16 rows is empty on average.
SIZES = 8


class TrainingBatch(NamedTuple):
    """The rollouts that one step learns from, R = P groups x G."""

    rollouts: Rollouts
    advantages: np.ndarray  # [R] float32
    loss_mask: np.ndarray  # [R] bool, rollouts that enter the loss


class LearnerBatch(NamedTuple):
    """A training batch by token. Minibatch i of n is rows i, i + n, ...: some of every group."""

    rows: Rows
    behaviour: np.ndarray  # [B, T] float32, the rollouts' log-probs of the rows' targets, nats
    advantages: np.ndarray  # [B, T] float32
    loss_mask: np.ndarray  # [B, T] bool


class Packing(NamedTuple):
    """How rollouts are packed into rows. The same rollouts get the same rows in every process."""

    limit: int  # tokens of the longest rollout that there may be
    parts: int = 1  # minibatches, each as many as the draft's updates from it
    num_shards: int = 1  # the rows of a part are a multiple of it
    sequence_shards: int = 1  # the tokens of a row are a multiple of it
    microbatch_tokens: int = 0  # of all rows in one forward and backward pass; 0: of a minibatch
    shortest: int = SHORTEST  # row, tokens

    def row_tokens(self, longest: int) -> int:
        """Return the tokens of a row whose longest rollout has `longest`: a power of two, or the limit rounded up."""
        tokens = power_of_two(max(2 * longest, self.shortest))
        if tokens > ROOM_FOR_TWO:
            tokens = min(power_of_two(max(longest, ROOM_FOR_TWO)), max(self.limit, ROOM_FOR_TWO))
        return self.divisible(tokens)

    def row_choices(self, longest: int) -> list[int]:
        """Return the tokens that a row may have, the fewest first; multiples of SHORTEST, up to ROOM_FOR_TWO."""
        fewest = self.row_tokens(longest)
        longer = [int(n * fewest) for n in LONGER if n * fewest <= ROOM_FOR_TWO and n * fewest % self.shortest == 0]
        return [fewest, *(n for n in longer if n % self.sequence_shards == 0)]

    def lone_row_tokens(self, longest: int) -> int:
        """Return the tokens of rows of one rollout each: a power of two, or the limit rounded up."""
        return self.divisible(min(power_of_two(max(longest, self.shortest)), self.limit))

    def divisible(self, tokens: int) -> int:
        """Return the tokens of a row rounded up to what its shards divide."""
        return -(-tokens // self.sequence_shards) * self.sequence_shards

    def rows(self, needed: int, tokens: int) -> int:
        """Return the rows of a part that needs `needed` of `tokens`: one of few numbers, in equal microbatches."""
        units = few_sizes(math.ceil(needed / self.num_shards))
        most = fitting_rows(tokens, self.microbatch_tokens, self.num_shards) // self.num_shards
        microbatches = math.ceil(units / most) if most else 1
        return self.num_shards * microbatches * math.ceil(units / microbatches)


def least_pass(packing: Packing) -> str:
    """Return how many tokens a pass takes where that can be more than microbatch_tokens; "" where it cannot."""
    asked, shards = packing.microbatch_tokens, packing.num_shards
    fewest, most = (shards * packing.row_tokens(n) for n in (1, packing.limit))
    if not 0 < asked < most:
        return ""
    taken = f"{max(fewest, asked)} to {most}" if fewest < most else f"{most}"
    rows = f"a row on each of {shards} shards" if shards > 1 else "one row"
    return f"grpo.microbatch_tokens={asked}: a pass takes {rows}, {taken} tokens by the longest rollout of a step"


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def few_sizes(n: int) -> int:
    """Return n rounded up to one of SIZES numbers between a power of two and the next: less than 1 / SIZES more."""
    step = max(1, power_of_two(n + 1) // (2 * SIZES))
    return -(-n // step) * step


def learner_batch(
    batch: TrainingBatch, pad_id: int, packing: Packing | None = None, drawn: bool = False
) -> LearnerBatch:
    """Pack rollouts into rows; without `packing` each has a row, as long as that of the longest.

    `drawn`: the rows say which tokens the policy drew itself.
    """
    r = batch.rollouts
    rows, behaviour = rollout_rows(r, pad_id)
    by_token = [behaviour, *(np.repeat(x[:, None], rows.tokens.shape[1], axis=1) for x in batch[1:])]
    if drawn:
        drew = np.pad(r.draft_positions[:, 1 : r.length.max()] == 0, ((0, 0), (0, 1)))
        by_token.append(drew & np.asarray(rows.mask))
    places = pack_parts(r.length, packing) if packing else None
    if places:
        rows = packed_rows(rows, places, r.length, pad_id)
        by_token = [packed(x, places, r.length, 0) for x in by_token]
    if r.mask_count.shape[1]:
        rows = dataclasses.replace(rows, kept=_kept_tokens(r, places))
    if len(r.experts):
        rows = dataclasses.replace(rows, experts=_experts(r, places, rows.tokens.shape))
    if drawn:
        rows = dataclasses.replace(rows, drawn=stand_in(by_token.pop()))
    return LearnerBatch(rows, *by_token)


def _kept_tokens(rollouts: Rollouts, places: Places | None) -> KeptTokens:
    """Lay out the rollouts' sampling masks, aligned with the rows' targets."""
    count = np.pad(rollouts.mask_count[:, 1 : rollouts.length.max()], ((0, 0), (0, 1)))
    row = order = np.arange(len(count))
    if places:
        count, row = packed(count, places, rollouts.length, 0), places.row
        order = np.lexsort((places.start, places.row))
    ids = np.full((len(count), ids_per_row(count.shape[1], int(count.sum(axis=1).max()))), -1, np.int32)
    used, masks = np.zeros(len(count), np.int64), rollouts.masks()
    for i in order:
        ids[row[i], used[row[i]] : used[row[i]] + len(masks[i])] = masks[i]
        used[row[i]] += len(masks[i])
    return KeptTokens(stand_in(ids), stand_in(count))


def _experts(rollouts: Rollouts, places: Places | None, shape: tuple[int, ...]) -> jax.Array:
    """Lay out the experts of the rollouts' tokens, [B, T, L k]; none of a rollout's last token and of padding."""
    out = np.zeros((*shape, rollouts.experts.shape[1]), rollouts.experts.dtype)
    for i, experts in enumerate(rollouts.experts_by_rollout()):
        row, start = (places.row[i], places.start[i]) if places else (i, 0)
        out[row, start : start + len(experts)] = experts
    return stand_in(out)


def ids_per_row(tokens: int, most: int) -> int:
    """Return N, room for the `most` ids of a row's sampling masks: `tokens` times a power of two, so N has few values.

    Each compiles the learner's programs.
    """
    return tokens * 2 ** math.ceil(math.log2(max(most / tokens, 1)))


def rollout_rows(rollouts: Rollouts, pad_id: int) -> tuple[Rows, np.ndarray]:
    """Return a row per rollout, as long as the longest, and the behaviour log-probs [B, T] of the rows' targets.

    What an environment wrote is context: no target, in no loss and no metric.
    """
    longest = rollouts.length.max()
    tokens, environment = rollouts.tokens[:, :longest], rollouts.environment[:, :longest]
    rows = rows_of(tokens, rollouts.prompt_length, rollouts.length, pad_id, environment)
    return rows, np.pad(rollouts.logprobs[:, 1:longest], ((0, 0), (0, 1)))


def pack_parts(length: np.ndarray, packing: Packing) -> Places:
    """Pack part i of n, rollouts i, i + n, ..., into rows i, i + n, ...; all parts get the same number of rows.

    Args:
      length: [R] tokens of the rollouts.
    """
    shortest, *longer = (_pack_parts(length, packing, tokens) for tokens in packing.row_choices(int(length.max())))
    fullest = min(longer, key=lambda places: places.rows * places.tokens, default=shortest)
    return fullest if fullest.rows * fullest.tokens < WORTH * shortest.rows * shortest.tokens else shortest


def pack_alike(length: np.ndarray, packing: Packing, tokens: int) -> Places:
    """Pack [R] sequences into rows of `tokens`, and one of few numbers of them: each shape compiles a step anew."""
    places = pack(length, tokens)
    return places._replace(rows=packing.rows(places.rows, places.tokens))


def _pack_parts(length: np.ndarray, packing: Packing, tokens: int) -> Places:
    """Pack into rows of `tokens`."""
    n = packing.parts
    parts = [pack(length[i::n], tokens) for i in range(n)]
    rows = packing.rows(max(part.rows for part in parts), tokens)
    row, start, segment = (np.zeros(len(length), np.int64) for _ in range(3))
    for i, part in enumerate(parts):
        row[i::n], start[i::n], segment[i::n] = part.row * n + i, part.start, part.segment
    return Places(row, start, segment, rows * n, tokens)
