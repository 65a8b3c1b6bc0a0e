"""The training batch: rollouts with advantages, packed into rows for the learner's jitted steps.

The learner's programs are compiled for each shape of their rows. A run knows all shapes before its first step, from
its config alone: rows have one of two lengths, and go through the programs in microbatches of one size, of which the
last one's rows may be empty.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import numpy as np

from specrl_jax.core import stand_in
from specrl_jax.data.rows import KeptTokens, Places, Rows, pack, packed, packed_rows, rows_of
from specrl_jax.decoding.rollouts import Recorded, Rollouts

# Tokens of the shortest row: attention over fewer saves nothing that could be measured.
SHORTEST = 128
# A row has room for two of the longest rollouts up to so many tokens, so that it fills whatever they are; a longer one
# only for one, since memory and attention grow with its length.
ROOM_FOR_TWO = 1024
# Rows half as long, for steps of short rollouts, have so many tokens at least: each length takes programs of its own.
# On a CPU tokens in rows of 512 cost a quarter more than in rows of 256, and these as much as in rows of 128.
SHORT_ROWS = 256
# A microbatch is a MICROBATCHES-th of what the rollouts of an update take where all are as long as they may be, some
# times as much as they do take: half of one is empty on average. It has LEAST_TOKENS on each shard, so that adding up
# gradients costs little beside making them.
MICROBATCHES, LEAST_TOKENS = 32, 1024
# Room for the sampling masks of a row, ids a token: all that a top-k up to EXACT can keep; else IDS, since what top-p
# cuts usually leaves a few.
EXACT, IDS = 32, 8
# Of the float32 logits that exist at once on a device.
TILE_BYTES = 2**26


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
    """Sizes by which rollouts are packed into rows. The same rollouts get the same rows in every process."""

    limit: int  # tokens of the longest rollout that there may be
    parts: int = 1  # minibatches, each as many as the draft's updates from it
    num_shards: int = 1  # the rows of a microbatch are a multiple of it
    sequence_shards: int = 1  # the tokens of a row are a multiple of it
    microbatch_tokens: int = 0  # of a microbatch, at most; 0: a part whose rollouts are all as long as they may be
    shortest: int = SHORTEST  # row, tokens
    rollouts: int = 1  # of a part, usually at most
    most_kept: int = 0  # tokens that top-k and top-p keep at most

    def row_tokens(self, longest: int) -> int:
        """Return the tokens of the rows of a step whose longest rollout has `longest`: one of `lengths`.

        What most steps of a run need is the row for the limit: of hundreds of rollouts some are cut. Where none has
        half of it, rows of half the length hold as many, and attention costs half.
        """
        return self.lengths[0] if longest <= self.limit // 2 else self.lengths[-1]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the tokens that a row of this run may have, one number or two, the smaller first."""
        tokens = power_of_two(max(2 * self.limit, self.shortest))
        if tokens > ROOM_FOR_TWO:
            tokens = max(self.limit, ROOM_FOR_TWO)
        return self._with_half(tokens)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Return the shapes of the microbatches of this run."""
        return [(self.microbatch(tokens), tokens) for tokens in self.lengths]

    def lone_row_tokens(self, longest: int) -> int:
        """Return the tokens of rows of one rollout each: one of two numbers, or one, as above."""
        lengths = self._with_half(min(power_of_two(max(self.limit, self.shortest)), self.limit))
        return next(n for n in lengths if n >= longest)

    def _with_half(self, tokens: int) -> tuple[int, ...]:
        lengths = (-(-tokens // 2), tokens) if tokens >= 2 * SHORT_ROWS else (tokens,)
        return tuple(self.divisible(n) for n in lengths)

    def divisible(self, tokens: int) -> int:
        """Return the tokens of a row rounded up to what its shards divide."""
        return -(-tokens // self.sequence_shards) * self.sequence_shards

    def microbatch(self, tokens: int) -> int:
        """Return the rows of a microbatch, of `tokens` each: at least one on each shard; otherwise not more tokens than
        microbatch_tokens, and not more rows than a part can need.
        """
        longest = self.limit if tokens >= self.lengths[-1] else max(1, self.limit // 2)
        # Whatever the rollouts' lengths, all rows of `pack` but the last hold so many.
        shared = math.ceil(self.rollouts / max(1, tokens // longest) / self.num_shards)
        if self.microbatch_tokens:
            wanted = max(math.ceil(shared / MICROBATCHES), LEAST_TOKENS // tokens)
            shared = max(1, min(shared, wanted, self.microbatch_tokens // tokens // self.num_shards))
        return self.num_shards * shared

    def vocab_tile(self, vocab: int, shards: int = 1) -> int:
        """Return `vocab_tile` of a microbatch."""
        tokens = max(math.prod(shape) for shape in self.shapes) // (self.num_shards * self.sequence_shards)
        return vocab_tile(tokens, vocab, shards)

    def rows(self, needed: int, tokens: int) -> int:
        """Return the rows of a part that needs `needed` of `tokens`: full microbatches."""
        size = self.microbatch(tokens)
        return -(-needed // size) * size

    @property
    def ids(self) -> int:
        """Return the room for the ids of a sampling mask, a token: see `ids_per_row`."""
        return max(1, self.most_kept) if self.most_kept <= EXACT else IDS


def vocab_tile(tokens: int, vocab: int, shards: int = 1) -> int:
    """Return the vocabulary entries that are unembedded at once, on all devices; 0: all.

    Of `vocab` entries over `shards` devices: the float32 logits of a device's `tokens` take TILE_BYTES there, at most.
    """
    tiles = power_of_two(math.ceil(4 * tokens * vocab / shards / TILE_BYTES))
    return -(-vocab // tiles) if tiles > 1 else 0


def least_pass(packing: Packing) -> str:
    """Return how many tokens a pass takes where that can be more than microbatch_tokens; "" where it cannot."""
    asked, shards = packing.microbatch_tokens, packing.num_shards
    taken = [shards * n for n in packing.lengths]
    if not 0 < asked < taken[-1]:
        return ""
    rows = f"a row on each of {shards} shards" if shards > 1 else "one row"
    shorter = f", or {taken[0]} in a step of short rollouts" if len(taken) > 1 else ""
    return f"grpo.microbatch_tokens={asked}: a pass takes {rows}, {taken[-1]} tokens{shorter}"


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def learner_batch(batch: TrainingBatch, pad_id: int, packing: Packing | None = None) -> LearnerBatch:
    """Pack rollouts into rows; without `packing` each has a row, as long as that of the longest."""
    r = batch.rollouts
    rows, behaviour = rollout_rows(r, pad_id)
    by_token = [behaviour, *(np.repeat(x[:, None], rows.tokens.shape[1], axis=1) for x in batch[1:])]
    places = pack_parts(r.length, packing) if packing else None
    if places:
        rows = packed_rows(rows, places, r.length, pad_id=pad_id)
        by_token = [packed(x, places, r.length, empty=0) for x in by_token]
    if "mask_count" in r.features:
        rows = dataclasses.replace(rows, kept=_kept_tokens(r, places, packing.ids if packing else 1))
    if "experts" in r.features and len(r.features["experts"].values):
        rows = dataclasses.replace(rows, experts=_experts(r.features["experts"], places, rows.tokens.shape))
    return LearnerBatch(rows, *by_token)


def _kept_tokens(rollouts: Rollouts, places: Places | None, each: int) -> KeptTokens:
    """Lay out the rollouts' sampling masks, aligned with the rows' targets; `each`: Packing.ids."""
    count = np.pad(rollouts.features["mask_count"].values[:, 1 : rollouts.length.max()], ((0, 0), (0, 1)))
    row = order = np.arange(len(count))
    if places:
        count, row = packed(count, places, rollouts.length, empty=0), places.row
        order = np.lexsort((places.start, places.row))
    room = ids_per_row(count.shape[1] * each, int(count.sum(axis=1).max()))
    ids = np.full((len(count), room), -1, np.int32)
    used, masks = np.zeros(len(count), np.int64), rollouts.features["mask_ids"].by_rollout()
    for i in order:
        ids[row[i], used[row[i]] : used[row[i]] + len(masks[i])] = masks[i]
        used[row[i]] += len(masks[i])
    return KeptTokens(stand_in(ids), stand_in(count))


def _experts(recorded: Recorded, places: Places | None, shape: tuple[int, ...]) -> jax.Array:
    """Lay out the experts of the rollouts' tokens, [B, T, L k]; none of a rollout's last token and of padding."""
    out = np.zeros((*shape, recorded.values.shape[1]), recorded.values.dtype)
    for i, experts in enumerate(recorded.by_rollout()):
        row, start = (places.row[i], places.start[i]) if places else (i, 0)
        out[row, start : start + len(experts)] = experts
    return stand_in(out)


def ids_per_row(usual: int, most: int) -> int:
    """Return N, room for the ids of a row's sampling masks: `usual`, or twice that, and so on, where one has `most`.

    Each compiles the learner's programs.
    """
    return usual * 2 ** math.ceil(math.log2(max(most / usual, 1)))


def rollout_rows(rollouts: Rollouts, pad_id: int) -> tuple[Rows, np.ndarray]:
    """Return a row per rollout, as long as the longest, and the behaviour log-probs [B, T] of the rows' targets.

    What an environment wrote is context: no target, in no loss and no metric.
    """
    longest = rollouts.length.max()
    tokens, environment = rollouts.tokens[:, :longest], rollouts.environment[:, :longest]
    rows = rows_of(tokens, rollouts.prompt_length, rollouts.length, pad_id=pad_id, environment=environment)
    return rows, np.pad(rollouts.logprobs[:, 1:longest], ((0, 0), (0, 1)))


def pack_parts(length: np.ndarray, packing: Packing) -> Places:
    """Pack part i of n, rollouts i, i + n, ..., into rows i, i + n, ...; all parts get the same number of rows.

    Args:
      length: [R] tokens of the rollouts.
    """
    n, tokens = packing.parts, packing.row_tokens(int(length.max()))
    parts = [pack(length[i::n], tokens) for i in range(n)]
    rows = packing.rows(max(part.rows for part in parts), tokens)
    row, start, segment = (np.zeros(len(length), np.int64) for _ in range(3))
    for i, part in enumerate(parts):
        row[i::n], start[i::n], segment[i::n] = part.row * n + i, part.start, part.segment
    return Places(row, start, segment, rows=rows * n, tokens=tokens)


def pack_alike(length: np.ndarray, packing: Packing, tokens: int) -> Places:
    """Pack [R] sequences into rows of `tokens`, full microbatches of them."""
    places = pack(length, tokens)
    return places._replace(rows=packing.rows(places.rows, tokens))
