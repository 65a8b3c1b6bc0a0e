"""The drafts that have weights of their own: an EAGLE-3 head, an MTP head, a smaller policy.

Each is described once, for everything that handles drafts without asking which kind it is: weights and their shardings,
the drafter that runs in the engine, what it learns from, and its folder on disk.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.core import InputError, shift_left
from specrl_jax.data.rows import Rows
from specrl_jax.decoding.drafters import NO_DRAFTER, Drafter
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.drafts.drafting import policy_drafter, recurrent_drafter
from specrl_jax.drafts.eagle3 import checkpoint as eagle3_formats
from specrl_jax.drafts.eagle3 import network as eagle3
from specrl_jax.drafts.lookup.drafter import cascade, lookup_drafter
from specrl_jax.drafts.mtp import checkpoint as mtp_formats
from specrl_jax.drafts.mtp import network as mtp
from specrl_jax.drafts.recurrent import DraftCache
from specrl_jax.drafts.weights import Weights
from specrl_jax.io import hf
from specrl_jax.models import cache as kv
from specrl_jax.models import qwen3
from specrl_jax.models.layers import matmul
from specrl_jax.sharding import Partitioner


class Tables(Protocol):
    embed: jax.Array
    lm_head: jax.Array


class DraftModel(Protocol):
    """What every kind of draft with weights can do.

    Attributes:
      vocab: Vd, words that it can draft.
      aux_layers: of the target, whose inputs it reads.
      specs, inference_specs: trees of ParamSpec of its two forms.
    """

    vocab: int
    aux_layers: tuple[int, ...]
    specs: Any
    inference_specs: Any

    def inference_params(self, params: Any, dtype: jnp.dtype) -> Any:
        """Learner form to rollout form."""

    def init_cache(self, rows: int, length: int, dtype: jnp.dtype) -> Any:
        """What it keeps of every sequence."""

    def cache_axes(self) -> Any:
        """Logical axes of `init_cache`'s arrays, as tuples in the same tree."""

    def record(self, params: Any, cache: Any, positions: jax.Array, out: qwen3.Output) -> Any:
        """The cache with what it needs of a forward of the target at positions [B, Q]."""

    def drafter(self, length: int, sampling: Sampling, dtype: jnp.dtype, partition: Partitioner) -> Drafter: ...

    def unrolled(
        self, params: Any, tables: Tables, out: Any, rows: Rows, steps: int, dtype: jnp.dtype, partition: Partitioner
    ) -> tuple[jax.Array, jax.Array]:
        """(outputs [steps, B, T, D], unembedding [Vd, D]): entry (i, t) predicts token t + 2 + i.

        `out` has `aux` and `hidden` of the target at every token.
        """

    def begin(self, params: Any, target: Any, lm_head: jax.Array) -> Any:
        """Random parameters with what the target can lend them.

        Args:
          params: learner form, of which new arrays replace some.
          target: the policy's parameters in learner form.
          lm_head: [Vd, D], the rows of the draft's ids in the policy's unembedding.
        """

    def load(self, folder: str, partition: Partitioner) -> Any:
        """Float32 parameters in learner form."""

    def load_vocab_map(self, folder: str, target: qwen3.Qwen3Config) -> np.ndarray | None:
        """[Vd] int32 target ids; None where draft and target ids are the same. '' for a draft that is made here."""

    def save(
        self, folder: str, params: Any, vocab_map: Any, target: qwen3.Qwen3Config, dtype: str, target_path: str = ""
    ) -> None:
        """`target_path`: the target's folder, for those that name it; '' where it has none."""


