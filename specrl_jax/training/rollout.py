"""Wires policy and draft into the engine: the rollout form of the weights, and the engine of one sampling setting."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specrl_jax.core import BadInput
from specrl_jax.data.tokenizers import Tokenizer
from specrl_jax.decoding.drafters import NO_DRAFTER
from specrl_jax.decoding.engine import Engine, Limits, make_engine
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.speculative import Slots
from specrl_jax.decoding.verification import Noise, Verified, verify
from specrl_jax.models import cache as kv
from specrl_jax.models import eagle3, qwen3
from specrl_jax.sharding import Partitioner
from specrl_jax.training.drafting import Caches, Weights, checksum, eagle3_drafter, record_features


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """`rollout` of the config, with the two dtypes of decoding."""

    sampling: Sampling
    limits: Limits
    seed: int
    dtype: jnp.dtype  # of the weights and activations of decoding
    cache_dtype: jnp.dtype
    draft_length: int  # k


def make_prepare(
    model: qwen3.Qwen3Config, head: eagle3.Eagle3Config | None, config: RolloutConfig, partition: Partitioner
) -> Callable[[Any, Any, jax.Array | None], Weights]:
    """The jitted map (policy params, draft params, vocab_map) -> Weights: cast, fused, unstacked, resharded, summed up.

    Without a head the last two are None.
    """

    def prepare(policy: Any, draft: Any, vocab_map: jax.Array | None) -> Weights:
        policy = qwen3.rollout_params(policy, model, config.dtype)
        draft = eagle3.rollout_params(draft, config.dtype) if head else None
        return Weights(policy, draft, vocab_map, checksum((policy, draft, vocab_map)))

    return jax.jit(prepare, out_shardings=weights_shardings(model, head, partition))


def weights_shardings(model: qwen3.Qwen3Config, head: eagle3.Eagle3Config | None, partition: Partitioner) -> Weights:
    return Weights(
        policy=partition.tree(qwen3.rollout_specs(model)),
        draft=partition.tree(eagle3.rollout_specs(head)) if head else None,
        vocab_map=partition.replicated if head else None,
        checksum=partition.replicated,
    )


def make_rollout_engine(
    model: qwen3.Qwen3Config,
    head: eagle3.Eagle3Config | None,
    config: RolloutConfig,
    sampling: Sampling,
    tokenizer: Tokenizer,
    partition: Partitioner,
) -> Engine:
    """The engine of this policy for one sampling setting; without a head it decodes plainly.

    Raises BadInput where the model has too few positions.
    """
    limits = config.limits
    check_cache_length(limits, model)
    forward = functools.partial(_target_forward, model, head, partition, config.dtype)

    def prefill(params: Weights, tokens: jax.Array, positions: jax.Array) -> Any:
        cache = _empty_cache(model, head, config, tokens.shape[0])
        return forward(params, tokens, positions, cache, unembed=False)[1]

    drafter = eagle3_drafter(head, config.draft_length, sampling, config.dtype, partition) if head else NO_DRAFTER
    return make_engine(
        prefill,
        forward,
        kv.take_rows,
        limits,
        sampling,
        tokenizer.eos_ids,
        tokenizer.pad_id,
        slots_shardings(model, head, limits, partition),
        drafter,
        verify_fn=functools.partial(sharded_verify, partition),
    )


def _empty_cache(model: qwen3.Qwen3Config, head: eagle3.Eagle3Config | None, config: RolloutConfig, batch: int) -> Any:
    S = config.limits.cache_length
    target = kv.init_cache(model.layers, batch, S, model.kv_heads, model.head_dim, config.cache_dtype)
    return Caches(target, eagle3.init_cache(head, batch, S, config.dtype, config.cache_dtype)) if head else target


def _target_forward(
    model: qwen3.Qwen3Config,
    head: eagle3.Eagle3Config | None,
    partition: Partitioner,
    dtype: jnp.dtype,
    params: Weights,
    tokens: jax.Array,
    positions: jax.Array,
    cache: Any,
    unembed: bool = True,
) -> tuple[jax.Array | None, Any]:
    """(logits, cache); with a head the cache keeps the features too."""
    out = qwen3.forward(
        params.policy,
        model,
        tokens,
        positions,
        partition,
        cache=cache.target if head else cache,
        aux_layers=head.aux_layers if head else (),
        dtype=dtype,
        unembed=unembed,
    )
    return out.logits, Caches(out.cache, record_features(cache.draft, positions, out.aux)) if head else out.cache


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


def slots_shardings(
    model: qwen3.Qwen3Config, head: eagle3.Eagle3Config | None, limits: Limits, partition: Partitioner
) -> Slots:
    """Shardings of the engine's state. Raises BadInput where num_slots does not divide over the mesh."""
    B, S = limits.num_slots, limits.cache_length
    row = partition.sharding(("batch",), (B,))
    table = partition.sharding(("batch", None), (B, S))
    buffer = partition.sharding(kv.AXES, (B, model.kv_heads, S, model.head_dim))
    cache = kv.KVCache((buffer,) * model.layers, (buffer,) * model.layers)
    features = partition.sharding(("batch", None, None, None))
    return Slots(
        tokens=table,
        logprobs=table,
        prompt_length=row,
        length=row,
        limit=row,
        done=row,
        rollout_id=row,
        verifications=row,
        drafted=table,
        accepted=table,
        cache=Caches(cache, eagle3.DraftCache(features, buffer, buffer)) if head else cache,
    )
