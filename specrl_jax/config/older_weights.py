"""Checks of a config whose rollouts may begin under older weights than a step learns with."""

from specrl_jax.config import Config, GRPOConfig
from specrl_jax.errors import InputError


def check_older_weights(config: Config) -> None:
    """Raise InputError for keys of `pipeline`, `grpo.oversample` and `rollout.carry` that do not go together."""
    p, g = config.pipeline, config.grpo
    if p.mode == "async":
        if not p.rollout_devices and not p.workers:
            raise InputError(
                "pipeline.mode=async: pipeline.rollout_devices says how many devices generate meanwhile, or "
                "pipeline.workers how many processes"
            )
        if p.weight_update != "exact" and p.lag and not _makes_up_for_age(g):
            raise InputError(
                f"pipeline.lag={p.lag}: an older policy draws the rollouts, which grpo.correction (token_truncate) or "
                "grpo.old_logprobs=rollout must make up for"
            )
    if p.weight_update == "exact":
        _exact(config)
    _in_flight(config)
    _oversampling(config)
    if not p.rollout_devices:
        for key, value in (("tensor", p.tensor), ("expert", p.expert)):
            if value != 1:
                raise InputError(f"pipeline.{key}={value} splits pipeline.rollout_devices, which is 0")
    if p.rollout_devices % (split := p.tensor * p.expert) and split % p.rollout_devices:
        raise InputError(
            f"pipeline.rollout_devices={p.rollout_devices} must divide by pipeline.tensor={p.tensor} x "
            f"pipeline.expert={p.expert}, or that by it: the copy then takes those of several processes"
        )


def _exact(config: Config) -> None:
    lag, rule = config.pipeline.lag, config.rollout.rule
    if rule != "coupled" and config.rollout.temperature:
        raise InputError(
            f"pipeline.weight_update=exact: under rollout.rule={rule} a rollout is not a function of weights and noise "
            "alone; set rollout.rule=coupled"
        )
    if not lag:
        raise InputError(
            "pipeline.lag=0: under pipeline.weight_update=exact it is how many steps begin early; set 1 or more"
        )


def _makes_up_for_age(g: GRPOConfig) -> bool:
    """Return whether the loss corrects for rollouts of older weights."""
    return g.old_logprobs == "rollout" or g.correction != "none"


def _in_flight(config: Config) -> None:
    p = config.pipeline
    if p.weight_update != "inflight":
        for key, value in (("recompute_cache", p.recompute_cache), ("repeat", p.repeat)):
            if value:
                raise InputError(
                    f"pipeline.{key}={value} is for pipeline.weight_update=inflight, not {p.weight_update}"
                )
    elif p.mode != "async" or not p.lag:
        raise InputError(
            f"pipeline.weight_update=inflight: with pipeline.mode={p.mode} and pipeline.lag={p.lag} no new weights "
            "arrive while rollouts run; set async and a lag of 1 or more"
        )
    elif p.repeat and config.draft.kind != "none" and config.draft.adaptive:
        raise InputError(
            "pipeline.repeat: with draft.adaptive the draft lengths, and so what a chunk does, follow the clock; set "
            "draft.adaptive=False in both runs"
        )


def _oversampling(config: Config) -> None:
    g, carry = config.grpo, config.rollout.carry
    if carry and not g.oversample:
        raise InputError(f"rollout.carry={carry}: a step waits for all its rollouts where grpo.oversample is 0")
    if not g.oversample:
        return
    if config.pipeline.weight_update == "exact":
        raise InputError(
            f"grpo.oversample={g.oversample}: which groups a step learns from would depend on their lengths, and no "
            "rollout would be a sample of the newest policy any more (pipeline.weight_update=exact); leave 0"
        )
    if g.sampling_rounds > 1:
        raise InputError(f"grpo.oversample={g.oversample}: grpo.sampling_rounds={g.sampling_rounds} must be 1")
    if carry and not _makes_up_for_age(g):
        raise InputError(
            f"rollout.carry={carry}: older policies draw a part of the rollouts, which grpo.correction "
            "(token_truncate) or grpo.old_logprobs=rollout must make up for"
        )
