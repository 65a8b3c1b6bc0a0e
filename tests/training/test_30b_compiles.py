"""The guard that this architecture carries a mixture of experts: Qwen3-30B-A3B compiles, sharded, without weights."""

import collections
import functools
import re

import jax.numpy as jnp
import pytest

from configs import rlzero_8b
from specrl_jax.config import OptimizerConfig
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.decoding.programs import Program
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts import eagle3
from specrl_jax.drafts.base import DrafterConfig
from specrl_jax.drafts.eagle3 import Eagle3Draft
from specrl_jax.learner.optimizer import make_optimizer
from specrl_jax.learner.policy_step import PolicyForward, make_policy_step
from specrl_jax.learner.state import abstract_state
from specrl_jax.models import decoder
from specrl_jax.models.layers import count_params
from specrl_jax.rl.objectives import Objective
from specrl_jax.rollout.inference_engine import InferenceConfig, make_rollout_engine
from specrl_jax.sharding import LEARNER, ROLLOUT, make_mesh, partitioner
from tests.helpers.abstract import inference_weights, minibatch

pytestmark = pytest.mark.slow

CONFIG = rlzero_8b.get_config()
MODEL = decoder.preset("qwen3_30b_a3b")
DRAFT = Eagle3Draft(eagle3.eagle3_config(MODEL, 32_000))
BF16 = jnp.dtype("bfloat16")


EXPERTS = 48 * 128 * 3 * 2048 * 768
REST = 30_532_122_624 - EXPERTS


@functools.cache
def mesh():
    return make_mesh({"data": 1, "fsdp": 2, "expert": 4, "tensor": 1})


def collectives(compiled, kind):
    """{shape: how often} of what one kind of collective gives."""
    found = re.findall(rf"= \w+\[([\d,]*)\]\S* {kind}\(", compiled.as_text())
    return collections.Counter(tuple(int(size) for size in shape.split(",") if size) for shape in found)


def test_policy_step_compiles_sharded():
    partition = partitioner(mesh(), LEARNER)
    learner = PolicyForward(MODEL, BF16, True, vocab_tile=4_748, temperature=1.0)
    optimizer = make_optimizer(OptimizerConfig(**CONFIG.optimizer))
    step = make_policy_step(
        learner, Objective(clip_low=0.2, clip_high=0.28, kl_coef=0.0), optimizer, partition=partition
    )
    B, T = 8, 4096
    state = abstract_state(decoder.param_specs(MODEL), optimizer, partition)
    compiled = step.gradient.lower(state, *minibatch(B, T)).compile()
    # Float32 parameters: an eighth of the experts on every device, half of the rest.
    expected = 4 * (EXPERTS / 8 + REST / 2)
    assert compiled.memory_analysis().argument_size_in_bytes == pytest.approx(expected, rel=0.02)
    # A microbatch has a row on each device. Of the four that share experts: rows in the forward, then with their
    # gradients; of what became of them: sums, and gradients by rows and shares.
    gathered, scattered = collectives(compiled, "all-gather"), collectives(compiled, "reduce-scatter")
    assert gathered[4, T, 2048] == 3 and scattered[1, T, 2048] == 2 and scattered[1, T, 8] == 1
    # Each matrix comes whole in the forward and again in the backward pass, and its gradient goes back to its owners.
    assert gathered[32, 2048, 768] == 4 and gathered[32, 768, 2048] == 2
    assert scattered[32, 1024, 768] == 2 and scattered[32, 768, 1024] == 1


def test_generation_loop_compiles_sharded_and_moves_rows_only():
    """Drafting 3 tokens with a head of the published size."""
    partition = partitioner(mesh(), ROLLOUT)
    B, k = 64, 3
    limits = EngineConfig(B, 1024, 1024, chunk=16)
    config = InferenceConfig(Sampling(), limits, 0, dtype=BF16, cache_dtype=BF16, compute_dtype=BF16)
    drafter = DRAFT.drafter(DrafterConfig(k, config.sampling, config.dtype, partition=partition))
    engine = make_rollout_engine(MODEL, DRAFT, drafter, config=config, tokenizer=CharTokenizer(), partition=partition)
    run, arguments = engine.compiled.describe(Program("decode", B, k), inference_weights(MODEL, DRAFT, BF16, partition))
    compiled = run.lower(*arguments).compile()
    # bfloat16: a fourth of the experts, everything else whole; caches by rows. The head has 4 KiB of keys and values a
    # token, and the features, 12 KiB.
    tokens = B * limits.cache_length / 8
    expected = 2 * (EXPERTS / 4 + REST + count_params(DRAFT.inference_specs)) + tokens * (
        2 * 48 * 4 * 128 * 2 + 2048 + 12_288
    )
    assert compiled.memory_analysis().argument_size_in_bytes == pytest.approx(expected, rel=0.02)
    rows = B // 8
    # Of the loop's end what the host reads, so that every process has it: numbers of each row and of each copy.
    told = {(B,), (8,)}
    assert set(collectives(compiled, "all-gather")) - told == {(4 * rows, k + 1, 2048), (4 * rows, k + 1, 8)}
    assert collectives(compiled, "reduce-scatter") == {(rows, k + 1, 2048): 48}
    # Whether all are done.
    assert not collectives(compiled, "all-to-all") and set(collectives(compiled, "all-reduce")) <= {()}
