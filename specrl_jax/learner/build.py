"""The learner's jitted steps. Building compiles nothing; a step does when first called."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from specrl_jax.config import DraftConfig, OptimizerConfig
from specrl_jax.core import Params, Tree
from specrl_jax.decoding.features.sampling_mask import most_kept_of
from specrl_jax.distributed import global_arrays
from specrl_jax.learner.batch import Packing
from specrl_jax.learner.draft_step import (
    ROWS_PER_PREDICTED,
    DraftForward,
    DraftStep,
    PredictStep,
    ReadTables,
    make_draft_step,
    make_predict_step,
    make_read_tables,
)
from specrl_jax.learner.microbatches import split
from specrl_jax.learner.optimizer import make_optimizer
from specrl_jax.learner.policy_step import (
    FeatureStep,
    LogprobStep,
    PolicyForward,
    PolicyStep,
    UnreplayedStep,
    make_feature_step,
    make_logprob_step,
    make_policy_step,
    make_unreplayed_step,
)
from specrl_jax.learner.programs import Programs
from specrl_jax.learner.state import TrainState
from specrl_jax.models.attention import find_attention
from specrl_jax.models.lora import LoRA
from specrl_jax.planning.plan import Plan
from specrl_jax.rl.objectives import Objective

# Tasks whose learner has batches of texts, whose rows have lengths of their own.
OF_TEXTS = ("pretrain", "draft_pretrain")
# In an update a drafter of one pass starts a draft every so many tokens, another one each time: one from every token
# would be ttt_steps slots for each.
ANCHOR_STRIDE = 4


@dataclasses.dataclass(frozen=True)
class Learner:
    """The jitted steps of the learner, each with its own compile cache, and what they are made from."""

    plan: Plan
    forward: PolicyForward
    draft_forward: DraftForward | None  # None: no draft with weights
    objective: Objective
    optimizer: optax.GradientTransformation
    draft_optimizer: optax.GradientTransformation
    packing: Packing  # of rollouts into rows
    programs: Programs  # announces what the steps compile
    logprob_step: LogprobStep
    policy_step: PolicyStep
    unreplayed_step: UnreplayedStep
    feature_step: FeatureStep
    read_tables: ReadTables
    draft_step: DraftStep | None  # None, as the next: no draft with weights
    predict_step: PredictStep | None

    def merged(self, policy: TrainState) -> Params:
        """Return the parameters that the policy's forward runs on, adapters merged in."""
        return self.forward.merge(policy.params, policy.frozen)

    def microbatches(self, rows: Tree) -> list[Tree]:
        """Split host arrays [B, T] into microbatches, each where the learner's steps expect it."""
        size = self.packing.microbatch(jax.tree.leaves(rows)[0].shape[1])
        by_row = self.plan.learner_partition.sharding(("batch", "sequence"))
        return [global_arrays(part, by_row) for part in split(rows, size)]


def make_learner(plan: Plan) -> Learner:
    """Build the learner's jitted steps."""
    config, partition = plan.config, plan.learner_partition
    names = {field.name for field in dataclasses.fields(Objective)} - {"longest"}
    values = {name: getattr(config.grpo, name) for name in names}
    objective = Objective(**values, longest=config.rollout.max_response_tokens)
    optimizer = make_optimizer(config.optimizer)
    draft_optimizer = make_optimizer(_draft_optimizer(config.optimizer.name, config.draft))
    packing = make_packing(plan)
    forward = _policy_forward(plan, packing)
    draft_forward = _draft_forward(plan, forward)
    # A draft that is trained in some steps is evaluated on all rows in the others.
    one_in = 1 if config.draft.online else ROWS_PER_PREDICTED
    draft_step = make_draft_step(draft_forward, draft_optimizer, partition) if draft_forward else None
    predict_step = make_predict_step(draft_forward, partition, one_in) if draft_forward else None
    policy_step = make_policy_step(forward, objective, optimizer, partition=partition)
    programs = Programs(() if config.task in OF_TEXTS else packing.shapes)
    announced, update = programs.announced, programs.announced_update
    return Learner(
        plan=plan,
        forward=forward,
        draft_forward=draft_forward,
        objective=objective,
        optimizer=optimizer,
        draft_optimizer=draft_optimizer,
        packing=packing,
        programs=programs,
        logprob_step=announced("logprob", "logprob", make_logprob_step(forward, partition)),
        policy_step=update("policy", policy_step),
        unreplayed_step=announced("comparison of experts", "logprob", make_unreplayed_step(forward, partition)),
        feature_step=announced("features", "features", make_feature_step(forward, partition)),
        read_tables=announced(
            "draft tables", "train", make_read_tables(plan.model, partition, most_kept_of(plan.limits) > 0)
        ),
        draft_step=draft_step
        and DraftStep(announced("draft pairs", "train", draft_step.count), update("draft", draft_step.update)),
        predict_step=predict_step and announced("draft prediction", "train", predict_step),
    )


def _policy_forward(plan: Plan, packing: Packing) -> PolicyForward:
    policy, draft = plan.config.policy, plan.draft
    dtype = jnp.dtype(policy.compute_dtype)
    return PolicyForward(
        model=plan.model,
        dtype=dtype,
        remat=policy.remat,
        vocab_tile=packing.vocab_tile(plan.model.vocab, plan.learner_partition.num_shards("vocab")),
        temperature=plan.config.rollout.temperature,
        features=draft is not None,
        aux_layers=draft.aux_layers if draft else (),
        lora=LoRA(policy.lora_rank, policy.lora_alpha) if policy.lora_rank else None,
        attention=find_attention(policy.attention, plan.model.head_dim, dtype, partition=plan.learner_partition),
    )


def _draft_forward(plan: Plan, forward: PolicyForward) -> DraftForward | None:
    if plan.draft is None:
        return None
    return DraftForward(
        draft=plan.draft,
        model=plan.model,
        dtype=forward.dtype,
        loss=plan.config.draft.loss,
        ttt_steps=plan.config.draft.ttt_steps,
        anchor_stride=ANCHOR_STRIDE if plan.draft.takes_anchors else 1,
        vocab_tile=forward.vocab_tile,
        temperature=forward.temperature,
    )


def _draft_optimizer(name: str, draft: DraftConfig) -> OptimizerConfig:
    return OptimizerConfig(
        name=name,
        learning_rate=draft.learning_rate,
        warmup=draft.warmup,
        clip=draft.clip,
        weight_decay=0.0,
        b2=0.95,
        decay_steps=draft.decay_steps,
    )


def make_packing(plan: Plan) -> Packing:
    """Return how the rollouts of a step are packed into rows."""
    config, learner = plan.config, plan.learner_partition
    grpo = config.grpo
    parts = grpo.minibatches * (config.draft.minibatches if plan.draft else 1)
    return Packing(
        limit=plan.sequence_tokens,
        rollouts=config.pretrain.batch_size
        if config.task in OF_TEXTS
        else grpo.prompts_per_step * grpo.group_size // parts,
        most_kept=most_kept_of(plan.limits),
        parts=parts,
        num_shards=learner.num_shards("batch"),
        sequence_shards=learner.num_shards("sequence"),
        microbatch_tokens=grpo.microbatch_tokens,
    )
