"""RL-Think in small: GRPO goes on with a policy that was trained on worked solutions already; longer answers.

    python main.py --config configs/pretrain_tiny.py:think
    python main.py --config configs/draft_tiny.py:think
    python main.py --config configs/rlthink_tiny.py

Hardware: 2 CPU cores, 4 GiB. 20 M parameters and one sequence at a time: there decoding is bound by reading weights on
two cores, as that of 64 sequences is on a GPU. The first two commands take half an hour and are done once. `:smoke` is
the same street with a random seven-layer policy and a random head, in seconds.
"""

from configs import rlzero_tiny


def get_config(arg: str = ""):
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/rlthink_tiny.py: no variant '{arg}'; there is smoke")
    c = rlzero_tiny.get_config(arg or "small")
    c.data.task = "long_arithmetic"
    c.rollout.max_prompt_tokens = 14
    if not arg:
        c.policy.path = "runs/think_base"
        c.draft.path = "runs/think_" + c.draft.get_ref("kind")
        c.rollout.max_response_tokens = 64
    return c
