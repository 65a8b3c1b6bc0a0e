"""Read and write EAGLE-3 heads as folders, in three formats recognised by config.json and the layer's tensor names:

    sglang       midlayer.*  sizes at the top of config.json     SafeAILab, SpecForge, SGLang
    vllm         layers.0.*  sizes at the top of config.json     vLLM, Model Optimizer
    speculators  layers.0.*  sizes in transformer_layer_config   speculators, vLLM

All have the same further tensors: fc, norm, lm_head, d2t (target id - draft id), t2d (is a target id drafted), and the
norms of a head that has them. Where the formats differ, or leave something open:

  * Layers that are read. The key eagle_aux_hidden_state_layer_ids names the layers *entered* where it is at the top
    (vLLM, speculators, and Eagle3Config), and those whose *outputs* are read, one less, where it is in eagle_config
    (SpecForge, SGLang, Model Optimizer). Flat configs are written with both. Without either: those of
    `network.default_aux_layers`. A head for a policy of one or two layers reads as many (num_aux_hidden_states).
  * norm_before_residual, where absent, is False in a flat config and True in a nested one, as vLLM reads them.
  * norm_output feeds the head's own output back after its final norm, in vLLM, speculators and SGLang. SpecForge trains
    on the output before the norm whatever the key says, and writes the same config. So under midlayer.* the key alone
    is refused: `FEEDBACK` beside it decides, and is written here. Where the key is false or absent, the final norm
    before the lm_head remains.
  * max_position_embeddings is not read: many heads say 2048, where vLLM clamps their rotary positions. Here angles are
    computed for any position, nothing is clamped, and the target's own limit is written.
  * rope_scaling is the head's own, whatever its target's, as for vLLM, SGLang and speculators: a yarn or nothing. Model
    Optimizer trains without and writes a yarn for lengths beyond those of the training. Where rollouts are not longer
    than that, remove it from the head's config.json.
  * The embedding is the policy's and is not stored. A copy in the folder (embed_tokens) is ignored, one that was
    trained with the head is refused.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.core import Params
from specrl_jax.drafts.eagle3 import formats
from specrl_jax.drafts.eagle3.eagle3_network import Eagle3Config, param_specs
from specrl_jax.drafts.eagle3.formats import FORMATS, Eagle3Format
from specrl_jax.drafts.vocab_ids import drafted, read_ids, vocab_tensors
from specrl_jax.errors import InputError
from specrl_jax.io.tensors import TensorFolder, hf_tensors, save_folder
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.layers import ParamSpec, Specs
from specrl_jax.sharding import Partitioner


def load_config(folder: str, target: DecoderConfig) -> Eagle3Config:
    """Return sizes and variants of the head in `folder`, checked against its target; read headers, d2t and t2d only.

    Raises InputError for a missing or damaged folder, another architecture, unsupported entries (see the module), and
    sizes that do not go with the target.
    """
    source, name = _find(folder)
    if (layers := formats.read_layers(source.config(), name)) != 1:
        raise source.config().error(f"has num_hidden_layers={layers}, a head of 1 is supported")
    head = formats.read_head(source.config(), name, target)
    _check_tensors(source, FORMATS[name], head, target)
    load_vocab_map(folder, head, target)
    return head


def load_params(folder: str, head: Eagle3Config, partition: Partitioner, *, dtype: jnp.dtype | None = None) -> Params:
    """Read parameters in the training layout; dtype None = each tensor's own. Raises InputError as `load_config`."""
    source, name = _find(folder)
    return source.load(in_format(param_specs(head), FORMATS[name], source), partition, dtype)


def load_vocab_map(folder: str, head: Eagle3Config, target: DecoderConfig) -> np.ndarray:
    """Return [Vd] int32 target ids of the draft ids; the file stores d2t, their difference.

    A head over the whole vocabulary may leave it out. Raises InputError where d2t does not name different ids of the
    target, or t2d names others.
    """
    source = TensorFolder(folder, "draft.path")
    names = source.names()
    if "d2t" not in names and head.draft_vocab == target.vocab:
        return np.arange(target.vocab, dtype=np.int32)
    ids = read_ids(source, head.draft_vocab, target.vocab)
    if "t2d" in names and not np.array_equal(source.tensor("t2d"), drafted(ids, target)):
        raise InputError(f"draft.path: t2d in {folder} is not true of exactly the ids that d2t names")
    return ids


def save(
    folder: str,
    params: Params,
    vocab_map: np.ndarray,
    *,
    config: Eagle3Config,
    target: DecoderConfig,
    dtype: str,
    dialect: str = "sglang",
    verifier: str = "",
) -> None:
    """Write a folder that the loaders above and the format's other users read.

    Args:
      dtype: storage dtype of the tensors, "float32" or "bfloat16".
      dialect: a key of FORMATS.
      verifier: folder or name of the target, '' = none. speculators' own module takes the embedding from there and does
        not load without it; the other formats do not name it.
    """

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        yield from hf_tensors(in_format(param_specs(config), FORMATS[dialect]), params, dtype)
        yield from vocab_tensors(vocab_map, target).items()

    save_folder(folder, tensors(), formats.write_head(config, target, dtype, name=dialect, verifier=verifier))


_LAYER = "midlayer."  # in the names of `param_specs`
_LEGACY = {f"fc_norm.{i}.weight": f"aux_norm_{name}.weight" for i, name in enumerate(("low", "mid", "high"))}
_EMBEDDING = "embed_tokens.weight"


def _find(folder: str) -> tuple[TensorFolder, str]:
    """Return the folder and its format, a key of FORMATS."""
    source = TensorFolder(folder, "draft.path")
    return source, formats.find_format(source.config(), source.names())


def _check_tensors(source: TensorFolder, found: Eagle3Format, head: Eagle3Config, target: DecoderConfig) -> None:
    """Raise InputError for missing or further tensors, and for other shapes."""
    specs = in_format(param_specs(head), found, source)
    names = set(source.names())
    strange = sorted(names - {spec.hf_name for spec in jax.tree.leaves(specs)} - {"d2t", "t2d", _EMBEDDING})
    if strange:
        raise InputError(
            f"draft.path: {source.path} holds {strange[0]}, which this head does not have: one layer, no biases, no "
            f"norms of queries or keys, and of {', '.join(formats.VARIANTS[1:3])} what its config.json declares"
        )
    if _EMBEDDING in names:
        embedding = ParamSpec((target.vocab, target.embed), (None, None), 0, hf_name=_EMBEDDING, hf_layout="v d -> v d")
        source.check({"embed": embedding})
        if source.config().check(formats.HeadFile).embed_requires_grad:
            raise InputError(
                f"draft.path: {source.path} was trained with an embedding of its own (embed_requires_grad), which is "
                "not supported: the head reads the policy's"
            )
    source.check(specs)


def in_format(specs: Specs, found: Eagle3Format, source: TensorFolder | None = None) -> Specs:
    """Return the specs of a head in the names of a format, and in SGLang's earlier ones where the source has these."""
    names = () if source is None else source.names()

    def named(spec: ParamSpec) -> ParamSpec:
        name = spec.hf_name
        if name.startswith(_LAYER):
            name = found.layer + name.removeprefix(_LAYER)
        if _LEGACY.get(name) in names:
            name = _LEGACY[name]
        return dataclasses.replace(spec, hf_name=name)

    return jax.tree.map(named, specs)
