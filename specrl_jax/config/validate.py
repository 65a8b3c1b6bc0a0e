"""Every check of a config that needs values only: no folder, no device, no mesh.

What needs those is checked by `training.plan`, before any array exists.
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
from specrl_jax.rewards.code.reward import MARGIN
from specrl_jax.rewards.sandbox.http import is_url
from specrl_jax.rewards.sandbox.mechanisms import MECHANISMS
from specrl_jax.rewards.scorer import check_environment, check_rewards
from specrl_jax.rewards.worker import CODE

# Lowest temperature above 0, so that logits divided by it stay finite and accurate.
COLDEST = 0.01
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
    d, r, learns = config.draft, config.rollout, has_weights(config.draft.kind) and config.draft.online
    beside = f"draft.cascade={d.cascade}" if has_weights(d.kind) else f"draft.kind={d.kind}"
    alone = has_weights(d.kind) and not d.cascade
    need("draft.argmax", alone or not d.argmax, f"it is for drafts with weights alone, not beside {beside}")
    need("draft.budget", not (d.budget and r.parity), "rollout.parity verifies all drafts in one shape; leave 0")
    within = d.kind != "none" and 0 < r.num_slots * d.length <= d.budget
    drafts = f"rollout.num_slots={r.num_slots} x draft.length={d.length}"
    need("draft.budget", not within, f"{drafts} drafts are all within it; leave 0")
    need("draft.replay_updates", learns or not d.replay_updates, "there is no draft that learns; leave 0")
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
    if config.reward.names or not config.environment.name:  # an environment may be all that rewards
        check_rewards(config.reward.names, config.reward.weights)


def _programs(config: Config, need: Requirement) -> None:
    r, e = config.reward, config.eval
    served = is_url(r.sandbox)
    known = served or r.sandbox in ("auto", *MECHANISMS)
    need("reward.sandbox", known, f"it is one of auto, {', '.join(MECHANISMS)}, or http://HOST:PORT of a server")
    if CODE not in r.names:
        return
    need(
        "reward.sandbox_python", not (served and r.sandbox_python), "the server of reward.sandbox has its own; leave ''"
    )
    need("reward.timeout", r.timeout > MARGIN, f"programs are ended {MARGIN:g} s before; more is needed")
    if config.task in ("train", "pretrain", "evaluate"):
        needed = "reward.name=code needs rows with tests, which the built-in tasks do not have"
        need("data.path", config.task == "evaluate" or config.data.path, needed)
        need("eval.path", e.path or (config.data.path and not e.task), needed)


def _policy(config: Config, need: Requirement) -> None:
    p = config.policy
    need("policy.preset", p.preset or p.path, "sizes are needed, from policy.preset or from policy.path")
    if p.lora_rank:
        adapts = config.task in ("train", "export", "dry_run")
        need("policy.lora_rank", adapts, f"adapters learn in task=train, not in task={config.task}")
        whole = config.optimizer.name == "muon"
        need("optimizer.name", not whole, "it is for whole matrices: adapters (policy.lora_rank) take adamw")


def _sampling(config: Config, need: Requirement) -> None:
    for section, inherited in (("rollout", ""), ("eval", "-1 (rollout.temperature), ")):
        warm = (value := getattr(config, section).temperature) >= COLDEST or value in (0, -1)
        need(f"{section}.temperature", warm, f"{inherited}0 (greedy), or {COLDEST} to 100 is needed")
    texts = config.rollout.stop
    need("rollout.stop", "" not in texts, "an empty text would end every response at its first token")
    size = sum(len(text.encode()) for text in texts)
    most = f"its texts have {size} bytes together, at most {MOST_STOP_BYTES} are possible"
    need("rollout.stop", size <= MOST_STOP_BYTES, most)


def _minibatches(config: Config, need: Requirement) -> None:
    """Check how the rollouts of a step are cut into minibatches; of rows there are as many as that takes."""
    g, draft = config.grpo, config.draft
    rollouts = g.prompts_per_step * g.group_size
    need("grpo.minibatches", not rollouts % g.minibatches, f"it must divide the {rollouts} rollouts of a step")
    rollouts //= g.minibatches
    divides = not (has_weights(draft.kind) and rollouts % draft.minibatches)
    need("draft.minibatches", divides, f"it must divide the minibatch of {rollouts} rollouts")


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
    need(
        "rollout.quantize",
        config.rollout.quantize == "none" or g.correction != "none" or config.task not in ("train", "dry_run"),
        "another policy than the learner's draws the rollouts; set grpo.correction, for example token_truncate",
    )
    need("grpo.clip_dual", not 0 < g.clip_dual <= 1, "above 1 is needed, or 0 for no bound")
    within = not longest or g.overlong_buffer <= longest
    need("grpo.overlong_buffer", within, f"at most rollout.max_response_tokens={longest} is possible")


def _environment(config: Config, need: Requirement) -> None:
    e, longest = config.environment, config.rollout.max_response_tokens
    if not e.name:
        return
    check_environment(e.name)
    most = f"at most rollout.max_response_tokens={longest}, of all turns together, is possible"
    need("environment.turn_tokens", not longest or e.turn_tokens <= longest, most)
    need = Requirement(config, f" beside environment.name={e.name}")
    need("task", config.task not in ("generate", "benchmark", "draft_pretrain"), "it knows single turns only")
    whole = config.pipeline.schedule in ("sync", "async")
    need("pipeline.schedule", whole, "a conversation does not outlive its weights; set sync or async")
    need("policy.router_replay", not config.policy.router_replay, "experts of single turns are recorded; leave False")
    need("rollout.max_prompt_tokens", config.rollout.max_prompt_tokens, "the data does not say; set a number")
    need("data.chat", config.data.chat == "never", "the environment makes the messages; leave never")
    compares = config.task == "train" and config.draft.kind != "none" and config.draft.compare_rounds
    need("draft.compare_rounds", not compares, "it compares single turns; set 0")


def _optimizers(config: Config, need: Requirement) -> None:
    for section, optimizer in (("optimizer", config.optimizer), ("draft", config.draft)):
        ends = not 0 < optimizer.decay_steps <= optimizer.warmup
        need(f"{section}.decay_steps", ends, f"it must be above {section}.warmup={optimizer.warmup}")


def _data(config: Config, need: Requirement) -> None:
    for section, own in (("data", config.data), ("eval", config.eval)):
        if own.template or section == "data":
            PromptFormat(own.template, key=f"{section}.template")
        if not own.path:
            continue
        files = len(split_paths(own.path, f"{section}.path"))
        names, key = (own.schema, f"{section}.schema") if own.schema else (config.data.schema, "data.schema")
        schema_names(names, files, key)
        if section == "data" and config.data.weights and len(config.data.weights) != files:
            raise InputError(f"data.weights: {len(config.data.weights)} weights for {files} files")
    need(
        "rollout.max_prompt_tokens",
        config.task not in ("train", "benchmark") or config.data.path or config.rollout.max_prompt_tokens,
        "it is measured, and the built-in tasks have no end: give data.path, or a number",
    )


def _mesh(config: Config, need: Requirement) -> None:
    sizes = vars(config.mesh)
    for axis, size in sizes.items():
        need(f"mesh.{axis}", size, "at least 1, or -1 for the rest of the devices is needed")
    if len(open_axes := [f"mesh.{axis}=-1" for axis, size in sizes.items() if size == -1]) > 1:
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
    alike = (
        "all responses to a prompt would be its greedy one, so no reward differs; leave 1.0 for the temperature and 0 "
        "for top_k (eval.temperature may be 0)"
    )
    need("rollout.temperature", r.temperature, alike)
    need("rollout.top_k", r.top_k != 1, alike)
    rounds = config.draft.compare_rounds
    need("draft.compare_rounds", rounds != 1, "0 (none), or 2 to 1000 is needed for an interval")


def _pretrain(config: Config, need: Requirement) -> None:
    makes = "task=pretrain makes a policy: leave none (task=draft_pretrain makes a head)"
    need("draft.kind", config.draft.kind == "none", makes)
    need("data.path", not config.data.path, "task=pretrain learns a built-in task: leave ''")


def _draft_pretrain(config: Config, need: Requirement) -> None:
    d, kinds = config.draft, " or ".join(name for name, kind in KINDS.items() if kind.has_weights)
    if not has_weights(d.kind):
        raise InputError(f"task=draft_pretrain makes a draft with weights: set draft.kind to {kinds}")
    need("draft.length", d.length, "task=draft_pretrain measures acceptance: at least 1 is needed")


def _benchmark(config: Config, need: Requirement) -> None:
    draft, lengths = config.draft, config.benchmark.lengths
    if draft.kind == "none" or draft.length == 0:
        raise InputError("task=benchmark compares a draft with plain decoding: draft.kind and draft.length are needed")
    beyond = [k for k in lengths if k > draft.length]
    need("benchmark.lengths", not beyond, f"each is between 0 and draft.length={draft.length}")


def _dry_run(config: Config, need: Requirement) -> None:
    is_sized = config.dry_run.devices or -1 not in vars(config.mesh).values()
    need("dry_run.devices", is_sized, "the number of devices to compile for is needed, such as 1 or 8")


Check = Callable[[Config, Requirement], None]
_CHECKS: tuple[Check, ...] = (
    *(_draft, _rewards, _programs, _environment, _policy, _sampling, _minibatches, _objective),
    *(check_schedule, check_workers, _optimizers, _data, _mesh),
)
# What a task needs beside what all of them need.
_TASKS: dict[str, Check] = {
    "train": _train,
    "pretrain": _pretrain,
    "draft_pretrain": _draft_pretrain,
    "benchmark": _benchmark,
    "dry_run": _dry_run,
}
