"""The interface between a kind of draft and everything that handles drafts.

A kind is a module beside this file with a function `make(options, target) -> DraftMethod`, and one line in `kinds.py`.
A kind with weights has a `DraftModel`. `docs/contributing.md` says how to add one.
"""

import abc
import dataclasses
import itertools
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.core import Params
from specrl_jax.data.rows import Rows
from specrl_jax.decoding.drafters import Drafter
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.drafts.vocab_map import read_vocab_map, vocab_tensors
from specrl_jax.io.tensors import TensorFolder, hf_tensors, save_folder
from specrl_jax.models.cache import PageShape, Paging
from specrl_jax.models.decoder import DecoderConfig, Output
from specrl_jax.models.layers import Specs
from specrl_jax.sharding import Partitioner

Cache = TypeVar("Cache")
# [Vd] int32, target id of each draft id; None = the same ids
VocabMap = jax.Array | np.ndarray | None


@dataclasses.dataclass(frozen=True)
class DraftOptions:
    """The keys `draft.*` of the config that choose and size a draft."""

    kind: str  # a key of `kinds.KINDS`
    path: str = ""  # folder of the draft's weights; '' = none
    preset: str = ""  # sizes of a small model that has no folder
    dialect: str = ""  # format that a run saves the draft in; '' = the kind's first
    vocab_size: int = 0  # Vd, vocabulary entries; 0 = the folder's, or the target's
    match_min: int = 2  # tokens, shortest match that a lookup drafter copies after
    match_max: int = 8  # tokens, longest match that is looked for
    slots: int = 7  # of a block of a new block drafter
    layers: int = 2  # of a new drafter of one pass
    cascade: int = 0  # tokens, match from which a lookup overrides a draft with weights; 0 = never
    quantize: str = "int8"  # format of a twin's weights, a key of models.quantized.FORMATS


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Settings of an engine's drafter."""

    length: int  # k, tokens of the longest draft
    sampling: Sampling
    dtype: jnp.dtype  # of the activations
    partition: Partitioner  # of the rollouts
    argmax: bool = False  # draft the likeliest token instead of sampling


@flax.struct.dataclass
class TargetTables:
    """The target's tables that a draft learns with, as they were in the forward pass that made the features."""

    embed: jax.Array  # [V, D]
    lm_head: jax.Array  # [Vd, D], the rows of the draft's vocabulary
    vocab_map: VocabMap = None  # where sampling masks are replayed; None: draft ids are target ids, or no masks


class DraftInputs(NamedTuple):
    """Inputs of a draft's loss, along rows of tokens [B, T]."""

    tables: TargetTables
    aux: jax.Array | None  # [B, T, A, D], the target's residual stream entering `aux_layers`; None = reads none
    hidden: jax.Array  # [B, T, D], input of the target's lm_head
    rows: Rows
    steps: int  # draft steps to unroll
    dtype: jnp.dtype  # of the activations
    anchors: jax.Array | None = None  # [A] int32, tokens of every row that start a draft; None = all T

    @property
    def features(self) -> jax.Array:
        """Return `aux` in the dtype of the activations."""
        assert self.aux is not None, "the forward was asked for aux_layers"
        return self.aux.astype(self.dtype)


def confidence_logits(params: Params, outputs: jax.Array) -> jax.Array:
    """Return [...] logits of the chance that each draft is kept if those before it are, from outputs [..., D].

    DSpark's confidence head: params["confidence"] [1, D] and params["confidence_bias"] [1].
    """
    weight, bias = (params[name].astype(jnp.float32) for name in ("confidence", "confidence_bias"))
    return jnp.einsum("...d,d->...", outputs.astype(jnp.float32), weight[0]) + bias[0]


