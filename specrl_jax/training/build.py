"""Both halves of a run, the learner and the engines that generate, and the weights that go from one to the other."""

import jax
from jax.sharding import Mesh

from specrl_jax.config import Config
from specrl_jax.decoding.rollouts import WeightsVersion
from specrl_jax.drafts.weights import Weights
from specrl_jax.learner.build import Learner, make_learner
from specrl_jax.learner.state import RunState
from specrl_jax.planning.plan import make_plan, open_mesh
from specrl_jax.rollout.build import RolloutEngines, make_rollout


def build(
    config: Config, mesh: Mesh | None = None, lengths: tuple[int, ...] | None = None
) -> tuple[Learner, RolloutEngines]:
    """Plan a run and build both halves; `mesh`: the learner's, None: that of the config; `lengths`: see make_rollout.

    Raises InputError.
    """
    plan = make_plan(config, mesh or open_mesh(config))
    return make_learner(plan), make_rollout(plan, lengths)


def prepare(learner: Learner, rollout: RolloutEngines, state: RunState) -> tuple[Weights, WeightsVersion]:
    """Compute the engines' weights from the learner's state, wait until they are ready, and return their version."""
    draft = state.draft.params if state.draft else None
    weights = rollout.prepare_step(learner.merged(state.policy), draft, state.vocab_map)
    jax.block_until_ready(weights)
    version = WeightsVersion(
        weights_version=int(state.policy.step),
        draft_version=int(state.draft.step) if state.draft else 0,
        checksum=int(weights.checksum),
    )
    return weights, version
