"""Time transformers' `generate` and a plain torch update on random weights, for peers.py, which gives the work as JSON.

Settings that matter:
- bfloat16 weights, sdpa attention, temperature 1, the whole vocabulary, no end of text;
- `static`: the static cache, with which `generate` compiles its forward on a GPU; the first call, not timed, compiles;
- `continuous`: continuous batching over pages, as many rows at once as there are;
- the update: float32 parameters, bfloat16 by autocast, activations recomputed, fused AdamW, so many rows at a time that
  the logits fit; PPO's clip on given old log-probs, which is what GRPO is beside its advantages.

A cell that fails is a line with its error; the others go on.
"""

import argparse
import json
import time
from collections.abc import Callable

from experiments import commands

# As a module: beside this file lies kernels.py, which transformers would take for a package of that name.
with commands.needed("pip install -r requirements-parity.txt"):
    import torch
    import transformers

PAGE = 256  # tokens, transformers' own choice


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], object], device: str) -> float:
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - start


def make_model(sizes: dict, dtype: torch.dtype, device: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**sizes)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(torch.float32)
    model.generation_config = transformers.GenerationConfig()
    return model


def static(model: transformers.PreTrainedModel, prompts: torch.Tensor, new: int) -> int:
    """Generate `new` tokens for each prompt; return how many there are."""
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new,
        eos_token_id=None,
        pad_token_id=0,
        cache_implementation="static",
    )
    return output[:, prompts.shape[1] :].numel()


def continuous(model: transformers.PreTrainedModel, prompts: torch.Tensor, new: int) -> int:
    sampling = transformers.GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, max_new_tokens=new
    )
    rows, prompt = prompts.shape
    pages = transformers.ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=rows * ((prompt + new) // PAGE + 1),
        max_batch_tokens=max(rows * prompt, PAGE),
        max_requests_per_batch=rows,
    )
    found = model.generate_batch(prompts.tolist(), sampling, continuous_batching_config=pages, progress_bar=False)
    return sum(len(one.generated_tokens) for one in found.values())


def generation(asked: dict, device: str, tell: Callable[[dict], None]) -> None:
    model = make_model(asked["sizes"], torch.bfloat16 if device == "cuda" else torch.float32, device).eval()
    for rows in asked["rows"]:
        prompts = torch.randint(1, asked["sizes"]["vocab_size"], (rows, asked["prompt"]), device=device)
        for name, call in (("static", static), ("continuous", continuous)):
            row = {"model": asked["name"], "rows": rows, "side": f"transformers, {name}"}
            try:
                with torch.inference_mode():
                    call(model, prompts, asked["new"])
                    counted: list[int] = []
                    seconds = timed(lambda: counted.append(call(model, prompts, asked["new"])), device)  # noqa: B023
                tell(row | {"seconds": seconds, "tokens": counted[0], "tokens_per_second": counted[0] / seconds})
            except Exception as error:  # of a library whose errors are many
                tell(row | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]})


def update(asked: dict, device: str, tell: Callable[[dict], None]) -> None:
    model = make_model(asked["sizes"], torch.float32, device).train()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device == "cuda")
    shape = (asked["update_rows"], asked["prompt"] + asked["new"])
    tokens = torch.randint(1, asked["sizes"]["vocab_size"], shape, device=device)
    old, advantages = torch.full(shape, -12.0, device=device)[:, 1:], torch.randn(shape[0], 1, device=device)

    def step() -> None:
        for part in torch.arange(shape[0]).split(asked["microbatch"]):
            with torch.autocast(device, torch.bfloat16):
                logits = model(tokens[part]).logits[:, :-1]
            new = torch.log_softmax(logits.float(), -1).gather(-1, tokens[part][:, 1:, None])[..., 0]
            ratio = (new - old[part]).clamp(-20, 20).exp()
            gain = torch.minimum(ratio * advantages[part], ratio.clamp(0.8, 1.28) * advantages[part])
            (-gain[:, asked["prompt"] - 1 :].sum() / (shape[0] * asked["new"])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    row = {"model": asked["name"], "rows": shape[0], "side": "torch, one update"}
    try:
        step()
        seconds = sorted(timed(step, device) for _ in range(3))[1]
        tell(row | {"seconds": seconds, "tokens": tokens.numel(), "tokens_per_second": tokens.numel() / seconds})
    except Exception as error:
        tell(row | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, help="JSON")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    a = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    print(json.dumps({"versions": versions}), flush=True)

    def tell(row: dict) -> None:
        print(json.dumps(row), flush=True)

    for asked in json.loads(a.work):
        (update if asked["update_rows"] else generation)(asked, a.device, tell)
        if a.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