class DraftModel(abc.ABC, Generic[Cache]):
    """A draft with weights, for the engine, the learner and the checkpoints; `Cache` is its state in the engine.

    A kind implements what is abstract and overrides what differs from a draft without a cache, on the target's
    vocabulary, whose folder has the names of `specs`. Parameters have two layouts: training (float32, named matrices,
    as `specs`) and inference (cast and fused for decoding, as `inference_specs`).
    """

    @property
    @abc.abstractmethod
    def vocab(self) -> int:
        """Return Vd, the entries of the draft's vocabulary."""

    @property
    def longest(self) -> int | None:
        """Return the most tokens of a draft; None = as many as are asked for."""
        return None

    @property
    def takes_anchors(self) -> bool:
        """Return whether in training drafts need not start at every token."""
        return False

    @property
    def has_vocab_map(self) -> bool:
        """Return whether draft ids are not target ids; the draft's lm_head is then its parameter "unembed" [Vd, D].

        Every parameter with Vd rows and first axis "vocab" in `specs` has a row for each draft id. Where a run changes
        the ids, rows and their moments move along; new rows of "unembed" are the target's, of other parameters 0.
        """
        return False

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Return the target's layers whose inputs the draft reads."""
        return ()

    @property
    @abc.abstractmethod
    def specs(self) -> Specs:
        """Return the training layout."""

    @property
    def inference_specs(self) -> Specs:
        """Return the inference layout."""
        return self.specs

    def inference_params(self, params: Params, dtype: jnp.dtype) -> Params:
        """Map parameters from the training to the inference layout."""
        return jax.tree.map(lambda w: w.astype(dtype), params)

    def init_cache(self, shape: PageShape) -> Cache:
        """Return an empty cache; axis 0 of every array is the page."""
        return cast(Cache, ())

    def cache_axes(self) -> Cache:
        """Return the logical axes of `init_cache`'s arrays, as tuples in the same tree."""
        return cast(Cache, ())

    def update_cache(
        self, params: Params, cache: Cache, paging: Paging, *, out: Output, partition: Partitioner
    ) -> Cache:
        """Write to the cache what the draft reads of a forward of the target over tokens [B, Q]."""
        return cache

    @abc.abstractmethod
    def drafter(self, config: DrafterConfig) -> Drafter:
        """Return the engine's functions; their parameters are `Weights`, their cache `Caches`."""

    @abc.abstractmethod
    def unrolled(self, params: Params, inputs: DraftInputs, partition: Partitioner) -> tuple[jax.Array, jax.Array]:
        """Unroll draft steps from every token of training rows, on ground-truth tokens.

        Returns:
          outputs [steps, B, T, D] and lm_head [Vd, D]: entry (i, t) predicts token t + 2 + i. Those of the anchors
          alone where there are some, which only a draft with `takes_anchors` has. A draft with parameters
          "confidence" and "confidence_bias" also learns `confidence_logits` of the outputs.
        """

    def initialise_from_target(self, params: Params, target: Params, lm_head: jax.Array) -> Params:
        """Replace random parameters by the target's where these fit, both in the training layout.

        `lm_head` [Vd, D] has the target's rows of the draft's vocabulary.
        """
        return params

    def load(self, folder: str, partition: Partitioner) -> Params:
        """Read float32 parameters in the training layout."""
        return TensorFolder(folder, "draft.path").load(self.specs, partition, jnp.float32)

    def load_vocab_map(self, folder: str, target: DecoderConfig) -> np.ndarray | None:
        """Return the target ids of the draft in `folder`, or of a new one where that is ''."""
        if not self.has_vocab_map:
            return None
        if not folder:
            return np.arange(self.vocab, dtype=np.int32)
        return read_vocab_map(TensorFolder(folder, "draft.path"), self.vocab, target.vocab)

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
        """Write a folder that `load` and other libraries read.

        Args:
          dtype: of the stored tensors, "float32" or "bfloat16".
          target_path: the target's folder, for formats that name it; '' = none.
        """
        ids = {} if vocab_map is None else vocab_tensors(np.asarray(vocab_map), target.vocab)
        tensors = itertools.chain(hf_tensors(self.specs, params, dtype), ids.items())
        save_folder(folder, tensors, {"architectures": [type(self).__name__]})


@dataclasses.dataclass(frozen=True)
class DerivedWeights:
    """Weights of a draft that `prepare` computes from the policy's: nothing of them is trained, loaded or saved."""

    specs: Specs  # of the inference layout
    make: Callable[[Params, jnp.dtype], Params]  # (the policy in the training layout, dtype) -> inference layout


@dataclasses.dataclass(frozen=True)
class DraftMethod:
    """A configured draft, as every kind's `make` returns it."""

    make_drafter: Callable[[DrafterConfig], Drafter]
    model: DraftModel | None = None  # None = no weights of its own: nothing to train, load or save
    uses_lookup_cache: bool = False  # drafts copy from other rollouts of the same prompt
    derived: DerivedWeights | None = None
