"""What `make run` runs: GRPO in which speculation makes the rollouts at least 1.5 times as fast, on two CPU cores.

    python main.py --config configs/demo.py

A policy of 12 M parameters works sums digit by digit (`data.task=walk`) and mostly forgets to carry. Its EAGLE-3 head
drafts five tokens and learns online. One sequence is decoded at a time, so an iteration is bound by reading the
weights, as it is on a GPU with few long rollouts. Both are in `experiments/demo/`.

Hardware: 2 CPU cores, 4 GiB. Time, accuracy and speedup of three seeds: docs/quickstart.md. `:smoke` runs the
same steps with a random seven-layer policy and a random head, in seconds.
"""

from ml_collections import ConfigDict

from specrl_jax.config import base, recipes


def get_config(arg: str = "") -> ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/demo.py: no variant '{arg}'; there is smoke")
    if arg == "smoke":
        c = recipes.load("rlzero_tiny").get_config("smoke")
        c.data.task = "walk"
        c.rollout.max_prompt_tokens = 16
        return c
    c = base()
    c.steps = 16
    c.data.task = "walk"
    c.policy.preset = ""
    c.policy.path = "experiments/demo/policy"
    c.rollout.max_prompt_tokens = 16
    c.rollout.max_response_tokens = 92
    c.rollout.num_slots = 1
    c.grpo.prompts_per_step = 4
    c.grpo.group_size = 8
    c.grpo.old_logprobs = "rollout"
    c.optimizer.learning_rate = 1e-4
    c.optimizer.warmup = 3
    c.draft.kind = "eagle3"
    c.draft.path = "experiments/demo/head"
    c.draft.length = 5
    c.draft.adaptive = False  # one compiled length, and a run repeats to the last bit
    c.draft.learning_rate = 1e-4
    c.draft.compare_rounds = 8
    c.eval.problems = 64
    c.eval.every = 0
    c.eval.greedy = False
    c.checkpoint.keep = 1
    return c
