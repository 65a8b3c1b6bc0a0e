"""What the host decides about speculation while a run goes on: draft lengths, when the draft learns, what to copy."""

import threading
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from specrl_jax.decoding.alarm import Alarm
from specrl_jax.decoding.controller import Choice, Controller
from specrl_jax.decoding.engine import FixedLength, Lengths
from specrl_jax.decoding.history import History
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.io.checkpoints import Host
from specrl_jax.learner.draft_step import DraftDiagnostics
from specrl_jax.learner.draft_vocab import VocabularyWatch
from specrl_jax.learner.state import RunState
from specrl_jax.training.build import Setup

# With a fixed length and a tripped alarm, one step in so many drafts, to see whether acceptance has recovered.
PROBE_STEPS = 8
# Prompts whose earlier rollouts are kept.
HISTORY_PROMPTS = 65_536
# Name among a checkpoint's arrays.
COUNTS = "vocabulary_counts"


class Speculation:
    """Draft lengths, alarm and history of one run; `saved`: as they were, from its checkpoint.

    `observe` and `state` may be called while another thread generates with `lengths` and `history`.
    """

    def __init__(self, setup: Setup, saved: Host | None = None) -> None:
        draft = setup.settings.draft
        self._draft, self._lock = draft, threading.RLock()
        self._sampled = setup.rollout.sampling.temperature > 0
        programs, self._longest = setup.engine.programs, setup.engine.draft_length
        self._untrained = setup.draft is not None and not draft.path
        self.controller = None
        if draft.adaptive and setup.engine.draft_length:
            self.controller = Controller(programs.lengths, programs.sizes)
        # A copier's acceptance follows the text, not the state of any weights.
        # Where the learner does not know what to expect, the first drafted token alone: it does not depend on k.
        longest = max(draft.length, 1) if self._sampled else 1
        self.alarm = Alarm(longest=longest) if setup.draft else None
        self.history = History(draft.history, HISTORY_PROMPTS) if setup.engine.limits.groups else None
        self._learns = setup.draft is not None and draft.online
        # A draft over the policy's whole vocabulary has nothing to choose.
        reduced = setup.draft is not None and setup.draft.vocab < setup.model.vocab and draft.online
        self._vocabulary = VocabularyWatch(setup.model, draft.min_coverage) if reduced else None
        self._step = 0
        if saved:
            self._restore(saved)

    @property
    def lengths(self) -> Lengths:
        """For the next rollouts."""
        tripped = self.alarm is not None and self.alarm.tripped
        if self.controller:
            return _Guarded(self.controller, tripped, self._lock)
        return FixedLength(0 if tripped and self._step % PROBE_STEPS else self._longest)

    @property
    def lengths_elsewhere(self) -> Lengths:
        """For engines of other sampling, whose costs nobody measures: the longest while the run's own drafts, else 0.

        A head that was never trained is left off until the run has seen that it pays.
        """
        with self._lock:
            return FixedLength(self._longest if self._drafts() else 0)

    def _drafts(self) -> bool:
        if self.alarm is not None and self.alarm.tripped:
            return False
        if self.controller is None:
            return True
        chosen = self.controller.drafts(max(self.controller.sizes))
        return not self._untrained if chosen is None else chosen

    def draft_learns(self, step: int) -> bool:
        """Whether RL step `step`, counted from 1, updates the draft."""
        return self._learns and step % self._draft.update_every == 0

    def fit_vocabulary(self, state: RunState, rollouts: Rollouts) -> tuple[RunState, dict[str, float]]:
        """(state, metrics): the draft over the ids that rollouts use, where it has ids of its own and learns."""
        return self._vocabulary.observe(rollouts, state) if self._vocabulary else (state, {})

    def observe(self, rollouts: Rollouts, diagnostics: DraftDiagnostics | None) -> dict[str, float]:
        """One step: feeds alarm, controller and history; warns where acceptance collapsed.

        Args:
          diagnostics: on the host, the learner's forward of the draft as it was before this step's updates (with a lag the
            rollouts had an earlier one); None: it has no weights.
        Returns:
          metrics: the predicted acceptance length at the lengths that were drafted, and whether the alarm is on.
        """
        with self._lock:
            return self._observe(rollouts, diagnostics)

    def _observe(self, rollouts: Rollouts, diagnostics: DraftDiagnostics | None) -> dict[str, float]:
        self._step += 1
        predicted = None if diagnostics is None else diagnostics.acceptance
        if self.history is not None:
            for i in range(len(rollouts.length)):
                prompt = rollouts.tokens[i, : rollouts.prompt_length[i]]
                self.history.add(prompt, [rollouts.whole(i)])
        if self.alarm is None:
            return {}
        drafted, accepted = (x.sum(axis=0, dtype=np.int64) for x in (rollouts.drafted, rollouts.accepted))
        known = predicted is not None and self._sampled
        if known and self.controller:
            self.controller.predict(predicted.tolist())
        # Where drafts were longer than the learner unrolls, the positions that both know.
        positions = min(len(predicted) if known else 1, len(drafted))
        drafted, accepted = drafted[:positions], accepted[:positions]
        if not drafted.sum():
            return {"spec/alarm": float(self.alarm.tripped)}
        expected = float((predicted[:positions] * drafted).sum() / drafted[0]) if known else None
        if self.alarm.observe(float(accepted.sum() / drafted[0]), expected, int(drafted[0])):
            warnings.warn(self.alarm.message(), stacklevel=2)
        row = {"spec/acceptance_predicted": 1 + expected} if known else {}
        return row | {"spec/alarm": float(self.alarm.tripped)}

    def state(self) -> Host:
        """Everything, for a checkpoint."""
        with self._lock:
            return self._state()

    def _state(self) -> Host:
        values = {
            "step": self._step,
            "controller": self.controller.state() if self.controller else None,
            "alarm": self.alarm.state() if self.alarm else None,
        }
        arrays = self.history.to_arrays() if self.history is not None else {}
        # Nothing kept yet is nothing to save: orbax has no arrays of no size.
        arrays = arrays if any(x.size for x in arrays.values()) else {}
        return Host(values, arrays | ({COUNTS: self._vocabulary.counts} if self._vocabulary else {}))

    def _restore(self, saved: Host) -> None:
        state = saved.values
        self._step = state["step"]
        if self.controller and state["controller"]:
            controller = Controller.restore(state["controller"])
            # Costs of other shapes say nothing about these.
            if (controller.lengths, controller.sizes) == (self.controller.lengths, self.controller.sizes):
                self.controller = controller
        if self.alarm and state["alarm"]:
            self.alarm = Alarm.restore(state["alarm"])
        arrays = dict(saved.arrays)
        if self._vocabulary and COUNTS in arrays:
            self._vocabulary.counts = arrays.pop(COUNTS)
        # Empty where the run copied nothing so far.
        if self.history is not None and arrays:
            self.history = History.from_arrays(self._draft.history, HISTORY_PROMPTS, arrays)


class _Guarded:
    """A controller under an alarm: tripped, it drafts in probes only. One thread at a time."""

    def __init__(self, controller: Controller, tripped: bool, lock: threading.RLock) -> None:
        self._controller, self._tripped, self._lock = controller, tripped, lock

    def choose(self, size: int, running: int) -> Choice:
        with self._lock:
            return self._controller.choose(size, running, off=self._tripped)

    def observe(self, *chunk: Any) -> None:
        with self._lock:
            self._controller.observe(*chunk)

    def replay(self, verifications: int, accepted: np.ndarray) -> None:
        with self._lock:
            self._controller.replay(verifications, accepted)

    def unmeasured(self, size: int) -> Sequence[int]:
        with self._lock:
            return self._controller.unmeasured(size)

    def calibrate(self, size: int, k: int, seconds: float) -> None:
        with self._lock:
            self._controller.calibrate(size, k, seconds)
