"""Every check of a config that needs values only: no folder, no device, no mesh.

What needs those is checked by `planning.plan`, before any array exists.
"""

import dataclasses
from collections.abc import Callable

from specrl_jax.config import Config, DraftConfig
from specrl_jax.config.requirement import Requirement
from specrl_jax.config.schedule import check_schedule, check_workers
from specrl_jax.config.schema import UINT32, build
from specrl_jax.data.prompts import PromptFormat, split_paths
from specrl_jax.data.schemas import schema_names
from specrl_jax.drafts.base import DraftOptions
from specrl_jax.drafts.kinds import KINDS, check_options
from specrl_jax.drafts.sizes import NEW_SLOTS
from specrl_jax.errors import InputError, Mistakes
from specrl_jax.rewards.sandbox.http import is_url
from specrl_jax.rewards.sandbox.mechanisms import MECHANISMS
from specrl_jax.rewards.scorer import check_environment, check_rewards
from specrl_jax.rewards.worker import CODE

# Of all stop texts: the search for them has as many states, each two bytes a token of the vocabulary.
MOST_STOP_BYTES = 128


def validate(config: Config) -> None:
    """Raise InputError naming each key whose value is wrong, alone or beside the others.

    Examples:
      >>> from specrl_jax import Config, validate
      >>> validate(Config(steps=-1))
      Traceback (most recent call last):
      specrl_jax.errors.InputError: steps=-1: ...
    """
    build(Config, dataclasses.asdict(config))  # each value by itself
    mistakes, need = Mistakes(), Requirement(config)
    for check in (*_CHECKS, *filter(None, [_TASKS.get(config.task)])):
        with mistakes.check():
            check(config, need)
    mistakes.refuse()


def has_weights(kind: str) -> bool:
    """Return whether a draft has weights; one that is still to be chosen may."""
    return kind == "auto" or KINDS[kind].has_weights


def draft_options(draft: DraftConfig) -> DraftOptions:
    """Return the keys that choose a draft, with the sizes of a new one."""
    names = {field.name for field in dataclasses.fields(DraftOptions)} & vars(draft).keys()
    slots = NEW_SLOTS.get(draft.kind, DraftOptions.slots)
    return DraftOptions(**{name: getattr(draft, name) for name in names}, slots=slots)


def _draft(config: Config, need: Requirement) -> None:
    d, r = config.draft, config.rollout
    need("draft.argmax", not (d.argmax and d.cascade), f"draft.cascade={d.cascade} overrides samples; leave False")
    need("draft.budget", not (d.budget and r.parity), "rollout.parity verifies all drafts in one shape; leave 0")
    if d.kind == "auto":
        named = d.path or d.preset or d.dialect or d.cascade
        need("draft.kind", not named, "name the kind beside draft.path, .preset, .dialect, .cascade: auto chooses one")
        return
    check_options(draft_options(d))
    need(
        "draft.quantize",
        not KINDS[d.kind].twin or r.quantize == "none" or d.quantize == "int4",
        f"under rollout.quantize={r.quantize} the draft would be as large as the policy; set draft.quantize=int4",
    )


def _rewards(config: Config, need: Requirement) -> None:
    r, e = config.reward, config.eval
    if r.names or not config.environment.name:  # an environment may be all that rewards
        check_rewards(r.names, r.weights)
    served = is_url(r.sandbox)
    need(
        "reward.sandbox",
        not r.sandbox_python if served else r.sandbox in ("auto", *MECHANISMS),
        f"it is one of auto, {', '.join(MECHANISMS)}, or http://HOST:PORT of a server without reward.sandbox_python",
    )
    learns = config.data.path or config.task not in ("train", "pretrain")
    rows = learns and (e.path or (config.data.path and not e.task))
    need(
        "reward.name",
        CODE not in r.names or config.task not in ("train", "pretrain", "evaluate") or rows,
        "code needs rows with tests, which the built-in tasks do not have: data.path, and eval.path or eval.holdout",
    )


def _policy(config: Config, need: Requirement) -> None:
    p = config.policy
    need("policy.preset", p.preset or p.path, "sizes are needed, from policy.preset or from policy.path")
    adapts = config.task in ("train", "export", "dry_run")
    need("policy.lora_rank", adapts or not p.lora_rank, f"adapters learn in task=train, not in task={config.task}")
    whole = p.lora_rank and config.optimizer.name == "muon"
    need("optimizer.name", not whole, "it is for whole matrices: adapters (policy.lora_rank) take adamw")


def _sampling(config: Config, need: Requirement) -> None:
    texts, size = config.rollout.stop, sum(len(text.encode()) for text in config.rollout.stop)
    need(
        "rollout.stop",
        "" not in texts and size <= MOST_STOP_BYTES,
        f"its texts have {size} bytes together, at most {MOST_STOP_BYTES} are possible; an empty text would end every "
        "response at its first token",
    )


def _minibatches(config: Config, need: Requirement) -> None:
    """Check how the rollouts of a step are cut into minibatches; of rows there are as many as that takes."""
    g, d = config.grpo, config.draft
    rollouts, parts = g.prompts_per_step * g.group_size, d.minibatches if has_weights(d.kind) else 1
    drafts = f"times draft.minibatches={parts} " if parts > 1 else ""
    divides = not rollouts % (g.minibatches * parts)
    need("grpo.minibatches", divides, f"{drafts}it must divide the {rollouts} rollouts of a step")


