"""Samplers with known faults, which the certifier must find, and right ones, which it must pass.

Each fault is a few lines over the right sampler, in numpy, written for this file.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from lossless_certify.block import Block, DraftRows
from lossless_certify.distributions import block_chances, draw, rejection_chances
from lossless_certify.noise import ACCEPT, DRAFT, RESIDUAL, uniforms


class Verification(NamedTuple):
    """A block with drafts that have probabilities, as it is verified."""

    block: Block
    p: np.ndarray  # [B, k + 1, V]
    q: np.ndarray  # [B, k, V]
    uniforms: np.ndarray  # [B, k] of acceptance

    @property
    def drafted(self) -> np.ndarray:
        """Return [B, k] bool, places where a token was drafted."""
        return np.arange(self.q.shape[1]) < self.block.num_drafted[:, None]

    @property
    def ratios(self) -> np.ndarray:
        """Return [B, k] min(1, p / q) of the drafted tokens."""
        return rejection_chances(self.p, self.q, self.block.draft_tokens)

    def at(self, rows: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Return rows [B, n, ...] at a place [B] of each; beyond the last one, the last."""
        return rows[np.arange(len(rows)), place.clip(max=rows.shape[1] - 1)]


@dataclasses.dataclass
class RightSampler:
    """`rejection` or `block`, keyed by seed, request, position of the block's first token, offset and stream.

    Drafts without probabilities are verified by exact match: a token is drawn from p at every position, and drafts are
    kept up to the first that differs. Its noise is keyed by absolute position. Faults replace one method.
    """

    rule: str | None = "rejection"

    def draft(self, rows: DraftRows) -> np.ndarray:
        """Draw [B] tokens from q."""
        return draw(rows.probs, self.noise(rows, DRAFT, rows.position, offset=rows.offset))

    def verify(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens [B, k + 1], count [B])."""
        p, q = block.target_probs, self.draft_probs(block)
        if q is None:
            return self.by_match(block, p)
        return self.by_ratio(Verification(block, p, q, self.accept_noise(block)))

    def by_ratio(self, v: Verification) -> tuple[np.ndarray, np.ndarray]:
        """Keep drafted tokens by the rule; draw the token after them from the residual, or from p after the last."""
        accepted, scale = self.keep_block(v) if self.rule == "block" else (self.keep_tokens(v), np.ones(len(v.p)))
        whole = accepted == v.block.num_drafted
        weights = np.where(whole[:, None], self.bonus(v, accepted), self.residual(v, accepted, scale))
        tokens = np.pad(v.block.draft_tokens, ((0, 0), (0, 1)))
        tokens[np.arange(len(tokens)), accepted] = self.draw_last(v, weights, accepted)
        return tokens, accepted + 1

    def by_match(self, block: Block, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw a token at every position; keep drafts up to the first that differs."""
        k, tokens = block.draft_tokens.shape[1], self.match_tokens(block, p)
        right = (tokens[:, :k] == block.draft_tokens) & (np.arange(k) < block.num_drafted[:, None])
        return tokens, right.cumprod(axis=1).sum(axis=1) + 1

    def keep_tokens(self, v: Verification) -> np.ndarray:
        """Return the tokens [B] that `rejection` keeps."""
        return ((v.uniforms < v.ratios) & v.drafted).cumprod(axis=1).sum(axis=1)

    def keep_block(self, v: Verification) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens [B] that `block` keeps, and the scales [B] of p in the residuals after them."""
        places = np.arange(1, v.q.shape[1] + 1)
        h, P = block_chances(v.p, v.q, v.block.draft_tokens)
        h = np.where(places == v.block.num_drafted[:, None], P[:, 1:], h)  # a shorter block ends with h = P
        accepted = ((v.uniforms < h) * v.drafted * places).max(axis=1)
        return accepted, v.at(P, accepted)

    def noise(self, keys: Block | DraftRows, stream: int, position: np.ndarray, *, offset: Any = 0) -> np.ndarray:
        """Return uniforms of a stream at positions and offsets, [B] or [B, n]."""
        request = keys.request if position.ndim == 1 else keys.request[:, None]
        return uniforms(keys.seed, request, position, offset, stream)

    def accept_noise(self, block: Block) -> np.ndarray:
        """Return the uniforms [B, k] of acceptance."""
        return self.noise(block, ACCEPT, block.position[:, None], offset=np.arange(block.draft_tokens.shape[1]))

    def draft_probs(self, block: Block) -> np.ndarray | None:
        """Return q [B, k, V] that drafts are verified against."""
        return block.draft_probs

    def match_tokens(self, block: Block, p: np.ndarray) -> np.ndarray:
        """Draw [B, k + 1] tokens from p."""
        return draw(p, self.noise(block, RESIDUAL, block.position[:, None] + np.arange(p.shape[1])))

    def residual(self, v: Verification, accepted: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Return the weights [B, V] of the token after a refused one."""
        p = v.at(v.p, accepted)
        weights = np.maximum(scale[:, None] * p - v.at(v.q, accepted), 0)
        return np.where(weights.sum(axis=-1, keepdims=True) > 0, weights, p)

    def bonus(self, v: Verification, accepted: np.ndarray) -> np.ndarray:
        """Return the weights [B, V] of the token after a draft that is kept whole."""
        return v.at(v.p, accepted)

    def draw_last(self, v: Verification, weights: np.ndarray, accepted: np.ndarray) -> np.ndarray:
        """Draw the last token [B] of each row from weights [B, V]."""
        return draw(weights, self.noise(v.block, RESIDUAL, v.block.position, offset=accepted))


