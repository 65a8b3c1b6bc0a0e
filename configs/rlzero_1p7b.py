"""RL-Zero on one accelerator: GRPO on Qwen3-1.7B-Base from GSM8K.

    python main.py --config configs/rlzero_1p7b.py

Hardware: one GPU or TPU chip of 80 GB. Parameters, gradient and moments in float32 and rollout weights in bfloat16 take
31 GB, keys and values of 128 slots 2,048 tokens x 115 kB = 30 GB.

Weights and data are read from local folders:

    hf download Qwen/Qwen3-1.7B-Base --local-dir checkpoints/Qwen3-1.7B-Base
    data/gsm8k/train.jsonl, data/gsm8k/test.jsonl    rows of `question` and `answer` (openai/grade-school-math)

Expected: unknown, since this project has not run this config on an accelerator. The base scores
75.4 % on GSM8K with four examples (Qwen3 technical report, 2505.09388); without examples it starts lower. The paper
(arXiv 2604.26779) has no run of this size or on this data, so the values below are ours.

Time, by this project's simulator: 28 s a step without drafts (24 to 34), 200 steps in 1.5 hours,

    python -m experiments.simulator --config configs/rlzero_1p7b.py --devices 1 --hardware h100

`:smoke` runs the same steps with a random nano policy, on any machine, in a minute or two.
"""

from ml_collections import ConfigDict

from specrl_jax.config import recipes


def get_config(arg: str = "") -> ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/rlzero_1p7b.py: no variant '{arg}'; there is smoke")
    c = recipes.gsm8k()
    c.steps = 200
    c.policy.preset = "qwen3_1p7b"
    c.policy.path = "checkpoints/Qwen3-1.7B-Base"
    c.rollout.max_response_tokens = 1536
    c.rollout.num_slots = 128
    c.grpo.prompts_per_step = 32
    c.grpo.group_size = 8
    c.grpo.minibatches = 2
    c.grpo.microbatch_tokens = 16_384
    return recipes.shrink(c, "nano_deep") if arg else c
