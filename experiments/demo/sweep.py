"""Sweep of the demo: three seeds, which change data order and all sampling."""

from typing import Any


def get_sweep() -> list[dict[str, Any]]:
    return [{"seed": seed, "rollout.seed": seed} for seed in range(3)]
