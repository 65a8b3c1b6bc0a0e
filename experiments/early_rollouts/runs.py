"""The versions of the policy of one RL run, and the engine that draws and verifies their rollouts."""

import dataclasses

from configs import rlzero_tiny
from specrl_jax.config import from_config_dict
from specrl_jax.drafts.weights import Weights
from specrl_jax.io.checkpoints import Checkpoints
from specrl_jax.learner.state import RunState
from specrl_jax.training.build import Learner, Rollout, build, prepare
from specrl_jax.training.initial import abstract_run_state
from specrl_jax.training.problems import load_problems
from specrl_jax.training.speedup import Workload, step_workload

STEPS = 9  # of each run
# Learning rate -> the run's workdir; README.md has the commands.
RUNS = {1e-4: "runs/early_1e-4", 1e-5: "runs/early_1e-5"}


@dataclasses.dataclass(eq=False)
class Versions:
    """A run whose checkpoints are all kept."""

    learner: Learner
    rollout: Rollout
    workloads: list[Workload]  # the problems of its steps
    checkpoints: Checkpoints

    def __post_init__(self) -> None:
        self._read: dict[int, Weights] = {}

    def weights(self, step: int) -> Weights:
        """Return the rollout weights after a step; read once."""
        if step not in self._read:
            state: RunState = self.checkpoints.restore(step, abstract_run_state(self.learner))[0]
            self._read[step] = prepare(self.learner, self.rollout, state)[0]
        return self._read[step]


def open_versions(workdir: str, dtype: str = "float32") -> Versions:
    """Open a finished run of configs/rlzero_tiny.py:rooms; `dtype` of the rollout weights."""
    config = rlzero_tiny.get_config("rooms")
    config.rollout.rule, config.rollout.num_slots, config.policy.dtype = "coupled", 16, dtype
    config.grpo.prompts_per_step = 16  # 128 rollouts a step
    config.pipeline.update = "exact"
    learner, rollout = build(from_config_dict(config))
    stream = load_problems(learner.plan.config, rollout.tokenizer).stream(config.grpo.prompts_per_step)
    workloads = [step_workload(rollout, next(stream)) for _ in range(STEPS)]
    return Versions(learner, rollout, workloads, Checkpoints(workdir, STEPS))
