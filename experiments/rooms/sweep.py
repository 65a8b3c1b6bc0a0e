"""Sweep of RL on the rooms with frozen and online heads, in-domain and generic; the seed is that of the base too."""

from typing import Any

from experiments.rooms.bases import HEADS, SEEDS, folder

# Eight updates a step, as online_adaptation.
LEARNS = {
    "draft.online": True,
    "draft.minibatches": 8,
    "draft.learning_rate": 1e-3,
    "draft.warmup": 16,
    "draft.decay_steps": 200,
}
FROZEN = {"draft.online": False}


def get_sweep() -> list[dict[str, Any]]:
    return [
        learns
        | {
            "steps": 25,
            "draft.compare_rounds": 0,
            "eval.every": 0,
            "policy.path": folder("rooms", "base", seed),
            "draft.path": folder("rooms", kind, seed),
            "seed": seed,
            "rollout.seed": seed,
        }
        for seed in SEEDS
        for kind in HEADS.values()
        for learns in (FROZEN, LEARNS)
    ]
