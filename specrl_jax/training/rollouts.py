"""Wires policy and draft into the engine: the rollout form of the weights, and the engine of one sampling setting."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.verify.op import Verified, VerifyInputs, verify
from specrl_jax.core import InputError
from specrl_jax.data.tokenizers import Tokenizer
from specrl_jax.decoding.compiled import Limits, Model, Prompts
from specrl_jax.decoding.drafters import Drafter
from specrl_jax.decoding.engine import Engine, make_engine
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.step import Slots
from specrl_jax.distributed import LOCAL_AXES, local_copy, local_mesh
from specrl_jax.drafts.base import DraftModel
from specrl_jax.drafts.weights import Caches, Weights, checksum
from specrl_jax.models import cache as kv
from specrl_jax.models import qwen3
from specrl_jax.sharding import Partitioner


@dataclasses.dataclass(frozen=True)
class InferenceConfig:
    """`rollout` of the config, with the two dtypes of decoding."""

    sampling: Sampling
    limits: Limits
    seed: int
    dtype: jnp.dtype  # of the weights
    cache_dtype: jnp.dtype
    compute_dtype: jnp.dtype = jnp.float32  # of the activations between products


def make_prepare(
    model: qwen3.Qwen3Config,
    draft: DraftModel | None,
    config: InferenceConfig,
    partition: Partitioner,
    learner: Partitioner | None = None,
) -> Callable[[Any, Any, jax.Array | None], Weights]:
    """The jitted map (policy params, draft params, vocab_map) -> Weights: cast, fused, unstacked, resharded, summed up.

    Without a draft the last two are None. Where rollouts have devices of their own, the result goes there as it is.

    Args:
      partition: of the rollouts.
      learner: of the parameters; None: they are on the same devices.
    """

    def shardings(partition: Partitioner) -> Weights:
        return Weights(
            policy=partition.shardings(qwen3.inference_specs(model)),
            draft=partition.shardings(draft.inference_specs) if draft else {},
            vocab_map=partition.replicated if draft and draft.has_vocab_map else None,
            checksum=partition.replicated,
        )

    def program(out: Weights) -> Callable[[Any, Any, jax.Array | None], Weights]:
        def prepare(policy: Any, params: Any, vocab_map: jax.Array | None) -> Weights:
            if model.tied:
                # Gathered once and then turned; XLA would gather it as embedding and again as unembedding.
                embed = jax.lax.with_sharding_constraint(policy["embed"].astype(config.dtype), out.policy["embed"])
                policy = policy | {"embed": jax.lax.optimization_barrier(embed)}
            policy = qwen3.inference_params(policy, model, config.dtype)
            params = draft.inference_params(params, config.dtype) if draft else {}
            return Weights(policy, params, vocab_map, checksum((policy, params, vocab_map)))

        return jax.jit(prepare, out_shardings=out)

    if learner is None or learner.mesh == partition.mesh:
        return program(shardings(partition))
    if jax.process_count() > 1:
        # One program of all processes, after which each has a whole copy among its own devices; what those of them that
        # only generate get is moved within the process.
        everywhere = program(shardings(dataclasses.replace(partition, mesh=learner.mesh)))
        own = shardings(dataclasses.replace(partition, mesh=local_mesh(learner.mesh, LOCAL_AXES)))
        return lambda *parts: jax.device_put(local_copy(everywhere(*parts), own), shardings(partition))
    # Made where the parameters are, split as finely as they are, then moved.
    made = program(shardings(learner))
    return lambda *parts: jax.device_put(made(*parts), shardings(partition))


def make_rollout_engine(
    model: qwen3.Qwen3Config,
    draft: DraftModel | None,
    drafter: Drafter,
    config: InferenceConfig,
    tokenizer: Tokenizer,
    partition: Partitioner,
    lengths: tuple[int, ...] | None = None,
) -> Engine:
    """The engine of this policy for one sampling setting.

    Args:
      draft: whose weights and cache there are beside the target's; None: there are none.
      drafter: what drafts, with that draft or without.
      lengths: draft lengths that a call may choose from; None: the drafter's own only.
    Raises:
      InputError: the model has too few positions, or num_slots does not divide over the mesh.
    """
    limits = config.limits
    check_cache_length(limits, model)
    target = Target(model, draft, config, partition)
    parts = Model(
        init_cache=target.init_cache,
        prefill=target.prefill,
        decode=target.decode,
        drafter=drafter,
        verify=functools.partial(sharded_verify, partition),
        sampling=config.sampling,
        eos_ids=tokenizer.eos_ids,
        pad_id=tokenizer.pad_id,
    )
    return make_engine(parts, limits, target.slots_shardings(), target.prompt_shardings(), lengths)


@dataclasses.dataclass(frozen=True)
class Target:
    """The policy as the engine sees it, with the cache of its draft beside its own where there is one."""

    model: qwen3.Qwen3Config
    draft: DraftModel | None
    config: InferenceConfig
    partition: Partitioner

    def init_cache(self, rows: int, length: int) -> Any:
        m, c = self.model, self.config
        target = kv.init_cache(m.layers, rows, length, m.kv_heads, m.head_dim, c.cache_dtype)
        if not self.draft:
            return target
        return Caches(target, self.draft.init_cache(rows, length, c.cache_dtype))

    def prefill(self, params: Weights, tokens: jax.Array, positions: jax.Array, cache: Any) -> Any:
        return self.decode(params, tokens, positions, cache, return_logits=False)[1]

    def decode(
        self, params: Weights, tokens: jax.Array, positions: jax.Array, cache: Any, return_logits: bool = True
    ) -> tuple[jax.Array | None, Any]:
        """(logits, cache); the draft keeps of the forward what it needs."""
        options = qwen3.Options(
            dtype=self.config.compute_dtype,
            aux_layers=self.draft.aux_layers if self.draft else (),
            return_logits=return_logits,
        )
        own = cache.target if self.draft else cache
        out = qwen3.forward(params.policy, self.model, qwen3.Inputs(tokens, positions), self.partition, options, own)
        if not self.draft:
            return out.logits, out.cache
        return out.logits, Caches(out.cache, self.draft.update_cache(params.draft, cache.draft, positions, out))

    def slots_shardings(self) -> Slots:
        """Shardings of the engine's state. Raises InputError where num_slots does not divide over the mesh."""
        B = self.config.limits.num_slots
        row, table = self.partition.sharding(("batch",), (B,)), self.partition.sharding(("batch", None), (B, 1))
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
            group=row,
            member=row,
            corpus=self.partition.replicated,
            cache=self._cache_shardings("batch"),
        )

    def prompt_shardings(self) -> Prompts:
        """Of one prefilled prompt: one row cannot be split over rows."""
        everywhere = self.partition.replicated
        return Prompts(everywhere, everywhere, self._cache_shardings(None))

    def _cache_shardings(self, rows: str | None) -> Any:
        m = self.model
        axes = kv.KVCache((kv.KEY_AXES,) * m.layers, (kv.VALUE_AXES,) * m.layers)
        axes = Caches(axes, self.draft.cache_axes()) if self.draft else axes

        def sharding(axes: tuple[str | None, ...]) -> Any:
            return self.partition.sharding((rows, *axes[1:]))

        return jax.tree.map(sharding, axes, is_leaf=lambda x: isinstance(x, tuple) and x[:1] == ("batch",))


