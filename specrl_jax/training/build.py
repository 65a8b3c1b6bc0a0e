"""Everything a task needs, built once from its frozen settings: models, tokenizer, engines, jitted steps."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from specrl_jax.config import (
    Config,
    DraftConfig,
    OptimizerConfig,
    PipelineConfig,
    RewardConfig,
)
from specrl_jax.config.validate import draft_options
from specrl_jax.core import InputError
from specrl_jax.data.tasks import Problem
from specrl_jax.data.tokenizers import Tokenizer, load_tokenizer
from specrl_jax.decoding.drafters import NO_DRAFTER, Drafter
from specrl_jax.decoding.engine import Engine, check_prompts
from specrl_jax.decoding.rollouts import WeightsVersion
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.distributed import LOCAL_AXES, global_arrays, local_mesh
from specrl_jax.drafts.base import DrafterConfig, DraftMethod, DraftModel
from specrl_jax.drafts.kinds import make_method
from specrl_jax.drafts.weights import Weights
from specrl_jax.io import hf
from specrl_jax.io.checkpoints import Checkpoints
from specrl_jax.learner.batch import Packing, packing_unit
from specrl_jax.learner.draft_step import (
    ROWS_PER_PREDICTED,
    DraftForward,
    make_draft_step,
    make_predict_step,
    make_read_tables,
)
from specrl_jax.learner.optimizer import make_optimizer
from specrl_jax.learner.policy_step import PolicyForward, make_feature_step, make_logprob_step, make_policy_step
from specrl_jax.learner.state import RunState, TrainState, abstract_state, init_random_params, init_state
from specrl_jax.models import qwen3
from specrl_jax.models.attention import find_attention
from specrl_jax.models.layers import abstract_params
from specrl_jax.models.lora import LoRA, init_adapters
from specrl_jax.rewards.scorer import Scorer
from specrl_jax.rl.objectives import Objective
from specrl_jax.sharding import LEARNER, ROLLOUT, Partitioner, make_mesh, partitioner
from specrl_jax.simulator.hardware import peak_flops
from specrl_jax.training.performance import Performance
from specrl_jax.training.plan import check_rows, draft_lengths, find_limits, policy_sizes
from specrl_jax.training.problems import Problems
from specrl_jax.training.rollouts import InferenceConfig, check_cache_length, make_prepare, make_rollout_engine


@dataclasses.dataclass(frozen=True)
class Setup:
    """Built from Config and a mesh. Building compiles nothing and, but for tokenizer and data, reads nothing."""

    settings: Config
    model: qwen3.Qwen3Config
    draft_method: DraftMethod
    draft: DraftModel | None  # the method's; None: it has no weights
    learner_partition: Partitioner
    rollout_partition: Partitioner
    tokenizer: Tokenizer
    scorer: Scorer
    rollout: InferenceConfig
    learner: PolicyForward
    draft_learner: DraftForward | None
    objective: Objective
    optimizer: optax.GradientTransformation
    draft_optimizer: optax.GradientTransformation

    @functools.cached_property
    def prepare_step(self) -> Any:
        return make_prepare(self.model, self.draft, self.rollout, self.rollout_partition, self.learner_partition)

    def prepare(self, state: RunState) -> tuple[Weights, WeightsVersion]:
        """The weights that rollouts run on, and which they are. Waits until they are there."""
        draft = state.draft.params if state.draft else None
        weights = self.prepare_step(self.whole(state.policy), draft, state.vocab_map)
        versions = int(state.policy.step), int(state.draft.step) if state.draft else 0
        jax.block_until_ready(weights)
        return weights, WeightsVersion(*versions, checksum=int(weights.checksum))

    def whole(self, policy: TrainState) -> Any:
        """The tree that the learner's forward runs on."""
        return self.learner.merge(policy.params, policy.frozen)

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
    def predict_step(self) -> Any:
        one_in = 1 if self.settings.draft.online else ROWS_PER_PREDICTED
        return make_predict_step(self.draft_learner, self.learner_partition, one_in)

    @functools.cached_property
    def engine(self) -> Engine:
        """Of the training rollouts."""
        drafter = self.drafter(self.rollout.sampling)
        return self._engine(self.rollout, drafter, draft_lengths(drafter.length, self.settings.draft.adaptive))

    def engine_of(self, lengths: tuple[int, ...]) -> Engine:
        """The same with programs of these draft lengths, ascending."""
        return self._engine(self.rollout, self.drafter(self.rollout.sampling), lengths)

    @functools.cached_property
    def eval_engine(self) -> Engine:
        """Sampled as `eval` says; the training engine itself where that is the same."""
        e = self.settings.eval
        config = self.eval_rollout(temperature=e.temperature, top_k=e.top_k, top_p=e.top_p)
        return self.engine if config == self.rollout else self._fixed_engine(config)

    @functools.cached_property
    def greedy_engine(self) -> Engine:
        return self._fixed_engine(self.eval_rollout(temperature=0.0, top_k=0, top_p=1.0))

    def eval_rollout(self, **sampling: Any) -> InferenceConfig:
        """That of training but for the longest answer, and for `sampling`."""
        limits, longest = self.rollout.limits, self.settings.eval.max_response_tokens
        return dataclasses.replace(
            self.rollout,
            sampling=dataclasses.replace(self.rollout.sampling, **sampling),
            limits=dataclasses.replace(limits, max_response_tokens=longest or limits.max_response_tokens),
        )

    @property
    def packing(self) -> Packing | None:
        """Of rollouts into the learner's rows."""
        g, draft = self.settings.grpo, self.settings.draft
        if not g.pack_tokens:
            return None
        num_shards = self.learner_partition.num_shards("batch")
        unit = packing_unit(num_shards, g.microbatch, draft.minibatches if self.draft else 1)
        return Packing(g.pack_tokens, g.minibatches, unit)

    @functools.cached_property
    def performance(self) -> Performance:
        mesh, o, g = self.learner_partition.mesh, self.objective, self.settings.grpo
        scored = int(o.old_logprobs == "learner") + int(o.kl_coef > 0)
        learners, apart = tuple(mesh.devices.flat), self.settings.pipeline.rollout_devices
        generating = tuple(self.rollout_partition.mesh.devices.flat) if apart else learners
        peak = peak_flops(jax.local_devices()[0], self.learner.dtype)
        return Performance(self.model, learners, generating, peak, scored, g.epochs, apart * jax.process_count())

    @functools.cached_property
    def plain_engine(self) -> Engine:
        """What `engine` is compared with: draft.kind=none."""
        limits = dataclasses.replace(self.rollout.limits, groups=0, members=0)
        config = dataclasses.replace(self.rollout, limits=limits)
        return make_rollout_engine(self.model, None, NO_DRAFTER, config, self.tokenizer, self.rollout_partition)

    def drafter(self, sampling: Sampling) -> Drafter:
        """What drafts in the engines: with weights, by copying, or both."""
        length, dtype = self.settings.draft.length, self.rollout.compute_dtype
        return self.draft_method.make_drafter(DrafterConfig(length, sampling, dtype, self.rollout_partition))

    def _fixed_engine(self, config: InferenceConfig) -> Engine:
        """The longest drafts or none, compiled when used: evaluation is short, and its programs few."""
        drafter = self.drafter(config.sampling)
        return self._engine(config, drafter, draft_lengths(drafter.length, adaptive=False))

    def _engine(self, config: InferenceConfig, drafter: Drafter, lengths: tuple[int, ...] | None) -> Engine:
        return make_rollout_engine(
            self.model, self.draft, drafter, config, self.tokenizer, self.rollout_partition, lengths
        )

    def on_learner(self, rows: Any) -> Any:
        """Host arrays [B, T] as the learner's steps take them."""
        return global_arrays(rows, self.learner_partition.sharding(("batch", "sequence")))

    def open_checkpoints(self, workdir: str) -> Checkpoints:
        c = self.settings.checkpoint
        return Checkpoints(workdir, c.keep, c.keep_every, c.keep_best)

    def initial_params(self) -> Any:
        """Float32 learner parameters: from policy.path, or random from the seed."""
        if self.settings.policy.path:
            return hf.load_params(self.settings.policy.path, self.model, self.learner_partition, jnp.float32)
        specs = qwen3.param_specs(self.model)
        return init_random_params(jax.random.key(self.settings.seed), specs, self.learner_partition)

    def initial_trained(self) -> Any:
        """What learns, as it begins: `initial_params`, or adapters of them."""
        if not self.learner.lora:
            return self.initial_params()
        key, specs = jax.random.fold_in(jax.random.key(self.settings.seed), 2), self.learner.trained_specs
        drawn = jax.jit(
            functools.partial(init_adapters, specs=specs), out_shardings=self.learner_partition.shardings(specs)
        )
        return drawn(key)

    @functools.cached_property
    def first_reference(self) -> Any:
        return self.initial_trained()

    def initial_draft_params(self, policy: Any) -> Any:
        """Float32 learner parameters of the draft: from draft.path, or random with what `policy`'s parameters lend."""
        if self.settings.draft.path:
            return self.draft.load(self.settings.draft.path, self.learner_partition)
        # Another key than the policy's: shapes coincide.
        key = jax.random.fold_in(jax.random.key(self.settings.seed), 1)
        drawn = init_random_params(key, self.draft.specs, self.learner_partition)
        # Jitted, so that nothing of the policy's is shared: an update donates the draft's parameters.
        initialise = jax.jit(
            self.draft.initialise_from_target,
            donate_argnums=0,
            out_shardings=self.learner_partition.shardings(self.draft.specs),
        )
        return initialise(drawn, policy, self.read_tables(policy, self.initial_vocab_map()).lm_head)

    def initial_vocab_map(self) -> jax.Array | None:
        """[Vd] int32: from draft.path, or the policy's first ids; None where draft and policy share their ids."""
        ids = self.draft.load_vocab_map(self.settings.draft.path, self.model)
        return None if ids is None else jax.device_put(ids, self.learner_partition.replicated)

    def initial_state(self) -> RunState:
        partition = self.learner_partition
        policy = init_state(self.initial_trained(), self.learner.trained_specs, self.optimizer, partition)
        policy = policy.replace(frozen=self.frozen_params())
        reference = jax.tree.map(jnp.copy, policy.params) if self.settings.grpo.reference_every else None
        if self.draft is None:
            return RunState(policy, None, None, reference)
        params = self.initial_draft_params(policy.base)
        draft = init_state(params, self.draft.specs, self.draft_optimizer, partition)
        return RunState(policy, draft, self.initial_vocab_map(), reference)

    def frozen_params(self) -> Any:
        """What lies under adapters; None without them."""
        return self.initial_params() if self.learner.lora else None

    def initial_weights(self) -> Weights:
        """The same weights ready to generate, without the optimizers' memory."""
        policy = self.initial_params()
        if self.draft is None:
            return self.prepare_step(policy, None, None)
        return self.prepare_step(policy, self.initial_draft_params(policy), self.initial_vocab_map())

    def abstract_state(self) -> RunState:
        """ShapeDtypeStructs of `initial_state` but for what is frozen, which a checkpoint is restored into."""
        partition = self.learner_partition
        policy = abstract_state(self.learner.trained_specs, self.optimizer, partition)
        reference = policy.params if self.settings.grpo.reference_every else None
        if self.draft is None:
            return RunState(policy, None, None, reference)
        draft = abstract_state(self.draft.specs, self.draft_optimizer, partition)
        if not self.draft.has_vocab_map:
            return RunState(policy, draft, None, reference)
        ids = jax.ShapeDtypeStruct((self.draft.vocab,), jnp.int32, sharding=partition.replicated)
        return RunState(policy, draft, ids, reference)

    def abstract_frozen(self) -> Any:
        """Of `frozen_params`."""
        if not self.learner.lora:
            return None
        specs = qwen3.param_specs(self.model)
        return abstract_params(specs, jnp.float32, self.learner_partition.shardings(specs))

    @functools.cached_property
    def problems(self) -> Problems:
        s = self.settings
        return Problems(s.data, s.eval, self.tokenizer, s.rollout.max_prompt_tokens, s.seed)

    def check_problems(self, train: bool = True) -> None:
        """Raises InputError for data that cannot be used, before anything long or lasting; says what files hold."""
        problems = list(self.eval_problems)
        if len(problems) < jax.process_count():
            raise InputError(
                f"eval: {len(problems)} validation problems; each of the {jax.process_count()} processes takes some"
            )
        if train:
            self.problems.stream(1)  # weights that fit the files
            problems += [source[i] for source in self.problems.train for i in range(min(256, len(source)))]
        check_prompts([self.tokenizer.encode(p.prompt) for p in problems], self.rollout.limits.max_prompt_tokens)
        for line in self.problems.reports:
            print(line)

    @property
    def eval_problems(self) -> list[Problem]:
        """Every fixed validation set, one after the other."""
        return [problem for problems in self.problems.validation.values() for problem in problems]


