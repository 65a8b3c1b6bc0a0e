"""Monitoring of a run on the host: alarms for what goes wrong in RL without an error, and skipped updates.

Each alarm reads one step's metrics, and is reported once when it begins.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from specrl_jax.decoding.engine import Engine
from specrl_jax.errors import RunFailed
from specrl_jax.io.checkpoint_reader import HostState
from specrl_jax.io.checkpoints import Checkpoints
from specrl_jax.planning.plan import Plan
from specrl_jax.rollout.speculation import Speculation

# Shares of responses, of groups and of the first entropy; and the growth of KL over its usual value.
UNSCORED, EQUAL, TRUNCATED, ENTROPY, GROWTH = 0.05, 0.9, 0.5, 0.1, 10.0
# Growth of the weights' norm since the run began. An update of Adam moves a weight by about its learning rate: at 1e-6,
# doubling weights of 0.02 takes 20,000 updates in one direction.
WEIGHTS = 10.0
# nats: two programs of one policy may differ by this in bfloat16, so growth below it is none.
SMALL_KL = 1e-3
# Updates in a row without a finite gradient that end a run.
MOST_SKIPPED = 10
# Weight of the newest step in the usual KL.
PACE = 0.1

NAMES = ("acceptance", "mismatch", "rewards", "equal_groups", "truncated", "entropy", "weights")
Row = Mapping[str, float]


@dataclasses.dataclass
class Alarms:
    """The alarms of one run, with the values that they compare with."""

    entropy: float | None = None  # of the first step, nats per token
    mismatch: float | None = None  # the usual rollout_vs_learner/kl, nats per token
    growth: float = 1.0  # of the weights' norm, up to the last step
    on: tuple[str, ...] = ()

    def observe(self, row: Row) -> tuple[dict[str, float], dict[str, str]]:
        """Return (alarm/* of this step, the message of each alarm that begins)."""
        found = dict(find_alarms(row, self))
        self._update(row, usual="mismatch" not in found)
        begun = {name: message for name, message in found.items() if name not in self.on}
        self.on = tuple(found)
        return {f"alarm/{name}": float(name in found) for name in NAMES}, begun

    def _update(self, row: Row, usual: bool) -> None:
        if self.entropy is None:
            self.entropy = row["policy/entropy"]
        self.growth *= row["policy/weight_growth"]
        now = row["rollout_vs_learner/kl"]
        if self.mismatch is None:
            self.mismatch = now
        elif usual:  # or growth would become the usual
            self.mismatch += PACE * (now - self.mismatch)


def find_alarms(row: Row, known: Alarms) -> Iterator[tuple[str, str]]:
    """Yield the name and the message of each alarm that a step's row gives. A value that is not a number rings."""
    if row.get("spec/alarm"):  # decided by decoding/alarm.py, which reports why
        yield "acceptance", "speculation is off apart from probes"
    kl, usual = row["rollout_vs_learner/kl"], known.mismatch
    if usual is not None and not kl <= max(GROWTH * usual, SMALL_KL):
        yield (
            "mismatch",
            f"rollouts and learner disagree: rollout_vs_learner/kl {kl:.2e} nats, usually {usual:.2e}. Likely causes: "
            "weights not synchronised, or another dtype, temperature or tokenizer on one side; grpo.correction bounds "
            "it",
        )
    unscored, count = row["reward/unscored"], row["rollout/count"]
    if row.get("reward/unscored_died") or unscored / count > UNSCORED:
        yield "rewards", f"{unscored} of {count} responses were not scored: their reward failed"
    if (equal := row["reward/equal_groups"]) >= EQUAL:
        why = "so no gradient: too easy, or too hard"
        yield "equal_groups", f"{equal:.0%} of the groups have no reward variance, {why}"
    if (cut := row["rollout/truncated"]) > TRUNCATED:
        yield "truncated", f"{cut:.0%} of the responses are cut by rollout.max_response_tokens"
    now, first = row["policy/entropy"], known.entropy
    if first is not None and not now >= ENTROPY * first:
        fell = f"entropy fell to {now:.3f} nats a token from {first:.3f}"
        yield "entropy", f"{fell}: the policy has stopped exploring"
    growth = known.growth * row["policy/weight_growth"]
    if not growth <= WEIGHTS:  # which does not pass: what the weights knew is gone
        yield (
            "weights",
            f"the policy's weights are {growth:.3g} times as large as at the start: what it knew is lost. "
            "optimizer.learning_rate is far too large",
        )


class Monitor:
    """The host's state of a run beside its arrays: speculation, alarms, and updates skipped in a row.

    Args:
      engine: of the training rollouts.
      host: its state in the run's checkpoint.
    """

    def __init__(self, plan: Plan, engine: Engine, host: HostState | None = None) -> None:
        values = host.values if host else {}
        self.speculation = Speculation(plan, engine, HostState(values["speculation"], host.arrays) if host else None)
        self._alarms = Alarms(**values.get("alarms", {}))
        self._skipped = values.get("skipped", 0)

    @property
    def skipping(self) -> bool:
        """Return whether the last update was skipped."""
        return self._skipped > 0

    def state(self, position: Mapping[str, object]) -> HostState:
        """Return what a checkpoint keeps, with the data position."""
        saved = self.speculation.state()
        values = {"position": position, "speculation": saved.values, "skipped": self._skipped}
        return HostState(values | {"alarms": dataclasses.asdict(self._alarms)}, saved.arrays)

    def observe(self, row: Row, skipped: Sequence[bool], checkpoints: Checkpoints) -> tuple[dict[str, float], str]:
        """Return (alarm/* of a step, the names of those that are on with the message of each that begins).

        Raises RunFailed where too many updates in a row were skipped.

        Args:
          skipped: of each update of the step, in order.
        """
        alarms, begun = self._alarms.observe(row)
        if "acceptance" in begun and self.speculation.alarm is not None:
            begun["acceptance"] = self.speculation.alarm.message()
        most = 0
        for update in skipped:
            self._skipped = self._skipped + 1 if update else 0
            most = max(most, self._skipped)
        if most >= MOST_SKIPPED:
            raise RunFailed(
                f"step {row['step']}: {most} updates in a row had no finite loss or gradient, at most "
                f"{MOST_SKIPPED - 1} may; {checkpoints.kept()}"
            )
        shown = [f"{name} ({begun[name]})" if name in begun else name for name in self._alarms.on]
        return alarms, f"ALARM: {', '.join(shown)}" if shown else ""