@dataclasses.dataclass(frozen=True)
class Eagle3Draft:
    """An EAGLE-3 head: reads three layers of the target, drafts on a vocabulary of its own."""

    config: eagle3.Eagle3Config
    dialect: str = "sglang"  # of the folder that it is saved to

    @property
    def vocab(self) -> int:
        return self.config.draft_vocab

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    @property
    def specs(self) -> Any:
        return eagle3.param_specs(self.config)

    @property
    def inference_specs(self) -> Any:
        return eagle3.inference_specs(self.config)

    def inference_params(self, params: Any, dtype: jnp.dtype) -> Any:
        return eagle3.inference_params(params, dtype)

    def init_cache(self, rows: int, length: int, dtype: jnp.dtype) -> DraftCache:
        return eagle3.init_cache(self.config, rows, length, dtype)

    def cache_axes(self) -> DraftCache:
        return HEAD_CACHE_AXES

    def record(self, params: Any, cache: DraftCache, positions: jax.Array, out: qwen3.Output) -> DraftCache:
        # What `fc` makes of the three features, a third of their size; it would be made when drafting all the same.
        hidden = eagle3.first_hidden(params, self.config, out.aux)
        return cache._replace(hidden=kv.write_tokens(cache.hidden, positions, hidden))

    def drafter(self, length: int, sampling: Sampling, dtype: jnp.dtype, partition: Partitioner) -> Drafter:
        return recurrent_drafter(self, length, sampling, dtype, partition)

    def write_pairs(self, params: Any, hidden: Any, embedded: Any, pairs: Any, cache: DraftCache) -> DraftCache:
        return eagle3.write_pairs(params, self.config, hidden, embedded, pairs, cache)

    def extend(self, params: Any, hidden: Any, embedded: Any, pairs: Any, cache: DraftCache) -> Any:
        return eagle3.extend(params, self.config, hidden, embedded, pairs, cache)

    def logits(self, weights: Weights, a: jax.Array) -> jax.Array:
        return eagle3.draft_logits(weights.draft, self.config, a)

    def unrolled(
        self, params: Any, tables: Tables, out: Any, rows: Rows, steps: int, dtype: jnp.dtype, partition: Partitioner
    ) -> tuple[jax.Array, jax.Array]:
        embedded, aux = tables.embed[rows.tokens].astype(dtype), out.aux.astype(dtype)
        outputs = eagle3.unrolled(params, self.config, aux, embedded, steps, rows.positions, rows.segments)
        return outputs, params["unembed"]

    def begin(self, params: Any, target: Any, lm_head: jax.Array) -> Any:
        """Unembedding and the norm before it, as speculators does: the target reads what it writes."""
        return params | {"unembed": lm_head, "final_norm": target["final_norm"]}

    def load(self, folder: str, partition: Partitioner) -> Any:
        return eagle3_formats.load_params(folder, self.config, partition, jnp.float32)

    def load_vocab_map(self, folder: str, target: qwen3.Qwen3Config) -> np.ndarray:
        if not folder:
            return np.arange(self.vocab, dtype=np.int32)
        return eagle3_formats.load_vocab_map(folder, self.config, target)

    def save(
        self, folder: str, params: Any, vocab_map: Any, target: qwen3.Qwen3Config, dtype: str, target_path: str = ""
    ) -> None:
        ids = np.asarray(vocab_map)
        eagle3_formats.save(folder, params, ids, self.config, target, dtype, self.dialect, target_path)


@dataclasses.dataclass(frozen=True)
class MTPDraft:
    """A multi-token-prediction head: reads what the target's unembedding reads, and shares that table."""

    config: mtp.MTPConfig
    dialect: str  # of the folder that it is saved to

    aux_layers = ()

    @property
    def vocab(self) -> int:
        return self.config.vocab

    @property
    def specs(self) -> Any:
        return mtp.param_specs(self.config)

    @property
    def inference_specs(self) -> Any:
        return mtp.inference_specs(self.config)

    def inference_params(self, params: Any, dtype: jnp.dtype) -> Any:
        return mtp.inference_params(params, dtype)

    def init_cache(self, rows: int, length: int, dtype: jnp.dtype) -> DraftCache:
        return mtp.init_cache(self.config, rows, length, dtype)

    def cache_axes(self) -> DraftCache:
        return HEAD_CACHE_AXES

    def record(self, params: Any, cache: DraftCache, positions: jax.Array, out: qwen3.Output) -> DraftCache:
        return cache._replace(hidden=kv.write_tokens(cache.hidden, positions, out.hidden))

    def drafter(self, length: int, sampling: Sampling, dtype: jnp.dtype, partition: Partitioner) -> Drafter:
        return recurrent_drafter(self, length, sampling, dtype, partition)

    def write_pairs(self, params: Any, hidden: Any, embedded: Any, pairs: Any, cache: DraftCache) -> DraftCache:
        return mtp.write_pairs(params, self.config, hidden, embedded, pairs, cache)

    def extend(self, params: Any, hidden: Any, embedded: Any, pairs: Any, cache: DraftCache) -> Any:
        return mtp.extend(params, self.config, hidden, embedded, pairs, cache)

    def logits(self, weights: Weights, a: jax.Array) -> jax.Array:
        return matmul("BTD,DV->BTV", a, weights.policy["to_logits"])

    def unrolled(
        self, params: Any, tables: Tables, out: Any, rows: Rows, steps: int, dtype: jnp.dtype, partition: Partitioner
    ) -> tuple[jax.Array, jax.Array]:
        embedded, hidden = tables.embed[rows.tokens].astype(dtype), out.hidden[:, :, None].astype(dtype)
        outputs = mtp.unrolled(params, self.config, hidden, embedded, steps, rows.positions, rows.segments)
        return outputs, tables.lm_head

    def begin(self, params: Any, target: Any, lm_head: jax.Array) -> Any:
        """The norm before the unembedding, which is the target's own."""
        return params | {"final_norm": target["final_norm"]}

    def load(self, folder: str, partition: Partitioner) -> Any:
        return mtp_formats.load_params(folder, self.config, partition, jnp.float32)

    def load_vocab_map(self, folder: str, target: qwen3.Qwen3Config) -> None:
        return None

    def save(
        self, folder: str, params: Any, vocab_map: Any, target: qwen3.Qwen3Config, dtype: str, target_path: str = ""
    ) -> None:
        mtp_formats.save(folder, params, self.config, target, dtype, self.dialect)


