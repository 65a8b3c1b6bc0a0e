"""Sweep of rlzero_tiny on six learner and two rollout devices: synchronous, lag 1 and lag 2, three seeds.

All runs use importance sampling (grpo.correction); without lag it changes nothing.
"""

from typing import Any

from experiments.claims import seeded

# Name in the table -> overrides.
PIPELINES: dict[str, dict[str, Any]] = {
    "sync": {"pipeline.schedule": "sync"},
    "lag 1": {"pipeline.schedule": "async", "pipeline.lag": 1},
    "lag 2": {"pipeline.schedule": "async", "pipeline.lag": 2},
}
SPLIT = {"pipeline.rollout_devices": 2, "mesh.data": 3, "mesh.fsdp": 2, "grpo.correction": "token_truncate"}
# The rows of a step and of the draft's updates must divide by six devices.
SPLIT |= {"grpo.prompts_per_step": 18, "rollout.num_slots": 128, "draft.compare_rounds": 0}
SPLIT |= {"steps": 30}


def get_sweep() -> list[dict[str, Any]]:
    return seeded(SPLIT | pipeline for pipeline in PIPELINES.values())
