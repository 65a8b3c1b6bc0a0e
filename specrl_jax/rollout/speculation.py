"""Speculation during a run, decided on the host: draft lengths, when the draft is trained, the history to copy from."""

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specrl_jax.decoding.alarm import Alarm
from specrl_jax.decoding.controller import Controller
from specrl_jax.decoding.draft_lengths import Choice, DraftLengthPolicy, FixedLength
from specrl_jax.decoding.engine import Engine
from specrl_jax.decoding.history import History
from specrl_jax.decoding.rollouts import DecodeChunk, Rollouts
from specrl_jax.io.checkpoint_reader import HostState, of_this_version
from specrl_jax.learner.draft_step import DraftDiagnostics
from specrl_jax.learner.draft_vocab import DraftVocabulary
from specrl_jax.learner.state import RunState
from specrl_jax.planning.plan import Plan

# With a fixed length and a tripped alarm, one step in so many drafts, to see whether acceptance has recovered.
PROBE_STEPS = 8
# Prompts whose earlier rollouts are kept.
HISTORY_PROMPTS = 65_536
# Name among a checkpoint's arrays.
COUNTS = "vocabulary_counts"


class Speculation:
    """Draft lengths, alarm and history of one run.

    `observe` may be called while another thread generates with what `as_of` returned.

    Args:
      engine: of the training rollouts.
      saved: the state of an earlier process, from the run's checkpoint.
    """

    def __init__(self, plan: Plan, engine: Engine, saved: HostState | None = None) -> None:
        draft, has_weights = plan.config.draft, plan.draft is not None  # a lookup draft has none
        self._draft, self._engine, self._lock = draft, engine, threading.RLock()
        # 1 - TV is the acceptance of sampled drafts; copies that replace some of them (draft.cascade) have another.
        self._predictable = plan.config.rollout.temperature > 0 and not draft.argmax and not draft.cascade
        self._coupled = plan.config.rollout.rule == "coupled"
        self._untrained = has_weights and not draft.path
        self.controller = None
        if draft.adaptive and engine.draft_length:
            self.controller = engine.controller(begins=0 if self._untrained else engine.draft_length)
        # The acceptance of copied drafts follows the text, not the state of any weights: no alarm.
        # Where the learner does not know what to expect, the first drafted token alone: it does not depend on k.
        longest = max(draft.length, 1) if self._predictable else 1
        self.alarm = Alarm(longest=longest) if has_weights else None
        self.history = History(draft.history, HISTORY_PROMPTS) if engine.config.groups else None
        self._trains = has_weights and draft.online
        # A draft over the policy's whole vocabulary has nothing to choose.
        self._vocabulary = None
        if self._trains and plan.draft is not None and plan.draft.vocab < plan.model.vocab:
            self._vocabulary = DraftVocabulary(plan.draft, plan.model, new=not draft.path)
        self._step = 0
        if saved:
            self._restore(saved)
        self._later: deque[_Observed] = deque()  # steps that `as_of` was not asked for yet
        self._known = self.lengths  # as of the last step before those

    @property
    def observed(self) -> int:
        """Return the number of steps observed so far."""
        return self._step

    def as_of(self, observed: int) -> tuple[DraftLengthPolicy, History | None]:
        """Return draft lengths and history as they were after so many steps; calls count up.

        With a lag, rollouts are generated before or after later steps are observed, as timing has it: what was observed
        later must not change them. An adaptive controller follows the clock all the same.
        """
        with self._lock:
            while self._later and self._later[0].step <= observed:
                step = self._later.popleft()
                self._known = step.lengths
                rollouts = step.rollouts
                if self.history is not None:
                    for i in range(len(rollouts.length)):
                        prompt = rollouts.tokens[i, : rollouts.prompt_length[i]]
                        self.history.add(prompt.tolist(), [rollouts.sequence(i)])
            return self._known, self.history

    @property
    def lengths(self) -> DraftLengthPolicy:
        """Return the newest choice of draft lengths."""
        tripped = self.alarm is not None and self.alarm.tripped
        if self.controller:
            return Guarded(self.controller, tripped, self._lock)
        return FixedLength(0 if tripped and self._step % PROBE_STEPS else self._engine.draft_length)

    def lengths_for(self, engine: Engine) -> DraftLengthPolicy:
        """Return the choice for any engine.

        Costs are measured on the training engine only: others draft the longest while training rollouts draft, else 0.
        An untrained draft stays off there until the run has measured that it pays.
        """
        if engine is self._engine:
            return self.lengths
        with self._lock:
            return FixedLength(self._engine.draft_length if self._is_drafting() else 0)

    def _is_drafting(self) -> bool:
        """Return whether training rollouts draft in their largest batch."""
        if self.alarm is not None and self.alarm.tripped:
            return False
        if self.controller is None:
            return True
        chosen = self.controller.drafts(max(self.controller.sizes))
        return not self._untrained if chosen is None else chosen

    def trains_draft(self, step: int) -> bool:
        """Return whether RL step `step`, counted from 1, updates the draft."""
        return self._trains and step % self._draft.update_every == 0

    def update_vocabulary(self, state: RunState, rollouts: Rollouts) -> tuple[RunState, dict[str, float]]:
        """Return (state, metrics), a reduced draft vocabulary moved to the ids that the rollouts use where due."""
        return self._vocabulary.observe(rollouts, state) if self._vocabulary else (state, {})

    def observe(self, rollouts: Rollouts, diagnostics: DraftDiagnostics | None) -> dict[str, float]:
        """Feed one step to alarm, controller and history.

        Args:
          diagnostics: on the host, of the draft before this step's updates (with a lag an earlier draft made the
            rollouts); None: it has no weights.
        Returns:
          metrics: the predicted acceptance length at the lengths that were drafted, and whether the alarm is on.
        """
        with self._lock:
            row = self._observe(rollouts, diagnostics)
            self._later.append(_Observed(self._step, self.lengths, rollouts))
            return row

    def _observe(self, rollouts: Rollouts, diagnostics: DraftDiagnostics | None) -> dict[str, float]:
        self._step += 1
        # That of greedy rollouts and of the likeliest drafts is another.
        predicted: np.ndarray | None = None
        if diagnostics is not None and self._predictable:
            rejection = np.asarray(diagnostics.acceptance)
            predicted = coupled_acceptance(rejection) if self._coupled else rejection
        if self.alarm is None:
            return {}
        drafted, accepted = (x.sum(axis=0, dtype=np.int64) for x in (rollouts.drafted, rollouts.accepted))
        finite = diagnostics is None or diagnostics.finite
        if finite and predicted is not None and self.controller:
            self.controller.predict(predicted.tolist())
        # The alarm compares the positions that both know, where drafts were longer than the learner unrolls.
        positions = min(1 if predicted is None else len(predicted), len(drafted))
        if finite and not drafted.sum():
            return {"spec/alarm": float(self.alarm.tripped)}
        verifications, expected, row = int(drafted[0]), None if finite else float("nan"), dict[str, float]()
        if finite and predicted is not None:
            terms = extended(predicted, len(drafted)) * drafted / verifications
            row, expected = {"spec/acceptance_predicted": 1 + float(terms.sum())}, float(terms[:positions].sum())
        elif not finite:
            row = {"spec/acceptance_predicted": float("nan")}
        self.alarm.observe(float(accepted[:positions].sum() / max(verifications, 1)), expected, verifications)
        return row | {"spec/alarm": float(self.alarm.tripped)}

    def state(self) -> HostState:
        """Return everything that a checkpoint keeps, with all observed steps.

        Call it only where no rollouts are left to generate that may not know them all.
        """
        with self._lock:
            self.as_of(self._step)
            values = {
                "step": self._step,
                "controller": self.controller.state() if self.controller else None,
                "alarm": self.alarm.state() if self.alarm else None,
            }
            arrays = self.history.to_arrays() if self.history is not None else {}
        # orbax cannot save arrays of size 0.
        arrays = arrays if any(x.size for x in arrays.values()) else {}
        return HostState(values, arrays | ({COUNTS: self._vocabulary.counts} if self._vocabulary else {}))

    def _restore(self, saved: HostState) -> None:
        state = saved.values
        self._step = state["step"]
        if self.controller and state["controller"]:
            with of_this_version():
                controller = Controller.restore(state["controller"])
            # Costs measured for other shapes do not apply.
            if all(getattr(controller, x) == getattr(self.controller, x) for x in ("lengths", "sizes", "budget")):
                self.controller = controller
        if self.alarm and state["alarm"]:
            with of_this_version():
                self.alarm = Alarm.restore(state["alarm"])
        arrays = dict(saved.arrays)
        if self._vocabulary and COUNTS in arrays:
            self._vocabulary.counts = arrays.pop(COUNTS)
        # Absent where nothing was kept yet.
        if self.history is not None and "tokens" in arrays:
            self.history = History.from_arrays(self._draft.history, HISTORY_PROMPTS, arrays)


