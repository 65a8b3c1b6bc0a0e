"""Draft with a multi-token-prediction head: it reads what the target's lm_head reads, and shares that table."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.core import Params
from specrl_jax.data.rows import Rows
from specrl_jax.drafts.base import DraftMethod, DraftOptions, TargetFeatures, TargetTables
from specrl_jax.drafts.mtp import checkpoint, network
from specrl_jax.drafts.recurrent.draft import RecurrentDraft
from specrl_jax.drafts.recurrent.network import DraftCache
from specrl_jax.drafts.weights import Weights
from specrl_jax.models import cache as kv
from specrl_jax.models import qwen3
from specrl_jax.models.layers import Specs, matmul
from specrl_jax.sharding import Partitioner

FORMATS = tuple(checkpoint.FORMATS)


def make(options: DraftOptions, target: qwen3.Qwen3Config) -> DraftMethod:
    """Return the head in draft.path, or the one that is made for the target. Raises InputError."""
    config = checkpoint.load_config(options.path, target) if options.path else network.mtp_config(target)
    draft = MTPDraft(config, options.dialect or FORMATS[0])
    return DraftMethod(draft.drafter, draft)


@dataclasses.dataclass(frozen=True)
class MTPDraft(RecurrentDraft):
    """Implement `DraftModel` for an MTP head."""

    config: network.MTPConfig
    dialect: str = FORMATS[0]  # format that `save` writes

    aux_layers = ()
    has_vocab_map = False

    @property
    def vocab(self) -> int:
        return self.config.vocab

    @property
    def specs(self) -> Specs:
        return network.param_specs(self.config)

    @property
    def inference_specs(self) -> Specs:
        return network.inference_specs(self.config)

    def inference_params(self, params: Params, dtype: jnp.dtype) -> Params:
        return network.inference_params(params, dtype)

    def update_cache(self, params: Params, cache: DraftCache, positions: jax.Array, out: qwen3.Output) -> DraftCache:
        return cache._replace(hidden=kv.write_tokens(cache.hidden, positions, out.hidden))

    def write_pairs(
        self, params: Params, hidden: jax.Array, embedded: jax.Array, pairs: jax.Array, cache: DraftCache
    ) -> DraftCache:
        return network.write_pairs(params, self.config, hidden, embedded, pairs, cache)

    def extend(
        self, params: Params, hidden: jax.Array, embedded: jax.Array, pairs: jax.Array, cache: DraftCache
    ) -> tuple[jax.Array, DraftCache]:
        return network.extend(params, self.config, hidden, embedded, pairs, cache)

    def logits(self, weights: Weights, a: jax.Array) -> jax.Array:
        return matmul("BTD,DV->BTV", a, weights.policy["to_logits"])

    def unrolled(
        self,
        params: Params,
        tables: TargetTables,
        features: TargetFeatures,
        rows: Rows,
        steps: int,
        dtype: jnp.dtype,
        partition: Partitioner,
    ) -> tuple[jax.Array, jax.Array]:
        embedded, hidden = tables.embed[rows.tokens].astype(dtype), features.hidden[:, :, None].astype(dtype)
        outputs = network.unrolled(params, self.config, hidden, embedded, steps, rows.positions, rows.segments)
        return outputs, tables.lm_head

    def initialise_from_target(self, params: Params, target: Params, lm_head: jax.Array) -> Params:
        """Take the norm before the lm_head from the target, whose lm_head this head uses."""
        return {**params, "final_norm": target["final_norm"]}

    def load(self, folder: str, partition: Partitioner) -> Params:
        return checkpoint.load_params(folder, self.config, partition, jnp.float32)

    def load_vocab_map(self, folder: str, target: qwen3.Qwen3Config) -> None:
        return None

    def save(
        self,
        folder: str,
        params: Params,
        vocab_map: jax.Array | np.ndarray | None,
        target: qwen3.Qwen3Config,
        dtype: str,
        target_path: str = "",
    ) -> None:
        checkpoint.save(folder, params, self.config, target, dtype, self.dialect)
