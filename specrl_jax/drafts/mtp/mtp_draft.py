"""Draft with a multi-token-prediction head: it reads the target's last hidden state, and shares its lm_head."""

import dataclasses
from typing import Any, ClassVar

import jax

from specrl_jax.core import Params
from specrl_jax.drafts.base import DraftInputs, DraftMethod, DraftOptions, VocabMap
from specrl_jax.drafts.mtp import mtp_checkpoint as checkpoint
from specrl_jax.drafts.mtp import mtp_network as network
from specrl_jax.drafts.recurrent.recurrent_draft import RecurrentDraft
from specrl_jax.drafts.recurrent.recurrent_network import Angles, Attend
from specrl_jax.drafts.weights import Weights
from specrl_jax.errors import InputError
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.layers import matmul

FORMATS = tuple(checkpoint.FORMATS)


def make(options: DraftOptions, target: DecoderConfig) -> DraftMethod:
    """Return the head in draft.path, or the one that is made for the target. Raises InputError."""
    if options.path:
        dialect, config = checkpoint.dialect_of(options.path), checkpoint.load_config(options.path, target)
        if options.dialect not in ("", dialect):
            raise InputError(
                f"draft.dialect={options.dialect}: the head in {options.path} computes as '{dialect}' says; leave ''"
            )
    else:
        dialect = options.dialect or FORMATS[0]
        config = checkpoint.FORMATS[dialect].config(target)
    draft = MTPDraft(config, dialect)
    return DraftMethod(draft.drafter, draft)


@dataclasses.dataclass(frozen=True)
class MTPDraft(RecurrentDraft):
    """Implement `DraftModel` for an MTP head."""

    NETWORK: ClassVar[Any] = network
    CHECKPOINT: ClassVar[Any] = checkpoint
    has_vocab_map = False

    config: network.MTPConfig
    dialect: str = FORMATS[0]

    @property
    def vocab(self) -> int:
        return self.config.vocab

    def hidden_states(self, params: Params, aux: jax.Array | None, hidden: jax.Array) -> jax.Array:
        if not self.aux_layers:
            return hidden
        assert aux is not None, "the forward was asked for aux_layers"
        return aux[:, :, 0]

    def layer(
        self, params: Params, hidden: jax.Array, embedded: jax.Array, *, angles: Angles, attend: Attend
    ) -> jax.Array:
        return network.layer(params, self.config, hidden, embedded=embedded, angles=angles, attend=attend)

    def logits(self, weights: Weights, a: jax.Array) -> jax.Array:
        return matmul("BTD,DV->BTV", a, weights.policy["to_logits"])

    def lm_head(self, params: Params, inputs: DraftInputs) -> jax.Array:
        return inputs.tables.lm_head

    def initialise_from_target(self, params: Params, target: Params, lm_head: jax.Array) -> Params:
        """Take the norm before the lm_head from the target, whose lm_head this head uses."""
        return {**params, "final_norm": target["final_norm"]}

    def save(
        self,
        folder: str,
        params: Params,
        vocab_map: VocabMap,
        *,
        target: DecoderConfig,
        dtype: str,
        target_path: str = "",
    ) -> None:
        checkpoint.save(folder, params, self.config, target=target, dtype=dtype, dialect=self.dialect)
