"""Sweep of rlzero_tiny with rollouts of float32 weights, int8 and float8: thirty steps, three seeds.

All runs use importance sampling (grpo.correction); with float32 weights it changes nothing. None drafts: rollouts are
those of the policy whatever drafts, and plain runs take half the time.
"""

from typing import Any

from experiments.claims import seeded

# Name in the table -> overrides.
WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {"rollout.quantize": "none"},
    "int8": {"rollout.quantize": "int8"},
    "fp8": {"rollout.quantize": "fp8"},
}
SHARED = {"grpo.correction": "token_truncate", "draft.kind": "none", "steps": 30}


def get_sweep() -> list[dict[str, Any]]:
    return seeded(SHARED | weights for weights in WEIGHTS.values())
