"""Read and write P-EAGLE drafts as folders, in two of EAGLE-3's formats (drafts/eagle3/eagle3_checkpoint.py):

    speculators  speculators_model_type "peagle", sizes in transformer_layer_config, mask_token_id     speculators
    vllm         an EAGLE-3 head with parallel_drafting, sizes at the top, ptd_token_id or pard_token  vLLM

Beside an EAGLE-3 head's tensors there are mask_hidden, layers.1 and the following, and the embedding (embed_tokens)
where it was trained with the draft. Where embed_requires_grad is false it is a copy of the target's, and ignored.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.core import Params
from specrl_jax.drafts.eagle3 import formats
from specrl_jax.drafts.eagle3.eagle3_checkpoint import in_format, load_vocab_map
from specrl_jax.drafts.peagle.peagle_network import PEagleConfig, extended, param_specs
from specrl_jax.drafts.vocab_ids import vocab_tensors
from specrl_jax.errors import InputError
from specrl_jax.io.tensors import TensorFolder, hf_tensors, save_folder
from specrl_jax.json_files import Checked
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.layers import ParamSpec, Specs
from specrl_jax.sharding import Partitioner

__all__ = ["FORMATS", "load_config", "load_params", "load_vocab_map", "save"]

# Format -> the layout of mask_hidden.
FORMATS = {"speculators": "1 1 (a e) -> a e", "vllm": "1 (a e) -> a e"}
_EMBEDDING = "embed_tokens.weight"


class PEagleFile(Checked):
    """The keys of a draft beside those of an EAGLE-3 head."""

    mask_token_id: int | None = None
    ptd_token_id: int | None = None
    pard_token: int | None = None
    parallel_drafting: bool = False
    embed_requires_grad: bool = True


def load_config(folder: str, target: DecoderConfig) -> PEagleConfig:
    """Return sizes and variants of the draft in `folder`, checked against its target; read headers, d2t and t2d only.

    Raises InputError for a missing or damaged folder, another kind of draft, unsupported entries, and sizes that do not
    go with the target.
    """
    source, name = _find(folder)
    raw = source.config()
    file = raw.check(PEagleFile)
    if name == "vllm" and not file.parallel_drafting:
        raise raw.error("has no parallel_drafting: it is an EAGLE-3 head, draft.kind=eagle3")
    tokens = [x for x in (file.mask_token_id, file.ptd_token_id, file.pard_token) if x is not None]
    if len(set(tokens)) != 1 or not 0 <= tokens[0] < target.vocab:
        raise raw.error(
            f"has the mask tokens {tokens}; mask_token_id, ptd_token_id or pard_token must name one of the policy's "
            f"{target.vocab}"
        )
    # The output norm of EAGLE-3.1 is about what the recurrence feeds back, and there is none.
    head = dataclasses.replace(formats.read_head(raw, name, target), norm_output=False)
    own_embedding = file.embed_requires_grad and _EMBEDDING in source.names()
    config = extended(head, target, formats.read_layers(raw, name), mask_token=tokens[0], own_embedding=own_embedding)
    specs = _specs(config, name, source)
    known = {spec.hf_name for spec in jax.tree.leaves(specs)} | {"d2t", "t2d", _EMBEDDING}
    if strange := sorted(set(source.names()) - known):
        raise InputError(
            f"draft.path: {folder} holds {strange[0]}, which this draft does not have: Llama layers, no biases, no "
            "norms of queries or keys, and what its config.json declares"
        )
    source.check(specs)
    load_vocab_map(folder, config, target)
    return config


def load_params(folder: str, config: PEagleConfig, partition: Partitioner, *, dtype: jnp.dtype | None = None) -> Params:
    """Read parameters in the training layout; dtype None = each tensor's own. Raises InputError as `load_config`."""
    source, name = _find(folder)
    return source.load(_specs(config, name, source), partition, dtype)


def save(
    folder: str,
    params: Params,
    vocab_map: np.ndarray,
    *,
    config: PEagleConfig,
    target: DecoderConfig,
    dtype: str,
    dialect: str = "speculators",
    verifier: str = "",
) -> None:
    """Write a folder that the loaders above and the format's other users read; arguments as of EAGLE-3's `save`."""

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        yield from hf_tensors(_specs(config, dialect), params, dtype)
        yield from vocab_tensors(vocab_map, target).items()

    content = formats.write_head(
        config, target, dtype, name=dialect, verifier=verifier, kind="peagle", layers=config.layers
    )
    if dialect == "speculators":
        content |= {"mask_token_id": config.mask_token, "embed_requires_grad": config.own_embedding}
    else:
        content |= {"parallel_drafting": True, "ptd_token_id": config.mask_token}
    save_folder(folder, tensors(), content)


def _find(folder: str) -> tuple[TensorFolder, str]:
    """Return the folder and its format, a key of FORMATS. Raises InputError for another."""
    source = TensorFolder(folder, "draft.path")
    name = formats.find_format(source.config(), source.names(), "peagle")
    if name not in FORMATS:
        raise source.config().error(f"has tensors named as in {name}'s format; there are {', '.join(FORMATS)}")
    return source, name


def _specs(config: PEagleConfig, name: str, source: TensorFolder | None = None) -> Specs:
    """Return `param_specs` in the names and layouts of a format."""
    specs = in_format(param_specs(config), formats.FORMATS[name], source)

    def laid_out(spec: ParamSpec) -> ParamSpec:
        return dataclasses.replace(spec, hf_layout=FORMATS[name]) if spec.hf_name == "mask_hidden" else spec

    return jax.tree.map(laid_out, specs)
