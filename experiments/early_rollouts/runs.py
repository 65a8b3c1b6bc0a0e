"""The versions of the policy of an RL run, and the engine that draws and verifies their rollouts."""

import dataclasses
import os

import jax
import jax.numpy as jnp

from configs import rlzero_tiny
from experiments.rooms import bases
from specrl_jax.config import from_config_dict
from specrl_jax.core import Params
from specrl_jax.drafts.weights import Weights
from specrl_jax.errors import InputError
from specrl_jax.io.checkpoints import Checkpoints
from specrl_jax.learner.build import Learner
from specrl_jax.learner.state import RunState
from specrl_jax.planning.problems import load_problems
from specrl_jax.rollout.build import RolloutEngines
from specrl_jax.training.build import build, prepare
from specrl_jax.training.initial import abstract_run_state
from specrl_jax.training.speedup import Workload, step_workload

STEPS = 9  # of each run
RATES = (1e-4, 1e-5)  # at which they learned
FOLDER = "runs"


@dataclasses.dataclass(eq=False)
class Versions:
    """A run whose checkpoints are all kept."""

    learner: Learner
    rollout: RolloutEngines
    workloads: list[Workload]  # the problems of its steps
    checkpoints: Checkpoints

    def __post_init__(self) -> None:
        self._read: dict[int, tuple[Weights, Params]] = {}

    def weights(self, step: int) -> Weights:
        """Return the rollout weights after a step; read once."""
        return self._version(step)[0]

    def policy(self, step: int) -> Params:
        """Return the policy after a step in the learner's layout and the rollout dtype, which its products take too."""
        return self._version(step)[1]

    def _version(self, step: int) -> tuple[Weights, Params]:
        if step not in self._read:
            state: RunState = self.checkpoints.restore(step, abstract_run_state(self.learner))[0]
            dtype = jnp.dtype(self.learner.plan.config.policy.dtype)
            params = self.learner.merged(state.policy)
            rounded = jax.tree.map(lambda x: x.astype(dtype), params)
            self._read[step] = prepare(self.learner, self.rollout, state)[0], rounded
        return self._read[step]


def run_name(rate: float, seed: int) -> str:
    """Return the folder of a run in that of all runs; README.md has the command."""
    return f"early_{rate:.0e}_{seed}"


def open_versions(rate: float, seed: int, dtype: str = "float32", folder: str = FOLDER) -> Versions:
    """Open a finished run of configs/rlzero_tiny.py:rooms.

    Args:
      rate: at which it learned.
      seed: of the run, and of the base and head that it began with.
      dtype: of the rollout weights.
      folder: of the run, the base and the head.
    Raises:
      InputError: the run is not finished.
    """
    workdir = os.path.join(folder, run_name(rate, seed))
    if not os.path.isdir(os.path.join(workdir, "checkpoints", str(STEPS))):
        raise InputError(
            f"{workdir}: no checkpoint of step {STEPS}; experiments/early_rollouts/README.md has its command"
        )
    config = rlzero_tiny.get_config("rooms")
    config.seed = config.rollout.seed = seed
    config.policy.path, config.draft.path = (
        os.path.join(folder, os.path.basename(bases.folder("rooms", kind, seed))) for kind in ("base", "head")
    )
    config.rollout.rule, config.rollout.num_slots, config.policy.dtype = "coupled", 16, dtype
    config.grpo.prompts_per_step = 16  # 128 rollouts a step
    config.pipeline.schedule = "exact"
    learner, rollout = build(from_config_dict(config))
    stream = load_problems(learner.plan.config, rollout.tokenizer).stream(config.grpo.prompts_per_step)
    workloads = [step_workload(rollout, next(stream)) for _ in range(STEPS)]
    return Versions(learner, rollout, workloads, Checkpoints(workdir, STEPS))
