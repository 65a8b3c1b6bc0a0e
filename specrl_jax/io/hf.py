"""Read and write a policy's checkpoint in Hugging Face format."""

import os
import re

import jax.numpy as jnp
import numpy as np

from specrl_jax.core import Params
from specrl_jax.errors import InputError
from specrl_jax.io import families
from specrl_jax.io.tensors import TensorFolder, hf_tensors, save_folder
from specrl_jax.models import decoder
from specrl_jax.sharding import Partitioner

_EMBEDDING, _LM_HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "input_layernorm.weight"
# What a folder may hold besides: heads that `draft.kind=mtp` reads, what reads images in a model of both, and tables of
# older versions of transformers.
_BESIDE = re.compile(r"lm_head\.weight|model\.mtp_layers\..*|mtp\..*|model\.visual\..*|.*rotary_emb\.inv_freq")
# Where models with such names are published.
_PUBLISHERS = {
    "Qwen": "Qwen",
    "Llama-": "meta-llama",
    "SmolLM": "HuggingFaceTB",
    "Mistral-": "mistralai",
    "MiMo-": "XiaomiMiMo",
}


def load_config(folder: str, key: str = "policy.path") -> decoder.DecoderConfig:
    """Read the sizes and options of a checkpoint; `key` of our config names the folder in messages.

    Raises InputError for a missing folder, another architecture, and entries that no model has.
    """
    return families.read_config(_folder(folder, key).config())


def check_params(folder: str, config: decoder.DecoderConfig, key: str = "policy.path") -> None:
    """Raise InputError as `load_params` would, and for a tensor that the model does not have; headers are read, and an
    lm_head where there should be none.
    """
    source, specs = _folder(folder, key), decoder.param_specs(config)
    source.check(specs)
    # Without its last layers a model still runs. What follows them may be an MTP head, which has an eh_proj.
    following, names = f"model.layers.{config.layers}.", source.names()
    has_mtp = following + "eh_proj.weight" in names
    if following + _NORM in names and not has_mtp:
        raise InputError(
            f"{key}: {folder}/config.json: num_hidden_layers={config.layers}, but the folder holds {following}{_NORM}"
        )
    for name in source.beyond(specs):
        if not (_BESIDE.fullmatch(name) or (has_mtp and name.startswith(following))):
            raise InputError(
                f"{key}: {folder} holds {name}, which its config.json ({config.family}) leaves no place for"
            )
    # A folder may store the tied lm_head as well. One of its own would be lost without a word.
    has_both = config.tied and _LM_HEAD in names
    if has_both and not np.array_equal(source.tensor(_EMBEDDING), source.tensor(_LM_HEAD)):
        raise InputError(f"{key}: {folder}/config.json: tie_word_embeddings=true, but {_LM_HEAD} is not {_EMBEDDING}")


def load_params(
    folder: str,
    config: decoder.DecoderConfig,
    partition: Partitioner,
    *,
    dtype: jnp.dtype | None = None,
    key: str = "policy.path",
) -> Params:
    """Read parameters in the training layout from a local folder of safetensors.

    Args:
      dtype: of the result; None = each tensor's own.
    Raises:
      InputError: a missing folder, file or tensor, a tensor of another shape, or a file that is not safetensors.
    """
    return _folder(folder, key).load(decoder.param_specs(config), partition, dtype)


def save_params(
    folder: str, params: Params, config: decoder.DecoderConfig, *, dtype: str, tokenizer_from: str = ""
) -> None:
    """Write a folder that `load_params` and transformers read: config.json, safetensors, and the tokenizer's files.

    Args:
      dtype: storage dtype of the tensors, "float32" or "bfloat16".
      tokenizer_from: a folder whose tokenizer files are copied; '' = none.
    """
    files = [os.path.join(tokenizer_from, name) for name in TOKENIZER_FILES] if tokenizer_from else []
    tensors = hf_tensors(decoder.param_specs(config), params, dtype)
    save_folder(folder, tensors, families.hf_config(config, dtype), copies=filter(os.path.isfile, files))


def _folder(path: str, key: str) -> TensorFolder:
    # Folders are usually called checkpoints/<model>: name the command that downloads exactly this one.
    model = os.path.basename(os.path.normpath(path))
    publisher = next((name for start, name in _PUBLISHERS.items() if model.startswith(start)), "")
    get_it = f"get it with `hf download {publisher}/{model} --local-dir {path}`" if publisher else ""
    return TensorFolder(path, key, get_it, prefix="model.")


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)