def extended(acceptance: np.ndarray, positions: int) -> np.ndarray:
    """Return the acceptance [positions] of drafts longer than `acceptance` knows, counted with all before them.

    Given those before it, each further draft is accepted as the last known one, as the controller assumes too.
    """
    above = acceptance[-2] if len(acceptance) > 1 else 1.0
    ratio = acceptance[-1] / above if above > 0 else 0.0
    return np.append(acceptance, acceptance[-1] * ratio ** np.arange(1, positions - len(acceptance) + 1))[:positions]


def coupled_acceptance(acceptance: np.ndarray) -> np.ndarray:
    """Return the least acceptance [positions] that drafts have under `coupled`, from that under `rejection`.

    A draft that `rejection` accepts with chance a = 1 - TV is accepted with at least (1 - TV) / (1 + TV) = a / (2 - a)
    (Daliri, Musco and Suresh, arXiv 2408.07978). Both count draft i together with all before it.
    """
    before = np.concatenate([[1.0], acceptance[:-1]])
    each = np.divide(acceptance, before, out=np.zeros(len(acceptance)), where=before > 0)
    return np.cumprod(each / (2 - each))


class _Observed(NamedTuple):
    """An observed step, until the rollouts that may know it are generated."""

    step: int
    lengths: DraftLengthPolicy  # after it
    rollouts: Rollouts


class Guarded(DraftLengthPolicy):
    """A controller behind a lock; while the alarm is on it drafts in probe chunks only."""

    def __init__(self, controller: Controller, tripped: bool, lock: threading.RLock) -> None:
        self._controller, self.tripped, self._lock = controller, tripped, lock

    def first(self, size: int) -> int:
        with self._lock:
            return 0 if self.tripped else self._controller.first(size)

    def choose(self, size: int, running: int, live: float) -> Choice:
        with self._lock:
            return self._controller.choose(size, running, live, off=self.tripped)

    def observe(self, chunk: DecodeChunk, accepted: np.ndarray) -> None:
        with self._lock:
            self._controller.observe(chunk, accepted)

    def replay(self, verifications: int, accepted: np.ndarray) -> None:
        with self._lock:
            self._controller.replay(verifications, accepted)

    def unmeasured(self, size: int) -> Sequence[int]:
        with self._lock:
            return self._controller.unmeasured(size)

    def calibrate(self, size: int, k: int, seconds: float, *, live: float) -> None:
        with self._lock:
            self._controller.calibrate(size, k, seconds, live=live)

    def calibrate_calls(self, size: int, seconds: float) -> None:
        with self._lock:
            self._controller.calibrate_calls(size, seconds)
