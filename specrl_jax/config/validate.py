"""Every check of a config that needs values only: no folder, no device, no mesh.

What needs those is checked by `training.plan`, before any array exists.
"""

import dataclasses
from collections.abc import Callable

from specrl_jax.config import Config, DraftConfig, RewardConfig, check_values
from specrl_jax.config.older_weights import check_older_weights
from specrl_jax.config.schema import UINT32
from specrl_jax.config.workers import check_workers
from specrl_jax.data.prompts import PromptFormat, split_paths
from specrl_jax.data.schemas import schema_names
from specrl_jax.drafts.base import DraftOptions
from specrl_jax.drafts.kinds import KINDS, check_options
from specrl_jax.errors import InputError, Mistakes
from specrl_jax.rewards.code.reward import MARGIN
from specrl_jax.rewards.sandbox.http import check_url
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
    check_values(config)
    mistakes = Mistakes()
    with mistakes.check():
        _draft(config)
    with mistakes.check():
        if config.reward.names or not config.environment.name:  # an environment may be all that rewards
            check_rewards(config.reward.names, config.reward.weights)
    with mistakes.check():
        _programs(config)
    checks = (
        _environment,
        _policy,
        _temperatures,
        _stop_texts,
        _pages,
        _learner_rows,
        _objective,
        check_older_weights,
        check_workers,
        _optimizers,
    )
    for check in (*checks, _data, _mesh):
        with mistakes.check():
            check(config)
    if config.task in _TASKS:
        with mistakes.check():
            _TASKS[config.task](config)
    mistakes.refuse()


def _draft(config: Config) -> None:
    d = config.draft
    if d.argmax and (not has_weights(d.kind) or d.cascade):
        beside = f"draft.cascade={d.cascade}" if has_weights(d.kind) else f"draft.kind={d.kind}"
        raise InputError(f"draft.argmax=True is for drafts with weights alone, not beside {beside}")
    if d.budget and config.rollout.parity:
        raise InputError(f"draft.budget={d.budget}: rollout.parity verifies all drafts in one shape; leave 0")
    if d.kind != "none" and 0 < config.rollout.num_slots * d.length <= d.budget:
        drafts = f"rollout.num_slots={config.rollout.num_slots} x draft.length={d.length}"
        raise InputError(f"draft.budget={d.budget}: {drafts} drafts are all within it; leave 0")
    if d.replay_updates and not (has_weights(d.kind) and d.online):
        raise InputError(f"draft.replay_updates={d.replay_updates}: there is no draft that learns; leave 0")
    if d.replay_idle and (config.pipeline.mode != "async" or not d.replay_updates):
        raise InputError(
            "draft.replay_idle=True: the learner waits for rollouts under pipeline.mode=async alone, and "
            "draft.replay_updates bounds the updates"
        )
    if config.pipeline.weight_update == "exact" and has_weights(d.kind) and d.online:
        _learns_as_synchronous(d)
    if d.kind != "auto":
        check_options(draft_options(d))
        quantized = config.rollout.quantize
        if KINDS[d.kind].twin and quantized != "none" and d.quantize != "int4":
            raise InputError(
                f"draft.quantize={d.quantize}: under rollout.quantize={quantized} the draft would be as large as the "
                "policy; set draft.quantize=int4"
            )
    elif d.path or d.preset or d.dialect or d.cascade:
        raise InputError(
            "draft.kind=auto chooses a new draft: name its kind beside draft.path, .preset, .dialect, .cascade"
        )


def _learns_as_synchronous(d: DraftConfig) -> None:
    """Check that the draft of an exact run has in every array what that of the synchronous run has."""
    for key, allowed, reason in (
        ("positions", d.positions == "all", "which tokens were refused drafts depends on when a rollout began; all"),
        ("replay_idle", not d.replay_idle, "how many updates there are depends on the clock; False"),
    ):
        if not allowed:
            raise InputError(
                f"draft.{key}={getattr(d, key)}: under pipeline.weight_update=exact a draft learns what it would in a "
                f"synchronous run, and {reason} is needed"
            )


def _programs(config: Config) -> None:
    r, e = config.reward, config.eval
    if r.sandbox_url and r.sandbox != "http":
        raise InputError(f"reward.sandbox_url={r.sandbox_url}: reward.sandbox={r.sandbox} uses no server; http does")
    if CODE not in r.names:
        return
    if r.sandbox == "http" and (fault := check_url(r.sandbox_url)):
        raise InputError(f"reward.sandbox_url={r.sandbox_url!r}: {fault}")
    for name in ("sandbox_python", "test_processes", "test_disk") if r.sandbox == "http" else ():
        if (value := getattr(r, name)) != (default := getattr(RewardConfig, name)):
            raise InputError(f"reward.{name}={value}: under reward.sandbox=http it is the server's; leave {default!r}")
    if r.test_seconds + MARGIN > r.timeout:
        raise InputError(
            f"reward.test_seconds={r.test_seconds:g}: reward.timeout={r.timeout:g} must be {MARGIN:g} s more, or longer"
        )
    if config.task not in ("train", "pretrain", "evaluate"):
        return
    learns = config.task != "evaluate" and not config.data.path
    if learns or (not e.path and (e.task or not config.data.path)):
        key = "data.path" if learns else "eval.path"
        raise InputError(f"{key}='': reward.name=code needs rows with tests, which the built-in tasks do not have")


