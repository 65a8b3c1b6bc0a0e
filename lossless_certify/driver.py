"""Drive a sampler as an engine does: draft, verify, advance; and refuse what does not fit."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from lossless_certify.block import Block, DraftRows, Rows, Sampler, take_rows
from lossless_certify.cases import Case
from lossless_certify.distributions import draw, flat_index
from lossless_certify.errors import CertifyError
from lossless_certify.toys import NODES, Toy


class WrongTokensError(Exception):
    """The sampler emitted what no verification of these drafts emits; the message says what."""


@dataclasses.dataclass(frozen=True)
class Keys:
    """Keys of the noise of B rows, and the setting of each."""

    request: np.ndarray  # [B]
    seed: int
    position: np.ndarray  # [B], of the first token that is emitted
    number: int = 0  # of the block
    setting: np.ndarray | int = 0  # [B], which of the case's settings a row has

    @property
    def columns(self) -> dict[str, Any]:
        """Return the keys as fields of a block."""
        number, position = np.full(len(self.request), self.number, np.int32), self.position.astype(np.int32)
        return {"request": self.request.astype(np.uint32), "seed": self.seed, "position": position, "number": number}


@dataclasses.dataclass
class EmittedTexts:
    """Emitted tokens of B rows."""

    tokens: np.ndarray  # [B, most that all blocks can emit]
    count: np.ndarray  # [B], how many of them
    variant: np.ndarray  # [B], which of the case's variants the first block was
    accepted: np.ndarray  # [B], drafted tokens that the first block kept
    setting: np.ndarray  # [B]


def drive(sampler: Sampler, case: Case, toy: Toy, *, keys: Keys, rng: np.random.Generator) -> EmittedTexts:
    """Verify a case's blocks one after the other, each at the position that the last one reached."""
    B, k = len(keys.request), case.k
    rows, node, kept = np.arange(B), np.zeros(B, np.int64), np.full(B, k)
    setting = rng.integers(0, len(case.settings), B)
    keys = dataclasses.replace(keys, setting=setting)
    count, variant, accepted = np.zeros((3, B), np.int64)
    out = EmittedTexts(np.zeros((B, case.blocks * (k + 1)), np.int64), count, variant, accepted, setting=setting)
    for number in range(case.blocks):
        block, nodes = make_block(sampler, case, toy, keys=keys, node=node, kept=kept, rng=rng)
        tokens, count = verify(sampler, block)
        if number == 0:
            out.accepted, out.variant = count - 1, _variant(case, toy, block, setting)
        for i in range(k + 1):
            emits = rows[i < count]
            out.tokens[emits, out.count[emits] + i] = tokens[emits, i]
        out.count, kept = out.count + count, count - 1
        node = toy.step(nodes[rows, kept], toy.places(tokens[rows, kept]))
        keys = dataclasses.replace(keys, position=keys.position + count, number=keys.number + 1)
    return out


def _variant(case: Case, toy: Toy, block: Block, setting: np.ndarray) -> np.ndarray:
    """Return [B], which of the case's variants a row is: its setting, and the draft or its length."""
    if case.drafts == "one-hot":
        return setting * case.V**case.k + flat_index(toy.places(block.draft_tokens), case.V)
    return setting * (case.k + 1) + block.num_drafted if case.lengths == "any" else setting


