"""Everything a task needs, built once from its frozen settings: models, tokenizer, engines, jitted steps."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from specrl_jax.core import BadInput
from specrl_jax.data.sources import JsonlSource
from specrl_jax.data.tasks import Problem, TaskSource
from specrl_jax.data.tokenizers import Tokenizer, load_tokenizer
from specrl_jax.decoding.engine import Engine, Limits, Stamp, check_prompts
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.io import eagle3_formats, hf
from specrl_jax.models import eagle3, qwen3
from specrl_jax.rewards.verifiable import Reward, find_reward
from specrl_jax.rl.grpo import Objective
from specrl_jax.sharding import LEARNER, ROLLOUT, Partitioner, partitioner
from specrl_jax.training.draft_learning import DraftLearner, make_draft_step, make_read_tables
from specrl_jax.training.drafting import Weights
from specrl_jax.training.rollout import RolloutConfig, check_cache_length, make_prepare, make_rollout_engine
from specrl_jax.training.settings import DraftSettings, PolicySettings, Settings, check_values, parse_dtype
from specrl_jax.training.state import (
    OptimizerConfig,
    RunState,
    abstract_state,
    init_random_params,
    init_state,
    make_optimizer,
)
from specrl_jax.training.steps import Learner, make_feature_step, make_logprob_step, make_policy_step


@dataclasses.dataclass(frozen=True)
class Setup:
    """Built from Settings and a mesh. Building compiles nothing and, but for tokenizer and data, reads nothing."""

    settings: Settings
    model: qwen3.Qwen3Config
    head: eagle3.Eagle3Config | None  # None: plain decoding, and nothing of a draft anywhere
    learner_partition: Partitioner
    rollout_partition: Partitioner
    tokenizer: Tokenizer
    reward: Reward
    rollout: RolloutConfig
    learner: Learner
    draft_learner: DraftLearner | None
    objective: Objective
    optimizer: optax.GradientTransformation
    draft_optimizer: optax.GradientTransformation

    @functools.cached_property
    def _prepare(self) -> Any:
        return make_prepare(self.model, self.head, self.rollout, self.rollout_partition)

    def prepare(self, state: RunState) -> tuple[Weights, Stamp]:
        """The weights that rollouts run on, and which they are. Waits until they are there."""
        draft = state.draft.params if state.draft else None
        weights = self._prepare(state.policy.params, draft, state.vocab_map)
        versions = int(state.policy.step), int(state.draft.step) if state.draft else 0
        jax.block_until_ready(weights)
        return weights, Stamp(*versions, checksum=int(weights.checksum))

    @functools.cached_property
    def logprob_step(self) -> Any:
        return make_logprob_step(self.learner, self.learner_partition)

    @functools.cached_property
    def policy_step(self) -> Any:
        return make_policy_step(self.learner, self.objective, self.optimizer, self.learner_partition)

    @functools.cached_property
    def feature_step(self) -> Any:
        return make_feature_step(self.learner, self.learner_partition)

    @functools.cached_property
    def read_tables(self) -> Any:
        return make_read_tables(self.model, self.learner_partition)

    @functools.cached_property
    def draft_step(self) -> Any:
        return make_draft_step(self.draft_learner, self.draft_optimizer, self.learner_partition)

    @functools.cached_property
    def engine(self) -> Engine:
        return self._engine(self.rollout.sampling, self.head)

    @functools.cached_property
    def eval_engine(self) -> Engine:
        """Sampled at eval.temperature over the whole vocabulary; the training engine itself where that is the same."""
        sampling = Sampling(self.settings.eval.temperature)
        return self.engine if sampling == self.rollout.sampling else self._engine(sampling, self.head)

    @functools.cached_property
    def greedy_engine(self) -> Engine:
        return self._engine(Sampling(0.0), self.head)

    @functools.cached_property
    def plain_engine(self) -> Engine:
        """What `engine` is compared with: draft.kind=none."""
        return self._engine(self.rollout.sampling, head=None)

    def _engine(self, sampling: Sampling, head: eagle3.Eagle3Config | None) -> Engine:
        return make_rollout_engine(self.model, head, self.rollout, sampling, self.tokenizer, self.rollout_partition)

    def initial_params(self) -> Any:
        """Float32 learner parameters: from policy.path, or random from the seed."""
        if self.settings.policy.path:
            return hf.load_params(self.settings.policy.path, self.model, self.learner_partition, jnp.float32)
        specs = qwen3.param_specs(self.model)
        return init_random_params(jax.random.key(self.settings.seed), specs, self.learner_partition)

    def initial_draft_params(self) -> Any:
        """Float32 learner parameters of the head: from draft.path, or random from the seed."""
        if self.settings.draft.path:
            return eagle3_formats.load_params(self.settings.draft.path, self.head, self.learner_partition, jnp.float32)
        # Another key than the policy's: shapes coincide.
        key = jax.random.fold_in(jax.random.key(self.settings.seed), 1)
        return init_random_params(key, eagle3.param_specs(self.head), self.learner_partition)

    def initial_vocab_map(self) -> jax.Array:
        """[Vd] int32: from draft.path, or every id of the policy."""
        path = self.settings.draft.path
        ids = eagle3_formats.load_vocab_map(path, self.head, self.model) if path else np.arange(self.model.vocab)
        return jax.device_put(ids.astype(np.int32), self.learner_partition.replicated)

    def initial_state(self) -> RunState:
        partition = self.learner_partition
        policy = init_state(self.initial_params(), qwen3.param_specs(self.model), self.optimizer, partition)
        if self.head is None:
            return RunState(policy, None, None)
        specs = eagle3.param_specs(self.head)
        draft = init_state(self.initial_draft_params(), specs, self.draft_optimizer, partition)
        return RunState(policy, draft, self.initial_vocab_map())

    def initial_weights(self) -> Weights:
        """The same weights ready to generate, without the optimizers' memory."""
        if self.head is None:
            return self._prepare(self.initial_params(), None, None)
        return self._prepare(self.initial_params(), self.initial_draft_params(), self.initial_vocab_map())

    def abstract_state(self) -> RunState:
        """ShapeDtypeStructs of `initial_state`, which a checkpoint is restored into."""
        partition = self.learner_partition
        policy = abstract_state(qwen3.param_specs(self.model), self.optimizer, partition)
        if self.head is None:
            return RunState(policy, None, None)
        vocab_map = jax.ShapeDtypeStruct((self.head.draft_vocab,), jnp.int32, sharding=partition.replicated)
        return RunState(
            policy, abstract_state(eagle3.param_specs(self.head), self.draft_optimizer, partition), vocab_map
        )

    @functools.cached_property
    def train_source(self) -> JsonlSource | TaskSource:
        data = self.settings.data
        return self._jsonl("data.path", data.path) if data.path else TaskSource(data.task, "train", self.settings.seed)

    def check_problems(self, train: bool = True) -> None:
        """Raises BadInput for data that cannot be used, before anything long or lasting."""
        problems = list(self.eval_problems)
        if train:
            problems += [self.train_source[i] for i in range(min(256, len(self.train_source)))]
        check_prompts([self.tokenizer.encode(p.prompt) for p in problems], self.rollout.limits.max_prompt_tokens)

    @functools.cached_property
    def eval_problems(self) -> Sequence[Problem]:
        """The fixed validation set."""
        s = self.settings
        if s.data.path and not s.eval.path:
            raise BadInput("eval.path: prompts come from data.path, so a JSONL file to validate on is needed here")
        source = self._jsonl("eval.path", s.eval.path) if s.eval.path else TaskSource(s.data.task, "validation", s.seed)
        return [source[i] for i in range(min(s.eval.problems, len(source)))]

    def _jsonl(self, key: str, path: str) -> JsonlSource:
        data = self.settings.data
        limit = self.settings.rollout.max_prompt_tokens
        return JsonlSource(path, data.prompt_key, data.answer_key, self.tokenizer, limit, key)


