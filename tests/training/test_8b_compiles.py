"""The guard that this architecture carries 8B: policy step and generation loop compile, sharded, without weights."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from configs import rlzero_8b
from specrl_jax.config import OptimizerConfig
from specrl_jax.data.rows import Rows
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.decoding.drafters import NO_DRAFTER
from specrl_jax.decoding.programs import Program
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts import eagle3
from specrl_jax.drafts.base import DrafterConfig, TargetTables
from specrl_jax.drafts.eagle3 import Eagle3Draft
from specrl_jax.learner.draft_step import DraftForward, make_draft_step
from specrl_jax.learner.optimizer import make_optimizer
from specrl_jax.learner.policy_step import Features, PolicyForward, make_policy_step
from specrl_jax.learner.state import abstract_state
from specrl_jax.models import decoder
from specrl_jax.models.layers import count_params
from specrl_jax.rl.objectives import Objective
from specrl_jax.rollout.inference_engine import InferenceConfig, make_rollout_engine
from specrl_jax.sharding import LEARNER, ROLLOUT, make_mesh, partitioner
from tests.helpers.abstract import inference_weights, minibatch

CONFIG = rlzero_8b.get_config()
MODEL = decoder.preset(CONFIG.policy.preset)
DRAFT_VOCAB = 32_000
DRAFT = Eagle3Draft(eagle3.eagle3_config(MODEL, DRAFT_VOCAB))
LARGEST_SHARD = 2**20  # elements: what an iteration may gather is activations, never a cache or a weight


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 1, "fsdp": 2, "expert": 1, "tensor": 4})


@pytest.mark.slow
def test_policy_step_compiles_sharded(mesh):
    partition = partitioner(mesh, LEARNER)
    grpo, policy = CONFIG.grpo, CONFIG.policy
    learner = PolicyForward(MODEL, jnp.dtype(policy.compute_dtype), policy.remat, vocab_tile=4_748, temperature=1.0)
    optimizer = make_optimizer(OptimizerConfig(**CONFIG.optimizer))
    step = make_policy_step(
        learner,
        Objective(clip_low=grpo.clip_low, clip_high=grpo.clip_high, kl_coef=grpo.kl_coef),
        optimizer,
        partition=partition,
    )
    B = grpo.microbatch_tokens // 10_240
    T = CONFIG.rollout.max_prompt_tokens + CONFIG.rollout.max_response_tokens
    state = abstract_state(decoder.param_specs(MODEL), optimizer, partition)
    sums = step.gradient.eval_shape(state, *minibatch(B, T))[0]
    # Parameters; then sums and two float32 moments beside them. An eighth of each on every device (norm
    # scales are split by fsdp alone).
    for lowered, copies in (
        (step.gradient.lower(state, *minibatch(B, T)), 1),
        (step.apply.lower(state, sums), 4),
    ):
        expected = copies * 4 * 8_190_735_360 / 8
        assert lowered.compile().memory_analysis().argument_size_in_bytes == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 3])
def test_generation_loop_compiles_sharded_and_gathers_nothing_large(mesh, k):
    """Plain, and drafting 3 tokens with a head of the published size."""
    partition = partitioner(mesh, ROLLOUT)
    r = CONFIG.rollout
    limits = EngineConfig(r.num_slots, r.max_prompt_tokens, r.max_response_tokens, chunk=64)
    config = InferenceConfig(
        Sampling(), limits, 0, dtype=jnp.dtype(CONFIG.policy.dtype), cache_dtype=jnp.dtype(r.dtype)
    )
    draft = DRAFT if k else None
    drafter = (
        draft.drafter(DrafterConfig(k, config.sampling, config.dtype, partition=partition)) if draft else NO_DRAFTER
    )
    engine = make_rollout_engine(MODEL, draft, drafter, config=config, tokenizer=CharTokenizer(), partition=partition)
    run, arguments = engine.compiled.describe(
        Program("decode", r.num_slots, k), inference_weights(MODEL, draft, config.dtype, partition)
    )
    compiled = run.lower(*arguments).compile()
    shapes = re.findall(r"= \w+\[([\d,]*)\][^=]* all-gather\(", compiled.as_text())
    gathered = [math.prod(int(size or 1) for size in shape.split(",")) for shape in shapes]
    assert max(gathered, default=0) <= LARGEST_SHARD
    # bfloat16 weights split four ways by `tensor`, and the cache eight ways; the head's are 0.40 G parameters, 4 KiB of
    # keys and values a token, and what it reads of the policy, 8 KiB a token split two ways.
    tokens = r.num_slots * limits.cache_length
    expected = 2 * 8_190_735_360 / 4 + tokens * 147_456 / 8
    if k:
        expected += 2 * count_params(draft.specs) / 4 + tokens * (4096 / 8 + 8192 / 2)
    assert compiled.memory_analysis().argument_size_in_bytes == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
def test_draft_step_compiles_sharded(mesh):
    partition = partitioner(mesh, LEARNER)
    dtype = jnp.dtype(CONFIG.policy.compute_dtype)
    learner = DraftForward(DRAFT, MODEL, dtype, loss=CONFIG.draft.loss, ttt_steps=3, vocab_tile=4_748, temperature=1.0)
    optimizer = make_optimizer(OptimizerConfig(**CONFIG.optimizer))
    step = make_draft_step(learner, optimizer, partition)
    state = abstract_state(DRAFT.specs, optimizer, partition)
    B, T, D = 8, 2048, MODEL.embed

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=partition.sharding(("batch",)))

    features = Features(shape(B, T, 3, D), shape(B, T, D), shape(B, T, dtype=jnp.float32))
    ints = shape(B, T, dtype=jnp.int32)
    table = partition.sharding(("vocab", "embed"))
    tables = TargetTables(
        *(jax.ShapeDtypeStruct((V, D), jnp.float32, sharding=table) for V in (MODEL.vocab, DRAFT_VOCAB))
    )
    counts = jax.ShapeDtypeStruct((3,), jnp.float32)
    rows = Rows(ints, ints, ints, mask=shape(B, T, dtype=jnp.bool_))
    compiled = step.update.gradient.lower(state, tables, counts, features, rows).compile()
    # Float32; `fc` is split by fsdp alone.
    learnt = 4 * (count_params(DRAFT.specs) / 8 + 3 * D * D * (1 / 2 - 1 / 8))
    given = 4 * (MODEL.vocab + DRAFT_VOCAB) * D / 8 + B * T * (2 * 4 * D + 4) / 2
    assert compiled.memory_analysis().argument_size_in_bytes == pytest.approx(learnt + given, rel=0.02)
