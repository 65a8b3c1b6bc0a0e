"""Sweep of rlzero_tiny with and without speculation, three seeds, which change data order and all sampling."""

from typing import Any

from experiments.claims import seeded


def get_sweep() -> list[dict[str, Any]]:
    return seeded({"draft.kind": kind} for kind in ("eagle3", "none"))
