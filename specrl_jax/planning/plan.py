"""The plan of a run: sizes, meshes and engine limits, checked against folders and devices before any array exists."""

import dataclasses
import math
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from kernels_pallas.verify.sampling import most_kept
from specrl_jax.config import Config, PipelineConfig, PolicyConfig
from specrl_jax.config.automatic import check_chosen, with_values
from specrl_jax.config.requirement import Requirement
from specrl_jax.config.validate import draft_options
from specrl_jax.decoding.features.base import Feature
from specrl_jax.decoding.features.reverify import Reverification
from specrl_jax.decoding.features.router_records import RouterRecords
from specrl_jax.decoding.features.sampling_mask import SamplingMasks
from specrl_jax.decoding.features.turns import SeveralTurns
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts.base import DraftMethod, DraftModel
from specrl_jax.drafts.kinds import make_method
from specrl_jax.errors import InputError
from specrl_jax.io import hf
from specrl_jax.models import decoder
from specrl_jax.planning.cache_size import check_cache_length, most_pages, page_bytes, with_pages
from specrl_jax.planning.memory import row_bytes
from specrl_jax.process_groups import ProcessGroups, find_groups, group_mesh
from specrl_jax.sharding import LEARNER, ROLLOUT, Partitioner, learner_devices, make_mesh, partitioner

# Draft lengths that the controller chooses from.
LENGTHS = (0, 1, 2, 3, 5, 7)
# A batch that has thinned goes on in one of num_slots / 4 and / 16 rows.
SHRINK = (4, 16)
# Prompt tokens that keep a device busy in one forward: from 300 on an H100 multiplies no less than it reads. A refill
# usually starts few prompts, and what its forwards have beyond those is for nothing.
BUSY_TOKENS = 256


class EngineSizes(NamedTuple):
    """Sizes of an engine that follow from its platform alone."""

    chunk: int  # decode steps per host synchronisation
    page: int  # tokens, a power of two
    prefill: int  # tokens of a prompt that one forward prefills; a longer prompt takes several
    turn: int  # the same where an environment speaks, whose messages are short


SIZES = {"cpu": EngineSizes(16, 64, 512, 16), "accelerator": EngineSizes(64, 64, 512, 512)}
# Tasks that learn from rollouts, or generate as such a run does.
WITH_ROLLOUTS = ("train", "dry_run", "benchmark")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes of a run. Holds no arrays."""

    config: Config
    model: decoder.DecoderConfig  # the policy's
    draft_method: DraftMethod
    learner_partition: Partitioner
    rollout_partition: Partitioner  # the learner's devices, or those that only generate, of this process's group
    limits: EngineConfig  # of the engine of this process's group, which trains and evaluates
    groups: ProcessGroups  # that hold one copy of the rollout weights each
    page_bytes: int  # of one page on one device

    @property
    def draft(self) -> DraftModel | None:
        """Return the draft model; None: the draft method has no weights."""
        return self.draft_method.model

    @property
    def sequence_tokens(self) -> int:
        """Return the tokens of the longest rollout, its prompt included."""
        return self.config.rollout.max_prompt_tokens + self.config.rollout.max_response_tokens


def make_plan(config: Config, mesh: Mesh, model: decoder.DecoderConfig | None = None, *, memory: int = 0) -> Plan:
    """Find the sizes of a run and check them against each other.

    Args:
      mesh: of the learner.
      model: the policy's sizes; None: those that the config names.
      memory: bytes of a device that is not here; 0: unknown.
    Raises:
      InputError: naming the key and what would be right.
    """
    check_chosen(config)
    if config.pipeline.workers:  # which are not sent earlier rollouts
        config = with_values(config, {"draft.history": 0})
    model = model or policy_sizes(config.policy)
    method = make_method(draft_options(config.draft), model)
    groups = _groups(config.pipeline, mesh)
    learner, rollout = partitioner(mesh, LEARNER), partitioner(_rollout_mesh(config.pipeline, mesh, groups), ROLLOUT)
    share = _group_share(config, len(groups.groups))
    limits = find_limits(share, rollout.num_shards("batch"), method.uses_lookup_cache, platform=rollout.platform)
    limits = limits if model.experts else limits.without(RouterRecords)
    records, tokens = limits.feature(RouterRecords) is not None, limits.page_tokens
    page = page_bytes(model, method.model, config.rollout.dtype, tokens=tokens, partition=rollout, records=records)
    held = row_bytes(model, tensor=rollout.mesh.shape["tensor"]) * (limits.num_slots + limits.prompts + limits.shards)
    rows = held // rollout.num_shards("batch")
    most = most_pages(config.rollout, page, rollout.mesh.devices.flat[0], memory=memory, rows=rows)
    plan = Plan(
        config,
        model,
        method,
        learner_partition=learner,
        rollout_partition=rollout,
        limits=limits,
        groups=groups,
        page_bytes=page,
    )
    _check_processes(config, groups)
    _check_hybrid(plan)
    _check_draft(plan)
    _check_shards(plan)
    check_cache_length(plan.limits, model)
    return dataclasses.replace(plan, limits=with_pages(limits, most, page))


def open_mesh(config: Config) -> Mesh:
    """Return `learner_mesh`.

    Checks the folders of policy and draft first: on a machine without the weights, they are what is missing. Raises
    InputError.
    """
    check_chosen(config)
    make_method(draft_options(config.draft), policy_sizes(config.policy))
    return learner_mesh(config)


def learner_mesh(config: Config) -> Mesh:
    """Return the learner's mesh. Raise InputError where its sizes do not multiply to the devices."""
    return make_mesh(dataclasses.asdict(config.mesh), learner_devices(config.pipeline.rollout_devices))


