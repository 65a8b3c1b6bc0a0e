"""The paper's RL-Zero workload (arXiv 2604.26779, section 4): GRPO on Qwen3-8B-Base from DAPO-Math-17k.

    python main.py --config configs/rlzero_8b.py

on 8 nodes x 4 GPUs (32 GB200 in the paper). One process per node as a Slurm job, or on every worker of a TPU pod:

    python -m experiments.launch --config configs/rlzero_8b.py --sweep experiments/once.py \
        --executor slurm --nodes 8 --gpus 4 --hours 24
    gcloud compute tpus tpu-vm ssh POD --worker=all \
        --command="cd specrl_jax && python main.py --distributed --config configs/rlzero_8b.py"

What every phase takes of a GB200, an H200 or a TPU, on any machine and without weights:

    python main.py --config configs/rlzero_8b.py --config.task=dry_run

The draft is a fresh EAGLE-3 head, which learns in the run and is left off until it pays; with a head for this policy,
in any of the three public formats,

    python main.py --config configs/rlzero_8b.py --config.draft.path=checkpoints/HEAD

Weights and data are read from local folders:

    hf download Qwen/Qwen3-8B-Base --local-dir checkpoints/Qwen3-8B-Base
    data/dapo-math-17k.jsonl    rows of `prompt` (chat messages) and `label` (DAPO-Math-17k)
    data/aime-2024.jsonl        rows of `problem` and `answer` (AIME-2024)

Both sets as DAPO's authors publish them, in Parquet and with every prompt many times, are read too, and a prompt counts
once: data.schema=verl and eval.schema=verl, with their paths.

Expected, from the paper's Table 1: 151 s a step without speculation, of which generation 100, log-probs 18, training
31; 108 s with a head made offline (generation 57): 400 steps in 12 hours. AIME-2024 accuracy from about 0.04 to about
0.34 (its figure, read by eye). The paper does not disclose prompts per step, group size, lengths, temperature, learning
rate, clipping, KL, parallelism, the head's size or the number of steps: those below are DAPO's (2503.14476) where it
states them and ours otherwise. Keys and values of 1,024 slots: 10,240 tokens x 147 kB = 48 GB a GPU of 32.
This project has not run this config on such hardware; a test compiles its policy step and its generation loop for 8
devices.

`:smoke` is the same street with a random nano policy, on any machine, in a minute or two.
"""

from configs import recipes


def get_config(arg: str = ""):
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/rlzero_8b.py: no variant '{arg}'; there is smoke")
    c = recipes.dapo_math()
    c.steps = 400
    c.policy.preset = "qwen3_8b"
    c.policy.path = "checkpoints/Qwen3-8B-Base"
    c.rollout.max_response_tokens = 8192
    c.rollout.num_slots = 1024
    c.grpo.prompts_per_step = 64
    c.grpo.group_size = 16
    c.grpo.minibatches = 4
    c.grpo.microbatch = 8  # rows: one per fsdp shard
    c.mesh.fsdp = 8
    c.mesh.tensor = 4
    return recipes.shrink(c, "nano_deep") if arg else c
