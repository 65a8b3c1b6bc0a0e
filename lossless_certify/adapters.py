"""Wrap an engine's verification as a `Sampler`; a subclass with a method `draft` uses the engine's own drafts, too.

Adapters call a function of the engine's signature with NumPy arrays, of which a wrapper of a few lines makes tensors.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from lossless_certify.block import Block
from lossless_certify.noise import ACCEPT, RESIDUAL, uniforms


@dataclasses.dataclass
class VllmSampler:
    """vLLM V1's `rejection_sample`, for which the ordinary sampler, `sample`, has drawn the bonus token already.

    Not run against vLLM: signature of vllm/v1/sample/rejection_sampler.py since vllm#32852 (2026-02), read on
    2026-11-28, with the block as `sampling_metadata`. `sample(logits [B, V] before temperature, block)`: tokens [B].
    """

    reject: Callable[..., Any]
    sample: Callable[[np.ndarray, Block], Any]
    skips: tuple[str, ...] = ("seeds",)
    rule: str = "rejection"

    def verify(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens [B, k + 1], count [B])."""
        (B, k), n = block.draft_tokens.shape, block.num_drafted
        drafted, q = np.arange(k) < n[:, None], block.draft_probs
        ids, ends = block.draft_tokens[drafted], n.cumsum().astype(np.int32)
        p = _logits(block.target_probs[:, :k][drafted])
        q = None if q is None else q[drafted].astype(np.float32)
        bonus = np.reshape(self.sample(block.target_logits[np.arange(B), n], block), (B, 1))
        emitted = self.reject(
            ids, n.tolist(), int(n.max()), ends, q, target_logits=p, bonus_token_ids=bonus, sampling_metadata=block
        )
        tokens = np.pad(emitted, ((0, 0), (0, k + 1 - emitted.shape[1])), constant_values=-1)
        return tokens, (tokens != -1).sum(axis=1)


@dataclasses.dataclass
class VllmKernelSampler:
    """vLLM's newer `rejection_sample`: it draws the bonus token, too, with noise keyed by seed and position.

    Not run against vLLM: signature of vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py since vllm#50910
    (2026-08: the draft's logits are before temperature), read on 2026-11-28. Rows of a request: a token, its drafts.
    """

    reject: Callable[..., Any]
    rule: str = "rejection"  # "block" with use_block_verification

    def verify(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens [B, k + 1], count [B])."""
        (B, k), n = block.draft_tokens.shape, block.num_drafted
        used, q = np.arange(k + 1) <= n[:, None], dataclasses.replace(block, temperature=np.ones(B)).draft_probs
        row, offset = (x.astype(np.int32) for x in np.nonzero(used))
        p, q = _logits(block.target_probs[used]), None if q is None else _logits(q)
        ids, ends = np.pad(block.draft_tokens, ((0, 0), (1, 0)))[used], np.pad((n + 1).cumsum(), (1, 0))
        rows = {"idx_mapping": np.arange(B, dtype=np.int32), "expanded_idx_mapping": row, "expanded_local_pos": offset}
        seed = (block.seed << 32) + block.request.astype(np.int64)
        settings = {"temperature": block.temperature, "seed": seed, "num_speculative_steps": k}
        return self.reject(p, q, ids, ends.astype(np.int32), block.position[row] - 1 + offset, **rows, **settings)


@dataclasses.dataclass
class SglangSampler:
    """SGLang's `tree_speculative_sampling_target_only`, of a chain: a draft x is kept with chance p(x), whatever q is.

    Not run against SGLang: signature of sgl-kernel/python/sgl_kernel/speculative.py, commit 6bfad8f1, read on
    2026-11-28. `draft_probs` are zeros, as SGLang passes them: the kernel notes there what it refused.
    """

    tree: Callable[..., None]
    skips: tuple[str, ...] = ("seeds",)  # the uniforms are made here, not by the engine

    def verify(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens [B, k + 1], count [B])."""
        B, n = block.target_logits.shape[:2]
        node, p = np.arange(n), block.target_probs.astype(np.float32)
        predicts, index, accepted = np.zeros(B * n, np.int32), np.full((B, n), -1, np.int32), np.zeros(B, np.int32)
        keys = block.seed, block.request[:, None], block.position[:, None], block.number[:, None]
        coins = (uniforms(*keys, stream, node) for stream in (ACCEPT, RESIDUAL))
        coins, last_coins = ((np.floor(u * 2**24) / 2**24).astype(np.float32) for u in coins)  # below 1, as torch.rand
        self.tree(
            predicts=predicts,
            accept_index=index,
            accept_token_num=accepted,
            candidates=np.pad(block.draft_tokens, ((0, 0), (1, 0))).astype(np.int64),
            retrive_index=np.arange(B * n).reshape(B, n),
            retrive_next_token=np.where(node < block.num_drafted[:, None], node + 1, -1),
            retrive_next_sibling=np.full((B, n), -1),
            uniform_samples=coins,
            uniform_samples_for_final_sampling=last_coins[:, 0],
            target_probs=p,
            draft_probs=np.zeros_like(p),
        )
        return predicts[index.clip(min=0)], accepted + 1


class TransformersSampler:
    """transformers' `_speculative_sampling`, row by row, with torch's global generator; run with transformers 5.24.0.

    Assisted generation applies the processors to the target's logits; the assistant's have the temperature here.
    Rows without a draft are sampled from p, as `generate` does; greedy rows and one-hot drafts do not come here.
    """

    skips = ("batches", "greedy", "one-hot drafts", "rows of their own", "seeds")
    rule = "rejection"

    def verify(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens [B, k + 1], count [B])."""
        import torch
        from transformers.generation.utils import _speculative_sampling

        drafts = torch.from_numpy(block.draft_tokens.astype(np.int64))
        target, draft = (torch.from_numpy(_logits(probs)) for probs in (block.target_probs, block.draft_probs))
        tokens, count = np.zeros(target.shape[:2], np.int64), np.ones(len(drafts), np.int64)
        for b, n in enumerate(block.num_drafted.tolist()):
            x, q, p = drafts[b : b + 1, :n], draft[b : b + 1, :n], target[b : b + 1, : n + 1]
            ids = _speculative_sampling(x, q, n, p)[0] if n else torch.multinomial(p[0].softmax(dim=-1), num_samples=1)
            tokens[b, : ids.shape[1]], count[b] = ids[0].numpy(), ids.shape[1]
        return tokens, count


def _logits(probs: Any) -> np.ndarray:
    """Return float32 logits whose softmax is `probs`."""
    with np.errstate(divide="ignore"):
        return np.log(probs).astype(np.float32)
