"""The scorer of a run."""

from collections.abc import Sequence

from specrl_jax.config import Config, RewardConfig
from specrl_jax.rewards.code.reward import CodeOptions
from specrl_jax.rewards.messages import RewardInput
from specrl_jax.rewards.pool import WorkerOptions
from specrl_jax.rewards.sandbox.choose import choose
from specrl_jax.rewards.sandbox.limits import Limits
from specrl_jax.rewards.scorer import OwnAnswer, Scorer, make_environment
from specrl_jax.rewards.worker import CODE


def make_scorer(config: Config, first: Sequence[RewardInput], own: Sequence[OwnAnswer] = ()) -> Scorer:
    """Return the scorer of reward.* and environment.*; its processes start when it does.

    Raises InputError for a reward or environment that cannot be loaded, or a reward that cannot score one of the rows
    `first` or does not pay 1 for one of `own`, and where the reward `code` has no sandbox.
    """
    r, e = config.reward, config.environment
    code = _code_options(r) if CODE in r.names else None
    environment = make_environment(e.name, WorkerOptions(r.workers, r.timeout, r.memory))
    scorer = Scorer(
        r.names,
        r.weights,
        workers=WorkerOptions(r.workers, r.timeout, r.memory),
        correct_from=r.correct_from,
        code=code,
        environment=environment,
    )
    try:
        scorer.try_rows(first)
        scorer.require_own(own)
    except BaseException:
        scorer.close()
        raise
    return scorer


def _code_options(reward: RewardConfig) -> CodeOptions:
    """Choose the sandbox of programs, by running one, and say which it is."""
    r = reward
    sandbox = choose(r.sandbox, r.sandbox_python, limits=Limits())
    print(sandbox.line())
    return CodeOptions(sandbox, r.pays_share, r.timeout)
