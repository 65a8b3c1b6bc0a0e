"""The paper's RL-Think workload (arXiv 2604.26779, section 4): GRPO on Qwen3-8B, which already reasons.

    python main.py --config configs/rlthink_8b.py

It needs 8 nodes x 4 GPUs (32 GB200 in the paper), with one process per node. The draft is as in configs/rlzero_8b.py.

Weights and data are read from local folders:

    hf download Qwen/Qwen3-8B --local-dir checkpoints/Qwen3-8B
    data/dapo-math-17k.jsonl    rows of `prompt` (chat messages) and `label` (DAPO-Math-17k)
    data/aime-2024.jsonl        rows of `problem` and `answer` (AIME-2024)

Expected, from the paper's Table 1: 185 s per step without speculation (generation 134, log-probs 18, training 31) and
137 s with a head trained offline (generation 87), 400 steps in 15 hours. AIME-2024 accuracy from about 0.60 to about
0.70 (read off its figure). The paper does not disclose what configs/rlzero_8b.py lists; responses may have twice the
tokens here, since a model that reasons writes more. Keys and values of 512 slots take 18,432 tokens x 147 kB = 43 GB on
each of 32 GPUs. This project has not run this config on such hardware.

`:smoke` runs the same steps with a random nano policy, on any machine, in a minute or two.
"""

from ml_collections import ConfigDict

from specrl_jax.config import recipes


def get_config(arg: str = "") -> ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/rlthink_8b.py: no variant '{arg}'; there is smoke")
    c = recipes.dapo_math()
    c.steps = 400
    c.policy.preset = "qwen3_8b"
    c.policy.path = "checkpoints/Qwen3-8B"
    c.policy.remat = "selective"
    c.rollout.max_response_tokens = 16_384
    c.rollout.num_slots = 512
    c.grpo.prompts_per_step = 64
    c.grpo.group_size = 16
    c.grpo.minibatches = 4
    c.grpo.microbatch_tokens = 147_456  # a row of the longest on each fsdp shard
    c.mesh.fsdp = 8
    c.mesh.tensor = 4
    return recipes.shrink(c, "nano_deep") if arg else c
