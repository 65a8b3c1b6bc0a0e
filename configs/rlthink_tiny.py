"""RL-Think at tiny size: GRPO on a policy that was already trained on worked solutions, with longer responses.

    python main.py --config configs/pretrain_tiny.py:think
    python main.py --config configs/draft_tiny.py:think
    python main.py --config configs/rlthink_tiny.py

Hardware: 2 CPU cores, 4 GiB. With 20 M parameters and one sequence at a time, decoding on two cores is bound by reading
the weights, as decoding 64 sequences on a GPU is. The first two commands take half an hour and run once. `:smoke` runs
the same steps with a random seven-layer policy and a random head, in seconds. `:rooms` is rlzero_tiny.py:rooms on the
policy that it goes on from, which is right in most of its answers (`careful` of pretrain_tiny.py and draft_tiny.py).
"""

from ml_collections import ConfigDict

from specrl_jax.config import recipes


def get_config(arg: str = "") -> ConfigDict:
    if arg not in ("", "rooms", "smoke"):
        raise ValueError(f"configs/rlthink_tiny.py: no variant '{arg}'; there are rooms, smoke")
    if arg == "rooms":
        c = recipes.load("rlzero_tiny").get_config(arg)
        c.policy.path, c.draft.path = "runs/careful_base_0", "runs/careful_head_0"
        return c
    c = recipes.load("rlzero_tiny").get_config(arg or "small")
    c.data.task = "long_arithmetic"
    c.rollout.max_prompt_tokens = 14
    if not arg:
        c.policy.path = "runs/think_base"
        c.draft.path = "runs/think_" + c.draft.get_ref("kind")
        c.rollout.max_response_tokens = 64
    return c
