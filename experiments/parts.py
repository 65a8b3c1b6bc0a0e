"""The parts of a training run for measurements: learner, rollout engines and problems of one config."""

from typing import NamedTuple

from jax.sharding import Mesh
from ml_collections import ConfigDict

from specrl_jax.config import from_config_dict
from specrl_jax.training.build import Learner, Rollout, make_learner, make_rollout
from specrl_jax.training.plan import make_plan
from specrl_jax.training.problems import Problems, load_problems


class Parts(NamedTuple):
    learner: Learner
    rollout: Rollout
    problems: Problems


def make_parts(config: ConfigDict, mesh: Mesh) -> Parts:
    """Build the parts of a run. Compiles nothing."""
    plan = make_plan(from_config_dict(config), mesh)
    rollout = make_rollout(plan)
    return Parts(make_learner(plan), rollout, load_problems(plan.config, rollout.tokenizer))
