"""Sizes of everything, checked against each other before any array exists."""

import dataclasses

from jax.sharding import Mesh

from specrl_jax.core import BadInput
from specrl_jax.decoding.programs import Limits
from specrl_jax.io import hf
from specrl_jax.models import qwen3
from specrl_jax.sharding import LEARNER, ROLLOUT, partitioner
from specrl_jax.training.draft_models import DraftModel
from specrl_jax.training.rollout import check_cache_length
from specrl_jax.training.settings import PolicySettings, Settings

# Draft lengths that the controller chooses from.
LENGTHS = (0, 1, 2, 3, 5, 7)
# A batch that has thinned goes on in one of num_slots / 4 and / 16 rows.
SHRINK = (4, 16)


def policy_sizes(policy: PolicySettings) -> qwen3.Qwen3Config:
    """The preset's sizes; a checkpoint's own must be the same but for the length it was trained for.

    Raises BadInput for an unknown preset, and for a checkpoint that is missing, damaged or of other sizes.
    """
    model = qwen3.preset(policy.preset)
    if not policy.path:
        return model
    found = hf.load_config(policy.path)
    for field in dataclasses.fields(model):
        ours, theirs = getattr(model, field.name), getattr(found, field.name)
        if ours != theirs and field.name != "max_positions":
            raise BadInput(
                f"policy.preset={policy.preset} has {field.name}={ours}, the checkpoint {policy.path} has {theirs}"
            )
    hf.check_params(policy.path, found)
    return found


def find_limits(settings: Settings, ways: int) -> Limits:
    """Shapes of the engine; `ways`: parts that rows are split into."""
    rollout, draft, grpo = settings.rollout, settings.draft, settings.grpo
    sizes = sorted({rollout.num_slots // n for n in SHRINK if rollout.num_slots % (n * ways) == 0}, reverse=True)
    copies = draft.kind == "suffix" or draft.cascade > 0
    return Limits(
        num_slots=rollout.num_slots,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_response_tokens=rollout.max_response_tokens,
        chunk=rollout.chunk,
        sizes=() if rollout.parity else tuple(sizes),
        prefill_rows=-(-rollout.num_slots // grpo.group_size),
        width=draft.length + 1 if rollout.parity else 0,
        groups=max(grpo.prompts_per_step, -(-rollout.num_slots // grpo.group_size) + 1) if copies else 0,
        members=grpo.group_size + draft.history if copies else 0,
    )


def check_rows(
    settings: Settings, model: qwen3.Qwen3Config, draft: DraftModel | None, limits: Limits, mesh: Mesh
) -> None:
    """Raises BadInput where shapes do not go with the mesh, the model or each other."""
    grpo = settings.grpo
    qwen3.require_dense(model)
    learner, rollout = partitioner(mesh, LEARNER), partitioner(mesh, ROLLOUT)
    learner.tree(qwen3.param_specs(model))
    rollout.tree(qwen3.rollout_specs(model))
    if draft:
        learner.tree(draft.specs)
        rollout.tree(draft.rollout_specs)
    if draft and not settings.draft.path and draft.vocab < model.vocab and settings.task != "draft_pretrain":
        raise BadInput(
            f"draft.vocab_size={draft.vocab}: which ids those are is for task=draft_pretrain to find out; "
            "give its result as draft.path, or leave 0"
        )
    ways = learner.ways("batch")
    shown = " x ".join(f"mesh.{name}={mesh.shape[name]}" for name in LEARNER["batch"])
    rows = grpo.prompts_per_step * grpo.group_size // grpo.minibatches
    if limits.num_slots % ways:
        raise BadInput(f"rollout.num_slots={limits.num_slots} must divide by {shown}")
    if rows % ways:
        raise BadInput(f"grpo: a minibatch of {rows} rows must divide by {shown}")
    if grpo.microbatch and rows % grpo.microbatch:
        raise BadInput(f"grpo.microbatch={grpo.microbatch} must divide the minibatch of {rows} rows")
    check_cache_length(limits, model)
    length = limits.cache_length
    chunk = settings.policy.logits_chunk
    if chunk and chunk < length and length % chunk:
        raise BadInput(f"policy.logits_chunk={chunk} must divide the row length of {length} tokens")
