"""RL-Zero in minutes on a CPU: GRPO teaches the tiny base to carry, with speculative decoding in every rollout.

    python main.py --config configs/rlzero_tiny.py

Hardware: 2 CPU cores, 4 GiB. Time: 5 minutes. Expected: validation accuracy +0.30 sampled at temperature 1 and +0.15
greedy over the base, every seed; acceptance length above 3.0 (k = 3) from the first step to the last. `:smoke` runs the
same steps with a random seven-layer policy and a random head, in seconds.

`:small` measures what speculation saves: one sequence at a time, with a base of 20 M parameters and its head, made by
the commands in rlthink_tiny.py (`:zero` for `:think`). `:rooms` has answers of 47 to 460 tokens that are hard to draft:

    python main.py --config configs/pretrain_tiny.py:recite
    python main.py --config configs/pretrain_tiny.py:careful
    python main.py --config configs/pretrain_tiny.py:rooms
    python main.py --config configs/draft_tiny.py:rooms
    python main.py --config configs/rlzero_tiny.py:rooms
"""

from ml_collections import ConfigDict

from specrl_jax.config import base


def get_config(arg: str = "") -> ConfigDict:
    if arg not in ("", "small", "rooms", "smoke"):
        raise ValueError(f"configs/rlzero_tiny.py: no variant '{arg}'; there are small, rooms, smoke")
    c = base()
    c.steps = 60
    c.policy.path = "experiments/tiny_base/checkpoint"
    c.rollout.max_prompt_tokens = 10
    c.rollout.max_response_tokens = 46
    c.draft.kind = "eagle3"
    c.draft.path = "experiments/tiny_head/checkpoint"
    c.draft.adaptive = False  # the claim is for k = 3, and a run repeats to the last bit
    c.draft.learning_rate = 5e-4
    c.optimizer.learning_rate = 1e-4
    c.optimizer.warmup = 3
    if arg == "small":
        c.policy.preset = ""
        c.policy.path = "runs/zero_base"
        c.draft.path = "runs/zero_" + c.draft.get_ref("kind")  # zero_eagle3, zero_mtp, zero_model
        c.rollout.num_slots = 1
        c.optimizer.learning_rate = 2e-5
        c.draft.learning_rate = 1e-4  # 5e-4 costs a head that is good half a token in twelve steps of 32 rollouts
        c.grpo.prompts_per_step = 4
        c.eval.problems = 64
        c.checkpoint.keep = 1
    if arg == "rooms":
        c.policy.preset = ""
        c.policy.path = "runs/rooms_base_0"
        c.draft.path = "runs/rooms_head_0"
        c.data.task = "rooms"
        c.rollout.max_prompt_tokens = 44
        c.rollout.max_response_tokens = 468
        c.rollout.num_slots = 32
        c.grpo.prompts_per_step = 8
        c.grpo.group_size = 8
        c.eval.problems = 64
        c.checkpoint.keep = 1
    if arg == "smoke":
        c.policy.preset = "nano_deep"
        c.policy.path = ""
        c.draft.path = ""
        c.steps = 3
        c.grpo.prompts_per_step = 4
        c.grpo.group_size = 4
        c.rollout.num_slots = 16
        c.rollout.max_response_tokens = 12
        c.eval.problems = 16
        c.checkpoint.every = 1
    return c
