"""Sweep of generation over draft lengths 1 to 8 and the controller (Table 4 of arXiv 2604.26779), three seeds."""

from typing import Any

from experiments.claims import seeded

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)


def get_sweep() -> list[dict[str, Any]]:
    run = {"task": "benchmark", "draft.length": LENGTHS[-1], "draft.adaptive": True, "benchmark.lengths": LENGTHS}
    return seeded([run | {"benchmark.rounds": 5}])
