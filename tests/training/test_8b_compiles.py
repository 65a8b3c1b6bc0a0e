"""The guard that this architecture carries 8B: policy step and generation loop compile, sharded, without weights."""

import re

import jax
import jax.numpy as jnp
import pytest

from configs import rlzero_8b
from specrl_jax.data.rows import Rows
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.decoding.engine import Limits
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.models import qwen3
from specrl_jax.models.layers import abstract_params
from specrl_jax.rl.grpo import Objective
from specrl_jax.sharding import LEARNER, ROLLOUT, make_mesh, partitioner
from specrl_jax.training.rollout import RolloutConfig, make_rollout_engine
from specrl_jax.training.state import OptimizerConfig, abstract_state, make_optimizer
from specrl_jax.training.steps import Learner, Signal, make_policy_step

CONFIG = rlzero_8b.get_config()
MODEL = qwen3.preset(CONFIG.policy.preset)
LARGEST_SHARD = 2**20  # elements: what an iteration may gather is activations, never a cache or a weight


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 1, "fsdp": 2, "expert": 1, "tensor": 4})


def test_policy_step_compiles_sharded(mesh):
    partition = partitioner(mesh, LEARNER)
    grpo, policy = CONFIG.grpo, CONFIG.policy
    learner = Learner(MODEL, jnp.dtype(policy.compute_dtype), policy.remat, policy.logits_chunk, grpo.microbatch, 1.0)
    optimizer = make_optimizer(OptimizerConfig(**CONFIG.optimizer))
    step = make_policy_step(learner, Objective(grpo.clip_low, grpo.clip_high, grpo.kl_coef), optimizer, partition)
    B = grpo.prompts_per_step * grpo.group_size // grpo.minibatches
    T = CONFIG.rollout.max_prompt_tokens + CONFIG.rollout.max_response_tokens
    ints, floats = jax.ShapeDtypeStruct((B, T), jnp.int32), jax.ShapeDtypeStruct((B, T), jnp.float32)
    rows = Rows(ints, ints, ints, jax.ShapeDtypeStruct((B, T), jnp.bool_))
    signal = Signal(floats, None, jax.ShapeDtypeStruct((B,), jnp.float32))
    state = abstract_state(MODEL, optimizer, partition)
    compiled = step.lower(state, rows, signal).compile()
    # Parameters and two float32 moments, an eighth of each on every device (norm scales are split by fsdp alone).
    expected = 3 * 4 * 8_190_735_360 / 8
    assert compiled.memory_analysis().argument_size_in_bytes == pytest.approx(expected, rel=0.02)


def test_generation_loop_compiles_sharded_and_gathers_nothing_large(mesh):
    partition = partitioner(mesh, ROLLOUT)
    r = CONFIG.rollout
    limits = Limits(r.num_slots, r.max_prompt_tokens, r.max_response_tokens, r.chunk)
    config = RolloutConfig(Sampling(), limits, 0, jnp.dtype(CONFIG.policy.dtype), jnp.dtype(r.cache_dtype))
    engine = make_rollout_engine(MODEL, config, config.sampling, CharTokenizer(), partition)
    specs = qwen3.rollout_specs(MODEL)
    params = abstract_params(specs, config.dtype, partition.tree(specs))
    P = r.num_slots // CONFIG.grpo.group_size
    ints = jax.ShapeDtypeStruct((P,), jnp.int32)
    prompts = jax.ShapeDtypeStruct((P, r.max_prompt_tokens), jnp.int32)
    slot = {d: jax.ShapeDtypeStruct((r.num_slots,), d) for d in (jnp.int32, jnp.uint32, jnp.bool_)}
    slots = jax.eval_shape(engine.start, params, prompts, ints, slot[jnp.int32], slot[jnp.uint32], slot[jnp.bool_])
    slots = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), slots)
    compiled = engine.run_chunk.lower(params, slots, jnp.uint32(0)).compile()
    gathered = [
        int(size)
        for shape in re.findall(r"= \w+\[([\d,]*)\][^=]* all-gather\(", compiled.as_text())
        for size in [_elements(shape)]
    ]
    assert max(gathered, default=0) <= LARGEST_SHARD
    # bfloat16 weights split four ways by `tensor`, and the cache eight ways.
    weights = 2 * 8_190_735_360 / 4
    cache = r.num_slots * limits.cache_length * 147_456 / 8
    assert compiled.memory_analysis().argument_size_in_bytes == pytest.approx(weights + cache, rel=0.02)


def _elements(shape):
    size = 1
    for dimension in shape.split(","):
        size *= int(dimension or 1)
    return size
