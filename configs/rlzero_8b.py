"""The paper's RL-Zero workload (arXiv 2604.26779, section 4): GRPO on Qwen3-8B-Base from DAPO-Math-17k.

    python main.py --config configs/rlzero_8b.py

It needs 8 nodes x 4 GPUs (the paper has 32 GB200). Start one process per node, as a Slurm job, or one on every worker
of a TPU pod:

    python -m experiments.launch --config configs/rlzero_8b.py --sweep experiments/once.py \
        --executor slurm --nodes 8 --gpus 4 --hours 24
    gcloud compute tpus tpu-vm ssh POD --worker=all \
        --command="cd specrl_jax && python main.py --distributed --config configs/rlzero_8b.py"

Compile every phase for a GB200, an H200 or a TPU and print its memory, on any machine and without weights:

    python main.py --config configs/rlzero_8b.py --config.task=dry_run

The draft is a new EAGLE-3 head, which learns during the run and drafts as soon as that saves time. To start from a head
trained for this policy, in any of the three public formats:

    python main.py --config configs/rlzero_8b.py --config.draft.path=checkpoints/HEAD

Weights and data are read from local folders:

    hf download Qwen/Qwen3-8B-Base --local-dir checkpoints/Qwen3-8B-Base
    data/dapo-math-17k.jsonl    rows of `prompt` (chat messages) and `label` (DAPO-Math-17k)
    data/aime-2024.jsonl        rows of `problem` and `answer` (AIME-2024)

The Parquet files of DAPO's authors, which repeat every prompt many times, work too, and a prompt counts once: give
their paths, with data.schema=verl and eval.schema=verl.

The recipe is DAPO's (arXiv 2503.14476): asymmetric clipping, token-level loss, no KL term, and
  dynamic sampling: prompts whose 16 responses all earn the same reward are replaced by new ones, in at most 10 rounds
    of generation per step (the limit of verl's DAPO recipe);
  overlong shaping: over the last 2,048 of 8,192 tokens a response loses up to 1.0 of its reward. DAPO uses the last
    4,096 of 20,480: the same penalty; a quarter of the limit here, a fifth there.
Rollouts are packed into learner rows of at most 10,240 tokens, the longest prompt and response together.

Expected, from the paper's Table 1: 151 s per step without speculation (generation 100, log-probs 18, training 31) and
108 s with a head trained offline (generation 57), 400 steps in 12 hours; each extra round of dynamic sampling generates
once more. AIME-2024 accuracy from about 0.04 to about 0.34 (read off its figure). The paper does not disclose prompts
per step, group size, lengths, temperature, learning rate, clipping, KL, parallelism, the head's size or the number of
steps: they are DAPO's where it states them and ours otherwise. Pages for
1,000 of the longest sequences take 59 GB on each of 32 GPUs, the head's among them; what runs reads its live tokens
only. This project has not run this config on such hardware; tests compile its policy step and its generation loop.

`:smoke` runs the same steps with a random nano policy, on any machine, in a minute or two.
"""

from ml_collections import ConfigDict

from specrl_jax.config import recipes


def get_config(arg: str = "") -> ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/rlzero_8b.py: no variant '{arg}'; there is smoke")
    c = recipes.dapo_math()
    c.steps = 400
    c.policy.preset = "qwen3_8b"
    c.policy.path = "checkpoints/Qwen3-8B-Base"
    c.policy.remat = "selective"
    c.rollout.max_response_tokens = 8192
    c.rollout.num_slots = 1024
    c.grpo.prompts_per_step = 64
    c.grpo.group_size = 16
    c.grpo.minibatches = 4
    c.grpo.microbatch_tokens = 81_920  # a row of the longest on each fsdp shard
    c.grpo.sampling_rounds = 10
    c.grpo.overlong_buffer = 2048
    c.mesh.fsdp = 8
    c.mesh.tensor = 4
    return recipes.shrink(c, "nano_deep") if arg else c
