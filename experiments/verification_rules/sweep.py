"""Sweep of generation over the exact verification rules at k = 3 and 7, three seeds (not in the paper)."""

from typing import Any

from experiments.claims import seeded

RULES, LENGTHS = ("rejection", "block", "coupled"), (3, 7)


def get_sweep() -> list[dict[str, Any]]:
    run = {"task": "benchmark", "draft.length": 7, "draft.adaptive": False, "benchmark.lengths": LENGTHS}
    return seeded(run | {"benchmark.rounds": 5, "rollout.rule": rule} for rule in RULES)
