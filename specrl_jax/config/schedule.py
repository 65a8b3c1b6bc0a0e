"""Checks of pipeline.schedule, and of the processes and devices that generate beside a learner."""

from specrl_jax.config import Config
from specrl_jax.config.requirement import Requirement


def check_schedule(config: Config, need: Requirement) -> None:
    """Raise InputError for keys that do not go with `pipeline.schedule`."""
    p, g, r = config.pipeline, config.grpo, config.rollout
    beside = Requirement(config, f" beside pipeline.schedule={p.schedule}")
    generates = bool(p.rollout_devices) != bool(p.workers)
    need(
        "pipeline.schedule",
        generates or not p.asynchronous,
        "either pipeline.rollout_devices says how many devices generate meanwhile, or pipeline.workers how many "
        "processes",
    )
    older = {"async": p.lag > 0, "inflight": True, "partial": True}.get(p.schedule, False)
    need(
        "pipeline.schedule",
        not older or g.old_logprobs == "rollout" or g.correction != "none",
        "older policies draw rollouts, which grpo.correction (token_truncate) or grpo.old_logprobs=rollout must make "
        "up for",
    )
    ahead = "no rollout begins early, and none sees newer weights; set 1 or more"
    beside("pipeline.lag", p.lag or p.schedule not in ("inflight", "exact"), ahead)
    beside(
        "rollout.rule",
        p.schedule != "exact" or r.rule == "coupled" or not r.temperature,
        "its rollouts are no function of weights and noise alone; set coupled",
    )
    for key in ("recompute_cache", "repeat"):
        beside(f"pipeline.{key}", p.schedule == "inflight" or not getattr(p, key), "it is for inflight; leave it out")
    repeats = p.repeat and config.draft.kind != "none"
    beside("draft.adaptive", not (repeats and config.draft.adaptive), "pipeline.repeat repeats no clock; set False")
    beside("grpo.oversample", g.oversample or p.schedule != "partial", "it is what a step begins beyond its own; set 1")
    # A step would learn from those that are short, or wait for processes that cannot tell what they have.
    chosen = p.schedule == "exact" or p.workers or config.environment.name or g.sampling_rounds > 1
    beside(
        "grpo.oversample",
        not (g.oversample and chosen),
        "a step then learns from the rollouts that end first: not exact, not of pipeline.workers or an environment, in "
        "one of grpo.sampling_rounds; leave 0",
    )


def check_workers(config: Config, need: Requirement) -> None:
    """Raise InputError for keys that do not go with `pipeline.workers`, or that need some."""
    p = config.pipeline
    # Both commands have the same config.
    reason = "pipeline.workers=0, so the learner asks for none; set it in both commands"
    need("task", config.task != "rollout" or p.workers, reason)
    if not p.workers:
        return
    need = Requirement(config, f" beside pipeline.workers={p.workers}")
    taken = p.schedule in ("async", "exact")
    need(
        "pipeline.schedule", taken, "they generate while the learner learns, and take weights between calls; set async"
    )
    need("environment.name", not config.environment.name, "they answer single turns")
    sizes = {"rollout.num_slots": config.rollout.num_slots, "mesh.tensor": config.mesh.tensor}
    for key, size in (sizes | {"mesh.expert": config.mesh.expert}).items():
        need(key, size > 0, "the learner does not know their devices; set a number")
