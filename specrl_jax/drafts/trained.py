"""Base class of drafts with weights and folders of their own: what their network and checkpoint modules say of them."""

from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp
import numpy as np

from specrl_jax.core import Params
from specrl_jax.drafts.base import DraftOptions, VocabMap
from specrl_jax.errors import InputError
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.layers import Specs
from specrl_jax.sharding import Partitioner


class TrainedDraft:
    """The part of `DraftModel` that a kind's two modules answer.

    A kind sets them, and overrides what differs:

        NETWORK     param_specs(config), inference_specs(config), inference_params(params, dtype)
        CHECKPOINT  load_config(folder, target), load_params(folder, config, partition, dtype=), save(...), and
                    load_vocab_map(folder, config, target) where the kind may have a reduced vocabulary
    """

    NETWORK: ClassVar[Any]
    CHECKPOINT: ClassVar[Any]
    takes_anchors = False

    if TYPE_CHECKING:  # fields of the kind's dataclass

        @property
        def config(self) -> Any:
            """Return the sizes."""

        @property
        def dialect(self) -> str:
            """Return the format that `save` writes."""

    @property
    def longest(self) -> int | None:
        return None

    @property
    def has_vocab_map(self) -> bool:
        return True

    @property
    def vocab(self) -> int:
        return self.config.draft_vocab

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    @property
    def specs(self) -> Specs:
        return self.NETWORK.param_specs(self.config)

    @property
    def inference_specs(self) -> Specs:
        return self.NETWORK.inference_specs(self.config)

    def inference_params(self, params: Params, dtype: jnp.dtype) -> Params:
        return self.NETWORK.inference_params(params, dtype)

    def load(self, folder: str, partition: Partitioner) -> Params:
        return self.CHECKPOINT.load_params(folder, self.config, partition, dtype=jnp.float32)

    def load_vocab_map(self, folder: str, target: DecoderConfig) -> np.ndarray | None:
        if not self.has_vocab_map:
            return None
        if not folder:
            return np.arange(self.vocab, dtype=np.int32)
        return self.CHECKPOINT.load_vocab_map(folder, self.config, target)

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
        ids = None if vocab_map is None else np.asarray(vocab_map)
        self.CHECKPOINT.save(
            folder,
            params,
            ids,
            config=self.config,
            target=target,
            dtype=dtype,
            dialect=self.dialect,
            verifier=target_path,
        )


def loaded_config(checkpoint: Any, options: DraftOptions, target: DecoderConfig) -> Any:
    """Return the sizes in draft.path. Raises InputError as `load_config`, and for another draft.vocab_size."""
    config = checkpoint.load_config(options.path, target)
    if options.vocab_size not in (0, config.draft_vocab):
        raise InputError(
            f"draft.vocab_size={options.vocab_size}, the draft {options.path} has {config.draft_vocab}; leave 0"
        )
    return config
