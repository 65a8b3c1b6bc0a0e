"""The paper's largest case (arXiv 2604.26779, section 5, a simulation): GRPO on Qwen3-235B-A22B with 512 GPUs.

    python main.py --config configs/rlzero_235b_a22b.py

It is for the simulator and for dry runs with 512 GB200, as in the paper's simulation. On each GPU parameters, gradient
and moments in float32 take 7 GB, rollout weights in bfloat16 18 GB (experts split in 8, widths in 4), keys and values
of 4,096 slots 10,240 tokens x 193 kB = 16 GB. On 128 nodes x 4 GPUs, with one process each, eight processes hold a copy
of the rollout weights: experts go through all-to-alls between nodes, widths stay within one (docs/scaling.md).

Weights and data are read from local folders:

    hf download Qwen/Qwen3-235B-A22B --local-dir checkpoints/Qwen3-235B-A22B
    data/dapo-math-17k.jsonl    rows of `prompt` (chat messages) and `label` (DAPO-Math-17k)
    data/aime-2024.jsonl        rows of `problem` and `answer` (AIME-2024)

Expected, by the paper's simulator: rollouts 2.72 times and steps 1.70 times as fast at k = 3 with acceptance length 3;
3.5 and 2.5 times with 2,048 GPUs and two versions of lag at k = 5 and acceptance length 4. It assumes a rollout batch
of 4,096 in FP8; here it is bfloat16. The paper does not disclose what configs/rlzero_8b.py lists. Nobody has run this.

Time, by this project's simulator: 124 s a step without drafts (107 to 164), 400 steps in 13.8 hours,

    python -m experiments.simulator --config configs/rlzero_235b_a22b.py --devices 512 --hardware gb200

`:smoke` runs the same steps with a random nano policy, on any machine, in a minute or two.
"""

from ml_collections import ConfigDict

from specrl_jax.config import recipes


def get_config(arg: str = "") -> ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/rlzero_235b_a22b.py: no variant '{arg}'; there is smoke")
    c = recipes.dapo_math()
    c.steps = 400
    c.policy.preset = "qwen3_235b_a22b"
    c.policy.path = "checkpoints/Qwen3-235B-A22B"
    c.rollout.max_response_tokens = 8192
    c.rollout.num_slots = 4096
    c.grpo.prompts_per_step = 256
    c.grpo.group_size = 16
    c.grpo.minibatches = 4
    c.grpo.microbatch_tokens = 1_310_720  # a row of the longest on each batch shard
    c.mesh.fsdp = 16
    c.mesh.expert = 8
    c.mesh.tensor = 4
    return recipes.shrink(c, "nano_moe_deep") if arg else c