def build(settings: Config, mesh: Mesh, model: qwen3.Qwen3Config | None = None) -> Setup:
    """Checks the settings against each other and builds. Raises InputError before any long work.

    `model`: the policy's sizes; None: those that the settings name.
    """
    policy, rollout, grpo = settings.policy, settings.rollout, settings.grpo
    model = model or policy_sizes(policy)
    draft_method = make_method(draft_options(settings.draft), model)
    draft = draft_method.model
    sampling = Sampling(rollout.temperature, rollout.top_k, rollout.top_p, rollout.rule)
    meshes = partitioner(mesh, LEARNER), partitioner(_rollout_mesh(settings.pipeline, mesh), ROLLOUT)
    limits = find_limits(_own_share(settings), meshes[1].num_shards("batch"), draft_method.uses_lookup_cache)
    check_rows(settings, model, draft, limits, *meshes)
    tokenizer = load_tokenizer(settings.data.tokenizer or policy.path, model.vocab)
    dtype = jnp.dtype(policy.compute_dtype)
    learner = PolicyForward(
        model=model,
        dtype=dtype,
        remat=policy.remat,
        vocab_tile=policy.vocab_tile,
        microbatch=grpo.microbatch,
        temperature=rollout.temperature,
        features=draft is not None,
        aux_layers=draft.aux_layers if draft else (),
        lora=_lora(settings),
        attention=find_attention(policy.attention, model.head_dim, dtype, meshes[0]),
    )
    setup = Setup(
        settings=settings,
        model=model,
        draft_method=draft_method,
        draft=draft,
        learner_partition=meshes[0],
        rollout_partition=meshes[1],
        tokenizer=tokenizer,
        scorer=_scorer(settings.reward),
        rollout=InferenceConfig(
            sampling=sampling,
            limits=limits,
            seed=rollout.seed,
            dtype=jnp.dtype(policy.dtype),
            cache_dtype=jnp.dtype(rollout.cache_dtype),
            compute_dtype=jnp.dtype(rollout.compute_dtype),
        ),
        learner=learner,
        draft_learner=_draft_learner(settings, draft, learner),
        objective=_objective(settings),
        optimizer=make_optimizer(settings.optimizer),
        draft_optimizer=_draft_optimizer(settings.draft),
    )
    check_cache_length(setup.eval_rollout().limits, model, "eval")
    return setup


