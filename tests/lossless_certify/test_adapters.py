"""Adapters give a function of an engine's signature what it expects, and read what it returns."""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from lossless_certify import Block, certify_sampler
from lossless_certify.adapters import SglangSampler, TransformersSampler, VllmKernelSampler, VllmSampler
from lossless_certify.distributions import draw, sampling_probs
from lossless_certify.hall import PositionKeyedBlock, RightSampler
from tests.helpers.runs import ROOT, process_environment


def padded(rows, mask):
    """Return [B, n, ...] of the rows [T, ...] that a mask [B, n] selects; 0 elsewhere."""
    full = np.zeros((*mask.shape, *rows.shape[1:]), rows.dtype)
    full[mask] = rows
    return full


def verify(sampler, p, q, drafts, n, *, seed=0, position=0):
    zeros, one = np.zeros(len(n), np.int64), np.ones(len(n), np.float32)
    keys = {"request": zeros + seed, "seed": 0, "position": zeros + position, "number": zeros}
    return sampler.verify(Block(drafts, n, p, q, None, temperature=one, top_k=zeros, top_p=one, **keys))


class Stream(RightSampler):  # its noise has no keys, as that of torch's generators
    rng = np.random.default_rng(0)

    def noise(self, keys, stream, position, *, offset=0):
        return self.rng.random(np.broadcast_shapes(np.shape(position), np.shape(offset)))


def sample(logits, block, top_k=True):
    temperature, top_k, top_p = (x[:, None] for x in (block.temperature, block.top_k * top_k, block.top_p))
    return draw(sampling_probs(logits, temperature, top_k=top_k, top_p=top_p), Stream.rng.random(len(logits)))


def reject(ids, num_drafted, longest, ends, q, target_logits, bonus_token_ids, sampling_metadata):
    n = np.diff(ends, prepend=0)
    mask = np.arange(longest) < n[:, None]
    assert n.tolist() == num_drafted and mask.any(axis=0).all()
    p, q = padded(target_logits, mask), None if q is None else padded(np.log(np.float64(q) + 1e-300), mask)
    p = np.pad(p, ((0, 0), (0, 1), (0, 0)))
    tokens, count = verify(Stream(), p, q, padded(ids, mask), n)
    tokens[np.arange(len(n)), n] = bonus_token_ids[:, 0]
    return np.where(np.arange(longest + 1) < count[:, None], tokens, -1)


def kernel(sampler, p, q, ids, ends, position, *, num_speculative_steps, seed, temperature, **rows):
    n = np.diff(ends) - 1
    mask = np.arange(num_speculative_steps + 1) <= n[:, None]
    assert np.array_equal(np.nonzero(mask), [rows["expanded_idx_mapping"], rows["expanded_local_pos"]])
    q = None if q is None else q / np.where(temperature == 0, 1, temperature)[:, None, None]
    return verify(sampler, padded(p, mask), q, padded(ids, mask)[:, 1:], n, seed=seed, position=position[ends[:-1]] + 1)


def tree(*, predicts, accept_index, accept_token_num, candidates, retrive_index, refuses=True, **arrays):
    rows, drafts, p = np.arange(len(candidates)), candidates[:, 1:], arrays["target_probs"]
    is_draft = arrays["retrive_next_token"] > 0
    kept = arrays["uniform_samples"][:, :-1] < p[rows[:, None], np.arange(drafts.shape[1]), drafts]
    accept_token_num[:] = accepted = (kept & is_draft[:, :-1]).cumprod(axis=1).sum(axis=1)
    accept_index[:] = np.where(np.arange(p.shape[1]) <= accepted[:, None], retrive_index, -1)
    weights, refused = p[rows, accepted], np.flatnonzero(is_draft[rows, accepted] & refuses)
    weights[refused, drafts[refused, accepted[refused]]] = 0
    predicts[retrive_index[:, :-1]] = drafts
    predicts[retrive_index[rows, accepted]] = draw(weights, arrays["uniform_samples_for_final_sampling"])


SAMPLERS = {
    "vllm": (VllmSampler(reject, sample), []),
    "vllm kernel": (VllmKernelSampler(partial(kernel, RightSampler())), []),
    "vllm kernel, block": (VllmKernelSampler(partial(kernel, RightSampler("block")), "block"), []),
    "sglang": (SglangSampler(tree), []),
    "bonus token without top-k": (VllmSampler(reject, partial(sample, top_k=False)), ["top-k"]),
    "keyed by position": (VllmKernelSampler(partial(kernel, PositionKeyedBlock("block")), "block"), ["two blocks"]),
    "residual with the refused token": (SglangSampler(partial(tree, refuses=False)), ["one block"]),
}


@pytest.mark.parametrize("sampler, failed", SAMPLERS.values(), ids=SAMPLERS)
def test_a_right_function_passes_and_a_fault_is_found(sampler, failed):
    report = certify_sampler(sampler, level="quick", stop_at_first=True)
    assert [result.name for result in report.failed] == failed, report.to_markdown()


@pytest.mark.slow
def test_transformers_passes():
    pytest.importorskip("transformers.generation.utils").torch.set_num_threads(1)  # more wait for each other
    assert not certify_sampler(TransformersSampler(), minutes=0.5).failed


@pytest.mark.slow
def test_assisted_generation_passes_at_a_small_size():
    pytest.importorskip("transformers.generation.utils")
    command = [sys.executable, "-m", "experiments.certify.transformers_generate", "--small"]
    done = subprocess.run(command, cwd=ROOT, env=process_environment(), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(": passed, ") == 5, done.stderr
