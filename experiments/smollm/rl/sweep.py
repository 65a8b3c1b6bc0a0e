"""Sweep of configs/smollm2_135m.py: a head that learns during the run, and one that stays as it was; a seed each.

`configs/smollm2_135m.py:task_head` makes the head. Three tokens are always drafted, so that all steps can be compared:
the controller would stop where drafts save no time.
"""

from typing import Any

HEAD = "checkpoints/smollm2-135m-task-head"


def get_sweep() -> list[dict[str, Any]]:
    shared = {"draft.path": HEAD, "draft.adaptive": False, "draft.length": 3}
    return [shared | {"seed": seed, "rollout.seed": seed, "draft.online": seed == 0} for seed in range(2)]
