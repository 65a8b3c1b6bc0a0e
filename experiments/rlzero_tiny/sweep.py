"""Three seeds of rlzero_tiny, with speculation and without; data order and all sampling differ by seed."""

from typing import Any


def get_sweep() -> list[dict[str, Any]]:
    return [
        {"draft.kind": kind, "seed": seed, "rollout.seed": seed} for seed in range(3) for kind in ("eagle3", "none")
    ]
