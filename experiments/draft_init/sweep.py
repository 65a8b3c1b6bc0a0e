"""Sweep of generation over four heads at k = 1, 3, 5, 7 and with the controller, on rlzero_tiny:small, three seeds.

An online head is the offline one after thirty RL steps, used with the policy of these steps; `experiments/reproduce.py`
makes all of them. Tables 3 and 5 of arXiv 2604.26779 have k = 3 alone.
"""

from typing import Any

from experiments.claims import seeded

LENGTHS = (1, 3, 5, 7)
# Name in the table -> folder of the head, or of `policy` and `draft` after RL steps.
HEADS = {
    "generic, offline": "runs/zero_generic",
    "generic, online": "runs/zero_generic_online",
    "in-domain, offline": "runs/zero_eagle3",
    "in-domain, online": "runs/zero_eagle3_online",
}


def paths(name: str) -> dict[str, str]:
    """Return the overrides that select a head, and its policy after RL steps."""
    folder = HEADS[name]
    if name.endswith("online"):
        return {"policy.path": f"{folder}/policy", "draft.path": f"{folder}/draft"}
    return {"draft.path": folder}


def get_sweep() -> list[dict[str, Any]]:
    run = {"task": "benchmark", "draft.length": LENGTHS[-1], "draft.adaptive": True, "benchmark.lengths": LENGTHS}
    return seeded(run | {"benchmark.rounds": 5} | paths(name) for name in HEADS)