def has_weights(kind: str) -> bool:
    """Return whether a draft has weights; one that is still to be chosen may."""
    return kind == "auto" or KINDS[kind].has_weights


def draft_options(draft: DraftConfig) -> DraftOptions:
    """Return the keys that choose and size a draft."""
    return DraftOptions(**{field.name: getattr(draft, field.name) for field in dataclasses.fields(DraftOptions)})


def _policy(config: Config) -> None:
    p = config.policy
    if not p.preset and not p.path:
        raise InputError("policy.preset='': sizes are needed, from policy.preset or from policy.path")
    if 0 < p.yarn_factor < 1:
        raise InputError(
            f"policy.yarn_factor={p.yarn_factor}: at least 1 is needed, or 0 for the checkpoint's own positions"
        )
    if not p.lora_rank:
        return
    if not p.lora_targets:
        raise InputError("policy.lora_targets=(): policy.lora_rank needs at least one matrix to adapt")
    if config.task not in ("train", "export", "dry_run"):
        raise InputError(f"policy.lora_rank={p.lora_rank}: adapters learn in task=train, not in task={config.task}")
    if config.optimizer.name == "muon":
        raise InputError("optimizer.name=muon is for whole matrices: adapters (policy.lora_rank) take adamw")


def _temperatures(config: Config) -> None:
    for key, value in (("rollout", config.rollout.temperature), ("eval", config.eval.temperature)):
        if 0 < value < COLDEST:
            raise InputError(f"{key}.temperature={value}: 0 (greedy), or {COLDEST} to 100 is needed")


def _stop_texts(config: Config) -> None:
    texts = config.rollout.stop
    if "" in texts:
        raise InputError("rollout.stop: an empty text would end every response at its first token")
    if (size := sum(len(text.encode()) for text in texts)) > MOST_STOP_BYTES:
        raise InputError(f"rollout.stop: its texts have {size} bytes together, at most {MOST_STOP_BYTES} are possible")


def _pages(config: Config) -> None:
    tokens = config.rollout.page_tokens
    if tokens & (tokens - 1):
        nearest = 1 << (tokens.bit_length() - 1)
        raise InputError(f"rollout.page_tokens={tokens}: a power of two is needed, such as {nearest} or {2 * nearest}")


