"""Generation with heads of four origins at k = 1, 3, 5, 7 and under the controller; three seeds (Tables 3 and 5 of
arXiv 2604.26779 have k = 3 alone).

Of the workload rlzero_tiny:small. An online head is what thirty RL steps made of the offline one, with the policy that
they made; `experiments/reproduce.py` makes all of them.
"""

from typing import Any

from experiments.claims import seeded

LENGTHS = (1, 3, 5, 7)
# Name in the table -> folder of the head; of a folder of two (policy, draft) where RL steps made both.
HEADS = {
    "generic, offline": "runs/zero_generic",
    "generic, online": "runs/zero_generic_online",
    "in-domain, offline": "runs/zero_eagle3",
    "in-domain, online": "runs/zero_eagle3_online",
}


def paths(name: str) -> dict[str, str]:
    folder = HEADS[name]
    if name.endswith("online"):
        return {"policy.path": f"{folder}/policy", "draft.path": f"{folder}/draft"}
    return {"draft.path": folder}


def get_sweep() -> list[dict[str, Any]]:
    run = {"task": "benchmark", "draft.length": LENGTHS[-1], "draft.adaptive": True, "benchmark.lengths": LENGTHS}
    return seeded(run | {"benchmark.rounds": 5, "benchmark.warmup": 3} | paths(name) for name in HEADS)
