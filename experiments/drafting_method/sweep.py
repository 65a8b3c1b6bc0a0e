"""Sweep of generation over kinds of draft, with k = 3 and with the controller (Table 2 of arXiv 2604.26779)."""

from typing import Any

from experiments.claims import seeded

Methods = dict[str, dict[str, Any]]  # name in the table -> overrides

COPIES = {"draft.path": "", "draft.history": 0}
METHODS: Methods = {"n-gram": {"draft.kind": "ngram"} | COPIES, "EAGLE-3": {"draft.kind": "eagle3"}}


def sweep_of(methods: Methods) -> list[dict[str, Any]]:
    """Return the runs of these kinds of draft, each beside plain decoding, with every seed."""
    run = {"task": "benchmark", "draft.length": 3, "draft.adaptive": True, "benchmark.lengths": (3,)}
    return seeded(run | {"benchmark.rounds": 5} | method for method in methods.values())


def get_sweep() -> list[dict[str, Any]]:
    return sweep_of(METHODS)
