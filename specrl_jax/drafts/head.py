"""Base class of trained heads: networks that draft from a target's features, in folders that other libraries read."""

import abc
import dataclasses
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.core import Params, branch, branches, nested, stand_in
from specrl_jax.drafts.base import DraftInputs, DraftMethod, DraftModel, DraftOptions, VocabMap
from specrl_jax.drafts.formats import FORMATS, open_head
from specrl_jax.drafts.kinds import KINDS
from specrl_jax.drafts.weights import Weights
from specrl_jax.errors import InputError
from specrl_jax.io.tensors import save_folder
from specrl_jax.models import cache as kv
from specrl_jax.models import decoder
from specrl_jax.models.decoder import DecoderConfig, Output
from specrl_jax.models.layers import ParamSpec, Specs, matmul
from specrl_jax.models.rotary import Rope
from specrl_jax.sharding import Partitioner

Angles = tuple[jax.Array, jax.Array]
Cache = TypeVar("Cache")
# Fields that a head's config shares with its target's, and with that of the decoder that has its layers.
_SHARED = ("vocab", "embed", "heads", "kv_heads", "head_dim", "rope", "norm_epsilon", "max_positions")
_OF_LAYERS = (*_SHARED, "mlp", "layers", "qk_norm", "qkv_bias", "rotary_dim", "gated", "norm_offset")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Sizes that every head has; letters as in specrl_jax.core, A auxiliary layers."""

    vocab: int  # V, the target's
    draft_vocab: int  # Vd
    embed: int  # D, the target's
    heads: int  # N
    kv_heads: int  # K
    head_dim: int  # H
    mlp: int  # F
    rope: Rope
    norm_epsilon: float
    max_positions: int  # tokens
    layers: int = 1  # L
    aux_layers: tuple[int, ...] = ()  # [A]; the residual stream *entering* these target layers, low first
    qk_norm: bool = False
    qkv_bias: bool = False
    rotary_dim: int = 0  # these three as DecoderConfig's
    gated: bool = False
    norm_offset: float = 0.0
    taken_offset: float = 0.0  # added to the scale of the target's final norm, where the head takes it

    @classmethod
    def of_target(cls, target: DecoderConfig, draft_vocab: int, **own: Any) -> Self:
        """Return the sizes of a new head: the target's, but for its `own`.

        For a mixture of experts the mlp is dense, of the width that config.json gives layers without experts, as in
        SpecForge's first heads for Qwen3-30B-A3B (6,144; other published heads are twice as wide). Raises InputError
        for a vocabulary larger than the target's.
        """
        if not 0 < draft_vocab <= target.vocab:
            raise InputError(f"draft.vocab_size={draft_vocab} must be in 1..{target.vocab}, the policy's vocabulary")
        sizes = {name: getattr(target, name) for name in _SHARED} | {"mlp": target.dense_mlp or target.mlp}
        sizes["taken_offset"] = target.norm_offset - own.get("norm_offset", 0.0)
        return cls(**sizes | {"draft_vocab": draft_vocab} | own)

    @property
    def block(self) -> DecoderConfig:
        """Return the sizes and options of the decoder that has these layers."""
        return DecoderConfig(tied=True, **{name: getattr(self, name) for name in _OF_LAYERS})

    def angles(self, positions: jax.Array) -> Angles:
        """Return the rotary angles of positions [B, T]."""
        return self.rope.angles(positions, self.block.turned)


class HeadCache(NamedTuple):
    """State of the sequences in the engine, in the pages that the target's cache has; entry t belongs to position t.

    Memory per token: 2 L K H + D numbers, of an EAGLE-3 head with L = 1 (Qwen3-8B: 6,144 against the target's 73,728).
    """

    hidden: jax.Array  # [C, T, D], the head's input from the target at each processed position
    layers: kv.KVCache


@dataclasses.dataclass(frozen=True)
class TrainedHead(DraftModel[Cache]):
    """Base of heads: a config of sizes, the inference layout, and folders in the formats of a kind.

    A head implements `kind`, `new_config`, `specs`, `drafter`, `unrolled`, and what `DraftModel` says of its cache.
    """

    config: Any  # a HeadConfig
    dialect: str  # the format that `save` writes

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """Return the value of draft.kind."""

    @classmethod
    @abc.abstractmethod
    def new_config(cls, target: DecoderConfig, options: DraftOptions) -> Any:
        """Return the config of a new head of these options. Raises InputError."""

    @classmethod
    def find_dialect(cls, config: Any, options: DraftOptions, stored: str) -> str:
        """Return the format to save in, given that of draft.path. Raises InputError where draft.dialect cannot be."""
        return options.dialect or KINDS[options.kind].formats[0]

    @classmethod
    def make(cls, options: DraftOptions, target: DecoderConfig) -> DraftMethod:
        """Return the head in draft.path, or a new one for the target.

        Raises InputError for a missing or damaged folder, one of another kind, unsupported entries, and sizes that do
        not go with the target or draft.vocab_size. Reads headers and the ids of a reduced vocabulary only.
        """
        dialect = options.dialect or KINDS[options.kind].formats[0]
        if not options.path:
            config = cls.new_config(target, dataclasses.replace(options, dialect=dialect))
            head = cls(config, cls.find_dialect(config, options, dialect))
            return DraftMethod(head.drafter, head)
        folder = open_head(options.path, options.kind)
        fields = folder.fields(target)
        vocab = fields.get("draft_vocab", 0)
        config = cls.new_config(target, dataclasses.replace(options, dialect=folder.dialect, vocab_size=vocab))
        config = dataclasses.replace(config, **fields)
        head = cls(config, cls.find_dialect(config, options, folder.dialect))
        folder.check_head(head.specs)
        head.load_vocab_map(options.path, target)
        if options.vocab_size not in (0, config.draft_vocab):
            raise InputError(
                f"draft.vocab_size={options.vocab_size}, the draft {options.path} has {config.draft_vocab}; leave 0"
            )
        return DraftMethod(head.drafter, head)

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
    def inference_specs(self) -> Specs:
        specs = {name: spec for name, spec in self.specs.items() if name not in ("layers", "unembed")}
        D = self.config.embed
        if "fc" in specs:
            specs["fc"] = ParamSpec((len(self.aux_layers) * D, D), (None, "embed"))
        if "unembed" in self.specs:
            specs["to_logits"] = ParamSpec((D, self.vocab), ("embed", "vocab"))
        if "layers" in self.specs:
            return nested(specs, layers=branches(decoder.inference_specs(self.config.block), "layers"))
        return specs

    def inference_params(self, params: Params, dtype: jnp.dtype) -> Params:
        """Map the training layout to the inference layout: the lm_head transposed and layers fused, as the policy's.

        Inputs of several parts become one axis: XLA copies the weight of a product over two axes each time.
        """
        fused = {name: w for name, w in params.items() if name not in ("layers", "unembed")}
        if "fc" in params:
            fused["fc"] = params["fc"].reshape(-1, self.config.embed)
        if "unembed" in params:
            fused["to_logits"] = params["unembed"].T
        if "layers" in params:
            fused = nested(fused, layers=decoder.unstacked(branch(params, "layers"), self.config.block))
        return jax.tree.map(lambda w: w.astype(dtype), fused)

    def lm_head(self, params: Params, inputs: DraftInputs) -> jax.Array:
        """Return the lm_head's table [Vd, D] in training: the head's own, or the target's."""
        return params["unembed"] if self.has_vocab_map else inputs.tables.lm_head

    def logits(self, weights: Weights, x: jax.Array) -> jax.Array:
        """Return [B, Q, Vd] float32 in the engine, of inputs of the lm_head [B, Q, D]."""
        table = weights.draft["to_logits"] if self.has_vocab_map else weights.policy["to_logits"]
        return matmul("BTD,DV->BTV", x, table)

    def initialise_from_target(self, params: Params, target: Params, lm_head: jax.Array) -> Params:
        """Take the norm before the lm_head from the target, and an lm_head of its own, as speculators does."""
        own = {"unembed": lm_head} if self.has_vocab_map else {}
        return {**params, **own, "final_norm": target["final_norm"] + self.config.taken_offset}

    def load(self, folder: str, partition: Partitioner) -> Params:
        found = open_head(folder, self.kind)
        return found.load(found.stored(self.specs), partition, jnp.float32)

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
        formats = FORMATS[self.kind]
        ids = None if vocab_map is None else np.asarray(vocab_map)
        tensors = formats.named[self.dialect].tensors(self.specs, params, dtype, ids=ids, target=target)
        content = formats.write(self.config, self.dialect, target, kind=self.kind, dtype=dtype, verifier=target_path)
        save_folder(folder, tensors, content)


class FeatureHead(TrainedHead[HeadCache]):
    """Base of heads whose cache has a hidden state for each position of the target, and keys and values."""

    def hidden_states(self, params: Params, aux: jax.Array | None, hidden: jax.Array) -> jax.Array:
        """Return the head's hidden states [B, T, D] of the target's features [B, T, A, D] and hidden states."""
        return hidden

    def init_cache(self, shape: kv.PageShape) -> HeadCache:
        c = self.config
        return HeadCache(kv.init_tokens(c.embed, shape), kv.init_cache(c.layers, c.kv_heads, c.head_dim, shape=shape))

    def cache_axes(self) -> HeadCache:
        return HeadCache(stand_in(kv.TOKEN_AXES), (stand_in(kv.PAGE_AXES),) * self.config.layers)

    def update_cache(
        self, params: Params, cache: HeadCache, paging: kv.Paging, *, out: Output, partition: Partitioner
    ) -> HeadCache:
        hidden = self.hidden_states(params, out.aux, out.hidden)
        return cache._replace(hidden=kv.write_tokens(cache.hidden, paging, hidden, partition=partition))
