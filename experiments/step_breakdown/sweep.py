"""Sweep of a few RL steps with and without a frozen EAGLE-3 head (Table 1 of arXiv 2604.26779), five seeds.

More seeds than elsewhere: the compared runs are separate processes, between which a shared machine changes its speed.
"""

from typing import Any

from experiments.claims import seeded

# Little beside the five phases: evaluation of few problems before and after, no comparison, one checkpoint.
TIMED = {"steps": 8, "eval.every": 0, "eval.problems": 8, "draft.compare_rounds": 0, "draft.online": False}


def get_sweep() -> list[dict[str, Any]]:
    runs = [TIMED | {"draft.kind": kind, "draft.adaptive": False} for kind in ("none", "eagle3")]
    return seeded(runs, seeds=range(5))
