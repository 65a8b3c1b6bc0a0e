"""Sweep of thirty steps of rlzero_tiny with and without speculation, for each rule, three seeds.

`coupled` runs in parity mode, where runs with and without speculation must be equal to the last bit.
"""

from typing import Any

from experiments.claims import seeded

# Name in the table -> overrides.
COUPLED = {"rollout.rule": "coupled", "rollout.parity": True}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {"draft.kind": "none", "rollout.rule": "rejection"},
    "rejection": {"draft.kind": "eagle3", "rollout.rule": "rejection"},
    "block": {"draft.kind": "eagle3", "rollout.rule": "block"},
    "plain, coupled": {"draft.kind": "none"} | COUPLED,
    "coupled": {"draft.kind": "eagle3"} | COUPLED,
}


def get_sweep() -> list[dict[str, Any]]:
    return seeded(run | {"steps": 30, "draft.compare_rounds": 0} for run in RUNS.values())
