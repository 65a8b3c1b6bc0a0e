"""The learner's programs, compiled beside the first rollouts: else the first update would wait for them."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from specrl_jax.errors import InputError
from specrl_jax.learner.build import Learner
from specrl_jax.learner.shapes import abstract_microbatch, placed_by_row
from specrl_jax.learner.state import RunState
from specrl_jax.rl.objectives import logprob_passes

ENOUGH_CORES = 4  # for the draft's programs beside the policy's


class Beside:
    """Threads that compile what the first step of a run will need, once its engine's programs leave them a core.

    A program that takes too much memory is left for the step, and it says so.
    """

    def __init__(self, learner: Learner, state: RunState, ready: threading.Event) -> None:
        """
        Args:
          state: of the run, of which the shapes are read.
          ready: set once they may begin.
        """
        self._learner: Any = learner  # its steps are announced ones
        self._ready, self._ended = ready, threading.Event()
        self._state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        policy, draft = [self._logprobs, self._policy], [self._draft]
        # Of few cores the rollouts need one.
        jobs = [policy, draft] if (os.cpu_count() or 1) >= ENOUGH_CORES else [policy + draft]
        self._threads = [threading.Thread(target=self._compile, args=(job,)) for job in jobs]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Begin no other program, and wait for the one under way."""
        self._ended.set()
        self._ready.set()
        for thread in self._threads:
            thread.join()

    def _compile(self, steps: Sequence[Callable[[], None]]) -> None:
        self._ready.wait()
        with contextlib.suppress(InputError):
            for step in steps:
                if self._ended.is_set():
                    return
                step()

    def _logprobs(self) -> None:
        learner, grpo = self._learner, self._learner.plan.config.grpo
        if logprob_passes(grpo.old_logprobs, grpo.kl_coef):
            learner.logprob_step.prepare(learner.merged(self._state.policy), abstract_microbatch(learner)[0])

    def _policy(self) -> None:
        update = self._learner.policy_step
        update.gradient.prepare(self._state.policy, *abstract_microbatch(self._learner))
        update.apply.prepare(self._state.policy, update.gradient.result[0])

    def _draft(self) -> None:
        learner, draft = self._learner, self._state.draft
        if draft is None:
            return
        rows, inputs = abstract_microbatch(learner)
        outputs = learner.policy_step.gradient.eval_shape(self._state.policy, rows, inputs)[1]
        features = placed_by_row(learner, outputs.features)
        learner.read_tables.prepare(self._state.policy.base, self._state.vocab_map)
        tables = learner.read_tables.result
        if not learner.plan.config.draft.online:
            learner.predict_step.prepare(draft.params, tables, features, rows)
            return
        step = learner.draft_step
        step.count.prepare(draft, rows)
        counts = jax.ShapeDtypeStruct(step.count.result.shape, step.count.result.dtype)  # it comes from the host
        step.update.gradient.prepare(draft, tables, counts, features, rows)
        step.update.apply.prepare(draft, step.update.gradient.result[0])