class CoupledSampler(RightSampler):
    """Shared Gumbel noise (Daliri, Musco, Suresh 2408.07978): draft and target take the argmax with the same noise."""

    def draft(self, rows: DraftRows) -> np.ndarray:
        """Return [B] tokens, the argmax of log q + noise of the token's absolute position."""
        return gumbel_argmax(rows.probs, rows, rows.position + rows.offset)

    def verify(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens [B, k + 1], count [B])."""
        return self.by_match(block, block.target_probs)

    def match_tokens(self, block: Block, p: np.ndarray) -> np.ndarray:
        """Return [B, k + 1] tokens, the argmax of log p + noise of each absolute position."""
        columns = [gumbel_argmax(p[:, i], block, block.position + i) for i in range(p.shape[1])]
        return np.stack(columns, axis=1)


def gumbel_argmax(probs: np.ndarray, keys: Block | DraftRows, position: np.ndarray) -> np.ndarray:
    """Return the argmax [B] of log probs [B, V] + Gumbel noise keyed by seed, request, position and token."""
    u = uniforms(keys.seed, keys.request[:, None], position[:, None], np.arange(probs.shape[-1]))
    with np.errstate(divide="ignore"):
        return (np.log(probs) - np.log(-np.log(np.maximum(u, 2.0**-60)))).argmax(axis=-1)


# --- faults


class SharedGumbel(RightSampler):
    """The refused token's replacement is drawn with the Gumbel noise that the draft was drawn with."""

    draft = CoupledSampler.draft

    def draw_last(self, v: Verification, weights: np.ndarray, accepted: np.ndarray) -> np.ndarray:
        return gumbel_argmax(weights, v.block, v.block.position + accepted)


class PositionKeyedBlock(RightSampler):
    """Block verification whose uniforms are keyed by absolute position: the next block sees those that failed."""

    def accept_noise(self, block: Block) -> np.ndarray:
        return self.noise(block, ACCEPT, block.position[:, None] + np.arange(block.draft_tokens.shape[1]))


class ReusedUniform(RightSampler):
    """The uniform that refused a token also draws its replacement."""

    def draw_last(self, v: Verification, weights: np.ndarray, accepted: np.ndarray) -> np.ndarray:
        reused = draw(weights, v.at(v.uniforms, accepted))
        return np.where(accepted < v.block.num_drafted, reused, super().draw_last(v, weights, accepted))


class ProductBlock(RightSampler):
    """A block rule that compares products of ratios and of uniforms, with the residual of `rejection`."""

    def keep_block(self, v: Verification) -> tuple[np.ndarray, np.ndarray]:
        passed = np.cumprod(v.uniforms, axis=1) < np.cumprod(v.ratios, axis=1)
        return (passed * v.drafted * np.arange(1, v.q.shape[1] + 1)).max(axis=1), np.ones(len(v.p))


