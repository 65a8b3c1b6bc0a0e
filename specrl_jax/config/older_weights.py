"""Checks of a config whose rollouts may begin under older weights than a step learns with."""

from specrl_jax.config import Config
from specrl_jax.config.requirement import Requirement


def check_older_weights(config: Config, need: Requirement) -> None:
    """Raise InputError for keys of `pipeline`, `grpo.oversample` and `rollout.carry` that do not go together."""
    p, g, carry, update = config.pipeline, config.grpo, config.rollout.carry, config.pipeline.weight_update
    corrected = g.old_logprobs == "rollout" or g.correction != "none"
    correct = "which grpo.correction (token_truncate) or grpo.old_logprobs=rollout must make up for"
    if p.mode == "async":
        need(
            "pipeline.mode",
            p.rollout_devices or p.workers,
            "pipeline.rollout_devices says how many devices generate meanwhile, or pipeline.workers how many processes",
        )
        older = f"an older policy draws the rollouts, {correct}"
        need("pipeline.lag", update == "exact" or not p.lag or corrected, older)
    if update == "exact":
        _exact(config, need)
    _in_flight(config, need)
    need("rollout.carry", not carry or g.oversample, "a step waits for all its rollouts where grpo.oversample is 0")
    if g.oversample:
        need(
            "grpo.oversample",
            update != "exact",
            "which groups a step learns from would depend on their lengths, and no rollout would be a sample of the "
            "newest policy any more (pipeline.weight_update=exact); leave 0",
        )
        need("grpo.oversample", g.sampling_rounds == 1, f"grpo.sampling_rounds={g.sampling_rounds} must be 1")
        need("rollout.carry", not carry or corrected, f"older policies draw a part of the rollouts, {correct}")
    for key in ("tensor", "expert") if not p.rollout_devices else ():
        need(f"pipeline.{key}", getattr(p, key) == 1, "it splits pipeline.rollout_devices, which is 0")
    split = p.tensor * p.expert
    need(
        "pipeline.rollout_devices",
        not p.rollout_devices % split or not split % p.rollout_devices,
        f"it must divide by pipeline.tensor={p.tensor} x pipeline.expert={p.expert}, or that by it: the copy then "
        "takes those of several processes",
    )


def _exact(config: Config, need: Requirement) -> None:
    rule = config.rollout.rule
    need(
        "pipeline.weight_update",
        rule == "coupled" or not config.rollout.temperature,
        f"under rollout.rule={rule} a rollout is not a function of weights and noise alone; set rollout.rule=coupled",
    )
    early = "under pipeline.weight_update=exact it is how many steps begin early; set 1 or more"
    need("pipeline.lag", config.pipeline.lag, early)


def _in_flight(config: Config, need: Requirement) -> None:
    p = config.pipeline
    if p.weight_update != "inflight":
        for key in ("recompute_cache", "repeat"):
            reason = f"it is for pipeline.weight_update=inflight, not {p.weight_update}"
            need(f"pipeline.{key}", not getattr(p, key), reason)
        return
    need(
        "pipeline.weight_update",
        p.mode == "async" and p.lag,
        f"with pipeline.mode={p.mode} and pipeline.lag={p.lag} no new weights arrive while rollouts run; set async and "
        "a lag of 1 or more",
    )
    need(
        "pipeline.repeat",
        not p.repeat or config.draft.kind == "none" or not config.draft.adaptive,
        "with draft.adaptive the draft lengths, and so what a chunk does, follow the clock; set draft.adaptive=False "
        "in both runs",
    )