def build(settings: Settings, mesh: Mesh) -> Setup:
    """Checks the settings against each other and builds. Raises BadInput before any long work."""
    policy, draft, rollout, grpo = settings.policy, settings.draft, settings.rollout, settings.grpo
    check_values(settings)
    model = policy_sizes(policy)
    head = head_sizes(draft, model)
    sampling = Sampling(rollout.temperature, rollout.top_k, rollout.top_p)
    rows = grpo.prompts_per_step * grpo.group_size
    if rows % grpo.minibatches:
        raise BadInput(f"grpo.minibatches={grpo.minibatches} must divide the {rows} rollouts of a step")
    limits = Limits(rollout.num_slots, rollout.max_prompt_tokens, rollout.max_response_tokens, rollout.chunk)
    _check_rows(settings, model, head, limits, mesh)
    tokenizer = load_tokenizer(settings.data.tokenizer or policy.path, model.vocab)
    learner = Learner(
        model=model,
        dtype=parse_dtype("policy.compute_dtype", policy.compute_dtype),
        remat=policy.remat,
        logits_chunk=policy.logits_chunk,
        microbatch=grpo.microbatch,
        temperature=rollout.temperature,
        aux_layers=head.aux_layers if head else (),
    )
    draft_learner = None
    if head:
        draft_learner = DraftLearner(head, learner.dtype, draft.ttt_steps, grpo.microbatch, rollout.temperature)
    draft_optimizer = OptimizerConfig(
        "adamw", draft.learning_rate, draft.warmup, draft.clip, weight_decay=0.0, b2=0.95, decay_steps=draft.decay_steps
    )
    return Setup(
        settings=settings,
        model=model,
        head=head,
        learner_partition=partitioner(mesh, LEARNER),
        rollout_partition=partitioner(mesh, ROLLOUT),
        tokenizer=tokenizer,
        reward=find_reward(settings.reward),
        rollout=RolloutConfig(
            sampling=sampling,
            limits=limits,
            seed=rollout.seed,
            dtype=parse_dtype("policy.dtype", policy.dtype),
            cache_dtype=parse_dtype("rollout.cache_dtype", rollout.cache_dtype),
            draft_length=draft.length,
        ),
        learner=learner,
        draft_learner=draft_learner,
        objective=Objective(grpo.clip_low, grpo.clip_high, grpo.kl_coef),
        optimizer=make_optimizer(settings.optimizer),
        draft_optimizer=make_optimizer(draft_optimizer, "draft"),
    )


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


