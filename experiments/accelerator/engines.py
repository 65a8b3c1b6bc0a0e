"""Engines with random weights on one device, which need not be here to compile their programs."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.engine.bench import Stops
from specrl_jax.core import Params
from specrl_jax.decoding.drafters import NO_DRAFTER
from specrl_jax.decoding.engine import Engine
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts.base import DrafterConfig
from specrl_jax.drafts.eagle3 import Eagle3Draft
from specrl_jax.drafts.weights import Weights
from specrl_jax.learner.state import init_random_params
from specrl_jax.models import decoder
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.layers import Specs, abstract_params
from specrl_jax.rollout.inference_engine import InferenceConfig, make_prepare, make_rollout_engine
from specrl_jax.sharding import LEARNER, ROLLOUT, Partitioner, make_mesh, partitioner

MESH = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}


class Built(NamedTuple):
    """An engine and its weights."""

    engine: Engine
    prepare: Any  # a jitted PrepareStep
    specs: tuple[Specs, Specs | None]  # training layout of policy and draft
    learner: Partitioner
    draft: Eagle3Draft | None

    def abstract(self) -> Weights:
        """Return the shapes of the weights, with shardings."""
        trees = [abstract_params(s, jnp.dtype("float32"), self.learner.shardings(s)) if s else None for s in self.specs]
        return self.prepare.eval_shape(trees[0], trees[1], self.ids(jax.ShapeDtypeStruct((self.vocab,), jnp.int32)))

    def random(self, seed: int = 0) -> Weights:
        """Draw the weights."""
        params: list[Params | None] = [
            init_random_params(jax.random.key(seed + i), s, self.learner) if s else None
            for i, s in enumerate(self.specs)
        ]
        ids = self.ids(jnp.arange(self.vocab, dtype=jnp.int32))
        return jax.block_until_ready(self.prepare(params[0], params[1], ids))

    @property
    def vocab(self) -> int:
        return self.draft.vocab if self.draft else 0

    def ids(self, vocab_map: Any) -> Any:
        return vocab_map if self.draft else None


def build(
    model: DecoderConfig,
    limits: EngineConfig,
    dtype: str,
    device: jax.Device,
    draft: Eagle3Draft | None = None,
    lengths: tuple[int, ...] = (0,),
) -> Built:
    """Build an engine whose rows end at their limits only. Compiles nothing.

    Args:
      lengths: draft lengths that have a program.
    """
    mesh = make_mesh(MESH, [device])
    partition, learner = partitioner(mesh, ROLLOUT), partitioner(mesh, LEARNER)
    kind = jnp.dtype(dtype)
    config = InferenceConfig(Sampling(), limits, 0, dtype=kind, cache_dtype=kind, compute_dtype=kind)
    options = DrafterConfig(max(lengths), config.sampling, kind, partition=partition)
    drafter = draft.drafter(options) if draft else NO_DRAFTER
    model = dataclasses.replace(model, max_positions=max(model.max_positions, limits.cache_length))
    engine = make_rollout_engine(
        model, draft, drafter, config=config, tokenizer=Stops((model.vocab,)), partition=partition, lengths=lengths
    )
    specs = (decoder.param_specs(model), draft.specs if draft else None)
    return Built(
        engine, make_prepare(model, draft, config, partition=partition, learner=partition), specs, learner, draft
    )


def without_draft(weights: Weights) -> Weights:
    """Return the weights for an engine without a draft."""
    return weights._replace(draft={}, vocab_map=None)
