"""Serve transformers' `generate` on a Hugging Face folder, float32 on the CPU, to peers.py (see peer_server.py).

Sampled at temperature 1 from the whole vocabulary: no top-k, no top-p, no logits processor. Two threads.

Settings that matter:
- sdpa attention and the growing cache, transformers' own choices;
- the folder's generation_config.json is replaced, so nothing in it changes the sampling or ends a row;
- `--continuous` answers commands with a length for each row by continuous batching, prompts' pages shared, as many rows
  at once as a batch has, and room for all of them; the other commands by `generate`;
- glibc keeps freed memory instead of returning it to the system after every tensor (see `keep_freed_memory`).

Install (Python 3.11, the CPU build of torch): pip install torch==2.13.0 transformers==5.23.0 safetensors
"""

import argparse
import sys

from experiments import commands
from experiments.engine import peer_server
from experiments.other_libraries import keep_freed_memory

with commands.needed("torch==2.13.0 transformers==5.23.0 safetensors"):
    import torch
    import transformers

THREADS = 2
PAGE = 256  # tokens, transformers' own choice


def load(folder: str) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    # `generate` fills what its arguments leave None from here: an eos or top-k of the folder must not come back.
    model.generation_config = transformers.GenerationConfig()
    return model.eval()


def make_generate(model: transformers.PreTrainedModel) -> peer_server.Generate:
    @torch.inference_mode()
    def generate(prompts: peer_server.Rows, new_tokens: int, eos: int | None) -> peer_server.Rows:
        longest = max(map(len, prompts))
        pad = 0 if eos is None else eos  # masked, so any id is valid
        tokens = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = model.generate(
            tokens,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            eos_token_id=eos,
            pad_token_id=pad,
        )
        return output[:, longest:].tolist()

    return generate


def make_generate_all(model: transformers.PreTrainedModel) -> peer_server.GenerateAll:
    sampling = transformers.GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1)

    def generate_all(prompts: peer_server.Rows, own: list[int], batch: int) -> peer_server.Rows:
        longest = max(len(prompt) + n for prompt, n in zip(prompts, own))
        config = transformers.ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=batch * (longest // PAGE + 1),
            max_batch_tokens=max(map(len, prompts)) + batch,
            max_requests_per_batch=batch,
        )
        found = dict[str, list[int]]()
        with model.continuous_batching_context_manager(
            generation_config=sampling, continuous_batching_config=config, block=True
        ) as manager:
            names = [manager.add_request(prompt, max_new_tokens=n) for prompt, n in zip(prompts, own)]
            while len(found) < len(names):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("continuous batching ended early")
                if result is not None and result.is_finished():
                    found[result.request_id] = result.generated_tokens
        return [found[name] for name in names]

    return generate_all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--continuous", action="store_true", help="continuous batching for rows of own lengths")
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}", file=sys.stderr)
    model = load(args.model)
    peer_server.serve(make_generate(model), make_generate_all(model) if args.continuous else None)


if __name__ == "__main__":
    main()
