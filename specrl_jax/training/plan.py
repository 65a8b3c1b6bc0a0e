"""Sizes of everything, checked against each other before any array exists."""

import dataclasses

from jax.sharding import Mesh

from specrl_jax.config import Config, PolicyConfig
from specrl_jax.config.validate import draft_options
from specrl_jax.core import InputError
from specrl_jax.decoding.compiled import Limits
from specrl_jax.drafts.base import DraftModel
from specrl_jax.drafts.kinds import make_method
from specrl_jax.io import hf
from specrl_jax.models import qwen3
from specrl_jax.models.layers import Yarn
from specrl_jax.sharding import Partitioner, learner_devices, make_mesh
from specrl_jax.training.rollouts import check_cache_length

# Draft lengths that the controller chooses from.
LENGTHS = (0, 1, 2, 3, 5, 7)
# A batch that has thinned goes on in one of num_slots / 4 and / 16 rows.
SHRINK = (4, 16)


def open_mesh(config: Config) -> Mesh:
    """Return the learner's mesh over the devices that do not only generate.

    Checks the folders of policy and draft first: on a machine without the weights, they are what is missing. Raises
    InputError.
    """
    make_method(draft_options(config.draft), policy_sizes(config.policy))
    return make_mesh(dataclasses.asdict(config.mesh), learner_devices(config.pipeline.rollout_devices))


def policy_sizes(policy: PolicyConfig) -> qwen3.Qwen3Config:
    """The preset's sizes; a checkpoint's own must be the same but for the length it was trained for.

    An empty preset stands for the checkpoint's sizes. `policy.yarn_factor` stretches the positions of either.

    Raises InputError for an unknown preset, and for a checkpoint that is missing, damaged or of other sizes.
    """
    sizes = _sizes(policy)
    if policy.yarn_factor == 0:
        return sizes
    return dataclasses.replace(sizes, yarn=Yarn(policy.yarn_factor, policy.yarn_original))


def _sizes(policy: PolicyConfig) -> qwen3.Qwen3Config:
    if policy.path and not policy.preset:
        found = hf.load_config(policy.path)
        hf.check_params(policy.path, found)
        return found
    model = qwen3.preset(policy.preset)
    if not policy.path:
        return model
    found = hf.load_config(policy.path)
    for field in dataclasses.fields(model):
        ours, theirs = getattr(model, field.name), getattr(found, field.name)
        if ours != theirs and field.name not in ("max_positions", "yarn"):
            raise InputError(
                f"policy.preset={policy.preset} has {field.name}={ours}, the checkpoint {policy.path} has {theirs}"
            )
    hf.check_params(policy.path, found)
    return found


def draft_lengths(longest: int, adaptive: bool) -> tuple[int, ...]:
    """The draft lengths that there are programs for: 0 always, since speculation may be switched off."""
    return tuple(sorted({0, longest} | {k for k in LENGTHS if adaptive and k < longest}))


def batch_limits(
    num_slots: int,
    max_prompt_tokens: int,
    max_response_tokens: int,
    num_shards: int,
    chunk: int = 16,
    group_size: int = 1,
    prompts: int = 0,
    uses_lookup_cache: bool = False,
    history: int = 0,
    width: int = 0,
) -> Limits:
    """Shapes of an engine.

    Args:
      num_shards: parts that rows are split into.
      group_size: rollouts that a prompt usually gets; sets how many prompts are prefilled at once.
      prompts: whose rollouts may be copied from at the same time, at least; 0: as many as can be under way.
      uses_lookup_cache: whether drafts are copied from other rollouts.
      width: of every forward (rollout.parity); 0: as wide as the draft.
    """
    sizes = sorted({num_slots // n for n in SHRINK if num_slots % (n * num_shards) == 0}, reverse=True)
    under_way = -(-num_slots // group_size)
    return Limits(
        num_slots=num_slots,
        max_prompt_tokens=max_prompt_tokens,
        max_response_tokens=max_response_tokens,
        chunk=chunk,
        # One shape of a forward is one batch size.
        sizes=() if width else tuple(sizes),
        # A refill usually starts few prompts; of many, several in one forward keep a device busy.
        prefill_rows=num_shards * max(1, under_way // (4 * num_shards)),
        new_prompts=under_way,
        width=width,
        groups=max(prompts, under_way + 1) if uses_lookup_cache else 0,
        members=group_size + history if uses_lookup_cache else 0,
    )


def find_limits(settings: Config, num_shards: int, uses_lookup_cache: bool) -> Limits:
    """Return the shapes of a config's engine; `num_shards` and `uses_lookup_cache` as in `batch_limits`."""
    rollout, draft, grpo = settings.rollout, settings.draft, settings.grpo
    return batch_limits(
        rollout.num_slots,
        rollout.max_prompt_tokens,
        rollout.max_response_tokens,
        num_shards,
        rollout.chunk,
        grpo.group_size,
        grpo.prompts_per_step,
        uses_lookup_cache=uses_lookup_cache,
        history=draft.history,
        width=draft.length + 1 if rollout.parity else 0,
    )


def _shown_ways(partition: Partitioner) -> str:
    return " x ".join(f"mesh.{name}={partition.mesh.shape[name]}" for name in partition.axes("batch"))


def check_rows(
    settings: Config,
    model: qwen3.Qwen3Config,
    draft: DraftModel | None,
    limits: Limits,
    learner: Partitioner,
    rollout: Partitioner,
) -> None:
    """Raises InputError where shapes do not go with the meshes, the model or each other."""
    grpo = settings.grpo
    learner.shardings(qwen3.param_specs(model))
    rollout.shardings(qwen3.inference_specs(model))
    if draft:
        learner.shardings(draft.specs)
        rollout.shardings(draft.inference_specs)
    d = settings.draft
    # What is exported has been chosen: the checkpoint holds it.
    chooses = settings.task in ("draft_pretrain", "export")
    chooses = chooses or (settings.task == "train" and d.online and d.min_coverage)
    if draft and not d.path and draft.vocab < model.vocab and not chooses:
        raise InputError(
            f"draft.vocab_size={draft.vocab}: which ids those are is found out by task=draft_pretrain, and by training "
            "with draft.online and draft.min_coverage; give a draft.path, or leave 0, or do without (draft.kind=none)"
        )
    num_shards = learner.num_shards("batch")
    shown, shown_rollout = (_shown_ways(partition) for partition in (learner, rollout))
    rows = grpo.prompts_per_step * grpo.group_size // grpo.minibatches
    tokens = grpo.pack_tokens or limits.cache_length
    if tokens % learner.num_shards("sequence"):
        raise InputError(
            f"mesh.sequence={learner.num_shards('sequence')} must divide the {tokens} tokens of a learner's row"
        )
    if limits.num_slots % rollout.num_shards("batch"):
        raise InputError(f"rollout.num_slots={limits.num_slots} must divide by {shown_rollout}")
    if rows % num_shards:
        raise InputError(f"grpo: a minibatch of {rows} rows must divide by {shown}")
    if grpo.pack_tokens:  # rows as many as it takes, a multiple of all these
        return check_cache_length(limits, model)
    if draft and rows // d.minibatches % num_shards:
        raise InputError(f"draft.minibatches={d.minibatches} must divide the minibatch of {rows} rows, over {shown}")
    check_cache_length(limits, model)
