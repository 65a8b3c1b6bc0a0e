"""Compare SmolLM2-135M with transformers: logits on prompts of real text, and greedy answers with and without drafts.

    python -m experiments.smollm.parity --policy checkpoints/smollm2-135m --output experiments/smollm/parity.json

Both sides are float32 on the CPU. Prompts are pieces of answers to GSM8K's questions. Drafts are n-grams of earlier
text, which need no head. Two greedy answers may part at a tie; its gap is the distance of the two tokens in the logits
of transformers. Exits with 1 where a logit differs by more than 1e-4, answers part at a gap above 1e-4, or more than a
tenth of them part. Both sides are also compared with float64, which says how much of a difference is rounding: logits
of 40 are rounded by some 1e-4 in 30 layers. `--small` compares the random model that `prepare --small` writes, and
writes it first.
"""

import copy
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments import commands
from experiments.engine.divergence import TIE, load_forward
from experiments.smollm import prepare
from specrl_jax.config import DraftConfig, RolloutConfig
from specrl_jax.data.tokenizers import Tokenizer, load_tokenizer
from specrl_jax.tasks.generate import Generator, load_generator
from specrl_jax.training.metrics import speculation_metrics

LOGITS, SHARE_PARTED = 1e-4, 0.1
SMALL_POLICY = "runs/small/smollm2"
TEXTS = commands.REPOSITORY / "experiments/rewards/answers.jsonl"
DRAFTS = ("none", "ngram")


def read_prompts(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """Return `count` pieces of `length` tokens, evenly spaced in TEXTS."""
    text = "\n".join(json.loads(line)["response"] for line in TEXTS.read_text().splitlines())
    tokens = tokenizer.encode(text)
    starts = [i * (len(tokens) - length) // count for i in range(count)]
    return [tokens[start : start + length] for start in starts]


class Distances(NamedTuple):
    """Largest differences of logits."""

    largest: float  # between the learner's and transformers'
    by_prompt: list[float]
    share_above: float  # of the logits, those that differ by more than LOGITS
    ours_from_float64: float  # of the learner's from transformers' in float64
    theirs_from_float64: float  # of transformers' from those
    largest_logit: float


def compare_logits(policy: str, model: Any, prompts: Sequence[list[int]]) -> Distances:
    """Return how far the learner's logits are from transformers', and both from those of transformers in float64."""
    forward, exact = load_forward(policy), copy.deepcopy(model).double()
    both, ours, theirs, above, size = list[float](), list[float](), list[float](), 0, 0.0
    for prompt in prompts:
        found, other = np.asarray(forward(np.array([prompt]))[0]), their_logits(model, prompt)
        reference = their_logits(exact, prompt)
        above += int((np.abs(found - other) > LOGITS).sum())
        for kept, difference in ((both, found - other), (ours, found - reference), (theirs, other - reference)):
            kept.append(float(np.abs(difference).max()))
        size = max(size, float(np.abs(reference).max()))
    share = above / (sum(map(len, prompts)) * other.shape[1])
    return Distances(max(both), both, share, max(ours), max(theirs), largest_logit=size)


def make_generator(policy: str, kind: str, *, prompt_tokens: int, new_tokens: int) -> Generator:
    """Load the policy with one kind of draft, greedy, one compiled draft length."""
    draft = DraftConfig(kind=kind, length=3, adaptive=False)
    rollout = RolloutConfig(
        temperature=0.0, max_prompt_tokens=prompt_tokens, max_response_tokens=new_tokens, num_slots=4
    )
    return load_generator(policy, draft, rollout, group_size=1)


def our_answers(generator: Generator, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """Return greedy answers, end-of-text included, and tokens per verification."""
    rollouts = generator.engine.generate(generator.weights, prompts, 1, seed=0, lengths=generator.lengths)
    answers = [rollouts.tokens[row, rollouts.response_part(row)].tolist() for row in range(len(prompts))]
    return answers, speculation_metrics(rollouts)["spec/acceptance_length"]


def their_answer(model: Any, prompt: list[int], new_tokens: int, eos: tuple[int, ...]) -> list[int]:
    """Return the greedy answer of transformers, end-of-text included."""
    import torch

    tokens = torch.tensor([prompt])
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=list(eos),
        pad_token_id=eos[0],
    )
    return list(output[0, len(prompt) :].tolist())


def their_logits(model: Any, tokens: list[int]) -> np.ndarray:
    """Return logits [T, V]."""
    import torch

    return np.asarray(model(torch.tensor([tokens])).logits[0])


def find_gaps(
    model: Any, prompts: list[list[int]], theirs: list[list[int]], ours: list[list[int]]
) -> list[dict[str, float]]:
    """Return where answers part, and how far the two tokens' logits are apart there."""
    partings = []
    for row, (prompt, expected, answer) in enumerate(zip(prompts, theirs, ours, strict=True)):
        if expected == answer:
            continue
        place = next(i for i, (a, b) in enumerate(zip(expected, answer, strict=False)) if a != b)
        logits = their_logits(model, prompt + expected[:place])[-1]
        gap = abs(float(logits[expected[place]] - logits[answer[place]]))
        partings.append({"prompt": row, "token": place, "gap": gap})
    return partings


def main() -> int:
    parser = commands.Parser(__doc__)
    parser.sizes(prompts=(20, 2), prompt_tokens=(200, 12), new_tokens=(100, 8))
    parser.add_argument("--policy", default="checkpoints/smollm2-135m", small=SMALL_POLICY)
    parser.add_argument("--output", default="experiments/smollm/parity.json")
    a = parser.parse_args()
    if a.small:
        prepare.prepare("", SMALL_POLICY)
    with commands.needed("pip install -r requirements-parity.txt"):
        import torch
        import transformers
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)  # two that share a core with another process take ten times as long
    model = transformers.AutoModelForCausalLM.from_pretrained(a.policy, dtype=torch.float32).eval()
    model.generation_config = transformers.GenerationConfig()
    tokenizer = load_tokenizer(a.policy, model.config.vocab_size)
    prompts = read_prompts(tokenizer, a.prompts, a.prompt_tokens)
    logits = compare_logits(a.policy, model, prompts)
    result: dict[str, object] = {"prompts": a.prompts, "prompt_tokens": a.prompt_tokens, "logits": logits._asdict()}
    theirs = [their_answer(model, prompt, a.new_tokens, tokenizer.eos_ids) for prompt in prompts]
    passed = logits.share_above == 0
    for kind in DRAFTS:
        generator = make_generator(a.policy, kind, prompt_tokens=a.prompt_tokens, new_tokens=a.new_tokens)
        ours, per_verification = our_answers(generator, prompts)
        partings = find_gaps(model, prompts, theirs, ours)
        passed &= len(partings) <= SHARE_PARTED * a.prompts and all(parting["gap"] <= TIE for parting in partings)
        result[kind] = {
            "tokens": sum(map(len, ours)),
            "tokens_per_verification": per_verification,
            "partings": partings,
        }
    pathlib.Path(a.output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(commands.run(main))