def _objective(config: Config, need: Requirement) -> None:
    g, longest = config.grpo, config.rollout.max_response_tokens
    need(
        "grpo.old_logprobs",
        g.old_logprobs != "current" or g.epochs * g.minibatches == 1,
        f"it holds for one update per step: grpo.epochs={g.epochs} and grpo.minibatches={g.minibatches} must be 1",
    )
    need(
        "grpo.correction",
        g.correction == "none" or g.old_logprobs != "rollout",
        "it compares the rollouts' log-probs with the learner's: grpo.old_logprobs must be learner or current",
    )
    within = not longest or g.overlong_buffer <= longest
    need("grpo.overlong_buffer", within, f"at most rollout.max_response_tokens={longest} is possible")


def _optimizers(config: Config, need: Requirement) -> None:
    for section, optimizer in (("optimizer", config.optimizer), ("draft", config.draft)):
        ends = not 0 < optimizer.decay_steps <= optimizer.warmup
        need(f"{section}.decay_steps", ends, f"it must be above {section}.warmup={optimizer.warmup}")


def _environment(config: Config, need: Requirement) -> None:
    if not config.environment.name:
        return
    check_environment(config.environment.name)
    need = Requirement(config, f" beside environment.name={config.environment.name}")
    single = {
        "task": config.task not in ("generate", "benchmark", "draft_pretrain"),
        "pipeline.schedule": config.pipeline.schedule in ("sync", "async"),
        "pipeline.workers": not config.pipeline.workers,
        "policy.router_replay": not config.policy.router_replay,
        "grpo.oversample": not config.grpo.oversample,
    }
    for key, holds in single.items():
        need(key, holds, "it is for rollouts of single turns; leave it out")
    need("data.chat", config.data.chat == "never", "the environment makes the messages; leave never")


def _data(config: Config, need: Requirement) -> None:
    d = config.data
    for section, own in (("data", d), ("eval", config.eval)):
        if own.template or section == "data":
            PromptFormat(own.template, key=f"{section}.template")
        if own.path:
            names, key = (own.schema, f"{section}.schema") if own.schema else (d.schema, "data.schema")
            schema_names(names, len(split_paths(own.path, f"{section}.path")), key)
    files = len(split_paths(d.path, "data.path")) if d.path else 0
    if d.path and d.weights and len(d.weights) != files:
        raise InputError(f"data.weights: {len(d.weights)} weights for {files} files")
    measured = (d.path or config.task not in ("train", "benchmark")) and not config.environment.name
    need(
        "rollout.max_prompt_tokens",
        measured or config.rollout.max_prompt_tokens,
        "it is measured, and built-in tasks and environments have no end: give a number, or data.path alone",
    )


def _mesh(config: Config, need: Requirement) -> None:
    if len(open_axes := [f"mesh.{axis}=-1" for axis, size in vars(config.mesh).items() if size == -1]) > 1:
        raise InputError(f"{' and '.join(open_axes)}: only one axis can take the rest of the devices")


def _train(config: Config, need: Requirement) -> None:
    g, r = config.grpo, config.rollout
    compared = f"the advantage (grpo.advantage={g.advantage}) compares the responses to a prompt"
    need("grpo.group_size", g.group_size > 1, f"at least 2 is needed, since {compared}")
    rollouts = g.sampling_rounds * g.prompts_at_once * g.group_size
    most = (UINT32 + 1) // rollouts - 1
    need(
        "steps",
        config.steps <= most,
        f"at most {most} steps of {rollouts} rollouts (grpo.sampling_rounds x (grpo.prompts_per_step + "
        "grpo.oversample) x grpo.group_size) have noise of their own",
    )
    need(
        "rollout.temperature",
        r.temperature and r.top_k != 1,
        f"with rollout.top_k={r.top_k} all responses to a prompt would be its greedy one, so no reward differs; leave "
        "1.0 for the temperature and 0 for top_k (eval.temperature may be 0)",
    )


def _pretrain(config: Config, need: Requirement) -> None:
    for key, holds in (("draft.kind", config.draft.kind == "none"), ("data.path", not config.data.path)):
        need(key, holds, "task=pretrain makes a policy from a built-in task (task=draft_pretrain a head); leave it out")


def _drafts(config: Config, need: Requirement) -> None:
    """Check the draft of a task that measures what it saves."""
    d = config.draft
    kinds = [
        name for name, kind in KINDS.items() if kind.has_weights or (config.task == "benchmark" and name != "none")
    ]
    need(
        "task",
        d.length and d.kind in (*kinds, "auto"),
        f"it needs a draft: set draft.length to 1 or more, and draft.kind to {' or '.join(kinds)}",
    )
    lengths = config.benchmark.lengths if config.task == "benchmark" else ()
    beyond = [k for k in lengths if k > d.length]
    need("benchmark.lengths", not beyond, f"each is between 0 and draft.length={d.length}")


def _dry_run(config: Config, need: Requirement) -> None:
    is_sized = config.dry_run.devices or -1 not in vars(config.mesh).values()
    need("dry_run.devices", is_sized, "the number of devices to compile for is needed, such as 1 or 8")


Check = Callable[[Config, Requirement], None]
_CHECKS: tuple[Check, ...] = (
    *(_draft, _rewards, _environment, _policy, _sampling, _minibatches, _objective),
    *(_optimizers, check_schedule, check_workers, _data, _mesh),
)
# What a task needs beside what all of them need.
_TASKS: dict[str, Check] = {
    "train": _train,
    "pretrain": _pretrain,
    "draft_pretrain": _drafts,
    "benchmark": _drafts,
    "dry_run": _dry_run,
}
