"""Checks of pipeline.schedule, and of the devices and processes that generate beside a learner."""

from specrl_jax.config import Config
from specrl_jax.config.requirement import Requirement


def check_schedule(config: Config, need: Requirement) -> None:
    """Raise InputError for keys that do not go with `pipeline.schedule`."""
    p, g, r = config.pipeline, config.grpo, config.rollout
    need(
        "pipeline.schedule",
        not p.asynchronous or bool(p.rollout_devices) != bool(p.workers),
        "either pipeline.rollout_devices says how many devices generate meanwhile, or pipeline.workers how many "
        "processes",
    )
    older = p.schedule in ("inflight", "partial") or (p.schedule == "async" and p.lag > 0)
    other = r.quantize != "none" and config.task in ("train", "dry_run")
    need(
        "grpo.correction",
        g.correction != "none" or not (other or (older and g.old_logprobs != "rollout")),
        f"other policies than the learner's draw rollouts (pipeline.schedule={p.schedule}, rollout.quantize="
        f"{r.quantize}); set token_truncate, or for older ones grpo.old_logprobs=rollout",
    )
    need = Requirement(config, f" beside pipeline.schedule={p.schedule}")
    ahead = "no rollout would begin early, or take newer weights; set 1 or more"
    need("pipeline.lag", p.lag or p.schedule not in ("inflight", "exact"), ahead)
    coupled = p.schedule != "exact" or r.rule == "coupled" or not r.temperature
    need("rollout.rule", coupled, "its rollouts are no function of weights and noise alone; set coupled")
    for key in ("recompute_cache", "repeat"):
        need(f"pipeline.{key}", p.schedule == "inflight" or not getattr(p, key), "it is for inflight; leave it out")
    follows = p.repeat and config.draft.kind != "none" and config.draft.adaptive
    need("draft.adaptive", not follows, "draft lengths follow the clock, which pipeline.repeat cannot; set False")
    chosen = p.schedule == "exact" or p.workers or g.sampling_rounds > 1
    need(
        "grpo.oversample",
        not (g.oversample and chosen),
        "a step then learns from the rollouts that end first: not exact, not of pipeline.workers, and in one of "
        "grpo.sampling_rounds; leave 0",
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
    sizes = {"rollout.num_slots": config.rollout.num_slots, "mesh.tensor": config.mesh.tensor}
    for key, size in (sizes | {"mesh.expert": config.mesh.expert}).items():
        need(key, size > 0, "the learner does not know their devices; set a number")