def policy_sizes(policy: PolicyConfig) -> decoder.DecoderConfig:
    """Return the preset's sizes; a checkpoint must have the same but for the length it was trained for.

    An empty preset stands for the checkpoint's sizes. YaRN comes from the checkpoint's rope_scaling alone.

    Raises InputError for an unknown preset, and for a checkpoint that is missing, damaged or of other sizes.
    """
    sizes = decoder.preset(policy.preset) if policy.preset or not policy.path else None
    if policy.path:
        found = hf.load_config(policy.path)
        for field in dataclasses.fields(found) if sizes else ():
            ours, theirs = (getattr(_unstretched(one), field.name) for one in (sizes or found, found))
            if ours != theirs and field.name != "max_positions":
                raise InputError(
                    f"policy.preset={policy.preset} has {field.name}={ours}, the checkpoint {policy.path} has "
                    f"{theirs}; policy.preset='' takes the checkpoint's sizes"
                )
        hf.check_params(policy.path, found)
        sizes = found
    assert sizes is not None  # of one of the two
    return sizes


def _unstretched(sizes: decoder.DecoderConfig) -> decoder.DecoderConfig:
    return dataclasses.replace(sizes, rope=sizes.rope.pretrained)


def sampling_of(config: Config, *, evaluates: bool = False) -> Sampling:
    """Return how training rollouts, or evaluations, are sampled."""
    r, own = config.rollout, config.eval.temperature
    return Sampling(own if evaluates and own >= 0 else r.temperature, r.top_k, r.top_p, rule=r.rule)


def draft_lengths(longest: int, adaptive: bool) -> tuple[int, ...]:
    """Return the draft lengths that get compiled programs: 0 always, since speculation may be switched off."""
    return tuple(sorted({0, longest} | {k for k in LENGTHS if adaptive and k < longest}))


def sizes_on(platform: str) -> EngineSizes:
    """Return the sizes of an engine on a platform."""
    return SIZES["cpu" if platform == "cpu" else "accelerator"]


