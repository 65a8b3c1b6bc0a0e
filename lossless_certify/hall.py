"""Samplers with known faults, which the certifier must find, and right ones, which it must pass.

Each fault is a few lines over the right sampler, in numpy, written for this file.
"""

import dataclasses

import numpy as np

from lossless_certify.block import Block, DraftRows
from lossless_certify.distributions import block_chances, draw, rejection_chances
from lossless_certify.noise import ACCEPT, DRAFT, RESIDUAL, uniforms


@dataclasses.dataclass
class RightSampler:
    """`rejection` or `block`, keyed by seed, request, position of the block's first token, offset and stream.

    Drafts without probabilities are verified by exact match: a token is drawn from p at every position, and drafts are
    kept up to the first that differs. Its noise is keyed by absolute position.
    """

    rule: str | None = "rejection"

    def draft(self, rows: DraftRows) -> np.ndarray:
        """Draw [B] tokens from q."""
        return draw(self.draft_weights(rows), self.noise(rows, DRAFT, rows.position, rows.offset))

    def verify(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens [B, k + 1], count [B])."""
        p, q = self.target_weights(block), self.draft_probs(block)
        k = block.draft_tokens.shape[1]
        if q is None:
            return self.by_match(block, p)
        drafted = np.arange(k) < block.num_drafted[:, None]
        u = self.accept_noise(block)
        if self.rule == "block":
            accepted, scale = self.keep_block(block, p, q, u)
        else:
            kept = (u < rejection_chances(p, q, block.draft_tokens)) & drafted
            accepted, scale = kept.cumprod(axis=1).sum(axis=1), np.ones(len(p))
        rows = np.arange(len(p))
        weights = self.residual(p, q, accepted, scale)
        weights = np.where((accepted < block.num_drafted)[:, None], weights, self.bonus(p, accepted))
        final = self.draw_residual(weights, block, accepted, u)
        tokens = np.pad(block.draft_tokens, ((0, 0), (0, 1)))
        tokens[rows, accepted] = np.where(block.temperature == 0, p[rows, accepted].argmax(axis=-1), final)
        return tokens, accepted + 1

    def keep_block(self, block: Block, p: np.ndarray, q: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the accepted tokens [B] of block verification, and the scales of p in the residuals after them."""
        k = block.draft_tokens.shape[1]
        h, P = block_chances(p, q, block.draft_tokens)
        last = np.arange(1, k + 1) == block.num_drafted[:, None]  # a shorter block ends with h = P
        h = np.where(last, P[:, 1:], h) * (np.arange(k) < block.num_drafted[:, None])
        accepted = ((u < h) * np.arange(1, k + 1)).max(axis=1)
        return accepted, P[np.arange(len(P)), accepted]

    def by_match(self, block: Block, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw a token at every position; keep drafts up to the first that differs."""
        k, tokens = block.draft_tokens.shape[1], self.match_tokens(block, p)
        right = (tokens[:, :k] == block.draft_tokens) & (np.arange(k) < block.num_drafted[:, None])
        return tokens, right.cumprod(axis=1).sum(axis=1) + 1

    # What faults replace.

    def match_tokens(self, block: Block, p: np.ndarray) -> np.ndarray:
        """Draw [B, k + 1] tokens from p."""
        positions = block.position[:, None] + np.arange(p.shape[1])
        return draw(p, self.noise(block, RESIDUAL, positions, 0))

    def noise(self, keys: Block | DraftRows, stream: int, position: np.ndarray, offset: np.ndarray | int) -> np.ndarray:
        """Return uniforms of a stream at positions and offsets, [B] or [B, n]."""
        request = keys.request if position.ndim == 1 else keys.request[:, None]
        return uniforms(keys.seed, request, position, offset, stream)

    def accept_noise(self, block: Block) -> np.ndarray:
        """Return the uniforms [B, k] of acceptance."""
        return self.noise(block, ACCEPT, block.position[:, None], np.arange(block.draft_tokens.shape[1]))

    def draw_residual(self, weights: np.ndarray, block: Block, accepted: np.ndarray, u: np.ndarray) -> np.ndarray:
        """Draw the last token [B] of each row."""
        return draw(weights, self.noise(block, RESIDUAL, block.position, accepted))

    def target_weights(self, block: Block) -> np.ndarray:
        """Return p [B, k + 1, V]."""
        return block.target_probs

    def draft_probs(self, block: Block) -> np.ndarray | None:
        """Return q [B, k, V] that drafts are verified against."""
        return block.draft_probs

    def draft_weights(self, rows: DraftRows) -> np.ndarray:
        """Return q [B, V] that drafts are drawn from."""
        return rows.probs

    def residual(self, p: np.ndarray, q: np.ndarray, accepted: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Return the weights [B, V] of the token after a refused one."""
        rows, refused = np.arange(len(p)), accepted.clip(max=q.shape[1] - 1)
        weights = np.maximum(scale[:, None] * p[rows, accepted] - q[rows, refused], 0)
        return np.where(weights.sum(axis=-1, keepdims=True) > 0, weights, p[rows, accepted])

    def bonus(self, p: np.ndarray, accepted: np.ndarray) -> np.ndarray:
        """Return the weights [B, V] of the token after a draft that is kept whole."""
        return p[np.arange(len(p)), accepted]


class CoupledSampler(RightSampler):
    """Shared Gumbel noise (Daliri, Musco, Suresh 2408.07978): draft and target take the argmax with the same noise."""

    def draft(self, rows: DraftRows) -> np.ndarray:
        """Return [B] tokens, the argmax of log q + noise of the token's absolute position."""
        return gumbel_argmax(rows.probs, rows.seed, rows.request, rows.position + rows.offset)

    def verify(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens [B, k + 1], count [B])."""
        return self.by_match(block, block.target_probs)

    def match_tokens(self, block: Block, p: np.ndarray) -> np.ndarray:
        """Return [B, k + 1] tokens, the argmax of log p + noise of each absolute position."""
        positions = block.position[:, None] + np.arange(p.shape[1])
        return gumbel_argmax(p, block.seed, block.request[:, None], positions)


def gumbel_argmax(probs: np.ndarray, seed: int, request: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return the argmax [...] of log probs [..., V] + Gumbel noise keyed by seed, request, position and token."""
    u = uniforms(seed, request[..., None], position[..., None], np.arange(probs.shape[-1]))
    with np.errstate(divide="ignore"):
        return (np.log(probs) - np.log(-np.log(np.maximum(u, 2.0**-60)))).argmax(axis=-1)


# --- faults


class SharedGumbel(RightSampler):
    """The refused token's replacement is drawn with the Gumbel noise that the draft was drawn with."""

    def draft(self, rows: DraftRows) -> np.ndarray:
        return gumbel_argmax(rows.probs, rows.seed, rows.request, rows.position + rows.offset)

    def draw_residual(self, weights: np.ndarray, block: Block, accepted: np.ndarray, u: np.ndarray) -> np.ndarray:
        return gumbel_argmax(weights, block.seed, block.request, block.position + accepted)


class PositionKeyedBlock(RightSampler):
    """Block verification whose uniforms are keyed by absolute position: the next block sees those that failed."""

    def accept_noise(self, block: Block) -> np.ndarray:
        return self.noise(block, ACCEPT, block.position[:, None] + np.arange(block.draft_tokens.shape[1]), 0)


class ReusedUniform(RightSampler):
    """The uniform that refused a token also draws its replacement."""

    def draw_residual(self, weights: np.ndarray, block: Block, accepted: np.ndarray, u: np.ndarray) -> np.ndarray:
        fresh = self.noise(block, RESIDUAL, block.position, accepted)
        refused = u[np.arange(len(u)), accepted.clip(max=u.shape[1] - 1)]
        return draw(weights, np.where(accepted < block.num_drafted, refused, fresh))


class ProductBlock(RightSampler):
    """A block rule that compares products of ratios and of uniforms, with the residual of `rejection`."""

    def keep_block(self, block: Block, p: np.ndarray, q: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        drafted = np.arange(q.shape[1]) < block.num_drafted[:, None]
        return self.kept(np.cumprod(rejection_chances(p, q, block.draft_tokens), axis=1), u, drafted), np.ones(len(p))

    def kept(self, chances: np.ndarray, u: np.ndarray, drafted: np.ndarray) -> np.ndarray:
        """Return [B], how far the product of ratios is above that of the uniforms."""
        return ((np.cumprod(u, axis=1) < chances) * drafted * np.arange(1, u.shape[1] + 1)).max(axis=1)


class OneHotBlock(ProductBlock):
    """Drafts without probabilities go through that rule, with 1 for their probability."""

    def by_match(self, block: Block, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        q = np.eye(p.shape[-1])[block.draft_tokens]
        drafted = np.arange(q.shape[1]) < block.num_drafted[:, None]
        u, rows = self.accept_noise(block), np.arange(len(p))
        accepted = self.kept(np.cumprod(rejection_chances(p, q, block.draft_tokens), axis=1), u, drafted)
        weights = np.where((accepted < block.num_drafted)[:, None], self.residual(p, q, accepted, np.ones(len(p))), 0)
        weights = np.where(weights.any(axis=-1, keepdims=True), weights, p[rows, accepted])
        tokens = np.pad(block.draft_tokens, ((0, 0), (0, 1)))
        tokens[rows, accepted] = self.draw_residual(weights, block, accepted, u)
        return tokens, accepted + 1


class IgnoredBlock(RightSampler):
    """`block` is asked for, and `rejection` is what runs: no bias, but not what was promised."""

    def keep_block(self, block: Block, p: np.ndarray, q: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        kept = (u < rejection_chances(p, q, block.draft_tokens)) & (np.arange(u.shape[1]) < block.num_drafted[:, None])
        return kept.cumprod(axis=1).sum(axis=1), np.ones(len(p))


class ArgmaxDrafts(RightSampler):
    """Drafts are the draft's likeliest tokens, and are verified as if they were sampled."""

    def draft(self, rows: DraftRows) -> np.ndarray:
        return rows.probs.argmax(axis=-1)


class UntruncatedTarget(RightSampler):
    """Acceptance takes the target's probabilities before top-k and top-p, the replacement those after."""

    def verify(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        whole = dataclasses.replace(block, top_k=0 * block.top_k, top_p=np.ones_like(block.top_p))
        tokens, count = super().verify(whole)
        rows = np.arange(len(count))
        last = super().draw_residual(block.target_probs[rows, count - 1], block, count - 1, None)
        refused = (count <= block.num_drafted) | (block.draft_logits is None)
        tokens[rows, count - 1] = np.where(refused, tokens[rows, count - 1], last)
        return tokens, count


class UnnormalisedResidual(RightSampler):
    """The residual is not divided by its sum: its inverse CDF ends before one, and the last token takes the rest."""

    def draw_residual(self, weights: np.ndarray, block: Block, accepted: np.ndarray, u: np.ndarray) -> np.ndarray:
        short = np.maximum(1 - weights.sum(axis=-1), 0)
        last = weights.shape[-1] - 1 - (weights[:, ::-1] > 0).argmax(axis=-1)
        weights = weights.copy()
        weights[np.arange(len(last)), last] += short
        return super().draw_residual(weights, block, accepted, u)


class WrongBonusRow(RightSampler):
    """The token after a draft that is kept whole is drawn from the row before its own."""

    def bonus(self, p: np.ndarray, accepted: np.ndarray) -> np.ndarray:
        return p[np.arange(len(p)), np.maximum(accepted - 1, 0)]


class SharedRows(RightSampler):
    """All rows of a batch are accepted with the same uniforms."""

    def accept_noise(self, block: Block) -> np.ndarray:
        return np.broadcast_to(super().accept_noise(block)[:1], block.draft_tokens.shape)


class SlotKeyed(RightSampler):
    """Noise is keyed by the row of the batch, where the request was meant."""

    def noise(self, keys: Block | DraftRows, stream: int, position: np.ndarray, offset: np.ndarray | int) -> np.ndarray:
        slots = np.arange(len(keys.request), dtype=keys.request.dtype)
        return super().noise(dataclasses.replace(keys, request=slots), stream, position, offset)


class OtherTemperature(RightSampler):
    """Drafts are drawn at the temperature, and verified against q at temperature 1."""

    def draft_probs(self, block: Block) -> np.ndarray | None:
        return dataclasses.replace(block, temperature=np.ones_like(block.temperature)).draft_probs


FAULTS = {
    "draft and residual share a Gumbel vector": SharedGumbel(),
    "block uniforms keyed by absolute position": PositionKeyedBlock("block"),
    "the residual reuses the acceptance uniform": ReusedUniform(),
    "a wrong block rule": ProductBlock("block"),
    "the block rule silently ignored": IgnoredBlock("block"),
    "one-hot drafts through the block rule": OneHotBlock("block"),
    "argmax drafts verified as sampled": ArgmaxDrafts(),
    "p before top-k and top-p": UntruncatedTarget(),
    "a residual that is not renormalised": UnnormalisedResidual(),
    "the bonus token from the wrong row": WrongBonusRow(),
    "uniforms shared between rows": SharedRows(),
    "noise keyed by slot": SlotKeyed(),
    "q of another temperature": OtherTemperature(),
}
RIGHT = {"rejection": RightSampler(), "block": RightSampler("block"), "coupled": CoupledSampler(None)}
