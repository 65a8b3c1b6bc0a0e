"""RL on pretrained weights with two CPU cores: SmolLM2-135M-Instruct on word problems in plain English.

    python -m experiments.smollm.prepare --output checkpoints/smollm2-135m
    python main.py --config configs/smollm2_135m.py

The first command says what it needs. A problem has one or two steps (experiments/smollm/word_problems.py), an answer at
most 64 tokens. Two worked examples stand before each problem as earlier turns, and the temperature is 0.6: without
either the policy is seldom right, and there is little to reinforce. The reward is 1 for a right answer, wherever `math`
finds it, and 0.2 for a last line "Answer: X". An EAGLE-3 head begins with random weights, learns during the run and
drafts once that saves time; `--config.draft.path` names a trained one. `:task_head` makes one from the policy's answers
to these problems, `:head` one from its answers to other questions at temperature 1:

    python main.py --config configs/smollm2_135m.py:task_head
    python main.py --config configs/smollm2_135m.py:head --config.data.path=gsm8k/train.jsonl \
        --config.eval.path=gsm8k/test.jsonl

Hardware: 2 CPU cores, 16 GiB. Time and accuracy: experiments/smollm/README.md. `:smoke` runs the same steps with a
random nano policy on a built-in task.
"""

from ml_collections import ConfigDict

from specrl_jax.config import base, recipes

EXAMPLES = (
    ("Kim has 4 pens. Kim buys 3 more pens. How many pens does Kim have now?", "4 + 3 = 7\nAnswer: 7"),
    ("Kim has 9 hats. Kim gives 4 hats to Lee. How many hats does Kim have now?", "9 - 4 = 5\nAnswer: 5"),
)
# Turns of the chat template without its system message, of which the problem is the last.
TURN = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
TEMPLATE = "".join(TURN.format(question=question) + f"{answer}<|im_end|>\n" for question, answer in EXAMPLES)
TEMPLATE += TURN.format(question="{prompt}")


def get_config(arg: str = "") -> ConfigDict:
    if arg not in ("", "task_head", "head", "smoke"):
        raise ValueError(f"configs/smollm2_135m.py: no variant '{arg}'; there are task_head, head, smoke")
    c = base()
    c.steps = 50
    c.policy.preset = ""
    c.policy.path = "checkpoints/smollm2-135m"
    c.policy.remat = "none"
    c.data.path = "experiments/smollm/problems/train.jsonl"
    c.data.schema = "question"
    c.data.template = TEMPLATE
    c.data.tokenizer = ""
    c.rollout.max_prompt_tokens = 136
    c.rollout.max_response_tokens = 64
    c.rollout.temperature = 0.6
    c.rollout.num_slots = 32
    c.rollout.cache_gb = 0.7  # all of their keys and values
    c.grpo.prompts_per_step = 4
    c.grpo.group_size = 8
    c.grpo.old_logprobs = "rollout"
    c.grpo.microbatch_tokens = 1_600  # eight rows
    c.optimizer.learning_rate = 1e-5
    c.optimizer.warmup = 3
    c.reward.name = "math,answer_line_format"
    c.reward.weights = (1.0, 0.2)
    c.draft.kind = "eagle3"  # draft.path='': a random head
    c.draft.vocab_size = 4_096
    c.draft.compare_rounds = 0
    c.eval.path = "experiments/smollm/problems/test.jsonl"
    c.eval.problems = 256
    c.eval.every = 25
    c.checkpoint.keep = 1
    if arg.endswith("head"):
        c.task = "draft_pretrain"
        c.steps = 100
        c.grpo.prompts_per_step = 96
        c.grpo.group_size = 1
        c.pretrain.rollouts = 768
        c.pretrain.batch_size = 16
        c.export.output = f"checkpoints/smollm2-135m-{arg.replace('_', '-')}"
        c.draft.length = 3
        c.draft.adaptive = False
        c.draft.learning_rate = 1e-3
        c.draft.warmup = 20
        c.draft.decay_steps = c.get_oneway_ref("steps")
        c.eval.problems = 48
    if arg == "head":
        c.steps = 300
        c.data.path = "gsm8k/train.jsonl"
        c.data.template = "{prompt}"
        c.data.chat = "always"
        c.rollout.max_prompt_tokens = 256
        c.rollout.max_response_tokens = 160
        c.rollout.temperature = 1.0
        c.grpo.microbatch_tokens = 832  # two rows
        c.pretrain.rollouts = 1_500
        c.pretrain.batch_size = 8
        c.draft.vocab_size = 8_192
        c.draft.warmup = 50
        c.eval.path = "gsm8k/test.jsonl"
        c.eval.every = 150
    if arg == "smoke":
        c = recipes.shrink(c, "nano_llama")
        c.data.template = "{prompt}"
    return c
