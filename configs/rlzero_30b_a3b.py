"""RL-Zero on a mixture of experts: GRPO on Qwen3-30B-A3B-Base from DAPO-Math-17k.

    python main.py --config configs/rlzero_30b_a3b.py

It needs 8 nodes x 4 GPUs of 141 GB or more (H200, GB200), with one process per node. On each GPU parameters, gradient
and moments in float32 take 15 GB, rollout weights in bfloat16 18 GB (a rollout stays within a node, so experts are
split over its four GPUs), pages for 1,024 of the longest sequences 10,240 tokens x 98 kB = 32 GB.

Weights and data are read from local folders:

    hf download Qwen/Qwen3-30B-A3B-Base --local-dir checkpoints/Qwen3-30B-A3B-Base
    data/dapo-math-17k.jsonl    rows of `prompt` (chat messages) and `label` (DAPO-Math-17k)
    data/aime-2024.jsonl        rows of `problem` and `answer` (AIME-2024)

Expected: unknown. The paper (arXiv 2604.26779) has no numbers for this model, and this project has not run the config
on such hardware. Lengths and batch are those of configs/rlzero_8b.py, which says what the paper does not disclose.

Time, by this project's simulator: 72 s a step without drafts (63 to 93), 400 steps in 8.0 hours,

    python -m experiments.simulator --config configs/rlzero_30b_a3b.py --devices 32 --hardware gb200

`:smoke` runs the same steps with a random nano policy, on any machine, in a minute or two.
"""

from ml_collections import ConfigDict

from specrl_jax.config import recipes


def get_config(arg: str = "") -> ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/rlzero_30b_a3b.py: no variant '{arg}'; there is smoke")
    c = recipes.dapo_math()
    c.steps = 400
    c.policy.preset = "qwen3_30b_a3b"
    c.policy.path = "checkpoints/Qwen3-30B-A3B-Base"
    c.rollout.max_response_tokens = 8192
    c.rollout.num_slots = 1024
    c.grpo.prompts_per_step = 64
    c.grpo.group_size = 16
    c.grpo.minibatches = 4
    c.grpo.microbatch_tokens = 327_680  # a row of the longest on each batch shard
    c.mesh.fsdp = 8
    c.mesh.expert = 4
    return recipes.shrink(c, "nano_moe_deep") if arg else c