def head_sizes(draft: DraftSettings, model: qwen3.Qwen3Config) -> eagle3.Eagle3Config | None:
    """Sizes of the draft head of a policy; None for draft.kind=none.

    Raises BadInput for an unknown kind, and for a head that is missing, damaged or another policy's.
    """
    if draft.kind == "none":
        return None
    if draft.kind != "eagle3":
        raise BadInput(f"draft.kind: no drafter '{draft.kind}'; there are none (plain decoding), eagle3")
    if draft.path:
        head = eagle3_formats.load_config(draft.path, model)
        if draft.vocab_size not in (0, head.draft_vocab):
            raise BadInput(
                f"draft.vocab_size={draft.vocab_size}, the head {draft.path} has {head.draft_vocab}; leave 0"
            )
        return head
    return eagle3.eagle3_config(model, draft.vocab_size or model.vocab)


def _check_rows(
    settings: Settings, model: qwen3.Qwen3Config, head: eagle3.Eagle3Config | None, limits: Limits, mesh: Mesh
) -> None:
    """Shapes against the mesh, the model and each other."""
    grpo = settings.grpo
    qwen3.require_dense(model)
    learner, rollout = partitioner(mesh, LEARNER), partitioner(mesh, ROLLOUT)
    learner.tree(qwen3.param_specs(model))
    rollout.tree(qwen3.rollout_specs(model))
    if head:
        learner.tree(eagle3.param_specs(head))
        rollout.tree(eagle3.rollout_specs(head))
    if head and not settings.draft.path and head.draft_vocab < model.vocab and settings.task != "draft_pretrain":
        raise BadInput(
            f"draft.vocab_size={head.draft_vocab}: which ids those are is for task=draft_pretrain to find out; "
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
