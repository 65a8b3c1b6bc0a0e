"""Sweep of generation over kinds of draft, with k = 3 and with the controller (Table 2 of arXiv 2604.26779)."""

from typing import Any

from experiments.claims import seeded

COPIES = {"draft.path": "", "draft.history": 0}
# Name in the table -> overrides.
METHODS: dict[str, dict[str, Any]] = {
    "n-gram": {"draft.kind": "ngram"} | COPIES,
    "suffix": {"draft.kind": "suffix"} | COPIES,
    "EAGLE-3": {"draft.kind": "eagle3"},
    "MTP": {"draft.kind": "mtp"},
    "small model": {"draft.kind": "model"},
    "EAGLE-3 and suffix": {"draft.kind": "eagle3", "draft.cascade": 4, "draft.history": 0},
}


def get_sweep() -> list[dict[str, Any]]:
    run = {"task": "benchmark", "draft.length": 3, "draft.adaptive": True, "benchmark.lengths": (3,)}
    return seeded(run | {"benchmark.rounds": 5, "benchmark.warmup": 3} | method for method in METHODS.values())