def check_cache_length(limits: Limits, model: qwen3.Qwen3Config, section: str = "rollout") -> None:
    """Raises InputError where a sequence could outgrow the positions that the policy was made for.

    `section` of the config says how long responses may be.
    """
    if limits.cache_length > model.longest:
        raise InputError(
            f"rollout.max_prompt_tokens + {section}.max_response_tokens = {limits.cache_length} tokens, "
            f"the policy was made for {model.longest}"
        )


def sharded_verify(partition: Partitioner, inputs: VerifyInputs, sampling: Sampling) -> Verified:
    """`verify` with each row's whole vocabulary on one device: one all-to-all of the logits, then no communication.

    Where the batch has become too small to be split that finely, it stays split as it is, and logits are gathered. The
    results go back to where the rows live at once; otherwise the finer split would spread into the whole loop.
    """
    rows = "batch" if len(inputs.draft.tokens) % partition.num_shards("sampled_rows") else "sampled_rows"
    target_logits = partition.constrain(inputs.target_logits, rows, None, None)
    inputs = dataclasses.replace(inputs, target_logits=target_logits)
    verified = verify(inputs, sampling, mesh=partition.mesh, rows=partition.spec((rows,))[0])
    return Verified(
        tokens=partition.constrain(verified.tokens, "batch", None),
        num_accepted=partition.constrain(verified.num_accepted, "batch"),
        logprobs=partition.constrain(verified.logprobs, "batch", None),
    )