def find_limits(config: Config, num_shards: int, uses_lookup_cache: bool, *, platform: str = "cpu") -> EngineConfig:
    """Return the engine's shapes; `num_shards`: of its rows."""
    rollout, draft, grpo, fixed = config.rollout, config.draft, config.grpo, sizes_on(platform)
    slots = rollout.num_slots
    sizes = sorted({slots // n for n in SHRINK if slots % (n * num_shards) == 0}, reverse=True)
    prompts = -(-slots // grpo.group_size)  # under way at once
    prefill = fixed.turn if config.environment.name else fixed.prefill
    piece = min(prefill, rollout.max_prompt_tokens)
    return EngineConfig(
        num_slots=slots,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_response_tokens=rollout.max_response_tokens,
        chunk=fixed.chunk,
        # Under parity one shape of a forward is one batch size.
        sizes=() if rollout.parity else tuple(sizes),
        page_tokens=fixed.page,
        shards=num_shards,
        prefill_tokens=prefill,
        prefill_rows=num_shards * max(1, min(prompts // (4 * num_shards), BUSY_TOKENS // piece)),
        new_prompts=prompts,
        width=draft.length + 1 if rollout.parity else 0,
        groups=max(grpo.prompts_at_once, prompts + 1) if uses_lookup_cache else 0,
        sequences=grpo.group_size + draft.history if uses_lookup_cache else 0,
        budget=draft.budget and max(1, draft.budget // num_shards),
        features=find_features(config),
    )


def find_features(config: Config) -> tuple[Feature, ...]:
    """Return the features of the engine that are on; `rollout.stop` is one more, which takes the tokenizer."""
    schedule, learns = config.pipeline.schedule, config.task in WITH_ROLLOUTS
    earlier = schedule in ("exact", "partial") or config.pipeline.recompute_cache
    kept = most_kept(sampling_of(config))
    features = (
        config.task == "train" and earlier and Reverification(keeps=schedule != "exact"),
        learns and config.policy.router_replay and RouterRecords(),
        learns and kept and SamplingMasks(kept),
        config.environment.name and SeveralTurns(),
    )
    return tuple(feature for feature in features if isinstance(feature, Feature))


def _groups(p: PipelineConfig, mesh: Mesh) -> ProcessGroups:
    """Return the processes of each copy of the rollout weights. Raise InputError.

    Those of a learner with rollout workers ask for rollouts together.
    """
    if p.workers:
        return ProcessGroups((tuple(range(jax.process_count())),))
    if not p.rollout_devices:
        return find_groups(mesh)
    n, each, split = jax.process_count(), p.rollout_devices, math.prod(_split(mesh))
    size = max(1, split // each)
    learning = mesh.size // n
    if (each % split and split % each) or n % size or (size > 1 and learning % each):
        tensor, expert = _split(mesh)
        raise InputError(
            f"pipeline.rollout_devices={each}: it must divide by mesh.tensor={tensor} x mesh.expert={expert}, which "
            f"split a copy of the weights, or that by it: a copy then takes those of {size} processes, which must "
            f"divide the {n} there are, and pipeline.rollout_devices the {learning} of each that learn"
        )
    return ProcessGroups(tuple(tuple(range(i, i + size)) for i in range(0, n, size)))


def _split(mesh: Mesh) -> tuple[int, int]:
    """Return the devices that split widths, and experts, of each copy of the weights: rollouts' as the learner's."""
    return mesh.shape["tensor"], mesh.shape["expert"]


def _rollout_mesh(p: PipelineConfig, mesh: Mesh, groups: ProcessGroups) -> Mesh:
    """Return the part of the learner's mesh that a group of processes has, or a mesh of its devices beside it."""
    if not p.rollout_devices:
        return group_mesh(mesh)
    tensor, expert = _split(mesh)
    devices = [d for i in groups.own for d in jax.local_devices(process_index=i)[-p.rollout_devices :]]
    sizes = {"data": len(devices) // (tensor * expert), "expert": expert, "tensor": tensor}
    if len(groups.own) == 1:
        return make_mesh(sizes, devices)
    # In the order of the processes, each of which holds the same parts among its devices that learn (`staging_mesh`).
    shape = [sizes.get(axis, 1) for axis in mesh.axis_names]
    return Mesh(np.array(devices).reshape(shape), mesh.axis_names, axis_types=mesh.axis_types)


def _group_share(config: Config, n: int) -> Config:
    """Return the config with the slots, prompts and drafts of one of n groups."""
    rollout, grpo, budget = config.rollout, config.grpo, config.draft.budget
    rollout = dataclasses.replace(rollout, num_slots=rollout.num_slots // n)
    grpo = dataclasses.replace(grpo, prompts_per_step=grpo.prompts_per_step // n)
    draft = dataclasses.replace(config.draft, budget=budget and max(1, budget // n))
    return dataclasses.replace(config, rollout=rollout, grpo=grpo, draft=draft)


def _check_processes(config: Config, groups: ProcessGroups) -> None:
    """Raise InputError for options that several processes do not support."""
    need = Requirement(config)
    alone = not config.pipeline.asynchronous or jax.process_count() == 1
    need(
        "grpo.sampling_rounds",
        alone or config.grpo.sampling_rounds == 1,
        "several processes would have to ask each other whether to generate again, and beside the learner they do not "
        "wait for each other",
    )
    need(
        "environment.name",
        not config.environment.name or len(groups.own) == 1,
        f"{len(groups.own)} processes hold a copy of the weights together (mesh.tensor, mesh.expert), and would hear "
        "of its answers at different times; keep copies within a process",
    )


def _check_hybrid(plan: Plan) -> None:
    """Raise InputError for options that a policy with gated delta nets does not have."""
    if plan.model.delta is None:
        return
    c, need = plan.config, Requirement(plan.config)
    holds = {
        "mesh.sequence": (plan.learner_partition.mesh.shape["sequence"] == 1, "goes over a row from its start"),
        "policy.lora_rank": (not c.policy.lora_rank, "has no adapters for them"),
        "rollout.quantize": (c.rollout.quantize == "none", "has no quantised matrices for them"),
        "draft.budget": (not c.draft.budget, "advances row by row"),
        "environment.name": (not c.environment.name, "cannot take the answers of an environment yet"),
    }
    for key, (right, reason) in holds.items():
        need(key, right, f"a policy with gated delta nets (linear_attention) {reason}")


def _check_draft(plan: Plan) -> None:
    """Raise InputError for options that the draft does not have, and where nothing would choose its vocabulary."""
    config, d, draft = plan.config, plan.config.draft, plan.draft
    need = Requirement(config)
    if draft is None:
        return
    for key in ("length", "ttt_steps") if draft.longest is not None else ():
        within = getattr(d, key) <= draft.longest
        need(f"draft.{key}", within, f"a block of this drafter has {draft.longest} drafts")
    # What is exported has been chosen: the checkpoint holds it.
    chooses = config.task in ("draft_pretrain", "export") or (config.task == "train" and d.online)
    need(
        "draft.vocab_size",
        d.path or draft.vocab >= plan.model.vocab or chooses,
        "which ids those are is found out by task=draft_pretrain, and by training with draft.online; give a "
        "draft.path, or leave 0, or do without (draft.kind=none)",
    )


def _check_shards(plan: Plan) -> None:
    """Raise InputError where weights or engine rows do not divide over the meshes."""
    learner, rollout = plan.learner_partition, plan.rollout_partition
    learner.shardings(decoder.param_specs(plan.model))
    rollout.shardings(decoder.inference_specs(plan.model))
    if plan.draft:
        learner.shardings(plan.draft.specs)
        rollout.shardings(plan.draft.inference_specs)
    copies, shards, processes = len(plan.groups.groups), rollout.num_shards("batch"), jax.process_count()
    sizes = " x ".join(f"mesh.{name}={rollout.mesh.shape[name]}" for name in rollout.axes("batch"))
    several = f"the {copies} copies of several processes, each of " if copies > 1 else ""
    grpo, each = plan.config.grpo, (processes, f"the {processes} processes")
    parts = {"rollout.num_slots": (plan.config.rollout.num_slots, copies * shards, several + sizes)}
    parts |= {"grpo.prompts_per_step": (grpo.prompts_per_step, *each), "grpo.oversample": (grpo.oversample, *each)}
    for key, (count, shares, what) in parts.items():
        Requirement(plan.config)(key, count % shares == 0, f"it must divide by {what}")
