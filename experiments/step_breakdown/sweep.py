"""A few RL steps, plain and with an EAGLE-3 head that is frozen, as in Table 1 of arXiv 2604.26779; five seeds.

More than elsewhere, since what is compared are processes, between which a shared machine changes its speed.
"""

from typing import Any

from experiments.claims import seeded

# Nothing but the five phases: a first and a last evaluation of few problems, no comparison, one checkpoint.
TIMED = {"steps": 8, "eval.every": 0, "eval.problems": 8, "draft.compare_rounds": 0, "draft.online": False}


def get_sweep() -> list[dict[str, Any]]:
    runs = [TIMED | {"draft.kind": kind, "draft.adaptive": False} for kind in ("none", "eagle3")]
    return seeded(runs, seeds=range(5))
