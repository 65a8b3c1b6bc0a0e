"""What goes wrong in RL without an error: each alarm reads one step's metrics, and says so once when it begins."""

import dataclasses
from collections.abc import Callable
from typing import Any

# A share of answers, of groups, of the first entropy, and how many times the usual mismatch.
UNSCORED, EQUAL, TRUNCATED, ENTROPY, GROWTH = 0.05, 0.9, 0.5, 0.1, 10.0
# nats: what two programs of one policy may differ by in bfloat16, so no growth below it is one.
SMALL_MISMATCH = 1e-3
# Weight of the newest step in the usual mismatch.
PACE = 0.1


@dataclasses.dataclass
class Alarms:
    """Of one run, which `entropy` and `mismatch` are of: the first entropy, and the mismatch as it usually is."""

    entropy: float | None = None  # nats per token
    mismatch: float | None = None  # nats per token
    on: tuple[str, ...] = ()

    def observe(self, row: dict[str, Any]) -> tuple[dict[str, float], list[str]]:
        """(alarm/* of this step, messages of the alarms that have just begun)."""
        found = {name: message for name, find in FINDERS.items() if (message := find(row, self))}
        self._learn(row)
        begun = [message for name, message in found.items() if name not in self.on]
        self.on = tuple(found)
        return {f"alarm/{name}": float(name in found) for name in FINDERS}, begun

    def _learn(self, row: dict[str, Any]) -> None:
        if self.entropy is None:
            self.entropy = row["policy/entropy"]
        now = row["rollout_vs_learner/kl"]
        if self.mismatch is None:
            self.mismatch = now
        elif not _grown(row, self):  # or it would become the usual
            self.mismatch += PACE * (now - self.mismatch)


def _acceptance(row: dict[str, Any], known: Alarms) -> str:
    # decoding/alarm.py decides, and says why.
    return "acceptance collapsed, drafting is off but for probes" if row.get("spec/alarm") else ""


def _grown(row: dict[str, Any], known: Alarms) -> str:
    now, usual = row["rollout_vs_learner/kl"], known.mismatch
    # Not a number is growth too.
    if usual is None or now <= max(GROWTH * usual, SMALL_MISMATCH):
        return ""
    return (
        f"rollouts and learner disagree: rollout_vs_learner/kl {now:.2e} nats, usually {usual:.2e}. Likely causes: weights not "
        "synchronised, or another dtype, temperature or tokenizer on one side; grpo.correction bounds the harm"
    )


def _rewards(row: dict[str, Any], known: Alarms) -> str:
    share = row["reward/unscored"] / row["rollout/count"]
    if not row.get("reward/unscored_died") and share <= UNSCORED:
        return ""
    return f"{row['reward/unscored']} of {row['rollout/count']} answers were not scored: their reward failed"


def _equal(row: dict[str, Any], known: Alarms) -> str:
    share = row["reward/equal_groups"]
    if share < EQUAL:
        return ""
    return f"{share:.0%} of the groups earn the same for every answer and teach nothing: too easy, or too hard"


def _truncated(row: dict[str, Any], known: Alarms) -> str:
    share = row["rollout/truncated"]
    return f"{share:.0%} of the answers are cut by rollout.max_response_tokens" if share > TRUNCATED else ""


def _entropy(row: dict[str, Any], known: Alarms) -> str:
    now, first = row["policy/entropy"], known.entropy
    if first is None or now >= ENTROPY * first:
        return ""
    return f"entropy fell to {now:.3f} nats a token from {first:.3f}: the policy has stopped exploring"


FINDERS: dict[str, Callable[[dict[str, Any], Alarms], str]] = {
    "acceptance": _acceptance,
    "mismatch": _grown,
    "rewards": _rewards,
    "equal_groups": _equal,
    "truncated": _truncated,
    "entropy": _entropy,
}
