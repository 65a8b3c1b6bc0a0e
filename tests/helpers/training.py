"""Build and run small training runs in this process, and read what they wrote."""

import dataclasses
import json
import sys
import threading
from typing import NamedTuple

import jax
import pytest

from configs import rlzero_tiny
from specrl_jax.config import from_config_dict
from specrl_jax.config.validate import validate
from specrl_jax.errors import InputError
from specrl_jax.io.checkpoints import Checkpoints
from specrl_jax.io.metrics import read_metrics
from specrl_jax.learner.build import Learner, make_learner
from specrl_jax.planning.plan import make_plan
from specrl_jax.planning.problems import Problems, load_problems
from specrl_jax.rewards.scorer import Scorer
from specrl_jax.rollout.build import RolloutEngines, make_rollout
from specrl_jax.rollout.scoring import make_scorer
from specrl_jax.sharding import make_mesh
from specrl_jax.training import loop
from specrl_jax.training.initial import abstract_run_state
from tests.helpers.rewards import FunctionScorer

NEVER = threading.Event()


class Run(NamedTuple):
    learner: Learner
    rollout: RolloutEngines
    problems: Problems
    scorer: Scorer

    @property
    def config(self):
        return self.learner.plan.config

    @property
    def plan(self):
        return self.learner.plan


class Changed:
    """A step of the learner that is called through another function, and compiled as it was."""

    def __init__(self, step, call):
        self._step, self._call = step, call

    def __call__(self, *args):
        return self._call(*args)

    def __getattr__(self, name):
        return getattr(self._step, name)


def changed(config, **changes):
    """Set section__key=value in a ConfigDict, and return it."""
    for path, value in changes.items():
        section, _, key = path.partition("__")
        if key:
            config[section][key] = value
        else:
            config[section] = value
    return config


def make_run(config, mesh=None, scorer=None, model=None, **changes):
    """Build a run of a ConfigDict with section__key=value changed.

    The mesh is one device unless given, the policy's sizes are the config's.
    """
    config = from_config_dict(changed(config, **changes))
    mesh = mesh or make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])
    plan = make_plan(config, mesh, model)
    rollout = make_rollout(plan)
    problems = load_problems(config, rollout.tokenizer)
    scorer = scorer or make_scorer(config, problems.first_rows(rollout.tokenizer))
    return Run(make_learner(plan), rollout, problems, scorer)


def with_config(run, **changes):
    """Return the same compiled steps under a config that differs in what they do not depend on.

    A dict changes some keys of its section.
    """
    for name, value in changes.items():
        if isinstance(value, dict):
            changes[name] = dataclasses.replace(getattr(run.config, name), **value)
    config = dataclasses.replace(run.config, **changes)
    plan = dataclasses.replace(run.plan, config=config)
    return Run(
        dataclasses.replace(run.learner, plan=plan),
        dataclasses.replace(run.rollout, plan=plan),
        dataclasses.replace(run.problems, config=config),
        run.scorer,
    )


def train(run, workdir, stop=NEVER):
    """Train in `workdir`; return the metrics rows."""
    steps = loop.training_steps(
        run.learner, run.rollout, run.problems, scorer=run.scorer, workdir=str(workdir), stop=stop
    )
    for _ in steps:
        pass
    return read_metrics(str(workdir))


def drafted_run(preset, steps, mesh=None, **changes):
    """Build a run of a preset with a fresh head, which is rewarded for lower-case letters."""
    config = rlzero_tiny.get_config("smoke")
    config.steps, config.policy.preset, config.draft.compare_rounds = steps, preset, 0
    config.eval.problems, config.optimizer.learning_rate, config.optimizer.warmup = 4, 3e-3, 0
    return make_run(config, mesh, FunctionScorer(lower_case), **changes)


def policy_rows(run, workdir, steps):
    """Train; return the metrics rows of its policy updates, of which there are `steps`."""
    rows = [row for row in train(run, workdir) if "policy/loss" in row]
    assert len(rows) == steps
    return rows


class StopAfter:
    """Stands in for the event of the signal handler: set from the n-th look at it on.

    Counted are the looks of one function. A step looks four times (`leave_if`); the engine looks between two chunks and
    the loop between two programs that it compiles (`on_progress`).
    """

    def __init__(self, looks, by="leave_if"):
        self.left, self.by = looks, by

    def is_set(self):
        self.left -= sys._getframe(1).f_code.co_name == self.by
        return self.left < 0


def saved(run, workdir, step):
    """Return (state, values of the host) of a checkpoint, on the host."""
    checkpoints = Checkpoints(str(workdir), 9)
    try:
        state, host = checkpoints.restore(step, abstract_run_state(run.learner))
    finally:
        checkpoints.close()
    return jax.device_get(state), host.values


def untimed(rows):
    """Return rows without what depends on the clock."""
    timed = ("time/", "perf/", "draft/seconds", "spec/speedup", "rollout/tokens_per_second")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]


def samples(workdir, step):
    """Return the sample rollouts of a step."""
    return [json.loads(line) for line in (workdir / f"rollouts/step_{step}.jsonl").read_text().splitlines()]


def lower_case(response, answer):
    """A toy reward: the share of lower-case letters, a quarter at random."""
    return sum(c.islower() for c in response) / max(len(response), 1)


def assert_refused(changes, said):
    """The smoke config with `changes`, {section: values}, is refused with what `said` matches."""
    config = rlzero_tiny.get_config("smoke")
    for name, values in changes.items():
        config[name].update(values)
    with pytest.raises(InputError, match=said):
        validate(from_config_dict(config))
