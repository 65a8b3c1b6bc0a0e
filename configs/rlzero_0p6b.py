"""RL-Zero on one accelerator: GRPO on Qwen3-0.6B-Base, or Qwen3-1.7B-Base, from GSM8K.

    python main.py --config configs/rlzero_0p6b.py
    python main.py --config configs/rlzero_0p6b.py:1p7b

Hardware: one GPU or TPU chip of 80 GB. Parameters, gradient and moments in float32 and rollout weights in bfloat16 take
11 GB, of the 1.7B 31 GB; keys and values of 128 slots 2,048 tokens x 115 kB = 30 GB of either.

Weights and data are read from local folders:

    hf download Qwen/Qwen3-0.6B-Base --local-dir checkpoints/Qwen3-0.6B-Base
    hf download Qwen/Qwen3-1.7B-Base --local-dir checkpoints/Qwen3-1.7B-Base
    data/gsm8k/train.jsonl, data/gsm8k/test.jsonl    rows of `question` and `answer` (openai/grade-school-math)

Expected: unknown, since this project has not run this config on an accelerator. The bases score 59.6 and
75.4 % on GSM8K with four examples (Qwen3 technical report, 2505.09388); without examples they start lower. The paper
(arXiv 2604.26779) has no run of these sizes or on this data, so the values below are ours.

Time, by this project's simulator: 16 s a step without drafts (14 to 20), 200 steps in 0.9 hours,

    python -m experiments.simulator --config configs/rlzero_0p6b.py --devices 1 --hardware h100

and of the 1.7B 28 s a step without drafts (24 to 34), 200 steps in 1.5 hours,

    python -m experiments.simulator --config configs/rlzero_0p6b.py:1p7b --devices 1 --hardware h100

`:smoke` runs the same steps with a random nano policy, on any machine, in a minute or two.
"""

from ml_collections import ConfigDict

from specrl_jax.config import recipes


def get_config(arg: str = "") -> ConfigDict:
    if arg not in ("", "1p7b", "smoke"):
        raise ValueError(f"configs/rlzero_0p6b.py: no variant '{arg}'; there are 1p7b, smoke")
    c = recipes.gsm8k()
    c.steps = 200
    c.policy.preset = "qwen3_0p6b"
    c.policy.path = "checkpoints/Qwen3-0.6B-Base"
    c.rollout.max_response_tokens = 1536
    c.rollout.num_slots = 128
    c.grpo.prompts_per_step = 32
    c.grpo.group_size = 8
    c.grpo.minibatches = 2
    if arg == "1p7b":
        c.policy.preset = "qwen3_1p7b"
        c.policy.path = "checkpoints/Qwen3-1.7B-Base"
        c.grpo.microbatch_tokens = 16_384
    return recipes.shrink(c, "nano_deep") if arg == "smoke" else c