@dataclasses.dataclass(frozen=True)
class PolicyDraft:
    """A smaller policy with the target's vocabulary."""

    config: qwen3.Qwen3Config

    aux_layers = ()

    @property
    def vocab(self) -> int:
        return self.config.vocab

    @property
    def specs(self) -> Any:
        return qwen3.param_specs(self.config)

    @property
    def inference_specs(self) -> Any:
        return qwen3.inference_specs(self.config)

    def inference_params(self, params: Any, dtype: jnp.dtype) -> Any:
        return qwen3.inference_params(params, self.config, dtype)

    def init_cache(self, rows: int, length: int, dtype: jnp.dtype) -> kv.KVCache:
        c = self.config
        return kv.init_cache(c.layers, rows, length, c.kv_heads, c.head_dim, dtype)

    def cache_axes(self) -> kv.KVCache:
        return kv.KVCache((kv.KEY_AXES,) * self.config.layers, (kv.VALUE_AXES,) * self.config.layers)

    def record(self, params: Any, cache: kv.KVCache, positions: jax.Array, out: qwen3.Output) -> kv.KVCache:
        return cache

    def drafter(self, length: int, sampling: Sampling, dtype: jnp.dtype, partition: Partitioner) -> Drafter:
        return policy_drafter(self.config, length, sampling, dtype, partition)

    def unrolled(
        self, params: Any, tables: Tables, out: Any, rows: Rows, steps: int, dtype: jnp.dtype, partition: Partitioner
    ) -> tuple[jax.Array, jax.Array]:
        """Ground-truth tokens are what it would have been fed: step i is the same pass, shifted."""
        text = rows.tokens, rows.positions
        out = qwen3.forward(
            params, self.config, *text, partition, segment_ids=rows.segments, dtype=dtype, return_logits=False
        )
        outputs = jnp.stack([shift_left(out.hidden, 1 + i) for i in range(steps)])
        return outputs, qwen3.lm_head_weight(params, self.config)

    def begin(self, params: Any, target: Any, lm_head: jax.Array) -> Any:
        """Nothing: its widths are its own."""
        return params

    def load(self, folder: str, partition: Partitioner) -> Any:
        return hf.load_params(folder, self.config, partition, jnp.float32, key="draft.path")

    def load_vocab_map(self, folder: str, target: qwen3.Qwen3Config) -> None:
        return None

    def save(
        self, folder: str, params: Any, vocab_map: Any, target: qwen3.Qwen3Config, dtype: str, target_path: str = ""
    ) -> None:
        hf.save_params(folder, params, self.config, dtype)


HEAD_CACHE_AXES = DraftCache(("batch", None, None), kv.KEY_AXES, kv.VALUE_AXES)
# Kinds that draft nothing, or copy text: no weights.
WITHOUT_WEIGHTS = ("none", "ngram", "suffix")
KINDS = (*WITHOUT_WEIGHTS, "eagle3", "mtp", "model")
# Tokens, the longest match that is looked for.
MAX_MATCH = 8


