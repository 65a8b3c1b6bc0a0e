"""Serve google-tunix's vanilla sampler on a Hugging Face folder, float32 on the CPU, to peers.py.

The protocol is in peer_server.py. Sampled at temperature 1 from the whole vocabulary: `top_p=1.0` and `top_k=None` make
tunix draw one categorical (without a top_p it would be greedy). XLA's default threads (all cores), no mesh.

Settings that matter:
- the sampler's cache holds exactly a prompt and an answer: attention runs over all of it;
- prompts are padded to the longest, not to a power of two;
- the padding id is what tunix takes for padding, in prompts and answers alike: the end-of-sequence id, or one past the
  vocabulary where rows have fixed lengths and nothing is padded. Prompts of several lengths that no id ends are padded
  with 0, so tokens that are drawn as 0 are not attended to, which changes no count and no time;
- a batch whose rows have lengths of their own runs to the longest of them.

Install (Python 3.12): pip install google-tunix==0.1.7 jax==0.12.0.1 jaxlib==0.12.0.1 flax==0.12.12 optax==0.2.8
"""

import argparse
import functools
import importlib.metadata
import itertools
import json
import sys
from pathlib import Path

from experiments import commands
from experiments.engine import peer_server
from experiments.other_libraries import IdTokenizer

with commands.needed("google-tunix==0.1.7"):
    import jax.numpy as jnp
    from tunix.generate import sampler as vanilla
    from tunix.models.qwen3 import model as qwen3
    from tunix.models.qwen3 import params as qwen3_params


def load(folder: str) -> qwen3.Qwen3:
    """Load the model. Raises ValueError for a rope_theta other than the constant in tunix's Qwen3."""
    raw = json.loads((Path(folder) / "config.json").read_text())
    if raw["rope_theta"] != 1e6:
        raise ValueError(f"rope_theta {raw['rope_theta']}: tunix 0.1.7 computes with 1e6 whatever its config says")
    config = qwen3.ModelConfig(
        num_layers=raw["num_hidden_layers"],
        vocab_size=raw["vocab_size"],
        embed_dim=raw["hidden_size"],
        hidden_dim=raw["intermediate_size"],
        num_heads=raw["num_attention_heads"],
        head_dim=raw["head_dim"],
        num_kv_heads=raw["num_key_value_heads"],
        rope_theta=1_000_000,
        norm_eps=raw["rms_norm_eps"],
        use_tied_embedding=raw["tie_word_embeddings"],
    )
    return qwen3_params.create_model_from_safe_tensors(folder, config, dtype=jnp.float32)


def make_generate(model: qwen3.Qwen3) -> peer_server.Generate:
    config, seeds = model.config, itertools.count()

    # One sampler per padding id: its compiled functions keep that of their first trace.
    @functools.cache
    def make_sampler(cache_size: int, pad: int) -> vanilla.Sampler:
        sizes = vanilla.CacheConfig(cache_size, config.num_layers, config.num_kv_heads, config.head_dim)
        return vanilla.Sampler(model, IdTokenizer(pad), sizes)

    def generate(prompts: peer_server.Rows, new_tokens: int, eos: int | None) -> peer_server.Rows:
        longest, shortest = max(map(len, prompts)), min(map(len, prompts))
        padding = config.vocab_size if longest == shortest else 0
        output = make_sampler(longest + new_tokens, padding if eos is None else eos)(
            [" ".join(map(str, prompt)) for prompt in prompts],
            max_generation_steps=new_tokens,
            max_prompt_length=longest,
            eos_tokens=None if eos is None else [eos],
            temperature=1.0,
            top_p=1.0,
            top_k=None,
            seed=next(seeds),
        )
        rows = [row.tolist() for row in output.tokens]
        # tunix cuts a row before its eos.
        return [[*row, eos] if eos is not None and len(row) < new_tokens else row for row in rows]

    return generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    args = parser.parse_args()
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("google-tunix", "jax", "flax")]
    print(", ".join(versions), file=sys.stderr)
    peer_server.serve(make_generate(load(args.model)))


if __name__ == "__main__":
    main()
