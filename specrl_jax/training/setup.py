"""Everything a task needs, built once from its frozen settings: model, tokenizer, engines, jitted steps."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from specrl_jax.core import BadInput
from specrl_jax.data.sources import JsonlSource
from specrl_jax.data.tasks import Problem, TaskSource
from specrl_jax.data.tokenizers import Tokenizer, load_tokenizer
from specrl_jax.decoding.engine import Engine, Limits, check_prompts
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.io import hf
from specrl_jax.models import qwen3
from specrl_jax.rewards.verifiable import Reward, find_reward
from specrl_jax.rl.grpo import Objective
from specrl_jax.sharding import LEARNER, ROLLOUT, Partitioner, partitioner
from specrl_jax.training.rollout import RolloutConfig, check_cache_length, make_prepare, make_rollout_engine
from specrl_jax.training.settings import PolicySettings, Settings, check_values, parse_dtype
from specrl_jax.training.state import TrainState, init_random_params, init_state, make_optimizer
from specrl_jax.training.steps import Learner, make_logprob_step, make_policy_step


@dataclasses.dataclass(frozen=True)
class Setup:
    """Built from Settings and a mesh. Building compiles nothing and, but for tokenizer and data, reads nothing."""

    settings: Settings
    model: qwen3.Qwen3Config
    learner_partition: Partitioner
    rollout_partition: Partitioner
    tokenizer: Tokenizer
    reward: Reward
    rollout: RolloutConfig
    learner: Learner
    objective: Objective
    optimizer: optax.GradientTransformation

    @functools.cached_property
    def prepare(self) -> Any:
        return make_prepare(self.model, self.rollout, self.rollout_partition)

    @functools.cached_property
    def logprob_step(self) -> Any:
        return make_logprob_step(self.learner, self.learner_partition)

    @functools.cached_property
    def policy_step(self) -> Any:
        return make_policy_step(self.learner, self.objective, self.optimizer, self.learner_partition)

    @functools.cached_property
    def engine(self) -> Engine:
        return self._engine(self.rollout.sampling)

    @functools.cached_property
    def eval_engine(self) -> Engine:
        """Sampled at eval.temperature over the whole vocabulary; the training engine itself where that is the same."""
        sampling = Sampling(self.settings.eval.temperature)
        return self.engine if sampling == self.rollout.sampling else self._engine(sampling)

    @functools.cached_property
    def greedy_engine(self) -> Engine:
        return self._engine(Sampling(0.0))

    def _engine(self, sampling: Sampling) -> Engine:
        return make_rollout_engine(self.model, self.rollout, sampling, self.tokenizer, self.rollout_partition)

    def initial_params(self) -> Any:
        """Float32 learner parameters: from policy.path, or random from the seed."""
        if self.settings.policy.path:
            return hf.load_params(self.settings.policy.path, self.model, self.learner_partition, jnp.float32)
        return init_random_params(jax.random.key(self.settings.seed), self.model, self.learner_partition)

    def initial_state(self) -> TrainState:
        return init_state(self.initial_params(), self.model, self.optimizer, self.learner_partition)

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
    policy, rollout, grpo = settings.policy, settings.rollout, settings.grpo
    check_values(settings)
    model = policy_sizes(policy)
    sampling = Sampling(rollout.temperature, rollout.top_k, rollout.top_p)
    rows = grpo.prompts_per_step * grpo.group_size
    if rows % grpo.minibatches:
        raise BadInput(f"grpo.minibatches={grpo.minibatches} must divide the {rows} rollouts of a step")
    limits = Limits(rollout.num_slots, rollout.max_prompt_tokens, rollout.max_response_tokens, rollout.chunk)
    _check_rows(settings, model, limits, mesh)
    tokenizer = load_tokenizer(settings.data.tokenizer or policy.path, model.vocab)
    learner = Learner(
        model=model,
        dtype=parse_dtype("policy.compute_dtype", policy.compute_dtype),
        remat=policy.remat,
        logits_chunk=policy.logits_chunk,
        microbatch=grpo.microbatch,
        temperature=rollout.temperature,
    )
    return Setup(
        settings=settings,
        model=model,
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
        ),
        learner=learner,
        objective=Objective(grpo.clip_low, grpo.clip_high, grpo.kl_coef),
        optimizer=make_optimizer(settings.optimizer),
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


def _check_rows(settings: Settings, model: qwen3.Qwen3Config, limits: Limits, mesh: Mesh) -> None:
    """Shapes against the mesh, the model and each other."""
    grpo = settings.grpo
    qwen3.require_dense(model)
    for table, specs in ((LEARNER, qwen3.param_specs(model)), (ROLLOUT, qwen3.rollout_specs(model))):
        partitioner(mesh, table).tree(specs)
    ways = partitioner(mesh, LEARNER).ways("batch")
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