def find_draft_model(
    kind: str,
    target: qwen3.Qwen3Config,
    path: str = "",
    preset: str = "",
    dialect: str = "",
    vocab_size: int = 0,
) -> DraftModel | None:
    """The draft of a config, its sizes checked against the target's; None for a kind without weights.

    Args:
      kind, path, preset, dialect, vocab_size: `draft.*` of the config.
    Raises:
      InputError: for an unknown kind, and for a draft that is missing, damaged or another policy's.
    """
    if kind not in KINDS:
        raise InputError(f"draft.kind: no drafter '{kind}'; there are {', '.join(KINDS)}")
    if kind == "none":  # whatever the config would draft with
        return None
    dialect = _dialect(kind, dialect)
    if kind in WITHOUT_WEIGHTS:
        if path:
            raise InputError(f"draft.path={path}: draft.kind={kind} has no weights to load; leave ''")
        return None
    if kind == "eagle3":
        return _eagle3(target, path, dialect, vocab_size)
    if vocab_size not in (0, target.vocab):
        raise InputError(f"draft.vocab_size={vocab_size}: only eagle3 has a vocabulary of its own; leave 0")
    return _mtp(target, path, dialect) if kind == "mtp" else _policy(target, path, preset)


def _dialect(kind: str, dialect: str) -> str:
    """The one that a draft is saved in: '' is the usual one of its kind, the first."""
    dialects = {"eagle3": (*eagle3_formats.DIALECTS,), "mtp": (*mtp_formats.DIALECTS,)}.get(kind, ())
    if dialect and dialect not in dialects:
        there = f"there are {', '.join(dialects)}" if dialects else "leave ''"
        raise InputError(f"draft.dialect: no dialect '{dialect}' of draft.kind={kind}; {there}")
    return dialect or (*dialects, "")[0]


def _eagle3(target: qwen3.Qwen3Config, path: str, dialect: str, vocab_size: int) -> Eagle3Draft:
    if not path:
        return Eagle3Draft(eagle3.eagle3_config(target, vocab_size or target.vocab), dialect)
    head = eagle3_formats.load_config(path, target)
    if vocab_size not in (0, head.draft_vocab):
        raise InputError(f"draft.vocab_size={vocab_size}, the head {path} has {head.draft_vocab}; leave 0")
    return Eagle3Draft(head, dialect)


def _mtp(target: qwen3.Qwen3Config, path: str, dialect: str) -> MTPDraft:
    config = mtp_formats.load_config(path, target) if path else mtp.mtp_config(target)
    return MTPDraft(config, dialect)


def _policy(target: qwen3.Qwen3Config, path: str, preset: str) -> PolicyDraft:
    if path:
        config = hf.load_config(path, key="draft.path")
        hf.check_params(path, config, key="draft.path")
    elif preset:
        config = qwen3.preset(preset, key="draft.preset")
    else:
        raise InputError("draft.kind=model: draft.path, a folder of a smaller Qwen3, or draft.preset is needed")
    if config.vocab != target.vocab:
        raise InputError(f"draft.kind=model: its vocabulary is {config.vocab}, the policy's {target.vocab}")
    return PolicyDraft(config)


def make_drafter(
    kind: str,
    draft: DraftModel | None,
    length: int,
    sampling: Sampling,
    dtype: jnp.dtype,
    partition: Partitioner,
    match_min: int,
    match_max: int,
    cascade_min: int,
) -> Drafter:
    """What drafts in an engine: with weights, by copying, or the one overriding the other; `draft.*` of the config.

    Raises InputError for matches that cannot be, and for a cascade over nothing.
    """
    if kind == "none":
        return NO_DRAFTER
    if draft is None and cascade_min:
        raise InputError(f"draft.cascade={cascade_min} overrides a draft with weights; draft.kind={kind} has none")
    if match_max > MAX_MATCH:
        raise InputError(f"draft.match_max={match_max}: at most {MAX_MATCH} tokens are compared")
    if draft is None:
        return lookup_drafter(length, match_min, match_max)
    neural = draft.drafter(length, sampling, dtype, partition)
    return cascade(neural, cascade_min, match_max) if cascade_min else neural
