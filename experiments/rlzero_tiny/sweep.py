"""Sweep of rlzero_tiny with and without speculation, three seeds, which change data order and all sampling."""

from typing import Any


def get_sweep() -> list[dict[str, Any]]:
    return [
        {"draft.kind": kind, "seed": seed, "rollout.seed": seed} for seed in range(3) for kind in ("eagle3", "none")
    ]
