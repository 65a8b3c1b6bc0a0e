"""Draft with an EAGLE-3 head: it reads up to three layers of the target and drafts on a vocabulary of its own."""

import dataclasses
from typing import Any, ClassVar

import jax

from specrl_jax.core import Params
from specrl_jax.drafts.base import DraftInputs, DraftMethod, DraftOptions
from specrl_jax.drafts.eagle3 import eagle3_checkpoint as checkpoint
from specrl_jax.drafts.eagle3 import eagle3_network as network
from specrl_jax.drafts.recurrent.recurrent_draft import RecurrentDraft
from specrl_jax.drafts.recurrent.recurrent_network import Angles, Attend, DraftCache
from specrl_jax.drafts.trained import loaded_config
from specrl_jax.drafts.weights import Weights
from specrl_jax.models import cache as kv
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.sharding import Partitioner

FORMATS = tuple(checkpoint.FORMATS)


def make(options: DraftOptions, target: DecoderConfig) -> DraftMethod:
    """Return the head in draft.path, or the one that is made for the target. Raises InputError."""
    if options.path:
        config = loaded_config(checkpoint, options, target)
    else:
        config = network.eagle3_config(target, options.vocab_size or target.vocab)
    draft = Eagle3Draft(config, options.dialect or FORMATS[0])
    return DraftMethod(draft.drafter, draft)


@dataclasses.dataclass(frozen=True)
class Eagle3Draft(RecurrentDraft):
    """Implement `DraftModel` for an EAGLE-3 head."""

    NETWORK: ClassVar[Any] = network
    CHECKPOINT: ClassVar[Any] = checkpoint

    config: network.Eagle3Config
    dialect: str = FORMATS[0]

    def hidden_states(self, params: Params, aux: jax.Array | None, hidden: jax.Array) -> jax.Array:
        # After `fc`: a third of the three features' size, and drafting needs it anyway.
        assert aux is not None, "the forward was asked for aux_layers"
        return network.first_hidden(params, self.config, aux)

    def layer(
        self, params: Params, hidden: jax.Array, embedded: jax.Array, *, angles: Angles, attend: Attend
    ) -> jax.Array:
        return network.layer(params, self.config, hidden, embedded=embedded, angles=angles, attend=attend)

    def write_pairs(
        self,
        params: Params,
        hidden: jax.Array,
        embedded: jax.Array,
        *,
        pairs: kv.Paging,
        cache: DraftCache,
        partition: Partitioner,
    ) -> DraftCache:
        """Compute neither attention nor mlp."""
        k, v = network.keys_values(
            params, self.config, hidden, embedded=embedded, angles=self.config.angles(pairs.positions)
        )
        return cache._replace(pages=kv.write(cache.pages, k, v, paging=pairs, partition=partition))

    def logits(self, weights: Weights, a: jax.Array) -> jax.Array:
        return network.draft_logits(weights.draft, self.config, a)

    def lm_head(self, params: Params, inputs: DraftInputs) -> jax.Array:
        return params["unembed"]

    def lm_head_input(self, params: Params, a: jax.Array) -> jax.Array:
        return network.lm_head_input(params, self.config, a)

    def initialise_from_target(self, params: Params, target: Params, lm_head: jax.Array) -> Params:
        """Take the lm_head and the norm before it from the target, as speculators does."""
        return {**params, "unembed": lm_head, "final_norm": target["final_norm"]}
