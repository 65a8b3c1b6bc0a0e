"""RL on real pretrained weights with two CPU cores: SmolLM2-135M-Instruct on word problems in plain English.

    python -m experiments.smollm.prepare --output checkpoints/smollm2-135m
    python main.py --config configs/smollm2_135m.py

The first command says what it needs. Problems have one or two steps (experiments/smollm/word_problems.py), answers at
most 64 tokens. The reward is 1 for a right answer, wherever `math` finds it, and 0.2 more for a last line "Answer: X".
An EAGLE-3 head that begins with random weights learns during the run and drafts once it saves time.

Hardware: 2 CPU cores, 16 GiB. Time and accuracy: experiments/smollm/README.md. `:smoke` runs the same steps with a
random nano policy on a built-in task.
"""

from ml_collections import ConfigDict

from specrl_jax.config import base, recipes


def get_config(arg: str = "") -> ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/smollm2_135m.py: no variant '{arg}'; there is smoke")
    c = base()
    c.steps = 200
    c.policy.preset = ""
    c.policy.path = "checkpoints/smollm2-135m"
    c.policy.vocab_tile = 6_144  # an eighth of the vocabulary
    c.data.path = "experiments/smollm/problems/train.jsonl"
    c.data.schema = "question"
    c.data.template = TEMPLATE
    c.data.chat = "always"
    c.data.tokenizer = ""
    c.rollout.max_prompt_tokens = 128
    c.rollout.max_response_tokens = 64
    c.rollout.num_slots = 32
    c.grpo.prompts_per_step = 4
    c.grpo.group_size = 8
    c.grpo.old_logprobs = "rollout"
    c.grpo.microbatch_tokens = 2_048
    c.optimizer.learning_rate = 2e-6
    c.optimizer.warmup = 5
    c.reward.name = "math,answer_line_format"
    c.reward.weights = (1.0, 0.2)
    c.draft.kind = "eagle3"  # draft.path='': a random head
    c.draft.vocab_size = 4_096
    c.draft.compare_rounds = 0
    c.eval.path = "experiments/smollm/problems/test.jsonl"
    c.eval.problems = 128
    c.eval.every = 50
    c.checkpoint.keep = 1
    return recipes.shrink(c, "nano_llama") if arg else c