def _rollout_mesh(p: PipelineConfig, mesh: Mesh) -> Mesh:
    """The learner's own, or one of the devices beside it. Raises InputError."""
    if not p.rollout_devices:
        return local_mesh(mesh, LOCAL_AXES)
    local_mesh(mesh, LOCAL_AXES)  # what the weights pass through
    split = p.tensor * p.expert
    sizes = {"data": p.rollout_devices // split, "fsdp": 1, "expert": p.expert, "tensor": p.tensor}
    return make_mesh(sizes, jax.local_devices()[-p.rollout_devices :])


def _own_share(settings: Config) -> Config:
    """With the slots and prompts of one process. Raises InputError where they do not divide."""
    n, rollout, grpo = jax.process_count(), settings.rollout, settings.grpo
    for key, value in (("rollout.num_slots", rollout.num_slots), ("grpo.prompts_per_step", grpo.prompts_per_step)):
        if value % n:
            raise InputError(f"{key}={value} must divide by the {n} processes")
    rollout = dataclasses.replace(rollout, num_slots=rollout.num_slots // n)
    return dataclasses.replace(
        settings, rollout=rollout, grpo=dataclasses.replace(grpo, prompts_per_step=grpo.prompts_per_step // n)
    )


def _objective(settings: Config) -> Objective:
    g = settings.grpo
    if settings.pipeline.mode == "async" and jax.process_count() > 1 and g.sampling_rounds > 1:
        raise InputError(
            f"grpo.sampling_rounds={g.sampling_rounds}: several processes would have to ask each other whether to "
            "generate again, and under pipeline.mode=async they do not wait for each other"
        )
    longest = settings.rollout.max_response_tokens
    names = {field.name for field in dataclasses.fields(Objective)} - {"longest"}
    return Objective(**{name: getattr(g, name) for name in names}, longest=longest)


def _lora(settings: Config) -> LoRA | None:
    p = settings.policy
    if not p.lora_rank:
        return None
    return LoRA(p.lora_rank, p.lora_alpha, tuple(p.lora_targets))


def _scorer(r: RewardConfig) -> Scorer:
    return Scorer(r.names, r.weights, r.timeout, r.workers, r.memory)


def _draft_learner(settings: Config, draft: DraftModel | None, learner: PolicyForward) -> DraftForward | None:
    if draft is None:
        return None
    return DraftForward(
        draft=draft,
        model=learner.model,
        dtype=learner.dtype,
        loss=settings.draft.loss,
        ttt_steps=settings.draft.ttt_steps,
        vocab_tile=settings.policy.vocab_tile,
        microbatch=learner.microbatch,
        temperature=learner.temperature,
    )


def _draft_optimizer(draft: DraftConfig) -> optax.GradientTransformation:
    config = OptimizerConfig(
        draft.optimizer,
        draft.learning_rate,
        draft.warmup,
        draft.clip,
        weight_decay=0.0,
        b2=0.95,
        decay_steps=draft.decay_steps,
    )
    return make_optimizer(config)
