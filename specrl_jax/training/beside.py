"""The learner's programs, compiled beside the first rollouts: else the first update would wait for them."""

import contextlib
import threading
from typing import Any

import jax

from specrl_jax.errors import InputError
from specrl_jax.learner.state import RunState
from specrl_jax.simulator.learner import logprob_passes
from specrl_jax.training.build import Learner
from specrl_jax.training.shapes import abstract_microbatch


class Beside:
    """A thread that compiles what the first step of a run will need, once its engine's programs leave it a core.

    A program that takes too much memory is left for the step, and it says so.
    """

    def __init__(self, learner: Learner, state: RunState, ready: threading.Event) -> None:
        """
        Args:
          state: of the run, of which the shapes are read.
          ready: set once it may begin.
        """
        self._learner: Any = learner  # its steps are announced ones
        self._ready, self._ended = ready, threading.Event()
        self._state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        self._thread = threading.Thread(target=self._compile)
        self._thread.start()

    def close(self) -> None:
        """Begin no other program, and wait for the one under way."""
        self._ended.set()
        self._ready.set()
        self._thread.join()

    def _compile(self) -> None:
        self._ready.wait()
        with contextlib.suppress(InputError):
            for step in (self._logprobs, self._policy, self._draft):
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
        if draft is None or self._ended.is_set():
            return
        rows, features = abstract_microbatch(learner)[0], learner.policy_step.gradient.result[1].features
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
