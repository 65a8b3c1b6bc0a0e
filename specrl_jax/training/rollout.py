"""Wires the policy into the engine: the rollout form of the weights, and the engine of one sampling setting."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specrl_jax.core import BadInput
from specrl_jax.data.tokenizers import Tokenizer
from specrl_jax.decoding.engine import Engine, Limits, make_engine
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.speculative import Slots
from specrl_jax.decoding.verification import Noise, Verified, verify
from specrl_jax.models import cache as kv
from specrl_jax.models import qwen3
from specrl_jax.sharding import Partitioner


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """`rollout` of the config, with the two dtypes of decoding."""

    sampling: Sampling
    limits: Limits
    seed: int
    dtype: jnp.dtype  # of the weights and activations of decoding
    cache_dtype: jnp.dtype


def make_prepare(model: qwen3.Qwen3Config, config: RolloutConfig, partition: Partitioner) -> Any:
    """The jitted map from learner parameters to rollout parameters: cast, fused, unstacked and resharded."""
    shardings = partition.tree(qwen3.rollout_specs(model))
    return jax.jit(functools.partial(qwen3.rollout_params, config=model, dtype=config.dtype), out_shardings=shardings)


def make_rollout_engine(
    model: qwen3.Qwen3Config,
    config: RolloutConfig,
    sampling: Sampling,
    tokenizer: Tokenizer,
    partition: Partitioner,
) -> Engine:
    """The engine of this policy for one sampling setting. Raises BadInput where the model has too few positions."""
    limits = config.limits
    check_cache_length(limits, model)

    def empty_cache(batch: int) -> kv.KVCache:
        return kv.init_cache(
            model.layers, batch, limits.cache_length, model.kv_heads, model.head_dim, config.cache_dtype
        )

    def prefill(params: Any, tokens: jax.Array, positions: jax.Array) -> kv.KVCache:
        cache = empty_cache(tokens.shape[0])
        out = qwen3.forward(params, model, tokens, positions, partition, cache=cache, dtype=config.dtype, unembed=False)
        return out.cache

    def decode(params: Any, tokens: jax.Array, positions: jax.Array, cache: kv.KVCache) -> tuple[jax.Array, kv.KVCache]:
        out = qwen3.forward(params, model, tokens, positions, partition, cache=cache, dtype=config.dtype)
        return out.logits, out.cache

    shardings = slots_shardings(model, limits, partition)
    return make_engine(
        prefill,
        decode,
        kv.take_rows,
        limits,
        sampling,
        tokenizer.eos_ids,
        tokenizer.pad_id,
        shardings,
        verify_fn=functools.partial(sharded_verify, partition),
    )


def check_cache_length(limits: Limits, model: qwen3.Qwen3Config) -> None:
    """Raises BadInput where a sequence could outgrow the positions that the policy was made for."""
    if limits.cache_length > model.max_positions:
        raise BadInput(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {limits.cache_length} tokens, "
            f"the policy was made for {model.max_positions}"
        )


def sharded_verify(
    partition: Partitioner,
    noise: Noise,
    draft_tokens: jax.Array,
    draft_logits: jax.Array | None,
    one_hot: jax.Array,
    vocab_map: jax.Array | None,
    target_logits: jax.Array,
    sampling: Sampling,
) -> Verified:
    """`verify` with each row's whole vocabulary on one device: one all-to-all of the logits, then no communication.

    The results go back to where the rows live at once; otherwise the finer split would spread into the whole loop.
    """
    target_logits = partition.constrain(target_logits, "sampled_rows", None, None)
    verified = verify(noise, draft_tokens, draft_logits, one_hot, vocab_map, target_logits, sampling)
    return Verified(
        tokens=partition.constrain(verified.tokens, "batch", None),
        num_accepted=partition.constrain(verified.num_accepted, "batch"),
        logprobs=partition.constrain(verified.logprobs, "batch", None),
    )


def slots_shardings(model: qwen3.Qwen3Config, limits: Limits, partition: Partitioner) -> Slots:
    """Shardings of the engine's state. Raises BadInput where num_slots does not divide over the mesh."""
    B, S = limits.num_slots, limits.cache_length
    row = partition.sharding(("batch",), (B,))
    table = partition.sharding(("batch", None), (B, S))
    buffer = partition.sharding(kv.AXES, (B, S, model.kv_heads, model.head_dim))
    layers = (buffer,) * model.layers
    return Slots(
        tokens=table,
        logprobs=table,
        prompt_length=row,
        length=row,
        limit=row,
        done=row,
        rollout_id=row,
        verifications=row,
        cache=kv.KVCache(layers, layers),
    )