def _learner_rows(config: Config) -> None:
    """Check how the rollouts of a step are cut into minibatches; of rows there are as many as that takes."""
    g, draft = config.grpo, config.draft
    if (rollouts := g.prompts_per_step * g.group_size) % g.minibatches:
        raise InputError(f"grpo.minibatches={g.minibatches} must divide the {rollouts} rollouts of a step")
    if has_weights(draft.kind) and (rollouts := rollouts // g.minibatches) % draft.minibatches:
        raise InputError(f"draft.minibatches={draft.minibatches} must divide the minibatch of {rollouts} rollouts")


def _objective(config: Config) -> None:
    g, longest = config.grpo, config.rollout.max_response_tokens
    if g.old_logprobs == "current" and g.epochs * g.minibatches > 1:
        raise InputError(
            f"grpo.old_logprobs=current holds for one update per step: grpo.epochs={g.epochs} and "
            f"grpo.minibatches={g.minibatches} must be 1"
        )
    if g.correction != "none" and g.old_logprobs == "rollout":
        raise InputError(
            f"grpo.correction={g.correction} compares the rollouts' log-probs with the learner's: "
            "grpo.old_logprobs must be learner or current"
        )
    if config.rollout.quantize != "none" and g.correction == "none" and config.task in ("train", "dry_run"):
        raise InputError(
            f"rollout.quantize={config.rollout.quantize}: another policy than the learner's draws the rollouts; set "
            "grpo.correction, for example token_truncate"
        )
    if 0 < g.clip_dual <= 1:
        raise InputError(f"grpo.clip_dual={g.clip_dual}: above 1 is needed, or 0 for no bound")
    if g.reference_every and not g.kl_coef:
        raise InputError(f"grpo.reference_every={g.reference_every}: grpo.kl_coef=0 has no reference")
    if longest and g.overlong_buffer > longest:
        raise InputError(
            f"grpo.overlong_buffer={g.overlong_buffer}: at most rollout.max_response_tokens={longest} is possible"
        )


def _environment(config: Config) -> None:
    e, longest = config.environment, config.rollout.max_response_tokens
    if not e.name:
        return
    check_environment(e.name)
    if "{message}" not in e.template:
        raise InputError(f"environment.template={e.template!r}: needs {{message}} where a message goes")
    if longest and e.turn_tokens > longest:
        raise InputError(
            f"environment.turn_tokens={e.turn_tokens}: at most rollout.max_response_tokens={longest}, of all turns "
            "together, is possible"
        )
    compares = config.task == "train" and config.draft.kind != "none"
    for key, allowed, reason in (
        (
            "task",
            config.task not in ("generate", "benchmark", "draft_pretrain"),
            "it knows single turns only",
        ),
        (
            "pipeline.weight_update",
            config.pipeline.weight_update == "none",
            "its rollouts are single turns; leave none",
        ),
        ("policy.router_replay", not config.policy.router_replay, "experts of single turns are recorded; leave False"),
        ("grpo.oversample", not config.grpo.oversample, "a conversation does not outlive its step; leave 0"),
        ("rollout.order", config.rollout.order == "given", "the lengths of conversations are not kept; leave given"),
        ("rollout.max_prompt_tokens", config.rollout.max_prompt_tokens > 0, "the data does not say; set a number"),
        ("data.chat", config.data.chat == "never", "the environment makes the messages; leave never"),
        ("draft.compare_rounds", not compares or not config.draft.compare_rounds, "it compares single turns; set 0"),
    ):
        if not allowed:
            section, _, name = key.rpartition(".")
            value = getattr(getattr(config, section) if section else config, name)
            raise InputError(f"{key}={value} beside environment.name={e.name}: {reason}")


def _optimizers(config: Config) -> None:
    for section, optimizer in (("optimizer", config.optimizer), ("draft", config.draft)):
        if 0 < optimizer.decay_steps <= optimizer.warmup:
            raise InputError(
                f"{section}.decay_steps={optimizer.decay_steps} must be above {section}.warmup={optimizer.warmup}"
            )


def _data(config: Config) -> None:
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
    if config.task in ("train", "benchmark") and not (config.data.path or config.rollout.max_prompt_tokens):
        raise InputError(
            "rollout.max_prompt_tokens=0 is measured, and the built-in tasks have no end: give data.path, or a number"
        )


def _mesh(config: Config) -> None:
    for axis, size in vars(config.mesh).items():
        if size == 0:
            raise InputError(f"mesh.{axis}=0: at least 1, or -1 for the rest of the devices is needed")
    if len(rest := [f"mesh.{axis}=-1" for axis, size in vars(config.mesh).items() if size == -1]) > 1:
        raise InputError(f"{' and '.join(rest)}: only one axis can take the rest of the devices")


def _train(config: Config) -> None:
    g, draft = config.grpo, config.draft
    if g.group_size < 2:
        raise InputError(
            f"grpo.group_size={g.group_size}: at least 2 is needed, since the advantage (grpo.advantage={g.advantage}) "
            "compares the responses to a prompt"
        )
    rollouts = g.sampling_rounds * g.prompts_at_once * g.group_size
    if (most := (UINT32 + 1) // rollouts - 1) < config.steps:
        raise InputError(
            f"steps={config.steps}: at most {most} steps of {rollouts} rollouts (grpo.sampling_rounds x "
            "(grpo.prompts_per_step + grpo.oversample) x grpo.group_size) have noise of their own"
        )
    r = config.rollout
    for key, greedy, value in (("temperature", r.temperature == 0, r.temperature), ("top_k", r.top_k == 1, r.top_k)):
        if greedy:
            raise InputError(
                f"rollout.{key}={value}: all responses to a prompt would be its greedy one, so no reward differs; "
                "leave 1.0 for the temperature and 0 for top_k (eval.temperature may be 0)"
            )
    if draft.compare_rounds == 1:
        raise InputError("draft.compare_rounds=1: 0 (none), or 2 to 1000 is needed for an interval")


def _pretrain(config: Config) -> None:
    if config.draft.kind != "none":
        raise InputError("task=pretrain makes a policy: leave draft.kind none (task=draft_pretrain makes a head)")
    if config.data.path:
        raise InputError("task=pretrain learns a built-in task: leave data.path ''")


def _draft_pretrain(config: Config) -> None:
    if not has_weights(config.draft.kind):
        kinds = " or ".join(name for name, kind in KINDS.items() if kind.has_weights)
        raise InputError(f"task=draft_pretrain makes a draft with weights: set draft.kind to {kinds}")
    if config.draft.length < 1:
        raise InputError("task=draft_pretrain measures acceptance: draft.length of at least 1 is needed")
    if config.draft.positions != "all":
        raise InputError(
            f"draft.positions={config.draft.positions}: texts of task=draft_pretrain have no refused drafts; leave all"
        )


def _benchmark(config: Config) -> None:
    draft, lengths = config.draft, config.benchmark.lengths
    if draft.kind == "none" or draft.length == 0:
        raise InputError("task=benchmark compares a draft with plain decoding: draft.kind and draft.length are needed")
    if bad := [k for k in lengths if k > draft.length]:
        raise InputError(f"benchmark.lengths={lengths}: {bad[0]} is not between 0 and draft.length={draft.length}")


def _dry_run(config: Config) -> None:
    if not config.dry_run.devices and -1 in vars(config.mesh).values():
        raise InputError("dry_run.devices=0: the number of devices to compile for is needed, such as 1 or 8")


# What a task needs beside what all of them need.
_TASKS: dict[str, Callable[[Config], None]] = {
    "train": _train,
    "pretrain": _pretrain,
    "draft_pretrain": _draft_pretrain,
    "benchmark": _benchmark,
    "dry_run": _dry_run,
}
