"""The parts of a training run for measurements: learner, rollout engines and problems of one config."""

from typing import NamedTuple

from jax.sharding import Mesh
from ml_collections import ConfigDict

from specrl_jax.config import from_config_dict
from specrl_jax.drafts.weights import Weights
from specrl_jax.learner.build import Learner, make_learner
from specrl_jax.learner.state import RunState
from specrl_jax.planning.plan import make_plan
from specrl_jax.planning.problems import Problems, load_problems
from specrl_jax.rollout.build import RolloutEngines, make_rollout
from specrl_jax.training.build import build, prepare
from specrl_jax.training.initial import initial_state
from specrl_jax.training.speedup import Workload, step_workload


class Parts(NamedTuple):
    learner: Learner
    rollout: RolloutEngines
    problems: Problems


def make_parts(config: ConfigDict, mesh: Mesh) -> Parts:
    """Build the parts of a run. Compiles nothing."""
    plan = make_plan(from_config_dict(config), mesh)
    rollout = make_rollout(plan)
    return Parts(make_learner(plan), rollout, load_problems(plan.config, rollout.tokenizer))


class Prepared(NamedTuple):
    """What generates, and what is generated."""

    learner: Learner
    rollout: RolloutEngines
    state: RunState  # before training
    weights: Weights
    work: Workload


def prepared(config: ConfigDict, lengths: tuple[int, ...]) -> Prepared:
    """Return engines with programs for these draft lengths, weights, and the rollouts of a step's problems."""
    learner, rollout = build(from_config_dict(config), lengths=lengths)
    problems = load_problems(learner.plan.config, rollout.tokenizer).stream(config.grpo.prompts_per_step)
    state = initial_state(learner)
    weights = prepare(learner, rollout, state)[0]
    return Prepared(learner, rollout, state, weights, step_workload(rollout, next(problems)))
