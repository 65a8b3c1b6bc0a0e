"""Sweep of generation over the kinds of draft that Table 2 of arXiv 2604.26779 lacks."""

from typing import Any

from experiments.drafting_method.sweep import COPIES, Methods, sweep_of

METHODS: Methods = {
    "suffix": {"draft.kind": "suffix"} | COPIES,
    "MTP": {"draft.kind": "mtp"},
    "small model": {"draft.kind": "model"},
    "EAGLE-3 and suffix": {"draft.kind": "eagle3", "draft.cascade": 4, "draft.history": 0},
}


def get_sweep() -> list[dict[str, Any]]:
    return sweep_of(METHODS)
