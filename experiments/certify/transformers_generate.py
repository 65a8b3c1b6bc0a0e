"""Certify `generate(assistant_model=...)` of transformers: the first tokens against the target's own distribution.

    python -m experiments.certify.transformers_generate [--distance 0.05] [--seed 0]

Two random Llamas over four tokens; torch and transformers are wanted, JAX is not.
"""

import time
from typing import Any

import numpy as np

from experiments import commands
from lossless_certify.distributions import flat_index, joint, sampling_probs, sequences
from lossless_certify.statistics import Rates, compare, draws_needed

V, LENGTH, PROMPT = 4, 3, [1, 3, 0, 2, 2, 1]
FALSE_ALARM = 1e-6  # of all settings together
CONSTANT = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0}
DEFAULTS = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
}
HEURISTIC = CONSTANT | {"num_assistant_tokens_schedule": "heuristic"}
# Name: how many tokens are drafted; temperature, top-k, top-p.
SETTINGS = {
    "3 drafted, temperature 1": (CONSTANT, (1.0, 0, 1.0)),
    "3 drafted, temperature 0.7, top-k 3, top-p 0.8": (CONSTANT, (0.7, 3, 0.8)),
    "defaults (stop below confidence 0.4), temperature 1": (DEFAULTS, (1.0, 0, 1.0)),
    "defaults, temperature 0.7, top-k 3, top-p 0.8": (DEFAULTS, (0.7, 3, 0.8)),
    "heuristic schedule, temperature 1": (HEURISTIC, (1.0, 0, 1.0)),
}


def make_model(seed: int, layers: int) -> Any:
    """Return a random model, of weights so large that its distributions are far from uniform."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": layers}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, initializer_range=0.4, **sizes, **ids)).eval()


def exact(target: Any, setting: tuple[float, int, float]) -> np.ndarray:
    """Return the distribution [V ** LENGTH] of the first tokens, by the target's own forward pass."""
    import torch

    (temperature, top_k, top_p), conditionals = setting, []
    for i in range(LENGTH):
        texts = torch.tensor([[*PROMPT, *row] for row in sequences(V, i).tolist()])
        logits = target(texts).logits[:, -1].double().numpy()
        probs = sampling_probs(logits, temperature, top_k=top_k, top_p=top_p)
        conditionals.append(probs.reshape((V,) * (i + 1)))
    return joint(conditionals).ravel()


def sample(target: Any, draft: Any, setting: tuple[float, int, float]) -> list[int]:
    """Return the first tokens of one assisted generation."""
    import torch

    temperature, top_k, top_p = setting
    processors = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    prompt = torch.tensor([PROMPT])
    text = target.generate(prompt, assistant_model=draft, do_sample=True, max_new_tokens=LENGTH + 1, **processors)
    return text[0, len(PROMPT) : len(PROMPT) + LENGTH].tolist()


def main() -> None:
    """Compare each setting; print a line of each."""
    parser = commands.Parser(__doc__)
    parser.sizes(distance=(0.05, 0.7, "total variation that is found"), seed=(0, 0))
    args = parser.parse_args()
    with commands.needed("requirements-parity.txt"):
        import torch
    torch.set_num_threads(1)
    target, draft = make_model(args.seed, 2), make_model(args.seed + 1, 1)
    rates = Rates(FALSE_ALARM / len(SETTINGS))
    for name, (drafted, setting) in SETTINGS.items():
        draft.generation_config.update(**drafted)
        start, draws = time.monotonic(), draws_needed(V**LENGTH, args.distance, rates)
        with torch.inference_mode():
            emitted = flat_index(np.array([sample(target, draft, setting) for _ in range(draws)]), V)
            compared = compare(emitted, exact(target, setting), rates)
        verdict = "passed" if compared.passed else "FAILED"
        print(f"{name}: {verdict}, {compared.statistic}, {draws:,} draws, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