class OneHotBlock(RightSampler):
    """Drafts without probabilities go through that rule, with 1 for their probability."""

    keep_block = ProductBlock.keep_block

    def by_match(self, block: Block, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        certain = np.eye(p.shape[-1])[block.draft_tokens]
        return self.by_ratio(Verification(block, p, certain, self.accept_noise(block)))

    def by_ratio(self, v: Verification) -> tuple[np.ndarray, np.ndarray]:
        certain = v.block.draft_logits is None
        return super().by_ratio(v) if certain else RightSampler("block").by_ratio(v)


class IgnoredBlock(RightSampler):
    """`block` is asked for, and `rejection` is what runs: no bias, but not what was promised."""

    def keep_block(self, v: Verification) -> tuple[np.ndarray, np.ndarray]:
        return self.keep_tokens(v), np.ones(len(v.p))


class ArgmaxDrafts(RightSampler):
    """Drafts are the draft's likeliest tokens, and are verified as if they were sampled."""

    def draft(self, rows: DraftRows) -> np.ndarray:
        return rows.probs.argmax(axis=-1)


class UntruncatedTarget(RightSampler):
    """Acceptance takes the target's probabilities before top-k and top-p, the token after it those after."""

    def keep_tokens(self, v: Verification) -> np.ndarray:
        whole = dataclasses.replace(v.block, top_k=0 * v.block.top_k, top_p=np.ones_like(v.block.top_p))
        return super().keep_tokens(v._replace(p=whole.target_probs))


class UnnormalisedResidual(RightSampler):
    """The residual is not divided by its sum: its inverse CDF ends before one, and the last token takes the rest."""

    def residual(self, v: Verification, accepted: np.ndarray, scale: np.ndarray) -> np.ndarray:
        weights = super().residual(v, accepted, scale)
        last = weights.shape[-1] - 1 - (weights[:, ::-1] > 0).argmax(axis=-1)
        weights[np.arange(len(last)), last] += np.maximum(1 - weights.sum(axis=-1), 0)
        return weights


class WrongBonusRow(RightSampler):
    """The token after a draft that is kept whole is drawn from the row before its own."""

    def bonus(self, v: Verification, accepted: np.ndarray) -> np.ndarray:
        return v.at(v.p, np.maximum(accepted - 1, 0))


class SharedRows(RightSampler):
    """All rows of a batch are accepted with the same uniforms."""

    def accept_noise(self, block: Block) -> np.ndarray:
        return np.broadcast_to(super().accept_noise(block)[:1], block.draft_tokens.shape)


class SlotKeyed(RightSampler):
    """Noise is keyed by the row of the batch, where the request was meant."""

    def noise(self, keys: Block | DraftRows, stream: int, position: np.ndarray, *, offset: Any = 0) -> np.ndarray:
        slots = dataclasses.replace(keys, request=np.arange(len(keys.request)))
        return super().noise(slots, stream, position, offset=offset)


class OtherTemperature(RightSampler):
    """Drafts are drawn at the temperature, and verified against q at temperature 1."""

    def draft_probs(self, block: Block) -> np.ndarray | None:
        return dataclasses.replace(block, temperature=np.ones_like(block.temperature)).draft_probs


@dataclasses.dataclass(frozen=True)
class Fault:
    """A sampler that is not what it says."""

    name: str
    seen: str  # in public: where, when, and its state as stored
    sampler: RightSampler


FAULTS = (
    Fault(
        "draft and residual share a Gumbel vector",
        "vllm#47386 (July 2026, closed), #54282 (August 2026, merged)",
        SharedGumbel(),
    ),
    Fault(
        "block uniforms keyed by absolute position",
        "vLLM's rejection_sampler_utils (August 2026, as stored)",
        PositionKeyedBlock("block"),
    ),
    Fault(
        "the residual reuses the acceptance uniform",
        "vllm-ascend#16370 (September 2026, open)",
        ReusedUniform(),
    ),
    Fault("a wrong block rule", "vllm-ascend#7807 (March 2026, closed by #7808)", ProductBlock("block")),
    Fault("the block rule silently ignored", "vllm-ascend#15673 (September 2026, open)", IgnoredBlock("block")),
    Fault("one-hot drafts through the block rule", "vllm-ascend#7839 (March 2026, merged)", OneHotBlock("block")),
    Fault("argmax drafts verified as sampled", "-", ArgmaxDrafts()),
    Fault("p before top-k and top-p", "-", UntruncatedTarget()),
    Fault("a residual that is not renormalised", "-", UnnormalisedResidual()),
    Fault("the bonus token from the wrong row", "-", WrongBonusRow()),
    Fault("uniforms shared between rows", "-", SharedRows()),
    Fault("noise keyed by slot", "-", SlotKeyed()),
    Fault("q of another temperature", "-", OtherTemperature()),
)
RIGHT = {"rejection": RightSampler(), "block": RightSampler("block"), "coupled": CoupledSampler("coupled")}
