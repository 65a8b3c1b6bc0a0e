"""Sweep of rlzero_tiny over six drafts, three seeds each.

In-domain and generic heads, frozen or learning online; fresh heads that learn, with k = 3 or with the controller.
README.md has the commands that make the heads first.
"""

from typing import Any

from experiments.claims import seeded

IN_DOMAIN, GENERIC = "runs/heads/in_domain", "runs/heads/generic"
# Eight updates of 16 rows per step: per second of training, a few large ones learn half as fast.
LEARNS = {
    "draft.online": True,
    "draft.minibatches": 8,
    "draft.learning_rate": 2e-3,
    "draft.warmup": 16,
    "draft.decay_steps": 480,
}
FRESH = LEARNS | {"draft.path": "", "draft.epochs": 2, "draft.decay_steps": 960}
# Name in the table -> overrides.
DRAFTS: dict[str, dict[str, Any]] = {
    "in-domain, offline": {"draft.path": IN_DOMAIN, "draft.online": False},
    "in-domain, online": LEARNS | {"draft.path": IN_DOMAIN},
    "generic, offline": {"draft.path": GENERIC, "draft.online": False},
    "generic, online": LEARNS | {"draft.path": GENERIC},
    "random, online": FRESH | {"draft.adaptive": False},
    # 8 slots: with 128 sequences at once no head gains speed on two cores.
    "random, adaptive": FRESH | {"draft.adaptive": True, "rollout.num_slots": 8},
}


def get_sweep() -> list[dict[str, Any]]:
    return seeded(overrides | {"draft.compare_rounds": 0, "eval.every": 0} for overrides in DRAFTS.values())
