"""rlzero_tiny from six drafts, three seeds each: heads made in-domain and from other prompts, learning or frozen, and
fresh heads that learn, drafting three tokens from the first step on or left to the controller.

The heads are made first (commands in README.md).
"""

from typing import Any

IN_DOMAIN, GENERIC = "runs/heads/in_domain", "runs/heads/generic"
# Eight updates a step, of 16 rows each: by seconds, a few large ones learn half as fast.
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
    # With 128 sequences at once no head earns anything on two cores.
    "random, adaptive": FRESH | {"draft.adaptive": True, "rollout.num_slots": 8},
}


def get_sweep() -> list[dict[str, Any]]:
    return [
        overrides | {"draft.compare_rounds": 0, "eval.every": 0, "seed": seed, "rollout.seed": seed}
        for seed in range(3)
        for overrides in DRAFTS.values()
    ]
