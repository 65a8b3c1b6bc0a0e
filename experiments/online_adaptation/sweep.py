"""rlzero_tiny from five drafts, three seeds each: heads made in-domain and from other prompts, learning or frozen, and
a random head that learns.

The heads are made first (commands in README.md).
"""

from typing import Any

IN_DOMAIN, GENERIC = "runs/heads/in_domain", "runs/heads/generic"
# Name in the table -> overrides.
DRAFTS: dict[str, dict[str, Any]] = {
    "in-domain, offline": {"draft.path": IN_DOMAIN, "draft.online": False},
    "in-domain, online": {"draft.path": IN_DOMAIN, "draft.online": True},
    "generic, offline": {"draft.path": GENERIC, "draft.online": False},
    "generic, online": {"draft.path": GENERIC, "draft.online": True},
    "random, online": {"draft.path": "", "draft.online": True},
}


def get_sweep() -> list[dict[str, Any]]:
    return [
        overrides | {"draft.compare_rounds": 0, "seed": seed, "rollout.seed": seed}
        for seed in range(3)
        for overrides in DRAFTS.values()
    ]