def make_block(
    sampler: Sampler,
    case: Case,
    toy: Toy,
    *,
    keys: Keys,
    node: np.ndarray,
    kept: np.ndarray,
    rng: np.random.Generator,
) -> tuple[Block, np.ndarray]:
    """Draft after texts `node` [B]; return the block to verify, and the nodes [B, k + 1] of its prefixes."""
    B, k, V = len(node), case.k, toy.vocabulary
    settings = np.array([dataclasses.astuple(setting) for setting in case.settings])
    temperature, top_k, top_p = settings[np.broadcast_to(keys.setting, B)].T
    columns = keys.columns | {
        "temperature": temperature.astype(np.float32),
        "top_k": top_k.astype(np.int32),
        "top_p": top_p.astype(np.float32),
    }
    tokens, nodes = np.zeros((B, k), np.int32), np.zeros((B, k + 1), np.int64)
    nodes[:, 0] = node
    for i in range(k):
        rows = DraftRows(toy.draft_logits(nodes[:, i]), toy.vocab_map, V, offset=i, **columns)
        if case.drafts == "one-hot":
            tokens[:, i] = toy.ids[rng.integers(0, case.V, B)]
        elif case.drafts == "likeliest":
            tokens[:, i] = rows.probs.argmax(axis=-1)
        elif hasattr(sampler, "draft"):
            tokens[:, i] = _draw(sampler, rows)
        else:
            tokens[:, i] = draw(rows.probs, rng.random(B))
        nodes[:, i + 1] = toy.step(nodes[:, i], toy.places(tokens[:, i]))
    num_drafted = {"full": np.full(B, k), "any": rng.integers(0, k + 1, B), "last": kept}[case.lengths]
    # Beyond what was drafted stands anything, as in an engine's buffers.
    beyond = np.arange(k + 1) - num_drafted[:, None]
    stale = rng.integers(0, NODES, (B, k + 1))
    block = Block(
        draft_tokens=np.where(beyond[:, :k] >= 0, toy.ids[stale[:, :k] % case.V], tokens),
        num_drafted=num_drafted.astype(np.int32),
        target_logits=toy.target_logits(np.where(beyond > 0, stale, nodes)),
        draft_logits=toy.draft_logits(np.where(beyond >= 0, stale, nodes)[:, :k]) if case.drafts == "sampled" else None,
        vocab_map=toy.vocab_map if case.drafts == "sampled" else None,
        **columns,
    )
    return block, nodes


def _draw(sampler: Any, rows: DraftRows) -> np.ndarray:
    """Return the sampler's drafted tokens [B]."""
    drawn = [
        _whole(sampler.draft(part), "draft", part.request.shape, highest=rows.vocabulary - 1)
        for part in _parts(sampler, rows)
    ]
    return np.concatenate(drawn)


def verify(sampler: Sampler, block: Block) -> tuple[np.ndarray, np.ndarray]:
    """Return the sampler's tokens [B, k + 1] and count [B].

    Raises:
      CertifyError: they have other shapes or types.
      WrongTokensError: more was kept than was drafted, or something else.
    """
    answers = [_verify_part(sampler, part) for part in _parts(sampler, block)]
    return np.concatenate([tokens for tokens, _ in answers]), np.concatenate([count for _, count in answers])


def _parts(sampler: Sampler, rows: Rows) -> Iterator[Rows]:
    """Yield rows in parts of at most the sampler's `max_rows`."""
    B = len(rows.request)
    most = getattr(sampler, "max_rows", None) or B
    if most >= B:
        yield rows
    else:
        yield from (take_rows(rows, np.arange(i, min(i + most, B))) for i in range(0, B, most))


def _verify_part(sampler: Sampler, block: Block) -> tuple[np.ndarray, np.ndarray]:
    B, k = block.draft_tokens.shape
    answer = sampler.verify(block)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise CertifyError(f"verify returned {type(answer).__name__}, where (tokens [B, k + 1], count [B]) was wanted")
    count = _whole(answer[1], "the count of verify", (B,))
    if (count < 1).any() or (count > block.num_drafted + 1).any():
        raise WrongTokensError("a count outside 1 to the number of drafted tokens + 1")
    emitted = np.arange(k + 1) < count[:, None]
    tokens = _whole(
        answer[0], "the tokens of verify", (B, k + 1), mask=emitted, highest=block.target_logits.shape[2] - 1
    )
    if ((tokens[:, :k] != block.draft_tokens) & emitted[:, 1:]).any():
        raise WrongTokensError("a token before the last that is not the drafted one")
    return tokens, count


def _whole(
    values: Any, name: str, shape: tuple[int, ...], *, mask: np.ndarray | bool = True, highest: int | None = None
) -> np.ndarray:
    """Return values as int64, 0 where not `mask`."""
    try:
        values = np.asarray(values)
    except ValueError:
        raise CertifyError(f"{name}: rows of several lengths, where integers {list(shape)} were wanted") from None
    if values.shape != shape or not np.issubdtype(values.dtype, np.integer):
        raise CertifyError(f"{name}: {values.dtype} {list(values.shape)}, where integers {list(shape)} were wanted")
    values = np.where(mask, values, 0).astype(np.int64)
    if highest is not None and ((values < 0) | (values > highest)).any():
        raise CertifyError(f"{name}: a token outside 0 to {highest}, the last of the vocabulary")
    return values
