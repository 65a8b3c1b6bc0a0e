"""The paper's RL-Zero workload (arXiv 2604.26779, section 4): GRPO on Qwen3-8B-Base from DAPO-Math-17k, rollouts by
plain sampling.

    python main.py --config configs/rlzero_8b.py

one process per node of 8 nodes x 4 GPUs (32 GB200 in the paper); with speculation, given an EAGLE-3 head for this
policy in SafeAILab's format,

    python main.py --config configs/rlzero_8b.py --config.draft.kind=eagle3 --config.draft.path=checkpoints/HEAD

Weights and data are read from local folders:

    hf download Qwen/Qwen3-8B-Base --local-dir checkpoints/Qwen3-8B-Base
    data/dapo-math-17k.jsonl    rows of `prompt` (chat messages) and `label` (DAPO-Math-17k)
    data/aime-2024.jsonl        rows of the same two keys (AIME-2024)

Expected, from the paper's Table 1 without speculation: 151 s a step, of which generation 100, log-probs 18, training
31; AIME-2024 accuracy from about 0.04 to about 0.34 (its Figure, read by eye). The paper does not disclose prompts per
step, group size, lengths, temperature, learning rate, clipping, KL or parallelism: those below are DAPO's (2503.14476)
where it states them and ours otherwise. This project has not run this config on such hardware; a test compiles its
policy step and its generation loop for 8 devices.
"""

from configs import common


def get_config(arg: str = ""):
    if arg:
        raise ValueError(f"configs/rlzero_8b.py: no variant '{arg}'")
    c = common.base()
    c.steps = 400
    c.policy.preset = "qwen3_8b"
    c.policy.path = "checkpoints/Qwen3-8B-Base"
    c.policy.dtype = "bfloat16"
    c.policy.compute_dtype = "bfloat16"
    c.policy.vocab_tile = 9_496  # words, a 16th: 10,240 x 2,374 logits a row and device, 97 MB, four at once
    c.rollout.cache_dtype = "bfloat16"
    c.rollout.compute_dtype = "bfloat16"
    c.rollout.max_prompt_tokens = 2048
    c.rollout.max_response_tokens = 8192
    c.rollout.num_slots = 1024
    c.rollout.chunk = 64
    c.grpo.prompts_per_step = 64
    c.grpo.group_size = 16
    c.grpo.minibatches = 4
    c.grpo.microbatch = 8  # rows: one per fsdp shard
    c.optimizer.learning_rate = 1e-6
    c.optimizer.warmup = 20
    c.reward.name = "answer_line"
    c.data.path = "data/dapo-math-17k.jsonl"
    c.data.answer_key = "label"
    c.data.tokenizer = ""
    c.eval.path = "data/aime-2024.jsonl"
    c.eval.problems = 30
    c.eval.samples = 32
    c.eval.every = 20
    c.checkpoint.every = 20
    c.mesh.fsdp = 8
    c.mesh.tensor = 4
    return c
